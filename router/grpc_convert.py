"""Between protobuf messages and the front door's own values.

Owns: every read and write of a pb2 field, but for explanations (router.grpc_explanation).
Does not: validate sampling values (SamplingParams) or run anything.
Invariants: an absent optional field never reaches `GenerationCall.sampling`, so the service's defaults apply;
exactly one prompt form is set, else `InvalidRequest`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from cluster.core.constraint import Constraint
from cluster.core.errors import InvalidRequest
from cluster.core.request import FinishReason
from cluster.rpc import inference_pb2 as pb
from router.deadline import checked_timeout
from router.generation import GenerationCall, GenerationEvent, LogprobEntry, ReplicaStatus, Usage
from router.grpc_explanation import totals_from
from router.reuse_counters import ReuseCounters

_OPTIONAL_SAMPLING = (
    *("temperature", "top_k", "top_p", "seed", "max_tokens", "ignore_eos"),
    *("n", "best_of", "beam_width", "length_penalty", "min_tokens", "include_stop_str_in_output"),
    *("min_p", "repetition_penalty", "presence_penalty", "frequency_penalty", "logprobs", "prompt_logprobs"),
)
_EARLY_STOPPING: dict[int, bool | str] = {pb.EARLY_STOPPING_FIRST: True, pb.EARLY_STOPPING_NEVER: "never"}

_FINISH_REASONS: dict[FinishReason | None, pb.FinishReason] = {
    None: pb.FINISH_REASON_UNSPECIFIED,
    FinishReason.STOP: pb.FINISH_REASON_STOP,
    FinishReason.LENGTH: pb.FINISH_REASON_LENGTH,
    FinishReason.CANCELLED: pb.FINISH_REASON_CANCELLED,
}


def call_from(request: pb.GenerateRequest, left_s: float | None) -> GenerationCall:
    """A client's message as a call. `left_s`: seconds until the deadline of the transport, where it is known."""
    prompt: dict[str, Any]
    match request.WhichOneof("input"):
        case "text":
            prompt = {"text": request.text, "prompt_field": "text"}
        case "token_ids":
            prompt = {"token_ids": _token_ids(request.token_ids.ids), "prompt_field": "token_ids"}
        case "chat":
            prompt = {"messages": _messages(request.chat.messages), "prompt_field": "chat.messages"}
        case _:
            raise InvalidRequest("input", "the request has no prompt: set text, token_ids or chat")
    return GenerationCall(
        model=request.model,
        sampling=_sampling(request.sampling),
        cache_salt=request.cache_salt,
        priority=request.priority,
        timeout_s=_timeout_s(request, left_s),
        constraint=_constraint(request.constraint) if request.HasField("constraint") else None,
        **prompt,
    )


def _timeout_s(request: pb.GenerateRequest, left_s: float | None) -> float | None:
    """Whichever ends first. A transport's deadline may have passed already; that is no mistake of the client."""
    ends = [] if left_s is None else [max(left_s, 0.0)]
    if request.HasField("timeout_s"):
        ends.append(checked_timeout(request.timeout_s))
    return min(ends, default=None)


def _token_ids(ids: Sequence[int]) -> tuple[int, ...]:
    if not ids:
        raise InvalidRequest("token_ids", "token_ids is empty")
    if min(ids) < 0:
        raise InvalidRequest("token_ids", f"token_ids must be >= 0, not {min(ids)}")
    return tuple(ids)


def _messages(messages: Sequence[pb.ChatMessage]) -> list[dict[str, Any]]:
    if not messages:
        raise InvalidRequest("chat.messages", "chat.messages is empty")
    for index, message in enumerate(messages):
        if not message.role:
            raise InvalidRequest(f"chat.messages[{index}].role", f"chat.messages[{index}].role is empty")
    return [{"role": message.role, "content": message.content} for message in messages]


def _sampling(options: pb.SamplingOptions) -> dict[str, Any]:
    sampling = {name: getattr(options, name) for name in _OPTIONAL_SAMPLING if options.HasField(name)}
    if options.stop:
        sampling["stop"] = tuple(options.stop)
    if options.stop_token_ids:
        sampling["stop_token_ids"] = tuple(options.stop_token_ids)
    if options.logit_bias:
        sampling["logit_bias"] = tuple(sorted(options.logit_bias.items()))
    if options.early_stopping:
        sampling["early_stopping"] = _EARLY_STOPPING.get(options.early_stopping, options.early_stopping)
    return sampling


def _constraint(constraint: pb.Constraint) -> Constraint:
    match constraint.WhichOneof("kind"):
        case "json_object":
            if not constraint.json_object:
                raise InvalidRequest("constraint.json_object", "constraint.json_object must be true, or not be there")
            return Constraint.json_object()
        case "json_schema":
            return Constraint.json_schema(constraint.json_schema)
        case "regex":
            return Constraint.regex(constraint.regex)
        case "choice":
            return Constraint.choice(tuple(constraint.choice.strings))
        case "grammar":
            return Constraint.grammar(constraint.grammar)
        case _:
            raise InvalidRequest("constraint", "constraint is empty: set one of its fields")


def _usage(usage: Usage) -> pb.Usage:
    return pb.Usage(
        prompt_tokens=usage.prompt_tokens,
        completion_tokens=usage.completion_tokens,
        cached_tokens=usage.cached_tokens,
    )


def chunk_from(event: GenerationEvent, request_id: str) -> pb.GenerateChunk:
    """One event as a stream message."""
    return pb.GenerateChunk(
        request_id=request_id,
        replica=event.replica,
        text=event.text,
        token_ids=event.token_ids,
        finish_reason=_FINISH_REASONS[event.finish_reason],
        usage=_usage(event.usage),
        index=event.index,
        score=event.score,
        logprobs=_logprobs(event.logprobs),
        prompt_logprobs=_logprobs(event.prompt_logprobs),
    )


def response_from(events: Sequence[GenerationEvent], request_id: str) -> pb.GenerateResponse:
    """All events of a finished call as one message."""
    by_index: dict[int, list[GenerationEvent]] = {}
    for event in events:
        by_index.setdefault(event.index, []).append(event)
    choices = [_choice(part) for _, part in sorted(by_index.items())]
    first, last = choices[0], events[-1]
    return pb.GenerateResponse(
        request_id=request_id,
        replica=last.replica,
        text=first.text,
        token_ids=first.token_ids,
        finish_reason=first.finish_reason,
        usage=_usage(last.usage),
        choices=choices,
        prompt_logprobs=[entry for event in events for entry in _logprobs(event.prompt_logprobs)],
    )


def _choice(events: Sequence[GenerationEvent]) -> pb.Choice:
    last = events[-1]
    return pb.Choice(
        index=last.index,
        text="".join(event.text for event in events),
        token_ids=[token for event in events for token in event.token_ids],
        finish_reason=_FINISH_REASONS[last.finish_reason],
        score=last.score,
        logprobs=[entry for event in events for entry in _logprobs(event.logprobs)],
    )


def _logprobs(entries: Sequence[LogprobEntry] | None) -> list[pb.TokenLogprob]:
    return [
        pb.TokenLogprob(
            token_id=entry.token_id, piece=entry.piece, logprob=entry.logprob, top=_logprobs(entry.top or None)
        )
        for entry in entries or ()
    ]


def status_from(
    models: Iterable[str], replicas: Iterable[ReplicaStatus], *, ready: bool, misses: ReuseCounters | None = None
) -> pb.StatusResponse:
    """The cluster's state as one message."""
    return pb.StatusResponse(
        models=models,
        ready=ready,
        replicas=[_replica(replica) for replica in replicas],
        reuse=None if misses is None else totals_from(misses),
    )


def _replica(replica: ReplicaStatus) -> pb.ReplicaStatus:
    info, load = replica.info, replica.load
    return pb.ReplicaStatus(
        worker_id=info.worker_id,
        epoch=replica.epoch,
        model=info.model,
        block_size=info.block_size,
        chunk_tokens=info.chunk_tokens,
        max_model_len=info.max_model_len,
        free_blocks=load.free_blocks,
        cached_blocks=load.cached_blocks,
        in_use_blocks=load.in_use_blocks,
        total_blocks=load.total_blocks,
        waiting=load.waiting,
        running=load.running,
        uncached_tokens=load.total_uncached_tokens,
        query_tokens=load.query_tokens,
        hit_tokens=load.hit_tokens,
        generated_tokens=load.generated_tokens,
        finished_requests=load.finished_requests,
        preemptions=load.preemptions,
        indexed_chunks=replica.indexed_chunks,
        prefill_tokens_per_s=load.prefill_tokens_per_s,
        step_time_s=load.step_time_s,
        step_time_model=load.step_time_model,
    )
