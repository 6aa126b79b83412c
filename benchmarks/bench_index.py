"""The router's in-process index, measured: lookup, events per second, bytes per entry, loading and sweeping.

    .venv/bin/python -m benchmarks.bench_index              everything (fifteen minutes, 3 GB of memory)
    .venv/bin/python -m benchmarks.bench_index --quick      8 and 64 replicas
    .venv/bin/python -m benchmarks.bench_index --peer-python ~/.cache/kvray-peers/v-dynamo/bin/python
                                                            also Dynamo's index, under the same content

What replicas hold is said in index_content.py: 20,000 chunks of 64 tokens each. A lookup is the overlap of one prompt
of 256 chunks (16k tokens) with all replicas, its hashes at hand. `stairs` are the worst prompts: every replica holds
them to another depth. Every row is a process of its own.

An event is one chunk stored or removed. `fill`: entries of up to 256 chunks into a growing index. `churn`: a full
index, an entry stores a new prompt's 256 chunks and removes an old one's. `+ decode`: the same, from the bytes that
stand in the stream. Bytes are per (chunk, replica): what tracemalloc counts, and what the process grew by,
with all replicas there and after all were dropped and swept.

Times are CPU time of the thread, in ten stretches, of which the one with the lowest median is reported: the machine may
have other work. In the comparison they are wall-clock, because the peer works on a thread of its own.
"""

from __future__ import annotations

import argparse
import gc
import json
import random
import subprocess
import sys
import time
import tracemalloc
from collections.abc import Iterator, Sequence

from benchmarks.index_content import CHUNKS_PER_REPLICA, HASH_BYTES, PROMPT_CHUNKS, Content, Stored, unpack
from benchmarks.quiet_clock import Percentiles, Stopwatch, python_call_ns, resident_bytes
from cluster.core.events import CacheEvent, CacheEventKind
from cluster.core.hashing import ChunkHash, RouteScheme, hash_prompt, root_hash
from cluster.core.replica import Epoch, WorkerId
from cluster.index.base import MAX_CHUNKS_PER_ENTRY, unpack_hashes
from cluster.index.memory import MemoryIndex
from cluster.index.wire import decode_entry, encode_entry

EPOCH = Epoch(1)
SLICE = 1024  # as the follower loads and sweeps
SNAPSHOT_CHUNKS = 1_000_000
CHURN_ENTRIES = 2000
LARGEST_TRACED = 256
NUM_STAIRS = 30


class Filled:
    """An index with the content in it, and the time that took."""

    def __init__(self, content: Content) -> None:
        self.content, self.index = content, MemoryIndex()
        self.workers = [WorkerId(f"replica#{number:04d}") for number in range(content.replicas)]
        self.fill, self.entries = Stopwatch(), 0
        for worker_id in self.workers:
            self.index.add_worker(worker_id, EPOCH)
        for stored in content:
            self.store(stored)
            self.entries += len(stored.chunks)

    def store(self, stored: Stored) -> None:
        event = CacheEvent(CacheEventKind.STORED, tuple(map(ChunkHash, stored.chunks)))
        self.fill(lambda: self.index.apply(self.workers[stored.replica], EPOCH, (event,)))

    def prompts(self) -> list[list[ChunkHash]]:
        return [list(map(ChunkHash, unpack(packed))) for packed in self.content.samples()]

    def drop_all(self) -> tuple[float, Percentiles]:
        """Milliseconds in all, and microseconds of one slice of sweeping."""
        drops, slices = Stopwatch(), Stopwatch()
        for worker_id in self.workers:
            drops(lambda worker_id=worker_id: self.index.drop_worker(worker_id))  # type: ignore[misc]
        while self.index.total_records():
            slices(lambda: self.index.sweep(SLICE))
        return 1000 * (sum(drops.seconds) + sum(slices.seconds)), slices.microseconds()


def measure_memory(kind: str, replicas: int, traced: bool) -> dict[str, object]:
    """Bytes per entry, full and after all replicas were dropped, as tracemalloc or as the system counts them."""
    if traced:
        tracemalloc.start()

    def used() -> int:
        gc.collect()
        return tracemalloc.get_traced_memory()[0] if traced else resident_bytes()

    content = Content(kind, replicas)
    before = used()
    filled = Filled(content)
    before += sys.getsizeof(filled.fill.seconds)
    full = used() - before
    in_all, slices = filled.drop_all()
    return {
        "entries": filled.entries,
        "bytes": full / filled.entries,
        "bytes_after_drop": (used() - before) / filled.entries,
        "drop_ms": in_all,
        "slices_us": slices,
    }


def measure_speed(kind: str, replicas: int) -> dict[str, object]:
    filled = Filled(Content(kind, replicas))
    index, samples = filled.index, filled.prompts()
    gc.collect()
    gc.freeze()
    result: dict[str, object] = {"checksum": sum(sum(index.overlaps(prompt).values()) for prompt in samples)}
    lookup, result["lookup_wall_us"] = time_lookups(index, samples, 10)
    result["lookup_us"] = lookup.microseconds()
    result["lookup_cpu_us"] = 1e6 * sum(lookup.seconds) / len(lookup.seconds)
    result["fill_rate"] = filled.entries / sum(filled.fill.seconds)
    for decode, name in ((False, "churn_rate"), (True, "churn_decode_rate")):
        result[name] = measure_churn(filled, decode)
    stairs = []
    for packed, storeds in filled.content.staircases(NUM_STAIRS):
        for stored in storeds:
            filled.store(stored)
        stairs.append(list(map(ChunkHash, unpack(packed))))
    lookup, result["stairs_wall_us"] = time_lookups(index, stairs, 100)
    result["stairs_us"] = lookup.microseconds()
    return result


def time_lookups(index: MemoryIndex, prompts: list[list[ChunkHash]], rounds: int) -> tuple[Stopwatch, Percentiles]:
    cpu, wall = Stopwatch(), Stopwatch(time.perf_counter)
    for watch in (cpu, wall):
        for _ in range(rounds):
            for prompt in prompts:
                watch(lambda prompt=prompt: index.overlaps(prompt))  # type: ignore[misc]
    return cpu, wall.microseconds()


def measure_churn(filled: Filled, decode: bool) -> float:
    """Events per second of a full index, by the median entry of the quietest stretch."""
    watch, content, old = Stopwatch(), filled.content, []
    for number in range(CHURN_ENTRIES + len(filled.workers)):
        worker_id = filled.workers[number % len(filled.workers)]
        new = tuple(map(ChunkHash, content.new_chunks(PROMPT_CHUNKS)))
        old.append(new)
        events = [CacheEvent(CacheEventKind.STORED, new)]
        if number >= len(filled.workers):
            gone = old[number - len(filled.workers)]
            events.append(CacheEvent(CacheEventKind.REMOVED, tuple(reversed(gone))))
        payload = encode_entry(worker_id, EPOCH, number + 1, events)
        entry = decode_entry(payload)

        def apply_entry(payload: bytes = payload, entry: object = entry) -> None:
            taken = decode_entry(payload) if decode else entry
            filled.index.apply(taken.worker_id, taken.epoch, taken.events)  # type: ignore[attr-defined]

        if len(events) == 2:
            watch(apply_entry)
        else:
            apply_entry()
    return 2 * PROMPT_CHUNKS * 1e6 / watch.microseconds().p50


def measure_snapshot() -> dict[str, object]:
    """A million chunks of one replica, in no order, as the follower loads them; beside 64 replicas that hold others."""
    filled = Filled(Content("shared", 64))
    content, worker_id = filled.content, WorkerId("newcomer")
    loads: list[Sequence[float]] = []
    sweeps: list[Sequence[float]] = []
    for _ in range(3):
        chunks = list(content.new_chunks(SNAPSHOT_CHUNKS))
        packed = b"".join(chunks)
        del chunks
        filled.index.add_worker(worker_id, EPOCH)
        load, sweep = Stopwatch(), Stopwatch()

        def load_slice(start: int, packed: bytes = packed) -> None:
            hashes = unpack_hashes(packed[start : start + SLICE * HASH_BYTES])
            filled.index.apply(worker_id, EPOCH, (CacheEvent(CacheEventKind.STORED, hashes),))

        for start in range(0, len(packed), SLICE * HASH_BYTES):
            load(lambda start=start: load_slice(start))  # type: ignore[misc]
        filled.index.drop_worker(worker_id)
        more = True
        while more:
            started = time.thread_time()
            more = filled.index.sweep(SLICE)
            sweep.seconds.append(time.thread_time() - started)
        loads.append(sorted(load.seconds))
        sweeps.append(sorted(sweep.seconds))
    return {"load": min(map(summary, loads)), "sweep": min(map(summary, sweeps))}


def summary(seconds: Sequence[float]) -> tuple[float, float, float, int]:
    """Milliseconds: the longest, the median, all together; and the number of calls."""
    return 1000 * seconds[-1], 1000 * seconds[len(seconds) // 2], 1000 * sum(seconds), len(seconds)


def measure_hashing() -> Percentiles:
    root, watch = root_hash(RouteScheme(tokenizer_revision="t", model_revision="m")), Stopwatch()
    tokens = random.Random(0).choices(range(150_000), k=16_384)
    for _ in range(1000):
        watch(lambda: hash_prompt(root, tokens, 64))
    return watch.microseconds()


def own_child(what: str, kind: str, replicas: int) -> dict[str, object]:
    return child(sys.executable, "benchmarks.bench_index", "--row", what, kind, str(replicas))


def child(python: str, module: str, *arguments: str) -> dict[str, object]:
    done = subprocess.run([python, "-m", module, *arguments], check=True, stdout=subprocess.PIPE, text=True)
    result: dict[str, object] = json.loads(done.stdout.splitlines()[-1])
    return result


def pair(value: object) -> str:
    assert isinstance(value, list)
    return " / ".join(f"{one:,.0f}" for one in value)


def growth_rows(sizes: list[int]) -> Iterator[list[str]]:
    for kind in ("shared", "disjoint"):
        for replicas in sizes:
            speed = own_child("speed", kind, replicas)
            memory = own_child("memory", kind, replicas)
            traced = own_child("traced", kind, replicas) if replicas <= LARGEST_TRACED else None
            yield [
                kind,
                f"{replicas:,}",
                f"{memory['entries']:,}",
                pair(speed["lookup_us"]),
                pair(speed["stairs_us"]),
                f"{speed['fill_rate']:,.0f}",
                f"{speed['churn_rate']:,.0f}",
                f"{speed['churn_decode_rate']:,.0f}",
                "" if traced is None else f"{traced['bytes']:.0f} → {traced['bytes_after_drop']:.0f}",
                f"{memory['bytes']:.0f} → {memory['bytes_after_drop']:.0f}",
                pair(memory["slices_us"]),
            ]


def print_table(titles: list[str], rows: Iterator[list[str]]) -> None:
    print(f"| {' | '.join(titles)} |")
    print(f"|{'|'.join('---' if n == 0 else '---:' for n in range(len(titles)))}|")
    for row in rows:
        print(f"| {' | '.join(row)} |", flush=True)
    print(flush=True)


def print_comparison(peer_python: str) -> None:
    ours, memory = own_child("speed", "shared", 64), own_child("memory", "shared", 64)
    peer = child(peer_python, "benchmarks.index_peer", "shared", "64")
    assert ours["checksum"] == peer["checksum"], "the two indexes disagree about the overlaps"
    print("Beside Dynamo's in-process index, RadixTree of ai-dynamo-runtime; both found the same overlaps\n")
    rows = [
        ["lookup, wall-clock µs p50 / p99", pair(ours["lookup_wall_us"]), pair(peer["lookup_wall_us"])],
        ["lookup, mean µs of CPU", f"{ours['lookup_cpu_us']:.0f}", f"{peer['lookup_cpu_us']:.0f}"],
        ["stairs, wall-clock µs p50 / p99", pair(ours["stairs_wall_us"]), pair(peer["stairs_wall_us"])],
        ["chunks stored per second of CPU", f"{ours['fill_rate']:,.0f}", f"{peer['rate_cpu']:,.0f}"],
        ["bytes per entry, RSS, full", f"{memory['bytes']:.0f}", f"{peer['bytes_rss']:.0f}"],
        ["the same with all dropped", f"{memory['bytes_after_drop']:.0f}", f"{peer['bytes_rss_after_drop']:.0f}"],
        ["dropping all, ms", f"{memory['drop_ms']:,.0f}", f"{peer['drop_all_ms']:,.0f}"],
        ["hashing 16k tokens, µs p50 / p99", str(measure_hashing()), pair(peer["hash_us"])],
    ]
    print_table(["64 replicas, shared", "kvray", "Dynamo"], iter(rows))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="8 and 64 replicas only")
    parser.add_argument("--peer-python", help="the interpreter of an environment with ai-dynamo-runtime")
    parser.add_argument("--row", nargs=3, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.row:
        what, kind, replicas = options.row[0], options.row[1], int(options.row[2])
        speed = what == "speed"
        print(json.dumps(measure_speed(kind, replicas) if speed else measure_memory(kind, replicas, what == "traced")))
        return
    print(f"A Python call takes {python_call_ns():.0f} ns.\n")
    print(f"Hashing a prompt of 16k tokens: {measure_hashing()} µs (p50 / p99).\n")
    print(f"{CHUNKS_PER_REPLICA:,} chunks per replica. Lookup, stairs and slices of sweeping in µs p50 / p99\n")
    titles = ["content", "replicas", "entries", "lookup", "stairs", "fill", "churn", "+ decode"]
    titles += ["traced, full → dropped", "RSS, full → dropped", "sweep"]
    print_table(titles, growth_rows([8, 64] if options.quick else [8, 64, 256, 1024]))
    snapshot = measure_snapshot()
    print(f"A snapshot of {SNAPSHOT_CHUNKS:,} chunks, loaded and swept {SLICE:,} at a time, in ms\n")
    rows = ([name, *(f"{one:,.2f}" for one in snapshot[name][:3]), str(snapshot[name][3])] for name in snapshot)  # type: ignore[index]
    print_table(["", "longest call", "median", "all", "calls"], rows)
    if options.peer_python:
        print_comparison(options.peer_python)
    print(
        f"At the end a Python call takes {python_call_ns():.0f} ns. Entries have up to {MAX_CHUNKS_PER_ENTRY:,} chunks."
    )


if __name__ == "__main__":
    main()
