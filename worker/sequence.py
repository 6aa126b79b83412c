r"""Sequence: one row inside the engine: a request's only one, or one of a group.

    WAITING -> RUNNING -> FINISHED        preempted: RUNNING -> WAITING, keeping its tokens
                  \-> FORKED              a group's leader, once its rows took over

Owns: the tokens, how many of them have KV, and what the request asked for.
Does not: own blocks (block_manager) or decide anything (scheduler).
Invariants: 0 <= num_computed <= num_tokens while alive; the newest token never has KV before it is scheduled.
"""

from __future__ import annotations

from collections.abc import Iterable
from enum import Enum, auto
from typing import TYPE_CHECKING

from cluster.core.request import GenerationRequest
from cluster.core.sampling import SamplingParams

if TYPE_CHECKING:
    from worker.sequence_group import SequenceGroup


class SequenceStatus(Enum):
    WAITING = auto()
    RUNNING = auto()
    FORKED = auto()
    FINISHED = auto()


class Sequence:
    """`max_tokens` is the resolved bound on new tokens (>= 1); `expected_cached` a look at the cache on arrival.

    index: which choice of the request this row becomes.  group: None for a request with one row.
    computes_only: a leader: it fills the cache for others and is never sampled.
    """

    __slots__ = (
        "candidates",
        "computes_only",
        "expected_cached",
        "first_cached",
        "group",
        "index",
        "logprob",
        "max_tokens",
        "num_computed",
        "num_prompt_tokens",
        "preemptions",
        "request",
        "sampling",
        "seq_id",
        "status",
        "stop_token_ids",
        "tokens",
    )

    def __init__(
        self,
        request: GenerationRequest,
        max_tokens: int,
        eos_token_ids: tuple[int, ...],
        *,
        group: SequenceGroup | None = None,
        seq_id: str | None = None,
        tokens: Iterable[int] | None = None,
        sampling: SamplingParams | None = None,
        index: int = 0,
        computes_only: bool = False,
    ) -> None:
        self.request = request
        self.sampling = sampling or request.sampling
        self.group = group
        self.seq_id = request.request_id if seq_id is None else seq_id
        self.index = index
        self.computes_only = computes_only
        self.max_tokens = max_tokens
        stops = request.sampling.stop_token_ids
        self.stop_token_ids = frozenset(stops if request.sampling.ignore_eos else (*stops, *eos_token_ids))
        self.tokens = list(request.prompt_token_ids if tokens is None else tokens)
        self.num_prompt_tokens = len(request.prompt_token_ids)
        self.num_computed = 0
        self.expected_cached = 0
        self.first_cached: int | None = None
        self.preemptions = 0
        self.logprob = 0.0  # of the generated tokens, where it was asked for
        self.candidates: tuple[tuple[int, float], ...] = ()  # a beam's next tokens, until the whole group has them
        self.status = SequenceStatus.WAITING

    @property
    def num_tokens(self) -> int:
        return len(self.tokens)

    @property
    def num_output_tokens(self) -> int:
        return len(self.tokens) - self.num_prompt_tokens

    @property
    def num_uncomputed(self) -> int:
        return len(self.tokens) - self.num_computed

    @property
    def decoding(self) -> bool:
        """Only the newest token lacks KV, and it is one that we generated."""
        count = len(self.tokens)
        return count - self.num_computed == 1 and count > self.num_prompt_tokens

    @property
    def uncached_tokens(self) -> int:
        """Tokens still to prefill: exact while running, estimated while waiting; 0 while decoding."""
        if self.status is SequenceStatus.WAITING:
            return max(1, self.num_tokens - self.expected_cached)
        return 0 if self.decoding or self.status is SequenceStatus.FORKED else self.num_uncomputed

    def num_shared_tokens(self, other: Sequence) -> int:
        """Length of the common beginning that may be shared; 0 across cache salts."""
        if self.request.cache_salt != other.request.cache_salt or self.tokens[:8] != other.tokens[:8]:
            return 0
        low, high = 0, min(len(self.tokens), len(other.tokens) - 1)
        while low < high:  # slices are compared in C, so this is O(length), not O(length) steps
            middle = (low + high + 1) // 2
            if self.tokens[low:middle] == other.tokens[low:middle]:
                low = middle
            else:
                high = middle - 1
        return low
