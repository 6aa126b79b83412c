"""What one cache as large as a fleet's saves, in the order of the past and of the future."""

from __future__ import annotations

import random
from collections.abc import Sequence

from cluster.simulate.ideal_hits import ideal_hits
from cluster.simulate.mooncake_trace import TraceRequest
from cluster.simulate.pooled_hits import farthest_hits, lru_hits

SEGMENT = 10


def requests(*prompts: Sequence[int]) -> list[TraceRequest]:
    """Prompts of whole segments and 5 tokens more."""
    return [
        TraceRequest(number, float(number), len(ids) * SEGMENT + 5, 1, (*ids, 10_000 + number), SEGMENT)
        for number, ids in enumerate(prompts)
    ]


def random_trace(seed: int) -> list[TraceRequest]:
    rng = random.Random(seed)
    parents = {name: rng.randrange(name) if name else None for name in range(60)}

    def path(name: int | None) -> list[int]:
        return [] if name is None else [*path(parents[name]), name]

    return requests(*(path(rng.randrange(60)) for _ in range(200)))


def test_with_memory_for_everything_both_are_ideal() -> None:
    trace = random_trace(1)
    assert lru_hits(trace, 10**6) == farthest_hits(trace, 10**6) == ideal_hits(trace)


def test_without_memory_nothing_is_found() -> None:
    trace = random_trace(2)
    assert set(lru_hits(trace, 0)) == set(farthest_hits(trace, 0)) == {0}


def test_a_cycle_longer_than_the_memory_is_where_they_differ() -> None:
    trace = requests(*([(1,), (2,), (3,)] * 3))
    assert lru_hits(trace, 2 * SEGMENT) == [0] * 9
    assert sum(farthest_hits(trace, 2 * SEGMENT)) == 4 * SEGMENT


def test_the_end_of_a_prompt_goes_before_its_beginning() -> None:
    trace = requests((1, 2, 3), (4,), (1, 2, 3))
    assert lru_hits(trace, 3 * SEGMENT)[2] == 2 * SEGMENT


def test_foresight_never_finds_fewer_and_more_memory_never_does_either() -> None:
    for seed in range(20):
        trace = random_trace(seed)
        before = 0
        for segments in (2, 5, 10, 20, 40):
            past, future = (sum(hits(trace, segments * SEGMENT)) for hits in (lru_hits, farthest_hits))
            assert before <= future and past <= future
            before = future


def test_the_last_token_is_always_computed() -> None:
    trace = [TraceRequest(number, float(number), 2 * SEGMENT, 1, (1, 2), SEGMENT) for number in range(2)]
    assert lru_hits(trace, 100) == farthest_hits(trace, 100) == [0, 2 * SEGMENT - 1]
