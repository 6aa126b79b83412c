"""DecisionLog: the latest routing decisions, each with what explains it.

Owns: RouteDecision, the last decisions, finding them by id, and telling the reuse watch what was decided.
Does not: decide or book (router.routing_state), or turn facts into reasons (router.reuse_explanation).
Invariants: used on one event loop; no decision holds a prompt's tokens; the number of decisions kept is bounded.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from cluster.core.replica import WorkerId
from router.reuse_watch import ReuseRecord, ReuseWatch
from router.route_explanation import RouteExplanation
from router.route_hint import RouteHint
from router.scoring import Candidate, Score

_KEPT = 256


@dataclass(slots=True, kw_only=True)
class RouteDecision:
    """hint: without the prompt's tokens.  worker_id: where the request went in the end.  reuse: what explains it."""

    hint: RouteHint
    ranking: tuple[Score, ...]
    at: float
    worker_id: WorkerId
    reuse: ReuseRecord | None

    def explanation(self, *, dry_run: bool = False) -> RouteExplanation:
        return RouteExplanation(
            request_id=self.hint.request_id,
            worker_id=self.worker_id,
            candidates=self.ranking,
            reuse=None if self.reuse is None else self.reuse.explanation(),
            dry_run=dry_run,
        )


class DecisionLog:
    """`held`, in all calls: chunks by worker, as the index and what was sent say, whether or not they are credited.

    feed_late: whether the index's feed is behind.  clock: seconds, monotonic.
    """

    def __init__(
        self, watch: ReuseWatch | None, chunk_tokens: int, feed_late: Callable[[], bool], clock: Callable[[], float]
    ) -> None:
        self._watch = watch
        self._chunk_tokens = chunk_tokens
        self._feed_late = feed_late
        self._clock = clock
        self.decisions: deque[RouteDecision] = deque(maxlen=_KEPT)
        self._by_id: dict[str, RouteDecision] = {}  # of those kept, by either id

    def made(self, hint: RouteHint, ranking: Sequence[Score], held: Mapping[WorkerId, int]) -> None:
        """The request goes to the first of the ranking."""
        decision = self.draft(hint, ranking, held)
        if len(self.decisions) == _KEPT:
            self._unlink(self.decisions[0])
        self.decisions.append(decision)
        for name in _ids(hint):
            self._by_id[name] = decision
        if self._watch is not None and decision.reuse is not None:
            self._watch.decided(decision.reuse)

    def draft(self, hint: RouteHint, ranking: Sequence[Score], held: Mapping[WorkerId, int]) -> RouteDecision:
        """The decision that would be made; it is not kept."""
        best = ranking[0].candidate if ranking else Candidate(worker_id=WorkerId(""))
        reuse = self._assess(hint, best, ranking, held)
        if reuse is not None:
            hint = reuse.hint
        elif hint.trail is not None:
            hint = replace(hint, trail=None)
        return RouteDecision(
            hint=hint,
            ranking=tuple(ranking),
            at=self._clock(),
            worker_id=best.worker_id,
            reuse=reuse,
        )

    def moved(self, hint: RouteHint, candidate: Candidate, held: Mapping[WorkerId, int]) -> None:
        """The request went to this replica instead."""
        decision = self._by_id.get(hint.request_id)
        if decision is None:
            return
        decision.worker_id = candidate.worker_id
        decision.reuse = self._assess(hint, candidate, decision.ranking, held)
        if self._watch is not None and decision.reuse is not None:
            self._watch.decided(decision.reuse)

    def find(self, request_id: str) -> RouteDecision | None:
        """The latest on a request, by its own id or the client's."""
        return self._by_id.get(request_id)

    def _assess(
        self, hint: RouteHint, chosen: Candidate, ranking: Sequence[Score], held: Mapping[WorkerId, int]
    ) -> ReuseRecord | None:
        if self._watch is None or hint.trail is None:
            return None
        most = max((score.candidate.overlap_tokens for score in ranking), default=0)
        said = max(held.values(), default=0) * self._chunk_tokens
        return self._watch.assess(
            hint,
            chosen.worker_id,
            chosen=chosen.overlap_tokens,
            held=max(most, chosen.overlap_tokens),
            uncredited=said if min(said, hint.prompt_tokens - 1) > most else 0,
            feed_late=self._feed_late,
        )

    def _unlink(self, decision: RouteDecision) -> None:
        for name in _ids(decision.hint):
            if self._by_id.get(name) is decision:
                del self._by_id[name]


def _ids(hint: RouteHint) -> set[str]:
    return {hint.request_id, hint.client_id} - {""}
