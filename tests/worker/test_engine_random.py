"""Random lives of many requests on the model-free engine: every answer right, nothing lost, always progress."""

from __future__ import annotations

import os
from typing import Any
from unittest import mock

import fake_engine as fakes
from hypothesis import given, settings
from hypothesis import strategies as st

from cluster.core.logprobs import PromptLogprobs
from worker.beam_search import BeamParams

PREFIXES = [list(range(1, 13)), [*range(1, 9), 70, 71, 72, 73], [200, 201, 202, 203, 204]]

requests = st.tuples(
    st.integers(0, len(PREFIXES) - 1),
    st.lists(st.integers(300, 303), max_size=6),  # tail: few values, so that prompts often share more
    st.integers(1, 14),
    st.sampled_from(["", "", "", "salt"]),
    st.sampled_from([{}, {}, {}, {"n": 2}, {"n": 3, "seed": 7}, {"beam_width": 2}, {"beam_width": 3}]),
    st.sampled_from([False, False, True]),  # with the log probabilities of the prompt
)
actions = st.one_of(
    st.tuples(st.just("add"), requests),
    st.tuples(st.just("step"), st.integers(1, 4)),
    st.tuples(st.just("cancel"), st.integers(0, 30)),
    st.tuples(st.just("reset"), st.none()),
)


@settings(max_examples=5000 if os.environ.get("KVRAY_LONG") else 120, deadline=None)
@given(
    script=st.lists(actions, max_size=60),
    num_blocks=st.integers(10, 24),
    budget=st.integers(1, 20),
    max_num_seqs=st.integers(1, 6),
    cache=st.sampled_from(["radix", "radix", "chunk", "off"]),
    max_scored=st.sampled_from([1, 5, 128]),
)
def test_random_requests_get_the_answers_they_would_get_alone(
    script: list[tuple[str, Any]], num_blocks: int, budget: int, max_num_seqs: int, cache: str, max_scored: int
) -> None:
    with mock.patch("worker.step_budget.MAX_SCORED", max_scored):
        _drive(script, num_blocks, budget, max_num_seqs, cache)


def _drive(script: list[tuple[str, Any]], num_blocks: int, budget: int, max_num_seqs: int, cache: str) -> None:
    fake = fakes.make_fake_engine(
        num_blocks=num_blocks, token_budget=budget, max_num_seqs=max_num_seqs, max_queue=1000, prefix_cache=cache
    )
    wanted: dict[str, dict[int, list[int]]] = {}
    scored: dict[str, PromptLogprobs | None] = {}
    cancelled: set[str] = set()
    for name, value in script:
        if name == "add":
            which, tail, max_tokens, salt, rows, scores = value
            prompt = PREFIXES[which] + tail
            rows = {**rows, "prompt_logprobs": 0 if scores else None}
            request = fake.add(prompt, max_tokens=max_tokens, cache_salt=salt, **rows)
            wanted[request] = _expected(prompt, max_tokens, rows)
            scored[request] = fakes.expected_prompt_logprobs(prompt) if scores else None
        elif name == "cancel":
            request = f"r{value}"
            if request in wanted and request not in fake.last:
                cancelled.add(request)
            fake.cancel(request)
        elif name == "reset":
            fake.engine.reset_cache()
        else:
            for _ in range(value):
                computed = fake.runner.computed_tokens
                fake.step()
                assert fake.runner.computed_tokens - computed <= budget
    fake.finish(limit=5000)
    for request, answers in wanted.items():
        got = fake.choices.get(request, {})
        if request in cancelled:
            assert all(tokens == answers[index][: len(tokens)] for index, tokens in got.items())
        elif fake.last[request].error is None:
            assert got == answers
            assert fake.prompt_logprobs.get(request) == scored[request]
            assert fake.cached[request] == 0 or scored[request] is None
        else:  # refused at the door: more rows than seats or blocks
            assert len(answers) > 1 and not any(got.values())
    load = fake.frames[-1].load
    assert (load.in_use_blocks, load.waiting, load.running, load.uncached_tokens) == (0, 0, 0, {})
    assert load.free_blocks + load.cached_blocks == num_blocks
    _check_events(fake)


def _expected(prompt: list[int], max_tokens: int, rows: dict[str, int]) -> dict[int, list[int]]:
    width = rows.get("beam_width")
    if width:
        params = BeamParams(width=width, max_tokens=max_tokens, eos_token_ids=frozenset({fakes.EOS}))
        return {i: list(beam.tokens) for i, beam in enumerate(fakes.expected_beams(prompt, params))}
    seed = rows.get("seed", 0)
    return {i: fakes.expected_sample(prompt, max_tokens, seed + i) for i in range(rows.get("n", 1))}


def _check_events(fake: fakes.FakeEngine) -> None:
    """Replaying the events gives exactly the chunks in the cache; each event is parent first or child first."""
    present: set[bytes] = set()
    for frame in fake.frames:
        for event in frame.events:
            if event.kind == "cleared":
                present.clear()
            elif event.kind == "stored":
                assert not present & set(event.chunk_hashes), "a chunk was stored twice"
                present |= set(event.chunk_hashes)
            else:
                assert present >= set(event.chunk_hashes), "an absent chunk was removed"
                present -= set(event.chunk_hashes)
    cache = fake.engine._manager._cache
    assert present == (cache.present_chunks if cache is not None else set())
