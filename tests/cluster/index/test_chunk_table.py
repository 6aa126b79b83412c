"""ChunkTable: memory goes back when records go, however they go."""

from __future__ import annotations

import random

import pytest

from cluster.core.hashing import ChunkHash
from cluster.index.chunk_table import ChunkTable

BYTES_PER_RECORD = 120


def random_chunks(count: int) -> list[ChunkHash]:
    packed = random.Random(0).randbytes(16 * count)
    return [ChunkHash(packed[at : at + 16]) for at in range(0, len(packed), 16)]


def largest_excess(table: ChunkTable, left: int) -> int:
    """Bytes of all shards over what `left` records and the empty shards may take."""
    return sum(table.table_bytes()) - BYTES_PER_RECORD * left - sum(ChunkTable().table_bytes())


@pytest.mark.parametrize("left", [50_000, 20_000, 5_000])
def test_removing_most_records_gives_most_memory_back(left: int) -> None:
    table, chunks = ChunkTable(), random_chunks(200_000)
    table.add(chunks, 1)
    full = sum(table.table_bytes())
    for start in range(left, len(chunks), 1000):
        table.remove(chunks[start : start + 1000], 1)
    assert len(table) == left
    # Up to three records per shard may have gone since it was last looked at.
    assert largest_excess(table, left) <= 3 * BYTES_PER_RECORD * len(table.table_bytes())
    assert sum(table.table_bytes()) < 0.7 * full


def test_sweeping_gives_memory_back_while_others_keep_their_chunks() -> None:
    table, chunks = ChunkTable(), random_chunks(200_000)
    table.add(chunks, 1)
    table.add(chunks[:20_000], 2)
    table.retire(1)
    assert sum(table.table_bytes()) > 200_000 * 30
    while not table.sweep(5000):
        pass
    assert len(table) == 20_000
    assert largest_excess(table, 20_000) <= 0
    assert {mask for _, mask in table.items()} == {2}


def test_memory_does_not_grow_with_churn() -> None:
    table, chunks = ChunkTable(), random_chunks(200_000)
    table.add(chunks[:20_000], 1)
    sizes = []
    for start in range(20_000, 200_000, 100):
        table.add(chunks[start : start + 100], 1)
        table.remove(chunks[start - 20_000 : start - 19_900], 1)
        if start % 20_000 == 0:
            sizes.append(sum(table.table_bytes()))
    assert len(table) == 20_000
    assert sizes[-1] < 1.05 * sizes[len(sizes) // 2]
    assert max(sizes) <= BYTES_PER_RECORD * 20_000


def test_chunks_with_the_same_holders_share_one_mask() -> None:
    table, chunks = ChunkTable(), random_chunks(4000)
    for number in range(200):
        for start in range(0, 4000, 50):
            table.add(chunks[start : start + 50], 1 << number)
    assert len({id(mask) for _, mask in table.items()}) == 1
    table.remove(chunks[:2000], 1 << 100)
    table.retire(1 << 50)
    while not table.sweep(100):
        pass
    assert len({id(mask) for _, mask in table.items()}) == 2


def test_removing_what_is_not_there_changes_nothing() -> None:
    table, chunks = ChunkTable(), random_chunks(10)
    assert table.add(chunks[:5], 1) == 5
    assert table.add(chunks, 1) == 5
    assert table.add(chunks, 2) == 10
    assert table.remove(chunks, 4) == 0
    assert table.remove([], 1) == 0
    assert table.remove([chunks[0], chunks[0]], 1) == 1
    assert table.remove(chunks, 2) == 10
    assert sorted(mask for _, mask in table.items()) == [1] * 9


def test_sweep_with_nothing_retired_does_nothing() -> None:
    table = ChunkTable()
    table.add(random_chunks(10), 1)
    assert table.sweep(10**9) == 0
    assert len(table) == 10
