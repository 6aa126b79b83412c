"""What replicas hold in the index benchmark: prompts of 256 chunks with real sharing, or with none.

`shared`: eight system prompts of 16 chunks, which every replica holds, and conversations that go on from one of them
for 240 chunks. A conversation is held by one to three replicas, by each to a depth of its own.
`disjoint`: prompts that share nothing, each held by one replica in full.

Owns: the content, the same for every index that is measured.
Does not: import anything but the standard library: the peer runs it in an environment of its own.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass

HASH_BYTES = 16
PROMPT_CHUNKS = 256
PROMPT_BYTES = PROMPT_CHUNKS * HASH_BYTES
SYSTEM_CHUNKS = 16
NUM_SYSTEMS = 8
CHUNKS_PER_REPLICA = 20_000
NUM_SAMPLES = 1000


@dataclass(frozen=True)
class Stored:
    """A replica stores `chunks`, in the place after `parent`."""

    replica: int
    parent: bytes | None
    chunks: tuple[bytes, ...]


def unpack(packed: bytes) -> tuple[bytes, ...]:
    return tuple(packed[at : at + HASH_BYTES] for at in range(0, len(packed), HASH_BYTES))


class Content:
    """Iterate once for all stored chunks; `samples` are then prompts to ask for, in random order."""

    def __init__(self, kind: str, replicas: int, chunks_per_replica: int = CHUNKS_PER_REPLICA) -> None:
        self.kind = kind
        self.replicas = replicas
        self.target = replicas * chunks_per_replica
        self._num_samples = 0
        self._samples = bytearray(NUM_SAMPLES * PROMPT_BYTES)  # no objects: they would pin memory between the index's
        self._rng = random.Random(0)

    def __iter__(self) -> Iterator[Stored]:
        yield from self._shared() if self.kind == "shared" else self._disjoint()

    def samples(self) -> list[bytes]:
        taken = range(0, self._num_samples * PROMPT_BYTES, PROMPT_BYTES)
        samples = [bytes(self._samples[at : at + PROMPT_BYTES]) for at in taken]
        random.Random(1).shuffle(samples)
        return samples

    def new_chunks(self, count: int) -> tuple[bytes, ...]:
        return unpack(self._rng.randbytes(HASH_BYTES * count))

    def _shared(self) -> Iterator[Stored]:
        rng, entries = self._rng, 0
        systems = [self.new_chunks(SYSTEM_CHUNKS) for _ in range(NUM_SYSTEMS)]
        for system in systems:
            for replica in range(self.replicas):
                yield Stored(replica, None, system)
                entries += SYSTEM_CHUNKS
        while entries < self.target:
            system, own = rng.choice(systems), self.new_chunks(PROMPT_CHUNKS - SYSTEM_CHUNKS)
            for replica in rng.sample(range(self.replicas), rng.choice((1, 1, 1, 2, 3))):
                depth = rng.randrange(1, len(own) + 1)
                yield Stored(replica, system[-1], own[:depth])
                entries += depth
            self._sample(system + own, expected=self.target / 200)

    def _disjoint(self) -> Iterator[Stored]:
        for number in range(self.target // PROMPT_CHUNKS):
            chunks = self.new_chunks(PROMPT_CHUNKS)
            yield Stored(number % self.replicas, None, chunks)
            self._sample(chunks, expected=self.target / PROMPT_CHUNKS)

    def _sample(self, prompt: tuple[bytes, ...], expected: float) -> None:
        if self._num_samples < NUM_SAMPLES and self._rng.random() < NUM_SAMPLES / expected:
            at = self._num_samples * PROMPT_BYTES
            self._samples[at : at + PROMPT_BYTES] = b"".join(prompt)
            self._num_samples += 1

    def staircases(self, count: int) -> Iterator[tuple[bytes, list[Stored]]]:
        """The worst prompts for a lookup: every replica holds one to another depth."""
        for _ in range(count):
            chunks = self.new_chunks(PROMPT_CHUNKS)
            depths = [self._rng.randrange(1, PROMPT_CHUNKS + 1) for _ in range(self.replicas)]
            yield b"".join(chunks), [Stored(replica, None, chunks[:depth]) for replica, depth in enumerate(depths)]
