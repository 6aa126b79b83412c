"""WaitingQueue: who waits, and who is next.

    priority 0    preempted ones, in the order of their arrival
                  then whoever waits for `ageing_s` or longer, in the order of arrival
                  then the one with the longest cached prefix, the older first
    priority 1    the same, when nobody of priority 0 can be next
    held          set aside until a prefix is computed that they share (prefix_holds); they keep their age

Longest prefix first uses what is cached before it is evicted; alone it would let a stream of hot prefixes starve a
cold one. The ageing bound ends that: nobody is overtaken by a younger one of its class for longer than `ageing_s`.

Owns: the order, and the tokens that wait, by router.
Does not: know memory or budgets, or look into the cache by itself (`look` does).
Invariants: classes are strictly ordered; what is held is never next; a look costs one match of a prompt, and a step
looks at a bounded number of them, at none again while the cache stays as it is; what left the queue leaves the heaps
before they are twice as long as the queue.
Source: longest-prefix-first as in SGLang's RadixAttention (arXiv 2312.07104); the bound is ours.
"""

from __future__ import annotations

import heapq
import itertools
from array import array
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping

from worker.sequence import Sequence

LOOKS_PER_CHOICE = 8  # prompts matched again before one is taken as the next
LOOKS_PER_STEP = 2  # others matched again, in turn, because somebody else may have computed their prefix

_Key = tuple[int, ...]


class WaitingQueue:
    """`look`: cached tokens of a sequence now. `prefix_first` False: in the order of arrival.

    changes: of the cache: while this number stays the same, so does the answer of a look.
    """

    def __init__(
        self,
        look: Callable[[Sequence], int],
        changes: Callable[[], int],
        ageing_s: float,
        *,
        prefix_first: bool = True,
    ) -> None:
        self._look = look
        self._changes = changes
        self._ageing_s = ageing_s
        self._prefix_first = prefix_first
        self._classes: dict[int, _PriorityClass] = {}
        self._waiting: dict[str, Sequence] = {}
        self._turns: deque[Sequence] = deque()  # whose cached prefix is looked at again, and when
        self._uncached: Counter[str] = Counter()
        self._counted: dict[str, tuple[str, int]] = {}
        self.num_held = 0
        self.num_tokens = 0
        self.num_looks = 0

    def __len__(self) -> int:
        return len(self._waiting)

    def __iter__(self) -> Iterator[Sequence]:
        return iter(self._waiting.values())

    @property
    def uncached_tokens(self) -> Mapping[str, int]:
        """Estimated tokens to prefill, by router id."""
        return self._uncached

    def add(self, seq: Sequence) -> None:
        """A new one, or a preempted one, which goes before those of its class that never ran."""
        self._waiting[seq.seq_id] = seq
        self.num_tokens += seq.num_tokens
        seq.packed = array("I", seq.tokens)
        seq.expected_cached = self._cached(seq)
        self._count(seq)
        self._line_up(seq)
        if self._prefix_first:
            self._turns.append(seq)

    def remove(self, seq: Sequence) -> None:
        del self._waiting[seq.seq_id]
        self.num_tokens -= seq.num_tokens
        self.num_held -= seq.held_by is not None
        seq.held_by = seq.queue_key = seq.packed = None
        router, tokens = self._counted.pop(seq.seq_id)
        self._uncached[router] -= tokens
        if not self._uncached[router]:
            del self._uncached[router]
        members = self._classes[seq.request.priority]
        members.leave(self._waiting)
        if not members.count:
            del self._classes[seq.request.priority]
        if len(self._turns) > 2 * len(self._waiting) + 16:
            self._turns = deque(seq for seq in self._waiting.values())

    def hold(self, seq: Sequence, leader_id: str) -> None:
        """Set it aside; only `release` makes it eligible again."""
        seq.held_by, seq.queue_key = leader_id, None
        self.num_held += 1

    def release(self, seq: Sequence) -> None:
        seq.held_by = None
        self.num_held -= 1
        self._look_again(seq)
        self._line_up(seq, new=False)

    def first(self, now: float) -> Sequence | None:
        """The next one to admit, of the most urgent class that has one; it stays in the queue."""
        for priority in sorted(self._classes):
            seq = self._first_of(self._classes[priority], now)
            if seq is not None:
                return seq
        return None

    def refresh(self) -> None:
        """Once a step: look again at a few, in turn."""
        for _ in range(min(LOOKS_PER_STEP, len(self._turns))):
            seq = self._turns.popleft()
            if self._waiting.get(seq.seq_id) is seq:
                self._turns.append(seq)
                if seq.held_by is None and self._look_again(seq):
                    self._line_up(seq, new=False)

    def _first_of(self, members: _PriorityClass, now: float) -> Sequence | None:
        front = members.front(self._waiting)
        if front is None:
            return None
        if front.queue_key[0] == 0 or not self._prefix_first:  # type: ignore[index]  # it is eligible
            return front
        oldest = members.oldest(self._waiting)
        if oldest is not None and now - oldest.arrived_at >= self._ageing_s:
            return oldest
        for _ in range(LOOKS_PER_CHOICE):
            if not self._look_again(front):
                return front
            members.line_up(front, self._key(front), self._waiting)
            after = members.front(self._waiting)
            if after is front:
                return front
            assert after is not None, "the sequence that was just lined up is not there"
            front = after
        return front

    def _look_again(self, seq: Sequence) -> bool:
        """Whether its cached prefix changed."""
        if seq.looked_at == self._changes():
            return False
        cached = self._cached(seq)
        if cached == seq.expected_cached:
            return False
        seq.expected_cached = cached
        self._count(seq)
        return True

    def _cached(self, seq: Sequence) -> int:
        self.num_looks += 1
        seq.looked_at = self._changes()
        return self._look(seq)

    def _count(self, seq: Sequence) -> None:
        router, before = self._counted.get(seq.seq_id, (seq.request.router_id, 0))
        tokens = seq.uncached_tokens
        self._counted[seq.seq_id] = (router, tokens)
        self._uncached[router] += tokens - before

    def _line_up(self, seq: Sequence, *, new: bool = True) -> None:
        members = self._classes.get(seq.request.priority)
        if members is None:
            members = self._classes[seq.request.priority] = _PriorityClass()
        members.count += new
        members.line_up(seq, self._key(seq), self._waiting)

    def _key(self, seq: Sequence) -> _Key:
        if seq.preemptions:
            return (0, seq.arrival)
        return (1, -seq.expected_cached if self._prefix_first else 0, seq.arrival)


class _PriorityClass:
    """Two heaps over the same sequences. An entry counts while its sequence waits with exactly this key."""

    __slots__ = ("_by_age", "_by_key", "_serials", "count")

    def __init__(self) -> None:
        self.count = 0  # held ones included
        self._serials = itertools.count()  # so that two entries of one sequence never compare equal
        self._by_key: list[tuple[_Key, int, Sequence]] = []
        self._by_age: list[tuple[int, int, _Key, Sequence]] = []

    def line_up(self, seq: Sequence, key: _Key, waiting: Mapping[str, Sequence]) -> None:
        seq.queue_key = key
        serial = next(self._serials)
        heapq.heappush(self._by_key, (key, serial, seq))
        heapq.heappush(self._by_age, (seq.arrival, serial, key, seq))
        self._trim(waiting)

    def leave(self, waiting: Mapping[str, Sequence]) -> None:
        """One of them is not in `waiting` any more."""
        self.count -= 1
        self._trim(waiting)

    def _trim(self, waiting: Mapping[str, Sequence]) -> None:
        if max(len(self._by_key), len(self._by_age)) > 2 * self.count + 16:
            self._by_key = [entry for entry in self._by_key if _counts(entry[2], entry[0], waiting)]
            self._by_age = [(seq.arrival, serial, key, seq) for key, serial, seq in self._by_key]
            heapq.heapify(self._by_key)
            heapq.heapify(self._by_age)

    def front(self, waiting: Mapping[str, Sequence]) -> Sequence | None:
        while self._by_key:
            key, _, seq = self._by_key[0]
            if _counts(seq, key, waiting):
                return seq
            heapq.heappop(self._by_key)
        return None

    def oldest(self, waiting: Mapping[str, Sequence]) -> Sequence | None:
        while self._by_age:
            _, _, key, seq = self._by_age[0]
            if _counts(seq, key, waiting):
                return seq
            heapq.heappop(self._by_age)
        return None


def _counts(seq: Sequence, key: _Key, waiting: Mapping[str, Sequence]) -> bool:
    return seq.queue_key is key and waiting.get(seq.seq_id) is seq
