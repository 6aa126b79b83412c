"""ReuseWatch: follows requests from the choice of a replica to the first token, and keeps what explains their reuse.

    decided --> answered --late_s--> counted                 an index that was late shows within this time
           \\--> forgotten: no engine began with it

A prompt is seen once it was answered: before that nobody has its KV.

Owns: the requests under way, the prompts seen, the ghosts, the counters and the latest examples of each reason.
Does not: choose replicas (router.routing_state) or turn facts into losses (router.reuse_explanation).
Invariants: used on one event loop; every answered request is counted once; neither text nor a prompt's tokens leave it;
memory is bounded, but for the requests under way.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from cluster.core.hashing import ChunkHash
from cluster.core.replica import WorkerId
from router.ghost_list import GhostList
from router.reuse_counters import ReuseCounters
from router.reuse_explanation import ReuseExplanation, ReuseFacts, explain
from router.route_hint import PromptTrail, RouteHint
from router.seen_prompts import MAX_BYTES, SeenPrompts

LATE_S = 2.0


@dataclass(slots=True, eq=False)
class ReuseRecord:
    """One routed request. trail: until it is answered or over.  awaited: the number of its first chunk nobody held."""

    hint: RouteHint
    worker_id: WorkerId
    at: float
    facts: ReuseFacts
    trail: PromptTrail | None
    awaited: int = 0
    due: float = field(default=float("inf"))

    def explanation(self) -> ReuseExplanation:
        return explain(self.facts)


class ReuseWatch:
    """Part of the index's observer. `clock`: seconds, monotonic."""

    def __init__(
        self, clock: Callable[[], float], chunk_tokens: int, *, max_bytes: int = MAX_BYTES, late_s: float = LATE_S
    ) -> None:
        self._clock = clock
        self._chunk = chunk_tokens
        self._late_s = late_s
        self._seen = SeenPrompts(chunk_tokens, max_bytes=max_bytes // 2)
        self._salted = SeenPrompts(chunk_tokens, max_bytes=max_bytes // 2)  # as if they had no salt
        self._ghosts = GhostList(clock)
        self._live: dict[str, ReuseRecord] = {}
        self._answered: deque[ReuseRecord] = deque()  # in the order of `due`
        self._awaiting: dict[ChunkHash, list[ReuseRecord]] = {}
        self._by_worker: dict[WorkerId, dict[int, ReuseRecord]] = {}  # by id(): live and answered ones
        self._counters = ReuseCounters()

    def __len__(self) -> int:
        """Requests that are not counted yet."""
        return sum(map(len, self._by_worker.values()))

    def assess(
        self,
        hint: RouteHint,
        worker_id: WorkerId,
        *,
        chosen: int,
        held: int,
        uncredited: int = 0,
        feed_late: Callable[[], bool] = lambda: False,
    ) -> ReuseRecord | None:
        """What would be said of the request there; nothing is kept. Token counts as in ReuseFacts.

        uncredited: held by a replica of which the index may be wrong.
        """
        trail = hint.trail
        if trail is None:
            return None
        seen = self._seen.find(trail.root, hint.chunk_hashes, trail.tokens)
        first_missing = -(-max(held, uncredited) // self._chunk)
        facts = ReuseFacts(
            prompt=hint.prompt_tokens,
            chunk=self._chunk,
            seen=seen.tokens,
            forked=seen.forked,
            message=trail.message_of(seen.tokens) if seen.forked else None,
            seen_elsewhere=self._seen_elsewhere(trail),
            held=held,
            chosen=chosen,
            ghosts=self._ghosts.leading_run(hint.chunk_hashes, first_missing) * self._chunk,
            late=uncredited,
        )
        facts.feed_late = seen.tokens >= max(held, facts.ghosts) + self._chunk and feed_late()
        bare = replace(hint, trail=None)  # a record may be kept for long, the tokens may not
        return ReuseRecord(bare, worker_id, self._clock(), facts, trail, awaited=first_missing)

    def decided(self, record: ReuseRecord) -> None:
        """The request goes where it was assessed. Replaces what was said of it."""
        self._settle()
        self.forget(record.hint.request_id)
        self._live[record.hint.request_id] = record
        self._by_worker.setdefault(record.worker_id, {})[id(record)] = record
        self._await(record)

    def answered(self, request_id: str, cached_tokens: int) -> ReuseExplanation | None:
        """Its first token is here, with what the engine reused. None: nothing is known of the request."""
        self._settle()
        record = self._live.pop(request_id, None)
        if record is None or record.trail is None:
            return None
        hint, facts, trail = record.hint, record.facts, record.trail
        facts.reused = min(cached_tokens, facts.prompt)
        if facts.reused < facts.chosen:
            deepest = facts.chosen // self._chunk - 1
            chunk = hint.chunk_hashes[deepest] if 0 <= deepest < len(hint.chunk_hashes) else None
            facts.lost_underway = self._ghosts.lost_since(record.worker_id, chunk, record.at)
        self._seen.add(trail.root, hint.chunk_hashes, trail.tokens)
        if trail.salted:
            self._salted.add(trail.plain_root, trail.plain_hashes, trail.tokens)
        record.trail = None
        record.due = self._clock() + self._late_s
        self._answered.append(record)
        return record.explanation()

    def forget(self, request_id: str) -> None:
        """It is over, or routed again. Changes nothing once it is answered."""
        record = self._live.pop(request_id, None)
        if record is not None:
            record.trail = None
            self._drop(record)

    def lost(self, worker_id: WorkerId, chunk_hashes: Sequence[ChunkHash] | None) -> None:
        self._ghosts.lost(worker_id, chunk_hashes)

    def stored(self, worker_id: WorkerId, chunk_hashes: Sequence[ChunkHash]) -> None:
        """Was it there, or about to be, when a request for it was routed elsewhere?"""
        if not self._awaiting:
            return
        for chunk in chunk_hashes:
            for record in self._awaiting.pop(chunk, ()):
                if self._is_news(record, worker_id, chunk):
                    record.awaited += 1
                    record.facts.late = record.awaited * self._chunk
                self._await(record)

    def settled(self) -> ReuseCounters:
        """Of all requests whose explanation will not change any more."""
        self._settle()
        return self._counters

    def _seen_elsewhere(self, trail: PromptTrail) -> int:
        if not (trail.salted or self._salted.size_bytes):
            return 0  # nobody uses salts
        stores = [self._salted, self._seen] if trail.salted else [self._salted]
        return max(store.find(trail.plain_root, trail.plain_hashes, trail.tokens).tokens for store in stores)

    def _is_news(self, record: ReuseRecord, worker_id: WorkerId, chunk: ChunkHash) -> bool:
        """Not if it is ourselves who had that worker compute it."""
        place = record.awaited
        return self._clock() - record.at <= self._late_s and not any(
            len(other.hint.chunk_hashes) > place and other.hint.chunk_hashes[place] == chunk
            for other in self._by_worker.get(worker_id, {}).values()
        )

    def _await(self, record: ReuseRecord) -> None:
        if record.awaited < len(record.hint.chunk_hashes):
            self._awaiting.setdefault(record.hint.chunk_hashes[record.awaited], []).append(record)

    def _settle(self) -> None:
        now = self._clock()
        while self._answered and self._answered[0].due <= now:
            record = self._answered.popleft()
            self._drop(record)
            self._counters.count(record.hint.request_id, record.worker_id, record.explanation())

    def _drop(self, record: ReuseRecord) -> None:
        of_worker = self._by_worker[record.worker_id]
        del of_worker[id(record)]
        if not of_worker:
            del self._by_worker[record.worker_id]
        if record.awaited < len(record.hint.chunk_hashes):
            chunk = record.hint.chunk_hashes[record.awaited]
            waiting = self._awaiting.get(chunk, [])
            if record in waiting:
                waiting.remove(record)
            if not waiting:
                self._awaiting.pop(chunk, None)
