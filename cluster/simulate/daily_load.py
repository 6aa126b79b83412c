"""daily_load: a trace whose rate rises and falls as over a day, and which is long and dense enough for many replicas.

    copies    of the trace, laid over each other, each with prompts of its own behind the first block that all share,
              and each beginning at another place (what would come after the end comes at the beginning)
    day       the arrivals are moved so that their rate is highest at the beginning and the end, and `swing` times
              as low in the middle:  rate(t) ~ 1 + (swing - 1) / (swing + 1) * cos(2 pi t / duration)

Owns: this transformation.
Does not: read files or run anything.
Invariants: deterministic; lengths of prompts and answers stay; requests are in order of arrival, with new numbers.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from cluster.core.errors import ConfigError
from cluster.simulate.mooncake_trace import TraceRequest
from cluster.simulate.trace_variants import commonest_first


def daily_load(requests: Sequence[TraceRequest], *, copies: int, duration_s: float, swing: float) -> list[TraceRequest]:
    if copies < 1 or duration_s <= 0 or swing < 1:
        raise ConfigError("a daily load needs at least one copy, a duration above 0 and a swing of 1 or more")
    begin = min(request.arrival_s for request in requests)
    length = max(request.arrival_s for request in requests) - begin + 1e-9
    shared = commonest_first(requests)
    own = 1 + max(max(request.hash_ids) for request in requests)
    moved: list[TraceRequest] = []
    for copy in range(copies):
        for request in requests:
            place = ((request.arrival_s - begin) / length + copy / copies) % 1.0
            ids = tuple(one if one == shared else one + copy * own for one in request.hash_ids)
            moved.append(request._replace(arrival_s=duration_s * _warped(place, swing), hash_ids=ids))
    moved.sort(key=lambda request: request.arrival_s)
    return [request._replace(number=number) for number, request in enumerate(moved)]


def _warped(place: float, swing: float) -> float:
    """Where of the day, from 0 to 1, this share of all requests has come."""
    depth = (swing - 1) / (swing + 1)
    low, high = 0.0, 1.0
    for _ in range(40):
        middle = (low + high) / 2
        if middle + depth * math.sin(2 * math.pi * middle) / (2 * math.pi) < place:
            low = middle
        else:
            high = middle
    return low
