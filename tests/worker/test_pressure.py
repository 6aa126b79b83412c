"""A real model under pressure: a pool far too small, storms of cancellation, and far more requests than may wait.

The quick form is a tiny random model. KVRAY_LONG=1 (`make test-long`) adds the demo model with 200, 500 and 1,000
requests; both are driven step by step, so every run is the same, and print what happened.
"""

from __future__ import annotations

import os
import random
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from mixed_traffic import Shape, Traffic
from pressure_engine import PressureEngine, cancel_some, make_engine, run_spread_out
from sampling_engine import Answer
from small_tokenizer import save_small_model

from cluster.core.errors import Overloaded
from cluster.core.logprobs import TokenLogprob
from cluster.core.request import FinishReason, GenerationRequest
from cluster.tokenizer import Tokenizer

LONG = bool(os.environ.get("KVRAY_LONG"))
pytestmark = pytest.mark.timeout(3600 if LONG else 300)

NEAR_TIE = 1e-4  # of two logits, as in tests/integration/test_parity.py
CLOSE = 1e-3  # of two log probabilities, whose sums differ with the batch
STATES = {"waiting", "held", "preempted", "leader", "prefilling", "decoding", "samples", "beams"}


@dataclass(frozen=True, kw_only=True)
class Form:
    """mixed, storm, burst: numbers of requests.  per_step: of those that arrive one after the other."""

    shape: Shape
    mixed: int
    storm: int
    burst: int
    per_step: float


QUICK = Form(
    shape=Shape(longest=160, answer=24, block_size=8, seats=16, budget=128, queue=64, threads=1),
    mixed=60,
    storm=120,
    burst=240,
    per_step=1.5,
)
DEMO = Form(
    shape=Shape(longest=600, answer=48, block_size=16, seats=48, budget=512, queue=256, threads=2),
    mixed=200,
    storm=500,
    burst=1000,
    per_step=3.0,
)


class World:
    """One model with its traffic, and the answers that it gives when nothing is short and nobody is urgent."""

    def __init__(self, form: Form, path: Path) -> None:
        self.form = form
        self.path = path
        self.engines: list[PressureEngine] = []
        self.traffic = Traffic(form.shape, _prose(path) if form is DEMO else _noise)

    def engine(self, num_blocks: int) -> PressureEngine:
        self.engines.append(make_engine(self.path, self.form.shape, num_blocks))
        return self.engines[-1]

    @cached_property
    def unconstrained(self) -> PressureEngine:
        engine = self.engine(self.form.shape.ample_blocks)
        requests = [replace(request, priority=0) for request in self.traffic.mixed(self.form.mixed)]
        run_spread_out(engine, requests, self.form.per_step)
        print(engine.report("unconstrained"))
        assert engine.stats.totals.preemptions == 0 and not engine.errors
        engine.assert_empty()
        return engine

    @property
    def third(self) -> int:
        """Blocks: a third of what the same requests hold at once when nothing is short."""
        return self.unconstrained.happened.most_in_use // 3

    @cached_property
    def _model(self) -> Any:
        model = transformers.AutoModelForCausalLM.from_pretrained(self.path, dtype=torch.float32)
        return model.eval()

    def gap(self, tokens: list[int], one: int, other: int) -> float:
        """Difference of two tokens' logits after `tokens`, says transformers."""
        with torch.inference_mode():
            logits = self._model(torch.tensor([tokens])).logits[0, -1]
        return abs(float(logits[one] - logits[other]))

    def near_ties(self, engine: PressureEngine, requests: list[GenerationRequest]) -> int:
        """Compare with the answers of the unconstrained run; the number of greedy ones that parted at a near tie."""
        found = 0
        for request in requests:
            name = request.request_id
            wanted, got = self.unconstrained.answers[name], engine.answers[name]
            assert got.keys() == wanted.keys(), name
            for choice in wanted:
                found += self._is_near_tie(request, got[choice], wanted[choice])
        return found

    def _is_near_tie(self, request: GenerationRequest, got: Answer, wanted: Answer) -> bool:
        name, end = request.request_id, len(wanted.tokens)
        parted = got.tokens != wanted.tokens
        if parted:
            pairs = enumerate(zip(got.tokens, wanted.tokens, strict=False))
            end, one, other = next((i, a, b) for i, (a, b) in pairs if a != b)  # an answer never just stops earlier
            greedy = request.sampling.temperature == 0 and not request.sampling.beam_width
            assert greedy, f"{name}: token {end} differs, and it was not greedy: {request.sampling}"
            gap = self.gap([*request.prompt_token_ids, *wanted.tokens[:end]], one, other)
            assert gap < NEAR_TIE, f"{name}: token {end} differs, logits are {gap:g} apart"
        else:
            assert got.end is not None and wanted.end is not None, name
            assert got.end.finish_reason is wanted.end.finish_reason, name
            assert got.end.score == pytest.approx(wanted.end.score, abs=CLOSE), name
        for ours, theirs in zip(_logprobs(got, end), _logprobs(wanted, end), strict=True):
            assert ours.logprob == pytest.approx(theirs.logprob, abs=CLOSE), name
            values = [value for _, value in theirs.top]
            assert [value for _, value in ours.top] == pytest.approx(values, abs=CLOSE), name
        return parted


def _logprobs(answer: Answer, count: int) -> list[TokenLogprob]:
    """Of its prompt, and of so many tokens, where they were asked for."""
    return [*filter(None, answer.prompt_logprobs or ()), *answer.logprobs[:count]]


def _noise(number: int, length: int) -> list[int]:
    rng = random.Random(f"text {number}")
    return [rng.randint(3, 380) for _ in range(length)]


def _prose(path: Path) -> Any:
    tokenizer = Tokenizer.from_dir(path)

    def text(number: int, length: int) -> list[int]:
        rng = random.Random(f"text {number}")
        words = ("rivers", "old maps", "winter", "bread", "glass", "the moon", "letters", "salt", "bridges", "clocks")
        sentences = (
            f"{rng.randint(100, 999)} people wrote about {rng.choice(words)} in {rng.randint(1700, 2000)}, and house "
            f"{rng.randint(1, 99)} kept a drawing of {rng.choice(words)}."
            for _ in range(length // 10 + 1)
        )
        return tokenizer.encode(" ".join(sentences))[:length]

    return text


@pytest.fixture(
    scope="module",
    params=[
        pytest.param(QUICK, id="quick"),
        *([pytest.param(DEMO, id="demo", marks=pytest.mark.model)] if LONG else []),
    ],
)
def world(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    form = request.param
    if form is DEMO:
        path = request.getfixturevalue("demo_model_dir")
    else:
        path = tmp_path_factory.mktemp("pressure")
        save_small_model(path)
    made = World(form, path)
    yield made
    for engine in made.engines:
        engine.grammars.close()


def test_with_a_third_of_the_memory_the_answers_are_the_same(world: World) -> None:
    form = world.form
    requests = world.traffic.mixed(form.mixed)
    engine = world.engine(world.third)
    run_spread_out(engine, requests, form.per_step)
    print(engine.report("a third"))
    assert not engine.errors and engine.last.keys() == engine.answers.keys()
    near_ties = world.near_ties(engine, requests)
    print(f"near ties: {near_ties} of {sum(map(len, engine.answers.values()))} answers")
    assert near_ties <= form.mixed // 20
    totals = engine.stats.totals
    assert totals.preemptions > form.mixed // 10 and totals.hit_tokens > 0 and engine.happened.held > 0
    assert engine.happened.most_in_use > 0.9 * world.third
    engine.assert_empty()


def test_a_storm_of_cancellations_leaves_the_pool_at_its_start(world: World) -> None:
    """Half of them: one after the other in every state, then all that still live, at once."""
    form = world.form
    requests = world.traffic.mixed(form.storm)
    engine, rng, states = world.engine(world.third), random.Random(7), Counter[str]()
    arriving, one_by_one = list(reversed(requests)), form.storm * 2 // 5
    while len(engine.last) - sum(states.values()) < form.storm // 2:
        room = form.shape.queue - engine.stats.waiting
        arrive = min(len(arriving), room, rng.randint(0, round(4 * form.per_step)))
        engine.add(arriving.pop() for _ in range(arrive))
        if rng.random() < 0.7:
            left = one_by_one - sum(states.values())
            cancel_some(engine, rng, min(left, rng.randint(1, round(2 * form.per_step))), states)
        engine.step()
    assert not arriving, "some never came"
    rest = engine.live()
    assert engine.stats.blocks.in_use > 0 and len(rest) > 1
    engine.cancel(name for names in rest.values() for name in names)
    engine.step()
    print(engine.report("storm"))
    print(f"cancelled one by one: {dict(sorted(states.items()))}; at once: { {k: len(v) for k, v in rest.items()} }")
    assert states.keys() == STATES
    assert not engine.engine.has_work and engine.last.keys() == engine.answers.keys() and not engine.errors
    cancelled = [name for name, delta in engine.last.items() if delta.finish_reason is FinishReason.CANCELLED]
    assert len(cancelled) == sum(states.values()) + sum(map(len, rest.values()))
    assert 0.45 * form.storm < len(cancelled) <= form.storm / 2
    survivors = [r for r in requests[: form.mixed] if r.request_id not in cancelled]
    assert len(survivors) > form.mixed // 4
    print(f"near ties: {world.near_ties(engine, survivors)} of {len(survivors)} survivors that were compared")
    assert engine.stats.totals.preemptions > 0 and engine.stats.totals.hit_tokens > 0 and engine.happened.held > 0
    engine.assert_empty()


def test_of_far_too_many_at_once_the_last_are_refused_and_the_others_finish(world: World) -> None:
    form = world.form
    requests = world.traffic.small(form.burst)
    engine = world.engine(max(world.third // 2, form.shape.max_model_len // form.shape.block_size + 1))
    engine.add(requests)
    engine.finish()
    print(engine.report("burst"))
    taken, refused = requests[: form.shape.queue], requests[form.shape.queue :]
    assert engine.errors.keys() == {request.request_id for request in refused}
    for error in engine.errors.values():
        assert isinstance(error, Overloaded) and error.retry_after_s > 0
    for request in taken:
        answers, sampling = engine.answers[request.request_id], request.sampling
        assert len(answers) == sampling.num_choices
        assert {len(answer.tokens) for answer in answers.values()} == {sampling.max_tokens}
        assert all(a.end is not None and a.end.finish_reason is FinishReason.LENGTH for a in answers.values())
    assert engine.stats.totals.finished_requests == len(taken)
    assert engine.stats.totals.preemptions > 0 and engine.stats.totals.hit_tokens > 0 and engine.happened.held > 0
    engine.assert_empty()
