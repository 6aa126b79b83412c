"""Sampling options through a real cluster: both protocols, streamed and whole, tell the same."""

from __future__ import annotations

from typing import Any

import openai
import pytest

from cluster.rpc import inference_pb2 as pb

pytestmark = [pytest.mark.cluster, pytest.mark.model, pytest.mark.timeout(300)]

PROMPT = "The capital of France is"
SEEDED: dict[str, Any] = {"temperature": 1.5, "seed": 11, "max_tokens": 8, "presence_penalty": 0.5}
EXTRA: dict[str, Any] = {"repetition_penalty": 1.2, "min_p": 0.02, "min_tokens": 3}


def test_log_probabilities_are_the_same_by_every_way(cluster: Any) -> None:
    client = openai.OpenAI(base_url=f"{cluster.http_url}/v1", api_key="x", max_retries=0)
    asked: dict[str, Any] = {"model": "demo", "prompt": PROMPT, "logprobs": 2, **SEEDED}
    whole = client.completions.create(**asked, extra_body=EXTRA).choices[0]
    assert whole.logprobs is not None and whole.logprobs.tokens
    assert "".join(whole.logprobs.tokens).startswith(whole.text)
    assert whole.logprobs.text_offset == [
        len("".join(whole.logprobs.tokens[:n])) for n in range(len(whole.logprobs.tokens))
    ]
    assert all(2 <= len(top) <= 3 for top in whole.logprobs.top_logprobs or ())
    chunks = [chunk.choices[0] for chunk in client.completions.create(**asked, extra_body=EXTRA, stream=True)]
    assert "".join(chunk.text for chunk in chunks) == whole.text
    streamed = [chunk.logprobs for chunk in chunks if chunk.logprobs is not None]
    assert [token for part in streamed for token in part.tokens or ()] == whole.logprobs.tokens
    assert [value for part in streamed for value in part.token_logprobs or ()] == whole.logprobs.token_logprobs
    assert [offset for part in streamed for offset in part.text_offset or ()] == whole.logprobs.text_offset

    options = pb.SamplingOptions(**SEEDED, **EXTRA, logprobs=2)
    answer = cluster.stub().GenerateOnce(pb.GenerateRequest(text=PROMPT, sampling=options), timeout=60)
    (choice,) = answer.choices
    assert choice.text == whole.text
    assert [entry.token_id for entry in choice.logprobs] == list(choice.token_ids)
    assert [entry.logprob for entry in choice.logprobs] == whole.logprobs.token_logprobs


def test_a_scored_prompt_is_the_same_cached_or_not(cluster: Any) -> None:
    client = openai.OpenAI(base_url=f"{cluster.http_url}/v1", api_key="x", max_retries=0)
    text = "Score this sentence about rivers, mountains and the sea, all of it, more than once. " * 3
    options: dict[str, Any] = {"model": "demo", "prompt": text, "max_tokens": 1, "temperature": 0}
    found = []
    for _ in range(3):
        echoed = client.completions.create(**options, logprobs=1, echo=True)
        assert echoed.choices[0].text.startswith(text)
        assert echoed.usage is not None and echoed.usage.prompt_tokens_details is not None
        assert echoed.usage.prompt_tokens_details.cached_tokens == 0
        logprobs = echoed.choices[0].logprobs
        assert logprobs is not None and logprobs.token_logprobs is not None
        assert logprobs.token_logprobs[0] is None and len(logprobs.tokens or ()) == echoed.usage.prompt_tokens + 1
        found.append(logprobs.token_logprobs)
        plain = client.completions.create(**options)
        assert plain.usage is not None
    assert found[0] == found[1] == found[2]
    sampling = pb.SamplingOptions(max_tokens=1, temperature=0, prompt_logprobs=1)
    scored = cluster.stub().GenerateOnce(pb.GenerateRequest(text=text, sampling=sampling), timeout=60)
    assert [e.logprob if e.HasField("logprob") else None for e in scored.prompt_logprobs] == found[0][:-1]


def test_chat_logprobs_and_bias(cluster: Any) -> None:
    client = openai.OpenAI(base_url=f"{cluster.http_url}/v1", api_key="x", max_retries=0)
    messages: Any = [{"role": "user", "content": "Say yes."}]
    reply = client.chat.completions.create(
        model="demo",
        messages=messages,
        max_tokens=4,
        temperature=0,
        logprobs=True,
        top_logprobs=3,
        logit_bias={"198": 100},
    )
    assert reply.choices[0].message.content == "\n" * 4
    assert reply.choices[0].logprobs is not None
    for entry in reply.choices[0].logprobs.content or ():
        assert (entry.token, entry.bytes, len(entry.top_logprobs)) == ("\n", [10], 3)
        assert entry.logprob <= entry.top_logprobs[0].logprob  # the model's own, before the bias
