"""The front door's transport-free vocabulary: what HTTP and gRPC hand in, and what they get back.

Owns: GenerationCall, GenerationEvent, LogprobEntry, Usage, the Generator and StatusSource protocols.
Does not: parse HTTP or protobuf (router.http_api, router.grpc_api) or choose replicas.
Invariants: exactly one of text, token_ids, messages is the prompt; the last event of every choice, and only it, has a
finish_reason; errors are raised as `KvrayError`, before or between events.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

from cluster.core.constraint import Constraint
from cluster.core.replica import Epoch, ReplicaInfo, ReplicaLoad, WorkerId
from cluster.core.request import FinishReason
from router.readiness import Readiness
from router.reuse_counters import ReuseCounters

ROUTE_HEADER = "x-kvray-route"  # in HTTP headers and in gRPC trailing metadata
ROUTER_HEADER = "x-kvray-router"  # in gRPC trailing metadata: which front door answered


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationCall:
    """One request as a client meant it. Sampling fields are raw and validated by the service.

    model: public model name, "" for the only one.  prompt: text | token ids | chat messages (exactly one is set).
    prompt_field: what the client's protocol calls the prompt, for errors.
    max_tokens None: the endpoint's default (16 for completions, the rest of the model length for chat and gRPC).
    priority: lower numbers run first.  timeout_s: seconds from now after which the client wants no answer any more.
    streamed: the client reads piece by piece; else events may come in larger pieces.
    request_id: the client's own name for it, "" for none.
    echo: every choice begins with the prompt's text; so do its log probabilities, where the prompt's are asked for.
    sampling: keyword arguments of SamplingParams (seed may be absent: drawn).
    constraint: what every answer must look like.
    """

    model: str = ""
    request_id: str = ""
    text: str | None = None
    token_ids: Sequence[int] | None = None
    messages: Sequence[dict[str, Any]] | None = None
    prompt_field: str = "prompt"
    sampling: dict[str, Any] = field(default_factory=dict)
    cache_salt: str = ""
    priority: int = 0
    timeout_s: float | None = None
    streamed: bool = True
    echo: bool = False
    constraint: Constraint | None = None

    @property
    def num_choices(self) -> int:
        """Answers that are asked for; meaningful once the service has accepted the sampling fields."""
        return self.sampling.get("n") or self.sampling.get("beam_width") or 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Usage:
    """Token counts of one call, all choices together. cached_tokens: prompt tokens whose KV was reused."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int


class LogprobEntry(NamedTuple):
    """A token and what the model thought of it. piece: its bytes.  logprob: None for a prompt's first token.

    top: the likeliest tokens at this place, best first.
    """

    token_id: int
    piece: bytes
    logprob: float | None
    top: tuple[LogprobEntry, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationEvent:
    """New text and tokens of one choice of a call. `replica` is the worker that produced them.

    index: which choice.  score: of a finished beam.  logprobs: of the new tokens, where they were asked for;
    `text_offsets` says where each token's text begins.  prompt_logprobs: of all prompt tokens, once per call.
    route: on the first event of a call, how much of the prompt was reused and why not more, in short.
    """

    text: str
    token_ids: tuple[int, ...]
    usage: Usage
    replica: WorkerId
    finish_reason: FinishReason | None = None
    index: int = 0
    score: float | None = None
    logprobs: tuple[LogprobEntry, ...] | None = None
    text_offsets: tuple[int, ...] = ()
    prompt_logprobs: tuple[LogprobEntry, ...] | None = None
    route: str | None = None


class Generator(Protocol):
    """The one code path behind every generate endpoint (implemented by router.front_door)."""

    @property
    def models(self) -> Sequence[str]: ...

    def generate(self, call: GenerationCall) -> AsyncIterator[GenerationEvent]:
        """Stream events. Closing the iterator early cancels the request and frees its blocks."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaStatus:
    """One row of Cache.Status. indexed_chunks: chunks this router's index credits to the replica."""

    info: ReplicaInfo
    epoch: Epoch
    load: ReplicaLoad
    indexed_chunks: int


class StatusSource(Protocol):
    def replicas(self) -> Sequence[ReplicaStatus]: ...

    def misses(self) -> ReuseCounters:
        """What was reused of all prompts so far, and for which reasons not more."""

    def ready(self) -> bool:
        """At least one live replica is ready and the index snapshot is in."""

    def readiness(self) -> Readiness:
        """The same, with what is missing."""
