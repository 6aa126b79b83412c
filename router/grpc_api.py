"""The gRPC methods: kvray.v1.Inference, kvray.v1.Cache and grpc.health.v1.Health.

Owns: turning calls into `Generator` calls and errors into gRPC status codes.
Does not: open a port. The ingress deployment delegates to it, and Serve's own server carries it; a plain
`grpc.aio` server works as well.
Health says SERVING, for "" and every service, while a request would be served: readiness, as its protocol means it.
Invariants: every failure sets code and details on the context and raises an error that shows nothing more than
these; however a stream ends, the generator's events are closed, so that the request is cancelled.
"""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import AsyncGenerator, Iterable, Sequence
from contextlib import aclosing
from dataclasses import replace
from typing import Protocol, cast, runtime_checkable

import grpc
from grpc_health.v1 import health_pb2

from cluster.core.errors import InvalidRequest, KvrayError, UnknownRequest
from cluster.rpc import inference_pb2 as pb
from router import grpc_convert
from router.generation import ROUTE_HEADER, ROUTER_HEADER, GenerationCall, GenerationEvent, Generator, StatusSource
from router.grpc_explanation import explanation_from
from router.route_explanation import RouteExplainer
from router.status import describe
from router.traffic_recorder import Recorded, TrafficRecorder

_SERVICES = ("", "kvray.v1.Inference", "kvray.v1.Cache")
_MAX_REQUEST_ID = 128


class RpcContext(Protocol):
    """What Serve's gRPC context and `grpc.aio.ServicerContext` have in common."""

    def set_code(self, code: grpc.StatusCode) -> None: ...
    def set_details(self, details: str) -> None: ...
    def set_trailing_metadata(self, trailing_metadata: list[tuple[str, str]]) -> None: ...
    def invocation_metadata(self) -> Iterable[tuple[str, str | bytes]] | None: ...


@runtime_checkable
class _KnowsDeadline(Protocol):
    """Serve hides the client's deadline (it cancels the call when it passes); a real server context has it."""

    def time_remaining(self) -> float | None: ...


class GrpcApi:
    """One front door's gRPC methods. Stateless apart from its collaborators."""

    def __init__(
        self,
        generator: Generator,
        status: StatusSource,
        models: Sequence[str],
        *,
        explainer: RouteExplainer,
        router_id: str,
        recorder: TrafficRecorder | None = None,
        watch_interval_s: float = 1.0,
    ) -> None:
        self._generator = generator
        self._status = status
        self._models = tuple(models)
        self._explainer = explainer
        self._router_id = router_id
        self._recorder = recorder
        self._watch_interval_s = watch_interval_s

    async def generate(
        self, request: pb.GenerateRequest, context: RpcContext
    ) -> AsyncGenerator[pb.GenerateChunk, None]:
        """Inference.Generate."""
        request_id = _request_id(context)
        try:
            async with aclosing(self._events(request, context, request_id)) as events:
                async for event in events:
                    self._tell_route(context, event)
                    yield grpc_convert.chunk_from(event, request_id)
        except Exception as error:
            raise _failed(context, error) from None

    async def generate_once(self, request: pb.GenerateRequest, context: RpcContext) -> pb.GenerateResponse:
        """Inference.GenerateOnce."""
        request_id = _request_id(context)
        try:
            async with aclosing(self._events(request, context, request_id, streamed=False)) as events:
                collected = [event async for event in events]
            self._tell_route(context, collected[0])
            return grpc_convert.response_from(collected, request_id)
        except Exception as error:
            raise _failed(context, error) from None

    async def status(self, request: pb.StatusRequest, context: RpcContext) -> pb.StatusResponse:
        """Cache.Status."""
        try:
            misses = self._status.misses() if request.misses else None
            rows, ready = self._status.replicas(), self._status.ready()
            return grpc_convert.status_from(self._models, rows, ready=ready, misses=misses)
        except Exception as error:
            raise _failed(context, error) from None

    async def explain_route(self, request: pb.ExplainRouteRequest, context: RpcContext) -> pb.ExplainRouteResponse:
        """Cache.ExplainRoute."""
        try:
            if request.WhichOneof("of") == "request":
                call = grpc_convert.call_from(request.request, None)
                return explanation_from(await self._explainer.explain(call))
            if not request.request_id:
                raise InvalidRequest("request_id", "set request_id, or request for a dry run")
            known = self._explainer.explained(request.request_id)
            if known is None:
                raise UnknownRequest("no request of this id is among the latest ones of this front door")
            return explanation_from(known)
        except Exception as error:
            raise _failed(context, error) from None

    async def record(self, request: pb.RecordRequest, context: RpcContext) -> AsyncGenerator[pb.RecordChunk, None]:
        """Cache.Record; without a recorder nothing ever ends."""
        try:
            recorder = self._recorder or TrafficRecorder(1)
            with recorder.listen() as listener:
                while True:  # also without requests: so a client that went away is noticed
                    yield pb.RecordChunk(
                        chunk_tokens=recorder.chunk_tokens,
                        requests=[_recorded(one) for one in await listener.next(self._watch_interval_s)],
                        missed=listener.missed,
                    )
        except Exception as error:
            raise _failed(context, error) from None

    async def health_check(
        self, request: health_pb2.HealthCheckRequest, context: RpcContext
    ) -> health_pb2.HealthCheckResponse:
        """Health.Check; an unknown service is NOT_FOUND, as the health protocol wants."""
        if request.service not in _SERVICES:
            message = "unknown service"
            context.set_code(grpc.StatusCode.NOT_FOUND)
            context.set_details(message)
            raise KvrayError(message)
        return self._health(request.service)

    async def health_watch(
        self, request: health_pb2.HealthCheckRequest, context: RpcContext
    ) -> AsyncGenerator[health_pb2.HealthCheckResponse, None]:
        """Health.Watch: the state now, then every change."""
        last: int | None = None
        while True:
            reply = self._health(request.service)
            if reply.status != last:
                last = reply.status
                yield reply
            await asyncio.sleep(self._watch_interval_s)

    async def health_list(
        self, request: health_pb2.HealthListRequest, context: RpcContext
    ) -> health_pb2.HealthListResponse:
        """Health.List."""
        return health_pb2.HealthListResponse(statuses={name: self._health(name) for name in _SERVICES})

    def _health(self, service: str) -> health_pb2.HealthCheckResponse:
        kinds = health_pb2.HealthCheckResponse
        if service not in _SERVICES:
            return kinds(status=kinds.SERVICE_UNKNOWN)
        return kinds(status=kinds.SERVING if self._status.ready() else kinds.NOT_SERVING)

    def _events(
        self, request: pb.GenerateRequest, context: RpcContext, request_id: str, *, streamed: bool = True
    ) -> AsyncGenerator[GenerationEvent, None]:
        call: GenerationCall = grpc_convert.call_from(request, _left_s(context))
        call = replace(call, streamed=streamed, request_id=request_id)
        return cast("AsyncGenerator[GenerationEvent, None]", self._generator.generate(call))

    def _tell_route(self, context: RpcContext, event: GenerationEvent) -> None:
        if event.route is not None:
            context.set_trailing_metadata([(ROUTE_HEADER, event.route), (ROUTER_HEADER, self._router_id)])


def _recorded(one: Recorded) -> pb.RecordedRequest:
    return pb.RecordedRequest(
        arrived_s=one.arrived_s, prompt_tokens=one.prompt_tokens, output_tokens=one.output_tokens, chunks=one.chunks
    )


def _left_s(context: RpcContext) -> float | None:
    return context.time_remaining() if isinstance(context, _KnowsDeadline) else None


def _request_id(context: RpcContext) -> str:
    """The client's own id if it sent a usable one, so that it can find the call in its logs."""
    for key, value in context.invocation_metadata() or ():
        if key == "request_id" and isinstance(value, str) and 0 < len(value) <= _MAX_REQUEST_ID:
            return value
    return uuid.uuid4().hex


def _failed(context: RpcContext, error: Exception) -> KvrayError:
    """Put `error` on the context; the result is to be raised, because Serve counts a call as failed only then."""
    problem = describe(error)
    context.set_code(problem.grpc_code)
    context.set_details(problem.details())
    headers = problem.headers()
    if headers:
        context.set_trailing_metadata(list(headers.items()))
    return KvrayError(problem.details())
