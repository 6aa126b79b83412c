"""Greedy answers through the whole cluster are transformers' own, cold, warm and in concurrent batches."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from itertools import zip_longest
from pathlib import Path
from typing import Any

import pytest

from cluster.rpc import inference_pb2 as pb
from cluster.tokenizer import Tokenizer

LONG = bool(os.environ.get("KVRAY_LONG"))
pytestmark = [
    pytest.mark.cluster,
    pytest.mark.model,
    pytest.mark.torch,
    pytest.mark.timeout(3600 if LONG else 600),
]

LENGTHS = (1, 2, 15, 16, 17, 31, 33, 63, 64, 65, 100, 127, 128, 129, 256, 257, 500, 640, 1000, 1500)
NEW_TOKENS = 64 if LONG else 8  # `make test-long` compares all 64
NEAR_TIE = 1e-4
CHUNK_TOKENS = 64
TOPICS = (
    "the sea", "old maps", "winter", "a small library", "the railway", "bread", "mountains", "a lost dog", "glass",
    "the moon", "gardens", "a letter", "salt", "the market", "bridges", "a storm", "paper", "the river", "clocks",
    "tea",
)  # fmt: skip


def prompt_of(tokenizer: Tokenizer, number: int, length: int) -> list[int]:
    """Prose that differs from its first words on, so that no prompt is warm by accident."""
    topic = TOPICS[number]
    sentences = (
        f"{topic.capitalize()} was on everybody's mind in year {year}. People who lived near house {year % 37} wrote "
        f"about {topic} in their diaries, and {year % 11 + 2} of them drew pictures of it."
        for year in range(1700 + number, 2000)
    )
    return tokenizer.encode(" ".join(sentences))[:length]


class Oracle:
    """transformers' generate() on the same weights, and its opinion of how close two tokens were."""

    def __init__(self, model_dir: Path) -> None:
        import torch
        import transformers

        torch.set_num_threads(2)
        self._torch = torch
        self._model: Any = transformers.AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32)
        self._model.eval()

    def answer(self, prompt: list[int]) -> list[int]:
        ids = self._torch.tensor([prompt])
        with self._torch.inference_mode():
            out = self._model.generate(
                ids, attention_mask=self._torch.ones_like(ids), max_new_tokens=NEW_TOKENS, do_sample=False
            )
        return out[0, len(prompt) :].tolist()

    def gap(self, tokens: list[int]) -> float:
        """Difference of the two best logits after `tokens`."""
        with self._torch.inference_mode():
            best = self._model(self._torch.tensor([tokens])).logits[0, -1].topk(2).values
        return float(best[0] - best[1])


@pytest.fixture(scope="module")
def cases(demo_model_dir: Path) -> list[tuple[list[int], list[int]]]:
    oracle, tokenizer = Oracle(demo_model_dir), Tokenizer.from_dir(demo_model_dir)
    prompts = [prompt_of(tokenizer, number, length) for number, length in enumerate(LENGTHS)]
    assert [len(p) for p in prompts] == list(LENGTHS)
    return [(prompt, oracle.answer(prompt)) for prompt in prompts]


def ask(stub: Any, prompt: list[int]) -> pb.GenerateResponse:
    return stub.GenerateOnce(
        pb.GenerateRequest(
            token_ids=pb.TokenIds(ids=prompt), sampling=pb.SamplingOptions(temperature=0, max_tokens=NEW_TOKENS)
        ),
        timeout=300,
    )


def test_greedy_answers_are_those_of_transformers(
    cluster: Any, cases: list[tuple[list[int], list[int]]], demo_model_dir: Path
) -> None:
    stub = cluster.stub()
    with ThreadPoolExecutor(2) as pair, ThreadPoolExecutor(8) as pool:
        cold = list(pair.map(lambda case: ask(stub, case[0]), cases))
        warm = [ask(stub, prompt) for prompt, _ in cases]  # one by one: a holder that is busy may rightly lose one
        batch = list(pool.map(lambda case: ask(stub, case[0]), cases))
    near_ties = 0
    oracle = None
    for run, replies in (("cold", cold), ("warm", warm), ("batch", batch)):
        for (prompt, expected), reply in zip(cases, replies, strict=True):
            got = list(reply.token_ids)
            assert reply.usage.prompt_tokens == len(prompt)
            if got == expected:
                continue
            at = next(i for i, (a, b) in enumerate(zip_longest(got, expected)) if a != b)
            oracle = oracle or Oracle(demo_model_dir)
            gap = oracle.gap(prompt + expected[:at])
            assert gap < NEAR_TIE, f"{run}, prompt of {len(prompt)}: token {at} differs, logits are {gap:g} apart"
            near_ties += 1
    print(f"near-ties: {near_ties} of {3 * len(cases)}")
    assert all(r.usage.cached_tokens < 16 for r in cold)  # some topics begin with the same word
    for (prompt, _), reply in zip(cases, warm, strict=True):
        if len(prompt) > CHUNK_TOKENS:
            assert reply.usage.cached_tokens == len(prompt) - 1
        else:  # no whole chunk, so the router cannot know the holder
            assert reply.usage.cached_tokens < 16 or reply.usage.cached_tokens == len(prompt) - 1
