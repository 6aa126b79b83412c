"""FrontDoor: the one code path behind every generate endpoint, gRPC or HTTP, streaming or not.

validate -> tokenise and hash once, off the event loop -> dispatch token ids -> turn deltas back into text, and
route again when a replica refuses or dies before the first token.

Owns: validation against the model, seeds, deadlines, re-routing, the ledger's prefill_done and release.
Does not: turn deltas into events (answer_events), know HTTP or protobuf (router.http_api, router.grpc_api), Ray
(Dispatcher) or choose replicas.
Invariants: tokens reach the client once; a booking is always released; an early exit cancels the request.
"""

from __future__ import annotations

import asyncio
import random
import time
import uuid
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any, Protocol

from cluster.core.errors import DeadlineExceeded, InvalidRequest, ModelNotFound, Overloaded, ReplicaLost, RequestTooLong
from cluster.core.hashing import RouteScheme, hash_prompt, root_hash
from cluster.core.replica import WorkerId
from cluster.core.request import GenerationRequest, TokenDelta
from cluster.core.sampling import SamplingParams
from cluster.tokenizer import Tokenizer
from router.answer_events import AnswerEvents
from router.generation import GenerationCall, GenerationEvent
from router.route_ledger import RouteLedger
from router.routing_state import RouteHint

MAX_ATTEMPTS = 3


class Dispatcher(Protocol):
    def dispatch(
        self, request: GenerationRequest, hint: RouteHint, *, whole: bool = False
    ) -> AsyncGenerator[tuple[WorkerId, TokenDelta], None]:
        """Send to a replica and stream its deltas; with `whole`, many of them may come as one.

        Raises the replica's typed error, or ReplicaLost when the call broke; both carry details["worker_id"] when the
        replica is known. details["dead"] is False where only the call failed and the replica may well live."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Prepared:
    request: GenerationRequest
    hint: RouteHint
    whole: bool
    echo: str | None


class FrontDoor:
    """`max_model_len` is asked per request, because replicas come and go; None skips the check here."""

    def __init__(
        self,
        *,
        model: str,
        tokenizer: Tokenizer,
        scheme: RouteScheme,
        dispatcher: Dispatcher,
        ledger: RouteLedger,
        router_id: str,
        max_model_len: Callable[[], int | None],
        on_lost: Callable[[WorkerId], None] = lambda worker_id: None,
        rng: random.Random | None = None,
    ) -> None:
        self._model = model
        self._tokenizer = tokenizer
        self._scheme = scheme
        self._dispatcher = dispatcher
        self._ledger = ledger
        self._router_id = router_id
        self._max_model_len = max_model_len
        self._on_lost = on_lost
        self._rng = rng or random.Random()

    @property
    def models(self) -> Sequence[str]:
        return [self._model]

    async def generate(self, call: GenerationCall) -> AsyncGenerator[GenerationEvent, None]:
        deadline = None if call.timeout_s is None else time.monotonic() + call.timeout_s
        if call.model and call.model != self._model:
            raise ModelNotFound(f"model {call.model!r} is not served here; served: {self._model}", model=call.model)
        sampling = self._sampling(call.sampling)
        limit = self._max_model_len()  # here, not in the thread: it reads state of the event loop
        prepared = await asyncio.to_thread(self._prepare, call, sampling, limit)
        try:
            async with (
                aclosing(self._attempts(prepared)) as deltas,
                aclosing(self._events(prepared, deltas)) as events,
            ):
                while (event := await _next_before(events, deadline, call.timeout_s)) is not None:
                    yield event
        finally:
            self._ledger.release(prepared.request.request_id)

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
        tokens = self._tokens(call)
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
        root = root_hash(self._scheme.with_salt(call.cache_salt))
        reads_cache = sampling.prompt_logprobs is None  # else nobody's cache helps, and the load alone decides
        hashes = hash_prompt(root, tokens, self._scheme.chunk_tokens) if reads_cache else []
        return _Prepared(
            request=GenerationRequest(
                request_id=request_id,
                prompt_token_ids=tuple(tokens),
                sampling=sampling,
                router_id=self._router_id,
                cache_salt=call.cache_salt,
                constraint=call.constraint,
            ),
            hint=RouteHint(request_id=request_id, chunk_hashes=tuple(hashes), prompt_tokens=len(tokens)),
            # With stop strings every token counts: it may be the one after which the engine need not go on.
            whole=not call.streamed and not sampling.stop,
            echo=(self._tokenizer.decode(tokens) if call.text is None else call.text) if call.echo else None,
        )

    def _tokens(self, call: GenerationCall) -> list[int]:
        if call.token_ids is not None:
            size = self._tokenizer.vocab_size
            for token in call.token_ids:
                if isinstance(token, bool) or not isinstance(token, int) or not 0 <= token < size:
                    raise InvalidRequest(call.prompt_field, f"token ids must be integers from 0 to {size - 1}")
            return list(call.token_ids)
        if call.messages is not None:
            return self._tokenizer.apply_chat_template(call.messages)
        if call.text is None:
            raise InvalidRequest(call.prompt_field, "a prompt is required: text, token ids or chat messages")
        return self._tokenizer.encode(call.text, field=call.prompt_field)

    async def _attempts(self, prepared: _Prepared) -> AsyncGenerator[tuple[WorkerId, TokenDelta], None]:
        """Deltas of the first attempt that yields any. Refused and lost attempts move on to another replica."""
        excluded: frozenset[WorkerId] = frozenset()
        tokens_out, refusals, deaths = 0, 0, 0
        for attempt in range(MAX_ATTEMPTS):
            hint = RouteHint(
                request_id=prepared.hint.request_id,
                chunk_hashes=prepared.hint.chunk_hashes,
                prompt_tokens=prepared.hint.prompt_tokens,
                exclude=excluded,
            )
            try:
                async with aclosing(self._dispatcher.dispatch(prepared.request, hint, whole=prepared.whole)) as stream:
                    async for worker_id, delta in stream:
                        tokens_out += len(delta.token_ids)
                        yield worker_id, delta
                        if delta.last:
                            return
                raise ReplicaLost("the replica ended the stream before the answer was complete")
            except (ReplicaLost, Overloaded) as error:
                worker = error.details.get("worker_id")
                if isinstance(error, ReplicaLost) and worker is not None and error.details.get("dead", True):
                    deaths += 1
                    self._on_lost(worker)
                if tokens_out:
                    raise ReplicaLost(
                        f"the replica was lost after {tokens_out} tokens; send the request again", tokens=tokens_out
                    ) from error
                refusals += isinstance(error, Overloaded)
                if attempt == MAX_ATTEMPTS - 1 or refusals > 1 or deaths > 1:
                    raise  # a request that two engines died of shall not kill a third
                if worker is not None:
                    excluded |= {worker}

    async def _events(
        self, prepared: _Prepared, deltas: AsyncIterator[tuple[WorkerId, TokenDelta]]
    ) -> AsyncGenerator[GenerationEvent, None]:
        answers, first = AnswerEvents(self._tokenizer, prepared.request, prepared.echo), True
        async for worker_id, delta in deltas:
            if first:
                first = False
                self._ledger.prefill_done(prepared.request.request_id)
            event = answers.event(worker_id, delta)
            if event is not None:
                yield event
                if answers.done:
                    return


async def _next_before(
    events: AsyncIterator[GenerationEvent], deadline: float | None, timeout_s: float | None
) -> GenerationEvent | None:
    """The next event, or None at the end; DeadlineExceeded when it does not come in time."""
    if deadline is None:
        return await anext(events, None)
    try:
        async with asyncio.timeout(deadline - time.monotonic()):
            return await anext(events, None)
    except TimeoutError:
        raise DeadlineExceeded(f"the deadline of {timeout_s:g} s passed") from None
