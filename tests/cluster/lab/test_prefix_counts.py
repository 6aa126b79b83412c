"""The lab's own counts: what each definition finds, on sequences small enough to count by hand."""

from __future__ import annotations

import pytest

from cluster.lab.prefix_counts import (
    ChunkCount,
    LongestPrefixCount,
    NothingCount,
    PrefixCount,
    WholePromptCount,
    common_beginning,
)

PROMPT = list(range(10))


@pytest.mark.parametrize(
    ("count", "again", "longer", "other_end"),
    [
        (NothingCount(), 0, 0, 0),
        (WholePromptCount(), 9, 0, 0),
        (ChunkCount(4), 8, 12, 8),
        (LongestPrefixCount(), 9, 12, 9),
        (LongestPrefixCount(4), 8, 12, 8),
    ],
    ids=["off", "whole prompt", "chunks", "longest", "whole blocks"],
)
def test_what_is_found_of_a_prompt_with_two_answer_tokens(
    count: PrefixCount, again: int, longer: int, other_end: int
) -> None:
    assert count.hit(PROMPT) == 0
    count.learn(PROMPT, [*PROMPT, 90, 91])
    assert count.hit(PROMPT) == again
    assert count.hit([*PROMPT, 90, 91, 92]) == longer
    assert count.hit([*PROMPT[:9], 77, 78]) == other_end
    assert count.hit([77, *PROMPT]) == 0


def test_the_last_token_of_a_prompt_is_never_found() -> None:
    count = ChunkCount(4)
    count.learn(PROMPT, PROMPT[:8])
    assert count.hit(PROMPT[:8]) == 4
    assert count.hit(PROMPT[:9]) == 8


def test_chunks_after_a_gap_are_not_found() -> None:
    count = ChunkCount(2)
    count.learn([1, 2, 3, 4, 5, 6], [1, 2, 3, 4, 5, 6])
    assert count.hit([1, 2, 9, 9, 5, 6, 0]) == 2


def test_common_beginning() -> None:
    assert common_beginning([1, 2, 3], [1, 2, 4]) == 2
    assert common_beginning([1, 2], [1, 2, 3]) == 2
    assert common_beginning([], [1]) == 0
