"""Dynamo's in-process index under the content of bench_index.py; run by it, in the peer's own environment.

    PEER_PYTHON -m benchmarks.index_peer KIND REPLICAS         prints one line of JSON

Its tree works on a thread of its own, so times are wall-clock; events reach it as JSON, which is written before the
clock starts and parsed by it. A block is one chunk: 64 tokens, named by the first 8 bytes of the chunk's hash.
"""

from __future__ import annotations

import json
import random
import sys
import time
from collections.abc import Iterable

from dynamo._core import RadixTree, compute_block_hash_for_seq  # type: ignore[import-not-found]

from benchmarks.index_content import Content, Stored, unpack
from benchmarks.quiet_clock import Stopwatch, resident_bytes

EVENTS_PER_STRETCH = 200


def block_hash(chunk: bytes) -> int:
    return int.from_bytes(chunk[:8], "little")


def as_json(stored: Stored) -> bytes:
    blocks = [{"block_hash": block_hash(chunk), "tokens_hash": block_hash(chunk)} for chunk in stored.chunks]
    parent = None if stored.parent is None else block_hash(stored.parent)
    return json.dumps({"event_id": 0, "data": {"stored": {"parent_hash": parent, "blocks": blocks}}}).encode()


class Peer:
    def __init__(self) -> None:
        self.tree = RadixTree()
        self.rates: list[tuple[float, float]] = []  # chunks per second of wall-clock and of CPU
        self.entries = 0

    def apply(self, batch: list[Stored]) -> None:
        events = [(stored.replica, as_json(stored)) for stored in batch]
        chunks = sum(len(stored.chunks) for stored in batch)
        wall, cpu = time.perf_counter(), time.process_time()
        for replica, event in events:
            self.tree.apply_event(replica, event)
        self.tree.find_matches([0])  # waits for what came before
        self.rates.append((chunks / (time.perf_counter() - wall), chunks / (time.process_time() - cpu)))
        self.entries += chunks

    def overlaps(self, hashes: list[int]) -> dict[tuple[int, int], int]:
        scores: dict[tuple[int, int], int] = self.tree.find_matches(hashes).scores
        return scores


def median(values: Iterable[float]) -> float:
    ordered = sorted(values)
    return ordered[len(ordered) // 2]


def main() -> None:
    content, peer = Content(sys.argv[1], int(sys.argv[2])), Peer()
    resident = resident_bytes()
    batch: list[Stored] = []
    for stored in content:
        batch.append(stored)
        if len(batch) == EVENTS_PER_STRETCH:
            peer.apply(batch)
            batch = []
    peer.apply(batch)
    result: dict[str, object] = {"bytes_rss": (resident_bytes() - resident) / peer.entries}

    prompts = [[block_hash(chunk) for chunk in unpack(packed)] for packed in content.samples()]
    result["checksum"] = sum(sum(peer.overlaps(prompt).values()) for prompt in prompts)
    lookup, stairs = Stopwatch(time.perf_counter), Stopwatch(time.perf_counter)
    cpu = time.process_time()
    for _ in range(10):
        for prompt in prompts:
            lookup(lambda prompt=prompt: peer.overlaps(prompt))  # type: ignore[misc]
    result["lookup_cpu_us"] = 1e6 * (time.process_time() - cpu) / len(lookup.seconds)
    worst = []
    for packed, storeds in content.staircases(30):
        peer.apply(storeds)
        worst.append([block_hash(chunk) for chunk in unpack(packed)])
    for _ in range(100):
        for prompt in worst:
            stairs(lambda prompt=prompt: peer.overlaps(prompt))  # type: ignore[misc]
    hashing = Stopwatch(time.perf_counter)
    tokens = random.Random(0).choices(range(150_000), k=16_384)
    for _ in range(200):
        hashing(lambda: compute_block_hash_for_seq(tokens, 64))
    result |= {
        "lookup_wall_us": lookup.microseconds(),
        "stairs_wall_us": stairs.microseconds(),
        "hash_us": hashing.microseconds(),
        "rate_wall": median(wall for wall, _ in peer.rates),
        "rate_cpu": median(cpu for _, cpu in peer.rates),
    }
    started = time.perf_counter()
    for replica in range(content.replicas):
        peer.tree.remove_worker(replica)
    peer.tree.find_matches([0])
    result["drop_all_ms"] = 1000 * (time.perf_counter() - started)
    result["bytes_rss_after_drop"] = (resident_bytes() - resident) / peer.entries
    print(json.dumps(result))


if __name__ == "__main__":
    main()
