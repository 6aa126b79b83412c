"""What travels between the front door and an engine: a request in, token deltas out.

Owns: GenerationRequest, TokenDelta, FinishReason and their wire forms (plain dicts and lists).
Does not: carry text; a worker sees token ids only.
Invariants: prompt_token_ids is never empty; a constraint goes with the sampling; exactly one delta of a choice has a
finish_reason (or the request's end was CANCELLED); exactly one delta of a request is its last, because it has an error,
or a finish_reason and no choice that goes on.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Any, NamedTuple, cast

from cluster.core import errors
from cluster.core import logprobs as logprob_forms
from cluster.core.constraint import Constraint
from cluster.core.logprobs import PromptLogprobs, TokenLogprob
from cluster.core.sampling import SamplingParams

MAX_PRIORITY = 2**31 - 1


class FinishReason(StrEnum):
    STOP = "stop"
    LENGTH = "length"
    CANCELLED = "cancelled"


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationRequest:
    """One prompt for one engine.

    request_id: unique among live requests.  router_id: whose ledger booked it (heartbeats report per router).
    cache_salt: requests share KV only with requests of the same salt.  constraint: what the answer must look like.
    priority: lower numbers run first, strictly; equal ones share.  timeout_s: seconds from its arrival at the engine
    after which nobody wants the answer any more.
    """

    request_id: str
    prompt_token_ids: tuple[int, ...]
    sampling: SamplingParams
    router_id: str = ""
    cache_salt: str = ""
    constraint: Constraint | None = None
    priority: int = 0
    timeout_s: float | None = None

    def __post_init__(self) -> None:
        if not self.prompt_token_ids:
            raise errors.InvalidRequest("prompt", "the prompt is empty: it has no tokens")
        if not -MAX_PRIORITY <= self.priority <= MAX_PRIORITY:
            raise errors.InvalidRequest("priority", f"priority must be within {-MAX_PRIORITY} and {MAX_PRIORITY}")
        if self.timeout_s is not None and not 0 <= self.timeout_s < float("inf"):
            raise errors.InvalidRequest("timeout_s", "timeout_s must be a number of seconds, 0 or more")
        if self.constraint is not None:
            check_constrained_sampling(self.constraint, self.sampling)

    def to_wire(self) -> dict[str, Any]:
        return {
            "request_id": self.request_id,
            "prompt_token_ids": list(self.prompt_token_ids),
            "sampling": self.sampling.to_wire(),
            "router_id": self.router_id,
            "cache_salt": self.cache_salt,
            "constraint": None if self.constraint is None else self.constraint.to_wire(),
            "priority": self.priority,
            "timeout_s": self.timeout_s,
        }

    @classmethod
    def from_wire(cls, wire: dict[str, Any]) -> GenerationRequest:
        return cls(
            request_id=wire["request_id"],
            prompt_token_ids=tuple(wire["prompt_token_ids"]),
            sampling=SamplingParams.from_wire(wire["sampling"]),
            router_id=wire["router_id"],
            cache_salt=wire["cache_salt"],
            constraint=None if wire["constraint"] is None else Constraint.from_wire(wire["constraint"]),
            priority=wire["priority"],
            timeout_s=wire["timeout_s"],
        )


def check_constrained_sampling(constraint: Constraint, sampling: SamplingParams) -> None:
    """InvalidRequest when an answer that is sampled so cannot follow a constraint."""
    if sampling.ignore_eos:
        raise errors.InvalidRequest("ignore_eos", f"ignore_eos does not go with {constraint.field}: its text must end")
    if sampling.beam_width:
        raise errors.InvalidRequest("beam_width", f"beam_width does not go with {constraint.field}: use n or best_of")


class TokenDelta(NamedTuple):
    """What one engine step produced for one choice of one request.

    token_ids: new tokens, in order (may be empty on the last delta).
    cached_tokens: prompt tokens taken from the cache; set on the first delta of a choice, None later.
    finish_reason: set on a choice's last delta; CANCELLED ends the request, whatever its choices.
    error: set instead when the request failed.
    choice: which answer of the request (n, best_of, beams), from 0.  more: other choices of the request go on.
    score: of a finished beam.  logprobs: one per token, where they were asked for.  prompt_logprobs: one per prompt
    token, on the request's first delta with tokens.
    """

    request_id: str
    token_ids: tuple[int, ...] = ()
    cached_tokens: int | None = None
    finish_reason: FinishReason | None = None
    error: errors.KvrayError | None = None
    choice: int = 0
    score: float | None = None
    more: bool = False
    logprobs: tuple[TokenLogprob, ...] | None = None
    prompt_logprobs: PromptLogprobs | None = None

    @property
    def last(self) -> bool:
        """Nothing of the request follows."""
        return self.error is not None or (self.finish_reason is not None and not self.more)

    def to_wire(self) -> list[Any]:
        error = None if self.error is None else self.error.to_wire()
        reason = None if self.finish_reason is None else str(self.finish_reason)
        wire = [
            self.request_id,
            list(self.token_ids),
            self.cached_tokens,
            reason,
            error,
            self.choice,
            self.score,
            self.more,
        ]
        if self.logprobs is not None or self.prompt_logprobs is not None:  # rare, and most deltas shall stay short
            wire += [_to_wire(self.logprobs), _to_wire(self.prompt_logprobs)]
        return wire

    @classmethod
    def from_wire(cls, wire: list[Any]) -> TokenDelta:
        request_id, token_ids, cached_tokens, reason, error, choice, score, more = wire[:8]
        delta = cls(
            request_id,
            tuple(token_ids),
            cached_tokens,
            None if reason is None else FinishReason(reason),
            None if error is None else errors.from_wire(error),
            choice,
            score,
            more,
        )
        if len(wire) == 8:
            return delta
        logprobs, prompt_logprobs = (None if part is None else logprob_forms.from_wire(part) for part in wire[8:])
        return delta._replace(
            logprobs=cast("tuple[TokenLogprob, ...] | None", logprobs), prompt_logprobs=prompt_logprobs
        )


def _to_wire(logprobs: PromptLogprobs | None) -> list[Any] | None:
    return None if logprobs is None else logprob_forms.to_wire(logprobs)
