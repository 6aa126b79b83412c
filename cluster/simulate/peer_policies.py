"""peer_policies: how other routers choose, as they publish it, each a small class behind router.scoring.Policy.

    least_requests    fewest live requests
    power_of_two      of two replicas drawn at random the one with fewer requests
    longest_prefix    the longest match, whatever waits there (production-stack, prefixaware)
    ray_affinity      PrefixCacheAffinityRouter: match below 10 % -> the smallest tree, else of the matched the shortest
                      queue; a spread of queues is never too large (its threshold is infinite)
    sglang            cache_aware: queues apart by more than 32 requests and 1.1 times -> fewest requests, else a match
                      of more than 50 % -> the longest, else fewest requests
    aibrix            prefix-cache: queues apart by more than 8 -> the shortest; else matches in falling order, the
                      first with no more than mean + 1 deviation of requests, else fewest
    dynamo            prefill blocks (active + own - overlap) + blocks of live requests with this one, in blocks of 16
    llm_d             precise prefix, KV use and queue, weights 3 : 2 : 2

Owns: these classes.
Does not: keep what was sent where: a router that goes by its own history gets overlaps from one (policy_lineup).
Invariants: as router.scoring.Policy. Sources and readings: docs/decisions/0013-the-simulated-fleet.md.
"""

from __future__ import annotations

import random
import statistics
from collections.abc import Callable, Sequence

from cluster.core.replica import WorkerId
from router.scoring import Candidate, Score

_DYNAMO_BLOCK = 16
_LLM_D_WEIGHTS = (3.0, 2.0, 2.0)
_SGLANG_THRESHOLD, _SGLANG_APART, _SGLANG_TIMES = 0.5, 32, 1.1
_AIBRIX_APART, _AIBRIX_DEVIATIONS = 8, 1.0
_RAY_THRESHOLD = 0.1


class _ByCost:
    """Lowest cost first, ties by chance."""

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng

    def rank(self, prompt_tokens: int, candidates: Sequence[Candidate]) -> list[Score]:
        if not candidates:
            return []
        costs = self.costs(prompt_tokens, candidates)
        draw = self._rng.random
        order = sorted(zip(candidates, costs, strict=True), key=lambda one: (one[0].lost, one[1], draw()))
        return [Score(c, cost) for c, cost in order]

    def costs(self, prompt_tokens: int, candidates: Sequence[Candidate]) -> list[float]:
        raise NotImplementedError


class LeastRequests(_ByCost):
    def costs(self, prompt_tokens: int, candidates: Sequence[Candidate]) -> list[float]:
        return [float(c.requests) for c in candidates]


class PowerOfTwo(_ByCost):
    def costs(self, prompt_tokens: int, candidates: Sequence[Candidate]) -> list[float]:
        drawn = self._rng.sample(range(len(candidates)), min(2, len(candidates)))
        return [float(c.requests) if n in drawn else 1e9 for n, c in enumerate(candidates)]


class LongestPrefix(_ByCost):
    def costs(self, prompt_tokens: int, candidates: Sequence[Candidate]) -> list[float]:
        return [float(-c.overlap_tokens) for c in candidates]


class RayAffinity(_ByCost):
    def __init__(self, rng: random.Random) -> None:
        super().__init__(rng)
        self._tree_tokens: dict[WorkerId, int] = {}

    def rank(self, prompt_tokens: int, candidates: Sequence[Candidate]) -> list[Score]:
        ranking = super().rank(prompt_tokens, candidates)
        if ranking:
            chosen = ranking[0].candidate
            new = prompt_tokens - chosen.overlap_tokens
            self._tree_tokens[chosen.worker_id] = self._tree_tokens.get(chosen.worker_id, 0) + new
        return ranking

    def costs(self, prompt_tokens: int, candidates: Sequence[Candidate]) -> list[float]:
        longest = max(c.overlap_tokens for c in candidates)
        if longest < _RAY_THRESHOLD * prompt_tokens:
            sizes = [self._tree_tokens.get(c.worker_id, 0) for c in candidates]
            group = [size == min(sizes) for size in sizes]
        else:
            group = [c.overlap_tokens == longest for c in candidates]
        return [c.requests if chosen else 1e9 for c, chosen in zip(candidates, group, strict=True)]


class SglangThreshold(_ByCost):
    def costs(self, prompt_tokens: int, candidates: Sequence[Candidate]) -> list[float]:
        most, least = max(c.requests for c in candidates), min(c.requests for c in candidates)
        longest = max(c.overlap_tokens for c in candidates)
        apart = most - least > _SGLANG_APART and most > _SGLANG_TIMES * least
        if not apart and longest > _SGLANG_THRESHOLD * prompt_tokens:
            return [float(-c.overlap_tokens) for c in candidates]
        return [float(c.requests) for c in candidates]


class Aibrix(_ByCost):
    def costs(self, prompt_tokens: int, candidates: Sequence[Candidate]) -> list[float]:
        requests = [c.requests for c in candidates]
        bound = statistics.fmean(requests) + _AIBRIX_DEVIATIONS * statistics.pstdev(requests)
        if max(requests) - min(requests) > _AIBRIX_APART:
            return [float(count) for count in requests]
        return [
            c.requests - 1e4 * c.overlap_tokens if c.overlap_tokens and c.requests <= bound else float(c.requests)
            for c in candidates
        ]


class DynamoCost(_ByCost):
    def costs(self, prompt_tokens: int, candidates: Sequence[Candidate]) -> list[float]:
        return [
            (max(c.ahead_tokens + prompt_tokens - c.overlap_tokens, 0) + c.work.active_tokens + prompt_tokens)
            / _DYNAMO_BLOCK
            for c in candidates
        ]


class LlmD(_ByCost):
    def costs(self, prompt_tokens: int, candidates: Sequence[Candidate]) -> list[float]:
        prefix, kv, queue = _LLM_D_WEIGHTS
        most, least = max(c.waiting for c in candidates), min(c.waiting for c in candidates)
        return [
            -prefix * c.overlap_tokens / prompt_tokens
            - kv * (1.0 - c.kv_in_use)
            - queue * ((most - c.waiting) / (most - least) if most > least else 1.0)
            for c in candidates
        ]


class PrebleE2(_ByCost):
    """Preble E2: more cached than new -> of those with the longest match the cheapest; else the cheapest of all.

    cost = L + M + P over a window of 3 minutes: L = prefill seconds sent there + live requests * median output * time
    per output token; M = recomputing what the new tokens evict; P = prefill of the new ones. `seconds_per_token` is the
    replicas' own, where Preble has a fitted equation. Moving and copying nodes afterwards is left out: it needs 50
    requests per replica and window and a ratio of 1.5, and acts on what comes later.
    """

    WINDOW_S, OUTPUT_S = 180.0, 45 * 0.15

    def __init__(self, rng: random.Random, clock: Callable[[], float], seconds_per_token: float) -> None:
        super().__init__(rng)
        self._clock = clock
        self._token_s = seconds_per_token
        self._sent: dict[WorkerId, list[tuple[float, float]]] = {}

    def rank(self, prompt_tokens: int, candidates: Sequence[Candidate]) -> list[Score]:
        ranking = super().rank(prompt_tokens, candidates)
        if ranking:
            chosen = ranking[0].candidate
            seconds = (prompt_tokens - chosen.overlap_tokens) * self._token_s
            self._sent.setdefault(chosen.worker_id, []).append((self._clock(), seconds))
        return ranking

    def costs(self, prompt_tokens: int, candidates: Sequence[Candidate]) -> list[float]:
        longest = max(c.overlap_tokens for c in candidates)
        exploits = prompt_tokens - longest < longest
        return [
            1e9 if exploits and c.overlap_tokens < longest else self._cost(prompt_tokens - c.overlap_tokens, c)
            for c in candidates
        ]

    def _cost(self, new_tokens: int, c: Candidate) -> float:
        sent = self._sent.get(c.worker_id, [])
        since = self._clock() - self.WINDOW_S
        while sent and sent[0][0] < since:
            del sent[0]
        load = sum(seconds for _, seconds in sent) + c.requests * self.OUTPUT_S
        new = new_tokens * self._token_s
        return load + new * (1.0 - c.kv_free) + new
