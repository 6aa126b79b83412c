"""FrontDoor: the one code path behind every generate endpoint, gRPC or HTTP, streaming or not.

validate -> tokenise and hash once, off the event loop -> send token ids to a replica -> turn deltas back into text.

Owns: validation against the model, seeds, the deadline of the whole call, and telling (also `recorder` and `metrics`)
when a request was answered and when it is over.
Does not: route again (attempts), turn deltas into events (answer_events), know HTTP or protobuf (router.http_api,
router.grpc_api) or choose replicas.
Invariants: tokens reach the client once; what was booked is always released; an early exit cancels the request; a
call whose deadline has passed is neither tokenised nor dispatched.
"""

from __future__ import annotations

import asyncio
import random
import uuid
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace
from typing import Any, Protocol

from cluster.core.errors import InvalidRequest, ModelNotFound, RequestTooLong
from cluster.core.hashing import RouteScheme, hash_packed, pack_tokens, root_hash
from cluster.core.replica import WorkerId
from cluster.core.request import GenerationRequest, TokenDelta
from cluster.core.sampling import SamplingParams
from cluster.tokenizer import Tokenizer
from router.answer_events import AnswerEvents
from router.attempts import Attempts
from router.deadline import Deadline
from router.generation import GenerationCall, GenerationEvent
from router.request_metrics import RequestMetrics
from router.route_explanation import RouteExplanation
from router.route_hint import PromptTrail, RouteHint
from router.traffic_recorder import TrafficRecorder


@dataclass(frozen=True, slots=True, kw_only=True)
class _Prepared:
    request: GenerationRequest
    hint: RouteHint
    whole: bool
    echo: str | None


class Accounting(Protocol):
    """Where a request counts from its first routing on (RoutingState). Both calls are idempotent."""

    def answered(self, request_id: str, cached_tokens: int | None) -> str | None:
        """Its first token is here, with what the engine reused; None: it ended before the engine began.

        Returns what the client is told of its prompt's reuse."""

    def release(self, request_id: str) -> None:
        """It is over, however it ended."""

    def preview(self, hint: RouteHint) -> RouteExplanation:
        """Where a request would go now; nothing is booked."""

    def explained(self, request_id: str) -> RouteExplanation | None:
        """Where one of the latest requests went, by its own id or the client's."""


class FrontDoor:
    """`max_model_len` is asked per request, because replicas come and go; None skips the check here.

    The clock of `metrics` is the front door's.
    """

    def __init__(
        self,
        *,
        model: str,
        tokenizer: Tokenizer,
        scheme: RouteScheme,
        attempts: Attempts,
        accounting: Accounting,
        router_id: str,
        max_model_len: Callable[[], int | None],
        rng: random.Random | None = None,
        metrics: RequestMetrics | None = None,
    ) -> None:
        self._model = model
        self._tokenizer = tokenizer
        self._scheme = scheme
        self._attempts = attempts
        self._accounting = accounting
        self._router_id = router_id
        self._max_model_len = max_model_len
        self._rng = rng or random.Random()
        self._metrics = metrics or RequestMetrics()
        self._clock = self._metrics.clock
        self.recorder = TrafficRecorder(scheme.chunk_tokens, self._clock)

    @property
    def models(self) -> Sequence[str]:
        return [self._model]

    async def generate(self, call: GenerationCall) -> AsyncGenerator[GenerationEvent, None]:
        with self._metrics.watched() as times:
            deadline = Deadline(call.timeout_s, self._clock)
            self._check_model(call)
            sampling = self._sampling(call.sampling)
            times.choices = call.num_choices
            limit = self._max_model_len()  # here, not in the thread: it reads state of the event loop
            deadline.left_s()
            prepared = await deadline.within(asyncio.to_thread(self._prepare, call, sampling, limit))
            request, hint = prepared.request, prepared.hint
            try:
                async with (
                    aclosing(self._attempts.deltas(request, hint, deadline, whole=prepared.whole)) as deltas,
                    aclosing(self._events(prepared, deltas)) as events,
                ):
                    while (event := await deadline.within(anext(events, None))) is not None:
                        times.note(event)
                        yield event
            finally:
                self._accounting.release(request.request_id)
                self.recorder.ended(times.began, hint.prompt_tokens, times.tokens, hint.chunk_hashes)

    async def explain(self, call: GenerationCall) -> RouteExplanation:
        """What would happen to the call now; no replica hears of it."""
        self._check_model(call)
        sampling, limit = self._sampling(call.sampling), self._max_model_len()
        prepared = await asyncio.to_thread(self._prepare, call, sampling, limit)
        return self._accounting.preview(prepared.hint)

    def explained(self, request_id: str) -> RouteExplanation | None:
        """Where one of the latest requests went."""
        return self._accounting.explained(request_id)

    def _check_model(self, call: GenerationCall) -> None:
        if call.model and call.model != self._model:
            raise ModelNotFound(f"model {call.model!r} is not served here; served: {self._model}", model=call.model)

    def _sampling(self, raw: dict[str, Any]) -> SamplingParams:
        values = {name: value for name, value in raw.items() if value is not None}
        for name in ("stop", "stop_token_ids"):
            if name in values:
                values[name] = tuple(values[name])
        values.setdefault("seed", self._rng.getrandbits(62))
        try:
            return SamplingParams(**values)
        except TypeError as error:
            raise InvalidRequest("sampling", f"unknown sampling parameter: {error}") from None

    def _prepare(self, call: GenerationCall, sampling: SamplingParams, limit: int | None) -> _Prepared:
        tokens, message_ends = self._tokens(call)
        if not tokens:
            raise InvalidRequest(call.prompt_field, "the prompt is empty: it has no tokens")
        wanted = len(tokens) + (sampling.max_tokens or 1)
        if limit is not None and wanted > limit:
            raise RequestTooLong(
                call.prompt_field if len(tokens) >= limit else "max_tokens",
                f"prompt ({len(tokens)} tokens) + max_tokens ({sampling.max_tokens or 1}) exceeds the limit of "
                f"{limit} tokens",
                limit=limit,
            )
        request_id = uuid.uuid4().hex
        reads_cache = sampling.prompt_logprobs is None  # else nobody's cache helps, and the load alone decides
        hint = RouteHint(request_id=request_id, chunk_hashes=(), prompt_tokens=len(tokens), client_id=call.request_id)
        if reads_cache:
            hint = self._hashed(hint, tokens, call.cache_salt, message_ends)
        return _Prepared(
            request=GenerationRequest(
                request_id=request_id,
                prompt_token_ids=tuple(tokens),
                sampling=sampling,
                router_id=self._router_id,
                cache_salt=call.cache_salt,
                constraint=call.constraint,
                priority=call.priority,
            ),
            hint=hint,
            # With stop strings every token counts: it may be the one after which the engine need not go on.
            whole=not call.streamed and not sampling.stop,
            echo=(self._tokenizer.decode(tokens) if call.text is None else call.text) if call.echo else None,
        )

    def _hashed(self, hint: RouteHint, tokens: list[int], salt: str, message_ends: tuple[int, ...]) -> RouteHint:
        size, packed = self._scheme.chunk_tokens, pack_tokens(tokens)
        root, plain_root = root_hash(self._scheme.with_salt(salt)), root_hash(self._scheme.with_salt(""))
        hashes = tuple(hash_packed(root, packed, size))
        trail = PromptTrail(
            root=root,
            tokens=packed,
            plain_root=plain_root,
            plain_hashes=tuple(hash_packed(plain_root, packed, size)) if salt else hashes,
            message_ends=message_ends,
        )
        return replace(hint, chunk_hashes=hashes, trail=trail)

    def _tokens(self, call: GenerationCall) -> tuple[list[int], tuple[int, ...]]:
        """The prompt's, and of a chat how many there are up to the end of each message."""
        if call.token_ids is not None:
            size = self._tokenizer.vocab_size
            for token in call.token_ids:
                if isinstance(token, bool) or not isinstance(token, int) or not 0 <= token < size:
                    raise InvalidRequest(call.prompt_field, f"token ids must be integers from 0 to {size - 1}")
            return list(call.token_ids), ()
        if call.messages is not None:
            return self._tokenizer.encode_chat(call.messages)
        if call.text is None:
            raise InvalidRequest(call.prompt_field, "a prompt is required: text, token ids or chat messages")
        return self._tokenizer.encode(call.text, field=call.prompt_field), ()

    async def _events(
        self, prepared: _Prepared, deltas: AsyncIterator[tuple[WorkerId, TokenDelta]]
    ) -> AsyncGenerator[GenerationEvent, None]:
        answers, first = AnswerEvents(self._tokenizer, prepared.request, prepared.echo), True
        route: str | None = None
        async for worker_id, delta in deltas:
            if first:
                first = False
                route = self._accounting.answered(prepared.request.request_id, delta.cached_tokens)
            event = answers.event(worker_id, delta)
            if event is not None:
                yield event if route is None else replace(event, route=route)
                route = None
                if answers.done:
                    return
