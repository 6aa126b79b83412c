"""PrefixHolds: waiting sequences whose beginning a running one is computing right now.

Without it, requests that arrive together with one new prefix would each compute it.

Owns: who is held by which leader, and when that ends: the shared part is computed, the leader runs no more, or the
hold lasts for `longest_s`.
Does not: order those who wait (waiting_queue), or look into the tree.
Invariants: a leader was admitted and is at least as urgent, so it always goes on, and every hold ends; who was held for
too long is not held again; a step costs one look per leader, and work per ended hold.
Source: in-batch prefix caching as in SGLang, with the leader running instead of waiting.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Iterable, Iterator

from worker.kvcache.block_manager import BlockManager
from worker.scheduling.waiting_queue import WaitingQueue
from worker.sequence import Sequence, SequenceStatus


class PrefixHolds:
    """`enabled` False: nobody is ever held, for comparison."""

    def __init__(self, manager: BlockManager, queue: WaitingQueue, longest_s: float, *, enabled: bool = True) -> None:
        self._manager = manager
        self._queue = queue
        self._longest_s = longest_s
        self._enabled = enabled and manager.caches_prefixes
        self._of: dict[str, tuple[Sequence, list[tuple[int, int, Sequence]]]] = {}  # (until, arrival, held) by leader
        self._since: deque[tuple[float, str, Sequence]] = deque()

    def try_hold(self, seq: Sequence, prefilling: Iterable[Sequence], now: float) -> bool:
        """Set `seq` aside when one of `prefilling` is computing at least a block of it that nobody has yet."""
        found = None if seq.scores_prompt or seq.held_too_long or not self._enabled else self._leader(seq, prefilling)
        if found is None:
            return False
        leader, until = found
        self._queue.hold(seq, leader.seq_id)
        _, held = self._of.setdefault(leader.seq_id, (leader, []))
        heapq.heappush(held, (until, seq.arrival, seq))
        self._since.append((now, leader.seq_id, seq))
        return True

    def release(self, now: float) -> None:
        """End the holds that are over."""
        for leader_id, (leader, held) in list(self._of.items()):
            over = leader.status is not SequenceStatus.RUNNING
            while held and (over or held[0][0] <= leader.num_computed or held[0][2].held_by != leader_id):
                seq = heapq.heappop(held)[2]
                if seq.held_by == leader_id:
                    self._queue.release(seq)
            if not held:
                del self._of[leader_id]
        while self._since:
            since, leader_id, seq = self._since[0]
            holds = seq.held_by == leader_id
            if holds and now - since < self._longest_s:
                return
            self._since.popleft()
            if holds:
                seq.held_too_long = True
                self._queue.release(seq)

    def _leader(self, seq: Sequence, prefilling: Iterable[Sequence]) -> tuple[Sequence, int] | None:
        """Who computes most of its beginning, and the tokens after which that part is there."""
        unit = self._manager.hit_unit
        least = max(unit, self._manager.block_size)
        most, leader = 0, None
        for other in _worth_waiting_for(prefilling, seq.request.priority):
            shared = other.num_shared_tokens(seq)
            if shared > max(most, other.num_computed):
                most, leader = shared, other
        most -= most % unit  # the rest will never be found
        if leader is None or most < max(least, leader.num_computed + 1):
            return None
        if most - self._manager.cached_prefix(seq.lookup, seq.request.cache_salt) < least:
            return None
        return leader, most


def _worth_waiting_for(prefilling: Iterable[Sequence], priority: int) -> Iterator[Sequence]:
    """One token of prefill is not worth a wait, who was preempted in this step computes nothing, and nobody waits for
    somebody less urgent, whom all others of its own class pass."""
    for one in prefilling:
        if one.num_uncomputed > 1 and one.status is SequenceStatus.RUNNING and one.request.priority <= priority:
            yield one
