"""PromptTokens: token ids for the hash ids of a trace.

    table   t0 t1 t2 t3 ...                random, drawn once
    id 0    t0 .. t511
    id 1       t1 .. t512                  windows overlap in the table, but no position of two ids agrees by design

So a segment is one slice: nothing is drawn or stored per id, however many there are.

Owns: the table.
Does not: know requests' fate or blocks of the pool.
Invariants: the same id always gives the same tokens; a shorter segment is the beginning of the longer one; FILLER
never occurs.
"""

from __future__ import annotations

import random
from collections.abc import Iterable

from cluster.simulate.mooncake_trace import TraceRequest
from cluster.simulate.virtual_runner import FILLER, VOCAB_SIZE


class PromptTokens:
    def __init__(self, requests: Iterable[TraceRequest], seed: int = 0) -> None:
        ends = (max(request.hash_ids) + request.segment_tokens for request in requests)
        vocabulary = range(FILLER + 1, VOCAB_SIZE)
        self._table = tuple(random.Random(seed).choices(vocabulary, k=max(ends, default=0)))

    def prompt(self, request: TraceRequest) -> tuple[int, ...]:
        tokens: list[int] = []
        for hash_id in request.hash_ids:
            tokens += self._table[hash_id : hash_id + request.segment_tokens]
        return tuple(tokens[: request.prompt_tokens])
