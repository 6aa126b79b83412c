"""trace_variants: other traces made from one: faster, with few cold requests, or a burst behind one prefix.

**Few cold requests.** In a chat trace most conversations begin cold, because nobody saw their documents before. In
services with long shared instructions it is the other way round. `with_cold_share` makes the second kind out of the
first and leaves arrivals, lengths and turns alone: the beginning of most conversations becomes one of a few hot
documents, in all their turns,

    before   [0][a1 a2 .. a7][a8 a9]      [0][b1 b2 .. b7][b8]      [0][c1 .. c7][c8]
    after    [0][d1 d2 .. d7][a8 a9]      [0][d1 d2 .. d7][b8]      [0][c1 .. c7][c8]   chosen by lot to stay cold

so that what follows the document (a8) still belongs to one conversation alone.

Owns: these transformations.
Does not: read files or run anything.
Invariants: deterministic by seed; requests keep number, arrival, lengths and order (the burst is made from nothing);
equal ids still mean equal beginnings.
"""

from __future__ import annotations

import random
from collections.abc import Sequence

from cluster.core.errors import ConfigError
from cluster.simulate.ideal_hits import ideal_hits, is_cold
from cluster.simulate.mooncake_trace import TRACE_BLOCK, TraceRequest

HOT_DOCUMENTS = 8
HOT_BLOCKS = 7  # 3,584 tokens behind the block that all share


def at_speed(requests: Sequence[TraceRequest], speed: float) -> list[TraceRequest]:
    """Everything arrives `speed` times as fast."""
    return [request._replace(arrival_s=request.arrival_s / speed) for request in requests]


def with_cold_share(
    requests: Sequence[TraceRequest],
    share: float,
    *,
    seed: int = 0,
    documents: int = HOT_DOCUMENTS,
    blocks: int = HOT_BLOCKS,
) -> list[TraceRequest]:
    """Only about this share of all requests finds no more than 512 tokens in an infinite cache.

    documents: how many become hot, at most; in a short trace fewer, because the first request for each is cold.

    ConfigError when the trace has fewer cold ones anyway, or other blocks than Mooncake's.
    """
    if any(request.segment_tokens != TRACE_BLOCK for request in requests):
        raise ConfigError("a cold share needs a trace in the Mooncake format")
    cold_turns: dict[tuple[int, ...], int] = {}
    for request, hit in zip(requests, ideal_hits(requests), strict=True):
        conversation = request.hash_ids[:2]
        cold_turns[conversation] = cold_turns.get(conversation, 0) + is_cold(hit)
    wanted = round(share * len(requests))
    if wanted > sum(cold_turns.values()):
        found = sum(cold_turns.values()) / len(requests)
        raise ConfigError(f"only {found:.1%} of the trace's requests are cold, which is below {share:.1%}")
    documents = max(min(documents, wanted // 2), 1)
    rng = random.Random(seed)
    cold = [conversation for conversation, turns in cold_turns.items() if turns]
    rng.shuffle(cold)
    left = wanted - documents  # the first request for each document is cold, too
    heated: dict[tuple[int, ...], int] = {}
    for conversation in cold:
        if cold_turns[conversation] <= left:
            left -= cold_turns[conversation]
        else:
            heated[conversation] = rng.randrange(documents)
    first = commonest_first(requests)
    free = 1 + max(max(request.hash_ids) for request in requests)
    beginnings = [(first, *range(free + d * blocks, free + (d + 1) * blocks)) for d in range(documents)]
    return [_begin_with(request, beginnings, heated.get(request.hash_ids[:2])) for request in requests]


def shared_burst(
    count: int = 32, *, prefix_tokens: int = 4000, tail_tokens: int = 100, output_tokens: int = 50
) -> list[TraceRequest]:
    """So many requests at once with the same new beginning and different ends."""
    assert 0 < tail_tokens <= prefix_tokens
    prompt = prefix_tokens + tail_tokens
    return [TraceRequest(n, 0.0, prompt, output_tokens, (0, 1 + n), prefix_tokens) for n in range(count)]


def commonest_first(requests: Sequence[TraceRequest]) -> int:
    counts: dict[int, int] = {}
    for request in requests:
        counts[request.hash_ids[0]] = counts.get(request.hash_ids[0], 0) + 1
    return max(counts, key=counts.__getitem__)


def _begin_with(request: TraceRequest, beginnings: Sequence[tuple[int, ...]], document: int | None) -> TraceRequest:
    if document is None:
        return request
    beginning = beginnings[document]
    ids = (*beginning[: len(request.hash_ids)], *request.hash_ids[len(beginning) :])
    assert request.segment_tokens == TRACE_BLOCK
    return request._replace(hash_ids=ids)
