"""DrivenEngine: one request or many, the engine's own counts, and errors that are not lost."""

from __future__ import annotations

import pytest

from cluster.core.errors import KvrayError
from cluster.core.request import GenerationRequest
from cluster.core.sampling import SamplingParams
from cluster.lab.driven_engine import DrivenEngine
from cluster.lab.lab_engines import counting_engine

ANSWER = SamplingParams(temperature=0.0, max_tokens=5, ignore_eos=True)


@pytest.fixture
def engine() -> DrivenEngine:
    return counting_engine(64, check_invariants=True, strict_blocks=True)


def test_one_request_after_the_other(engine: DrivenEngine) -> None:
    prompt = list(range(100, 140))
    first, second = engine.ask(prompt, ANSWER), engine.ask(prompt, ANSWER)
    assert (first.prompt_tokens, first.cached_tokens, len(first.tokens)) == (40, 0, 5)
    assert (second.cached_tokens, second.computed_tokens) == (39, 1)
    assert first.first_s > second.first_s > 0 and first.decode_s > 0
    assert engine.totals.hit_tokens == 39


def test_a_salt_keeps_requests_apart(engine: DrivenEngine) -> None:
    prompt = list(range(100, 140))
    assert [engine.ask(prompt, ANSWER, salt).cached_tokens for salt in ("a", "b", "a")] == [0, 0, 39]


def test_many_at_once(engine: DrivenEngine) -> None:
    requests = [
        GenerationRequest(request_id=f"r{number}", prompt_token_ids=tuple(range(100, 140 + number)), sampling=ANSWER)
        for number in range(4)
    ]
    steps: list[int] = []
    record = engine.run(requests, lambda stats: steps.append(stats.totals.steps))
    assert {name: len(choices[0]) for name, choices in record.choices.items()} == {f"r{n}": 5 for n in range(4)}
    assert record.prompt_tokens == 40 + 41 + 42 + 43
    assert record.steps == len(steps) == len(record.running) and record.preemptions == 0
    assert max(record.in_use) <= 64


@pytest.mark.parametrize("way", ["ask", "run"])
def test_a_refused_request_ends_the_experiment(engine: DrivenEngine, way: str) -> None:
    wrong = (2**30,)  # outside the vocabulary
    with pytest.raises(KvrayError):
        if way == "ask":
            engine.ask(wrong, ANSWER)
        else:
            engine.run([GenerationRequest(request_id="r", prompt_token_ids=wrong, sampling=ANSWER)])
