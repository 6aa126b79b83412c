r"""Sequence: one row inside the engine: a request's only one, or one of a group.

    WAITING -> RUNNING -> FINISHED        preempted: RUNNING -> WAITING, keeping its tokens
                  \-> FORKED              a group's leader, once its rows took over

Owns: the tokens, how many of them have KV, and what the request asked for.
Does not: own blocks (block_manager) or decide anything (scheduler).
Invariants: 0 <= num_computed <= num_tokens while alive; the newest token never has KV before it is scheduled.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable
from collections.abc import Sequence as Seq
from enum import Enum, auto
from typing import TYPE_CHECKING

from cluster.core.logprobs import PromptLogprobs, TokenLogprob
from cluster.core.request import GenerationRequest
from cluster.core.sampling import SamplingParams
from worker.grammar_port import GrammarProgress
from worker.sampling.row_extras import RowExtras
from worker.sampling.token_counts import TokenCounts

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
    extras: what its steps want beyond a plain token, None for most sequences.
    grammar: what its answer follows, at its newest token; kept when it is preempted.
    arrival: its number in the order of arrivals, at `arrived_at` in seconds.
    held_by, held_too_long, queue_key: its state in the waiting queue.  packed: its tokens while it waits, see `lookup`.
    """

    __slots__ = (
        "arrival",
        "arrived_at",
        "candidate_logprobs",
        "candidates",
        "computes_only",
        "expected_cached",
        "extras",
        "first_cached",
        "grammar",
        "group",
        "held_by",
        "held_too_long",
        "index",
        "logprob",
        "logprobs",
        "looked_at",
        "max_tokens",
        "num_computed",
        "num_prompt_tokens",
        "packed",
        "preemptions",
        "prompt_logprobs",
        "queue_key",
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
        self.stop_token_ids = ends_of(request.sampling, eos_token_ids)
        self.tokens = list(request.prompt_token_ids if tokens is None else tokens)
        self.num_prompt_tokens = len(request.prompt_token_ids)
        self.num_computed = 0
        self.arrival = 0
        self.arrived_at = 0.0
        self.held_by: str | None = None
        self.held_too_long = False
        self.queue_key: tuple[int, ...] | None = None
        self.packed: array[int] | None = None
        self.expected_cached = 0
        self.looked_at = -1  # the state of the cache that `expected_cached` is of
        self.first_cached: int | None = None
        self.preemptions = 0
        self.logprob = 0.0  # of the generated tokens, where it was asked for
        self.logprobs: list[TokenLogprob] = []  # of the generated tokens, where the answer waits for other rows
        self.prompt_logprobs: list[TokenLogprob] = []  # of the prompt tokens behind the computed ones
        self.candidates: tuple[tuple[int, float], ...] = ()  # a beam's next tokens, until the whole group has them
        self.candidate_logprobs: tuple[TokenLogprob, ...] = ()
        self.status = SequenceStatus.WAITING
        self.grammar: GrammarProgress | None = None
        self.extras = self._extras()

    @property
    def num_tokens(self) -> int:
        return len(self.tokens)

    @property
    def lookup(self) -> Seq[int]:
        """Its tokens, while it waits as an array: it is looked up in the cache again and again."""
        return self.tokens if self.packed is None else self.packed

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

    @property
    def scores_prompt(self) -> bool:
        """Log probabilities of its prompt are wanted and not all there: nothing of it may come from the cache."""
        if self.request.sampling.prompt_logprobs is None or (self.group is not None and not self.computes_only):
            return False
        return len(self.prompt_logprobs) < self.num_prompt_tokens - 1

    def extras_for(self, end: int) -> RowExtras | None:
        """What it wants of a step that computes its tokens up to `end`."""
        if self.extras is None:
            return None
        extras = RowExtras()
        if end == len(self.tokens) and not self.computes_only:
            extras = self.extras
            if extras.counts is not None:
                extras.counts.update(self.tokens, self.num_prompt_tokens)
            if self.num_output_tokens < self.sampling.min_tokens:
                extras = extras._replace(forbidden=self.stop_token_ids)
        if self.scores_prompt:
            prompt = self.request.prompt_token_ids
            extras = extras._replace(
                prompt_logprobs=self.sampling.prompt_logprobs,
                next_prompt_token=prompt[end] if end < len(prompt) else None,
            )
        return None if extras == RowExtras() else extras

    def all_prompt_logprobs(self) -> PromptLogprobs | None:
        """One for each prompt token, where they were asked for."""
        return None if self.sampling.prompt_logprobs is None else (None, *self.prompt_logprobs)

    def _extras(self) -> RowExtras | None:
        sampling, group = self.sampling, self.group
        extras = RowExtras(
            candidates=0 if group is None else group.num_candidates,
            logprobs=0 if sampling.logprobs is None and group is not None and group.withholds else sampling.logprobs,
            counts=TokenCounts() if sampling.penalised else None,
            biased=bool(sampling.logit_bias),
        )
        asked = extras != RowExtras() or sampling.min_tokens or sampling.prompt_logprobs is not None
        return extras if asked else None

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


def ends_of(sampling: SamplingParams, eos_token_ids: Iterable[int]) -> frozenset[int]:
    """The tokens that end an answer."""
    stops = sampling.stop_token_ids
    return frozenset(stops if sampling.ignore_eos else (*stops, *eos_token_ids))
