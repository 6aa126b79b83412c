"""pooled_hits: what the memory of a whole fleet saves of each request if it is one cache, each segment in it once.

    lru       what was asked for longest ago goes first: the most that routing can reach where replicas evict so
    farthest  what is asked for again latest goes first: the most that any eviction could reach, knowing the future

Source of the second: L. A. Belady, "A study of replacement algorithms for a virtual-storage computer", IBM Systems
Journal 5(2), 1966. Either way a segment's ancestors are never worth less than it, so what is held stays closed under
prefix.

Owns: these two counts.
Does not: know time: a prefix is there at once, requests that run need no memory, nothing has a second copy.
Invariants: never the whole prompt, and whole segments only; with memory for everything both are ideal_hits, but for
parts of segments.
"""

from __future__ import annotations

import heapq
import math
from collections import OrderedDict
from collections.abc import Sequence

from cluster.simulate.mooncake_trace import TraceRequest


def lru_hits(requests: Sequence[TraceRequest], memory_tokens: int) -> list[int]:
    """Tokens per request, in order of arrival.  memory_tokens: of all replicas together."""
    hits: list[int] = []
    held: OrderedDict[int, None] = OrderedDict()
    for request in requests:
        hits.append(_hit(request, held))
        for hash_id in reversed(_whole(request)):  # the beginning of a prompt is used last
            held[hash_id] = None
            held.move_to_end(hash_id)
        while len(held) > memory_tokens // request.segment_tokens:
            held.popitem(last=False)
    return hits


def farthest_hits(requests: Sequence[TraceRequest], memory_tokens: int) -> list[int]:
    """As lru_hits."""
    hits: list[int] = []
    later = _next_uses(requests)
    held: dict[int, float] = {}  # segment -> when it is asked for again
    latest: list[tuple[float, int, int]] = []  # what may go, the latest first; entries may be out of date
    for number, request in enumerate(requests):
        hits.append(_hit(request, held))
        for place, hash_id in enumerate(_whole(request)):
            held[hash_id] = again = later[number][place]
            heapq.heappush(latest, (-again, -place, hash_id))
        while len(held) > memory_tokens // request.segment_tokens:
            again, _, hash_id = heapq.heappop(latest)
            if held.get(hash_id) == -again:
                del held[hash_id]
    return hits


def _whole(request: TraceRequest) -> tuple[int, ...]:
    """A cut segment is nobody's beginning by its id."""
    return request.hash_ids[: request.prompt_tokens // request.segment_tokens]


def _hit(request: TraceRequest, held: OrderedDict[int, None] | dict[int, float]) -> int:
    found = 0
    for hash_id in request.hash_ids:
        if hash_id not in held:
            break
        found += 1
    return min(found * request.segment_tokens, request.prompt_tokens - 1)


def _next_uses(requests: Sequence[TraceRequest]) -> list[list[float]]:
    """For each request and whole segment: the number of the next request that asks for it, or infinity."""
    coming: dict[int, float] = {}
    found: list[list[float]] = [[] for _ in requests]
    for number in range(len(requests) - 1, -1, -1):
        ids = _whole(requests[number])
        found[number] = [coming.get(hash_id, math.inf) for hash_id in ids]
        coming.update(dict.fromkeys(ids, number))
    return found
