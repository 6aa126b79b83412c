"""EstimatedTtft: the replica that gives the first token soonest, at the least cost to everybody else.

    cost = ahead + own + others * (own + evicted) + own * overtaken

ahead      seconds of compute there before this request's own: what is left of our bookings, other routers' tokens
           where live prompts and this one do not fit into memory, or live requests and this one do not find a seat
           each, the time until enough of them have ended, if longer
own        this prompt's uncached tokens on the replica's step-time model: tokens, the context they attend to, and in
           each step of the budget the weights and the rows that decode there meanwhile
evicted    what is cached anew pushes out something else, unless there is free memory: `eviction` times `own`
overtaken  waiting requests with less in the cache, which this one makes wait (router.own_work)

`others` is what a second of compute costs the requests to come. It keeps a burst of one new prefix together, and hot
prefixes on few replicas until their queues are worth a second copy; nothing is spread or kept by a threshold, so under
imbalance affinity goes on among the replicas that are near the best. Costs within `near_tie` of the best are equal:
then the larger overlap wins, then the one with less that decodes, then chance. Where nothing is known to be cached all
this is load only.

A prefix with one holder that many ask for gets a second one before queues ask for it: the first request that finds the
second replica no busier goes there, and is not charged for what it computes again (`Candidate.hot_tokens`).

Owns: the estimate and its parameters.
Does not: gather candidates or book (router.routing_state).
Invariants: without a step-time model a replica is judged by its prefill rate, without that by the mean of the others'
rates, or else by `default_rate`; costs are finite and >= 0.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

from router.own_work import SEATS
from router.scoring import Candidate, Score


@dataclass(frozen=True, slots=True, kw_only=True)
class TtftParameters:
    """others, eviction: see above.  token_budget: of a step.  max_num_seqs: seats.  Both as the engines have them."""

    others: float = 1.0
    eviction: float = 0.3
    token_budget: int = 2048
    max_num_seqs: int = SEATS


class EstimatedTtft:
    """default_rate: tokens per second.  near_tie: a share."""

    def __init__(
        self,
        default_rate: float,
        near_tie: float,
        rng: random.Random,
        parameters: TtftParameters | None = None,
    ) -> None:
        self._default_rate = default_rate
        self._near_tie = near_tie
        self._rng = rng
        self._parameters = parameters or TtftParameters()

    def rank(self, prompt_tokens: int, candidates: Sequence[Candidate]) -> list[Score]:
        fallback = self._fallback(candidates)
        parameters = self._parameters
        others, eviction, seats = parameters.others, parameters.eviction, parameters.max_num_seqs
        scored: list[tuple[Candidate, float, float]] = []
        best = float("inf")
        for c in candidates:
            own = self._own_seconds(prompt_tokens, c.overlap_tokens, c, fallback)
            if c.hot_tokens > c.overlap_tokens:
                charged = self._own_seconds(prompt_tokens, c.hot_tokens, c, fallback)
            else:
                charged = own
            work = c.work
            ahead = work.ahead_s + self._token_seconds(c.others_tokens, c, fallback)
            short = work.active_tokens + prompt_tokens - c.kv_tokens
            if short > 0 and work.active_tokens and prompt_tokens <= c.kv_tokens:
                ahead = max(ahead, work.decode_s * short / work.active_tokens)
            if c.running >= seats:
                ahead = max(ahead, work.decode_s * (c.running + 1 - seats) / seats)
            pushed_out = charged * eviction * (1.0 - c.kv_free)
            cost = ahead + charged + others * (charged + pushed_out) + charged * work.overtaken
            scored.append((c, cost, own))
            if cost < best and not c.lost:
                best = cost
        bound = best * (1 + self._near_tie)
        draw = self._rng.random

        def key(one: tuple[Candidate, float, float]) -> tuple[bool, float, int, int, float]:
            c, cost, _ = one
            return (c.lost, 0.0 if cost <= bound else cost, -max(c.overlap_tokens, c.hot_tokens), c.running, draw())

        scored.sort(key=key)
        new = tuple.__new__  # in C; Score(..) calls a Python function, once for every replica
        return [new(Score, one) for one in scored]

    def _fallback(self, candidates: Sequence[Candidate]) -> float:
        """The rate of whoever has none."""
        known = [c.prefill_tokens_per_s for c in candidates if c.prefill_tokens_per_s > 0]
        return sum(known) / len(known) if known else self._default_rate

    def _own_seconds(self, prompt: int, held: int, c: Candidate, fallback: float) -> float:
        tokens = max(prompt - held, 1)
        model = c.step_time
        if model is None:
            return tokens / (c.prefill_tokens_per_s or fallback)
        work, budget = c.work, self._parameters.token_budget
        steps = -(-tokens // budget)
        step = model.base + model.per_decode_seq * work.decoding + model.per_decode_context * work.decode_tokens
        attended = tokens * (held + (tokens + 1) / 2)
        return model.per_prefill_token * tokens + model.per_prefill_context * attended + steps * step

    def _token_seconds(self, tokens: int, c: Candidate, fallback: float) -> float:
        """Of other routers' tokens, of which nothing but their number is known."""
        if not tokens:
            return 0.0
        model = c.step_time
        if model is None:
            return tokens / (c.prefill_tokens_per_s or fallback)
        return tokens * (model.per_prefill_token + model.base / self._parameters.token_budget)
