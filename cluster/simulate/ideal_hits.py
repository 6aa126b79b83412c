"""ideal_hits: what one infinite cache would save of each request of a trace.

Owns: counting, to the token: the last, partial segment of a prompt matches the beginning of a longer one of its id.
Does not: know pools, eviction, or that a prefix takes time until it is computed.
Invariants: never the whole prompt, because the last token must be computed for the first answer token.
"""

from __future__ import annotations

from collections.abc import Sequence

from cluster.simulate.mooncake_trace import TraceRequest

COLD_TOKENS = 512  # a request that finds no more than this is cold


def ideal_hits(requests: Sequence[TraceRequest]) -> list[int]:
    """Tokens per request, in order of arrival."""
    seen: dict[int, int] = {}  # id -> the longest part of its segment so far
    return [_hit(request, seen) for request in requests]


def is_cold(hit_tokens: int) -> bool:
    return hit_tokens <= COLD_TOKENS


def _hit(request: TraceRequest, seen: dict[int, int]) -> int:
    hit = 0
    matches = True
    for index, hash_id in enumerate(request.hash_ids):
        tokens = min(request.segment_tokens, request.prompt_tokens - index * request.segment_tokens)
        before = seen.get(hash_id, 0)
        if matches:
            hit += min(before, tokens)
            matches = before >= tokens == request.segment_tokens
        if tokens > before:
            seen[hash_id] = tokens
    return min(hit, request.prompt_tokens - 1)


def ideal_block_hits(requests: Sequence[TraceRequest]) -> float:
    """Share of all block references, the last partial ones too, whose id came before: as Dynamo counts it."""
    seen: set[int] = set()
    hits = references = 0
    for request in requests:
        references += len(request.hash_ids)
        hits += sum(hash_id in seen for hash_id in request.hash_ids)
        seen.update(request.hash_ids)
    return hits / references if references else 0.0
