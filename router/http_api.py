"""The OpenAI-compatible HTTP API.

    POST /v1/completions   POST /v1/chat/completions   GET /v1/models   GET /v1/models/{name}
    GET /health: this process answers (liveness)   GET /ready: a request would be served (readiness)
    GET /metrics: the fleet, for Prometheus

Owns: the routes, reading bodies, and answering whole or as a stream.
Does not: open a port or choose replicas; the Serve ingress mounts the app and provides the services.
Invariants: every error is one JSON object in OpenAI's form (router.status); an error before the first token has
its own HTTP status also for streams; a client that goes away cancels its request.
"""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from dataclasses import dataclass, replace
from typing import Any, cast

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.responses import Response

from cluster.core.errors import InvalidRequest, KvrayError, ModelNotFound, ReplicaLost, RequestCancelled
from router.chunk_writer import ChunkWriter
from router.generation import ROUTE_HEADER, GenerationCall, GenerationEvent, Generator, StatusSource
from router.http_replies import CHAT, COMPLETION, Reply, ReplyShape
from router.http_schema import ChatBody, CompletionBody, parse
from router.metrics_page import CONTENT_TYPE, metrics_page
from router.sse import EventStream, frame, until_disconnect
from router.status import describe

MAX_BODY_BYTES = 8 * 2**20

_Events = AsyncGenerator[GenerationEvent, None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Services:
    """What the app needs of its front door."""

    generator: Generator
    status: StatusSource


def build_http_app(get_services: Callable[[], Services], *, clock: Callable[[], float] = time.time) -> FastAPI:
    """The app. `get_services` is asked per request, because the ingress builds the app before it has any."""
    app = FastAPI(title="kvray", docs_url=None, redoc_url=None, openapi_url=None)
    app.add_exception_handler(HTTPException, _http_error)
    app.add_exception_handler(KvrayError, _any_error)
    app.add_exception_handler(Exception, _any_error)
    started = int(clock())

    @app.post("/v1/completions")
    async def completions(request: Request) -> Response:
        return await _answer(request, get_services, CompletionBody, COMPLETION, clock)

    @app.post("/v1/chat/completions")
    async def chat_completions(request: Request) -> Response:
        return await _answer(request, get_services, ChatBody, CHAT, clock)

    @app.get("/v1/models")
    async def models() -> Response:
        services = get_services()
        data = [_model(services, name, started) for name in services.generator.models]
        return JSONResponse({"object": "list", "data": data})

    @app.get("/v1/models/{name:path}")
    async def model(name: str) -> Response:
        services = get_services()
        if name not in services.generator.models:
            raise ModelNotFound(f"the model {name!r} does not exist")
        return JSONResponse(_model(services, name, started))

    @app.get("/health")
    async def health() -> Response:
        return JSONResponse({"status": "alive"})

    @app.get("/ready")
    async def ready() -> Response:
        try:
            found = get_services().status.readiness()
        except ReplicaLost as error:  # there are no services yet
            return JSONResponse({"status": "not ready", "reason": error.message, "replicas": {}}, status_code=503)
        return JSONResponse(found.body(), status_code=200 if found.ready else 503)

    @app.get("/metrics")
    async def metrics() -> Response:
        status = get_services().status
        return Response(metrics_page(status.replicas(), status.readiness()), media_type=CONTENT_TYPE)

    return app


async def _answer(
    request: Request,
    get_services: Callable[[], Services],
    body_kind: type[CompletionBody | ChatBody],
    shape: ReplyShape,
    clock: Callable[[], float],
) -> Response:
    """Both generating endpoints, whole or streamed."""
    try:
        body = parse(body_kind, await _read_body(request))
        call, services = replace(body.call(), streamed=body.streams), get_services()
        model = call.model or services.generator.models[0]
        reply = Reply(shape, model=model, created=int(clock()), num_choices=call.num_choices)
        call = replace(call, request_id=reply.id)
        if body.streams:
            return await _stream(request, services.generator, call, reply, include_usage=body.include_usage)
        events = await until_disconnect(request.receive, _collect(services.generator, call))
    except Exception as error:
        return _error(error)
    return JSONResponse(reply.whole(events), headers=_headers(events[-1], events[0].route))


async def _collect(generator: Generator, call: GenerationCall) -> list[GenerationEvent]:
    async with aclosing(_open(generator, call)) as events:
        return [event async for event in events]


async def _stream(
    request: Request, generator: Generator, call: GenerationCall, reply: Reply, *, include_usage: bool
) -> Response:
    """Wait for the first event, so that an error before it becomes a plain error response."""
    events = _open(generator, call)
    try:
        first = await until_disconnect(request.receive, anext(events))
    except BaseException:
        await events.aclose()
        raise
    frames = _frames(first, events, ChunkWriter(reply, include_usage=include_usage))
    # The generator must have begun, or closing it would not reach its `finally` and the events.
    await anext(frames)
    return EventStream(frames, headers=_headers(first, first.route))


async def _frames(first: GenerationEvent, events: _Events, writer: ChunkWriter) -> AsyncGenerator[bytes, None]:
    """The stream's frames, after an empty one that only starts the generator."""
    last = first
    async with aclosing(events):
        yield b""
        try:
            for data in writer.opening():
                yield data
            yield writer.chunk(first)
            async for last in events:
                yield writer.chunk(last)
        except Exception as error:
            yield frame(describe(error).body())
            return
        for data in writer.closing(last.usage):
            yield data


def _open(generator: Generator, call: GenerationCall) -> _Events:
    return cast("_Events", generator.generate(call))


async def _read_body(request: Request) -> bytes:
    body = bytearray()
    try:
        async for part in request.stream():
            body += part
            if len(body) > MAX_BODY_BYTES:
                raise InvalidRequest("body", f"the body is larger than {MAX_BODY_BYTES} bytes")
    except ClientDisconnect:
        raise RequestCancelled("the client went away while sending the body") from None
    return bytes(body)


def _headers(event: GenerationEvent, route: str | None) -> dict[str, str]:
    """`route` is known with an answer's first event, so the headers of a stream have it, too."""
    headers = {"x-kvray-replica": event.replica, "x-kvray-cached-tokens": str(event.usage.cached_tokens)}
    return headers if route is None else headers | {ROUTE_HEADER: route}


def _error(error: Exception) -> JSONResponse:
    problem = describe(error)
    return JSONResponse(problem.body(), status_code=problem.http_status, headers=problem.headers())


async def _any_error(request: Request, error: Exception) -> JSONResponse:
    return _error(error)


async def _http_error(request: Request, error: Exception) -> JSONResponse:
    """Unknown paths and methods, in the same form."""
    assert isinstance(error, HTTPException)
    body = {"message": error.detail, "type": "invalid_request_error", "param": None, "code": "invalid_request"}
    return JSONResponse({"error": body}, status_code=error.status_code, headers=error.headers)


def _model(services: Services, name: str, created: int) -> dict[str, Any]:
    """One entry of the model list; `max_model_len` is there once a replica has said it."""
    lengths = [replica.info.max_model_len for replica in services.status.replicas() if replica.info.model == name]
    length = {"max_model_len": min(lengths)} if lengths else {}
    return {"id": name, "object": "model", "created": created, "owned_by": "kvray", **length}
