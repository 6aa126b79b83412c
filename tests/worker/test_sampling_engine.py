"""What the whole engine answers under every sampling option: the oracle's tokens, whatever happens around a request."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import sampling_oracle as oracle
import torch
import transformers
from sampling_engine import Answer, SamplingEngine, refusal

from cluster.core.errors import InvalidRequest
from cluster.core.request import FinishReason
from cluster.core.sampling import SamplingParams

VOCAB = 96
EOS = 2
PROMPT = [4 + (29 * i + 7) % 92 for i in range(21)]
OPTIONS: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {"temperature": 0.0, "repetition_penalty": 1.8, "presence_penalty": 0.7, "frequency_penalty": 0.9},
    {"seed": 3, "temperature": 2.0},
    {"seed": 4, "temperature": 3.0, "repetition_penalty": 1.4},
    {"seed": 5, "temperature": 2.0, "frequency_penalty": 1.5, "top_k": 30},
    {"seed": 6, "temperature": 2.0, "presence_penalty": -1.5, "min_p": 0.01},
    {"seed": 7, "temperature": 1.5, "logit_bias": ((5, 6.0), (9, -100.0), (EOS, 8.0)), "min_tokens": 4},
    {"seed": 8, "temperature": 4.0, "top_k": 40, "top_p": 0.9, "min_p": 0.001, "repetition_penalty": 0.7},
]


@pytest.fixture(scope="module")
def model(tiny_llama_dir: Path) -> Any:
    return transformers.AutoModelForCausalLM.from_pretrained(tiny_llama_dir, dtype=torch.float32)


@pytest.fixture(scope="module")
def engine(tiny_llama_dir: Path) -> Iterator[SamplingEngine]:
    yield SamplingEngine(tiny_llama_dir)


def logits_of(model: Any, tokens: list[int]) -> list[list[float]]:
    with torch.inference_mode():
        found: list[list[float]] = model(torch.tensor([tokens])).logits[0].tolist()
    return found


def expected(model: Any, prompt: list[int], count: int, options: dict[str, Any]) -> list[int]:
    """One token after the other with transformers' logits and the per-row oracle."""
    params, answer = SamplingParams(**options), list[int]()
    while len(answer) < count and (not answer or answer[-1] != EOS):
        forbidden = {EOS} if len(answer) < params.min_tokens else set[int]()
        logits = oracle.adjusted(logits_of(model, prompt + answer)[-1], params, prompt, answer, forbidden=forbidden)
        answer.append(oracle.sampled(logits, params, len(prompt) + len(answer)))
    return answer


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_an_answer_is_the_oracles(options: dict[str, Any], model: Any, engine: SamplingEngine) -> None:
    wanted = expected(model, PROMPT, 14, options)
    assert engine.run("one", PROMPT, **{**options, "max_tokens": 14}).tokens == wanted


def test_scenario_25_a_seeded_answer_survives_preemption_batching_and_caching(tiny_llama_dir: Path) -> None:
    """Same seed, same answer: alone, in a batch, preempted after every step, with the prompt cached and not."""
    prompts = [[*PROMPT, 10 + i] if i % 2 else PROMPT for i in range(len(OPTIONS))]
    alone: list[Answer] = []
    for i, options in enumerate(OPTIONS):
        fresh = SamplingEngine(tiny_llama_dir)
        alone.append(fresh.run("fresh", prompts[i], logprobs=2, **options))
        again = fresh.run("cached", prompts[i], logprobs=2, **options)
        assert (alone[i].cached, again.cached) == (0, len(prompts[i]) - 1)
        assert (again.tokens, again.logprobs) == (alone[i].tokens, alone[i].logprobs)
        for step in range(1, len(alone[i].tokens) + 1):
            preempted = fresh.run(f"at{step}", prompts[i], preempt_at=step, logprobs=2, **options)
            assert (preempted.tokens, preempted.logprobs) == (alone[i].tokens, alone[i].logprobs)
    for cache in ("radix", "off"):
        busy = SamplingEngine(tiny_llama_dir, prefix_cache=cache, token_budget=24)
        rng = random.Random(1)
        for i, options in enumerate(OPTIONS):
            busy.add(str(i), prompts[i], logprobs=2, **options)
            busy.step()
        while busy.engine.has_work:
            busy.step()
            if rng.random() < 0.3 and busy.steps < 200:
                busy.preempt_newest()
        for i, answer in enumerate(alone):
            found = busy.answers[str(i)][0]
            assert (found.tokens, found.logprobs) == (answer.tokens, answer.logprobs)


def test_children_of_a_seeded_request_differ_and_equal_requests_with_their_seeds(engine: SamplingEngine) -> None:
    options: dict[str, Any] = {"temperature": 3.0, "repetition_penalty": 1.3, "frequency_penalty": 0.5, "logprobs": 1}
    together = engine.run_all("n", PROMPT, n=3, seed=50, **options)
    assert len({tuple(answer.tokens) for answer in together.values()}) == 3
    for index, answer in together.items():
        alone = engine.run(f"child{index}", PROMPT, seed=50 + index, **options)
        assert (answer.tokens, answer.logprobs) == (alone.tokens, alone.logprobs)


def test_no_end_before_min_tokens(engine: SamplingEngine) -> None:
    eager: dict[str, Any] = {"temperature": 0.0, "logit_bias": ((EOS, 100.0), (50, 90.0)), "max_tokens": 9}
    assert engine.run("eager", PROMPT, **eager).tokens == [EOS]
    late = engine.run("late", PROMPT, min_tokens=4, **eager)
    assert late.tokens == [50, 50, 50, 50, EOS]
    assert late.end is not None and late.end.finish_reason is FinishReason.STOP
    assert engine.run("stops", PROMPT, min_tokens=2, stop_token_ids=(50,), **eager).tokens[2:] == [EOS]
    both = engine.run("ids", PROMPT, min_tokens=2, stop_token_ids=(50,), ignore_eos=True, **eager)
    assert both.tokens[:2] == [EOS, EOS] and len(both.tokens) == 9  # nothing but the stop id ends this one


@pytest.mark.parametrize(
    ("sampling", "field"),
    [
        ({"logit_bias": ((VOCAB, 1.0),)}, "logit_bias"),
        ({"stop_token_ids": (VOCAB,)}, "stop_token_ids"),
        ({"max_tokens": None, "min_tokens": 254}, "min_tokens"),
    ],
)
def test_what_does_not_fit_the_model_is_refused_by_name(
    sampling: dict[str, Any], field: str, engine: SamplingEngine
) -> None:
    error = refusal(engine, **sampling)
    assert isinstance(error, InvalidRequest) and error.field == field and field in error.message
    assert engine.engine.load().in_use_blocks == 0


def test_log_probabilities_are_the_raw_models(model: Any, engine: SamplingEngine) -> None:
    answer = engine.run("logprobs", PROMPT, seed=9, logprobs=3, temperature=5.0, repetition_penalty=1.9)
    rows = logits_of(model, PROMPT + answer.tokens)[len(PROMPT) - 1 : -1]
    for token, one, logits in zip(answer.tokens, answer.logprobs, rows, strict=True):
        wanted = oracle.log_softmax(logits)
        assert one.logprob == pytest.approx(wanted[token], abs=1e-3)
        assert [value for _, value in one.top] == pytest.approx(sorted(wanted, reverse=True)[:3], abs=1e-3)
        assert [value for _, value in one.top] == pytest.approx([wanted[other] for other, _ in one.top], abs=1e-3)
    plain = engine.run("plain", PROMPT, seed=9, temperature=5.0, repetition_penalty=1.9)
    assert plain.tokens == answer.tokens and plain.logprobs == []


def test_best_of_tells_the_log_probabilities_of_what_it_returns(engine: SamplingEngine) -> None:
    options: dict[str, Any] = {"seed": 1, "temperature": 3.0, "ignore_eos": True}
    best = engine.run_all("best", PROMPT, n=2, best_of=5, logprobs=1, **options)
    samples = engine.run_all("all", PROMPT, n=5, logprobs=1, **options)
    ranked = sorted(samples.values(), key=lambda answer: -sum(one.logprob for one in answer.logprobs))
    assert [best[i].tokens for i in range(2)] == [answer.tokens for answer in ranked[:2]]
    assert [best[i].logprobs for i in range(2)] == [answer.logprobs for answer in ranked[:2]]
    assert engine.run("quiet", PROMPT, best_of=3, **options).logprobs == []


# --- beams ---


@pytest.mark.parametrize("length_penalty", [1.0, 0.0])
def test_beams_tell_the_log_probability_of_every_token(
    length_penalty: float, model: Any, engine: SamplingEngine
) -> None:
    beams = engine.run_all("beams", PROMPT, beam_width=4, logprobs=2, length_penalty=length_penalty)
    assert len(beams) == 4
    for beam in beams.values():
        assert len(beam.logprobs) == len(beam.tokens)
        assert beam.end is not None and beam.end.score is not None
        total = sum(one.logprob for one in beam.logprobs)
        assert beam.end.score == pytest.approx(total / len(beam.tokens) ** length_penalty, abs=1e-4)
        rows = logits_of(model, PROMPT + beam.tokens)[len(PROMPT) - 1 : -1]
        for token, one, logits in zip(beam.tokens, beam.logprobs, rows, strict=True):
            assert one.logprob == pytest.approx(oracle.log_softmax(logits)[token], abs=1e-3)
            assert len(one.top) == 2
    quiet = engine.run_all("quiet beams", PROMPT, beam_width=4, length_penalty=length_penalty)
    assert [beam.tokens for beam in quiet.values()] == [beam.tokens for beam in beams.values()]
    assert not any(beam.logprobs for beam in quiet.values())


@pytest.mark.parametrize("preempt_at", [None, 3, 7])
def test_beams_with_penalties_are_those_of_transformers(
    preempt_at: int | None, model: Any, engine: SamplingEngine
) -> None:
    ids = torch.tensor([PROMPT])
    model.generation_config.eos_token_id = EOS
    with torch.inference_mode():
        out = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            do_sample=False,
            num_beams=4,
            num_return_sequences=4,
            max_new_tokens=10,
            min_new_tokens=6,
            repetition_penalty=1.3,
            pad_token_id=0,
            return_dict_in_generate=True,
            output_scores=True,
        )
    lengths = (out.beam_indices >= 0).sum(dim=1).tolist()
    wanted = [row[:length] for row, length in zip(out.sequences[:, len(PROMPT) :].tolist(), lengths, strict=True)]
    found = engine.run_all(
        f"hf{preempt_at}", PROMPT, preempt_at=preempt_at, beam_width=4, min_tokens=6, repetition_penalty=1.3, logprobs=0
    )
    assert [beam.tokens for beam in found.values()] == wanted
    scores = [beam.end.score for beam in found.values() if beam.end is not None]
    assert scores == pytest.approx(out.sequences_scores.tolist(), abs=1e-4)
    assert all(len(beam.logprobs) == len(beam.tokens) for beam in found.values())


# --- prompts ---


def check_prompt(model: Any, prompt: list[int], answer: Answer, count: int) -> None:
    assert answer.prompt_logprobs is not None and len(answer.prompt_logprobs) == len(prompt)
    assert answer.prompt_logprobs[0] is None
    for token, one, logits in zip(prompt[1:], answer.prompt_logprobs[1:], logits_of(model, prompt), strict=False):
        assert one is not None
        wanted = oracle.log_softmax(logits)
        assert one.logprob == pytest.approx(wanted[token], abs=1e-3)
        assert [value for _, value in one.top] == pytest.approx(sorted(wanted, reverse=True)[:count], abs=1e-3)


def test_scenario_16_prompt_log_probabilities_do_not_depend_on_the_cache(model: Any, tiny_llama_dir: Path) -> None:
    """A prompt of 33 tokens scored twice and in different order: the same values, computed and not read."""
    prompt = [4 + (31 * i + 5) % 92 for i in range(33)]
    tails = [[7, 8, 9], [9, 8]]
    found: dict[str, list[Answer]] = {}
    for order in ("scored first", "cached first", "in pieces"):
        engine = SamplingEngine(tiny_llama_dir, token_budget=5 if order == "in pieces" else 2048)
        if order == "cached first":
            engine.run("warm", [*prompt, 50], temperature=0.0)
        for i, tail in enumerate([[], *tails, []]):
            answer = engine.run(f"score{i}", prompt + tail, temperature=0.0, prompt_logprobs=2)
            assert answer.cached == 0
            check_prompt(model, prompt + tail, answer, 2)
            found.setdefault(order, []).append(answer)
        assert engine.engine.load().hit_tokens == 0
        written = engine.run("reader", [*prompt, 60], temperature=0.0)
        assert written.cached == len(prompt), "it may still write the cache"
    for order in found:
        assert [answer.prompt_logprobs for answer in found[order]] == [
            answer.prompt_logprobs for answer in found["scored first"]
        ]
        assert [answer.tokens for answer in found[order]] == [answer.tokens for answer in found["scored first"]]
    first, again = found["scored first"][0], found["scored first"][-1]
    assert (first.prompt_logprobs, first.tokens) == (again.prompt_logprobs, again.tokens)


@pytest.mark.parametrize("preempt_at", [1, 2, 3, 5, 6, 9])
def test_a_scored_prompt_that_is_preempted_is_told_once_and_whole(
    preempt_at: int, model: Any, tiny_llama_dir: Path
) -> None:
    engine = SamplingEngine(tiny_llama_dir, token_budget=4)
    whole = SamplingEngine(tiny_llama_dir).run("whole", PROMPT, temperature=0.0, prompt_logprobs=1, max_tokens=6)
    answer = engine.run("cut", PROMPT, preempt_at=preempt_at, temperature=0.0, prompt_logprobs=1, max_tokens=6)
    check_prompt(model, PROMPT, answer, 1)
    assert answer.tokens == whole.tokens


@pytest.mark.parametrize(
    "rows", [{"n": 2, "seed": 1}, {"n": 1, "best_of": 3}, {"beam_width": 3}, {"n": 2, "prompt_logprobs": 0}], ids=str
)
def test_several_rows_score_their_prompt_once(rows: dict[str, Any], model: Any, engine: SamplingEngine) -> None:
    count = rows.get("prompt_logprobs", 2)
    answers = engine.run_all("rows", PROMPT, **{"prompt_logprobs": 2, **rows})
    told = [answer for answer in answers.values() if answer.prompt_logprobs is not None]
    assert len(told) == 1
    check_prompt(model, PROMPT, told[0], count)
    one = engine.run("one token", [5], **{"prompt_logprobs": 2, **rows})
    assert one.prompt_logprobs == (None,)


def test_many_scored_prompts_share_the_logits_of_a_step(model: Any, tiny_llama_dir: Path) -> None:
    engine = SamplingEngine(tiny_llama_dir)
    prompts = {str(i): [4 + (13 * j + i) % 92 for j in range(60 + i)] for i in range(5)}
    for name, prompt in prompts.items():
        engine.add(name, prompt, temperature=0.0, prompt_logprobs=1, max_tokens=3)
    engine.add("plain", PROMPT, temperature=0.0)
    engine.finish()
    for name, prompt in prompts.items():
        check_prompt(model, prompt, engine.answers[name][0], 1)
    alone: Callable[..., Answer] = SamplingEngine(tiny_llama_dir).run
    assert engine.answers["plain"][0].tokens == alone("plain", PROMPT, temperature=0.0).tokens


def test_a_prompt_with_too_many_log_probabilities_is_refused(engine: SamplingEngine, monkeypatch: Any) -> None:
    monkeypatch.setattr("worker.request_gate.MAX_PROMPT_LOGPROBS", 9)
    error = refusal(engine, prompt_logprobs=3)
    assert isinstance(error, InvalidRequest) and error.field == "prompt_logprobs"
    assert engine.run("fits", [5, 6, 7], prompt_logprobs=2).prompt_logprobs is not None
