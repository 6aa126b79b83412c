"""The article's fork in numbers, for the block sizes and prefixes at which the saving is known exactly."""

from __future__ import annotations

import pytest

from cluster.lab.fork_saving import ForkSaving, fork_saving, fork_scenes


@pytest.mark.parametrize(
    ("prefix", "total", "block_size", "expected"),
    [
        (30, 50, 16, ForkSaving(apart=4, shared=3, copies=1, unseen=2)),
        (30, 50, 1, ForkSaving(apart=60, shared=30, copies=0, unseen=20)),
        (30, 50, 2, ForkSaving(apart=30, shared=15, copies=0, unseen=10)),
        (32, 50, 16, ForkSaving(apart=4, shared=2, copies=0, unseen=2)),
        (1000, 1050, 16, ForkSaving(apart=126, shared=64, copies=1, unseen=3)),
    ],
)
def test_what_a_fork_saves(prefix: int, total: int, block_size: int, expected: ForkSaving) -> None:
    assert fork_saving(prefix, total, block_size) == expected


def test_the_shares() -> None:
    assert fork_saving(30, 50, 16).saved == 0.25
    assert fork_saving(30, 50, 1).saved == 0.5
    assert round(fork_saving(1000, 1050, 16).saved, 3) == 0.492


def test_the_tables_of_the_example() -> None:
    *_, forked, written = fork_scenes()
    assert forked.tables == {"A": (0, 1, 2, 3), "B": (0, 1)}
    assert written.tables == {"A": (0, 1, 2, 3), "B": (0, 4)}
    assert written.refs == (2, 1, 1, 1, 1, 0, 0, 0)
