"""Ingress: the front door as a Ray Serve deployment. HTTP routes come from router.http_api, gRPC methods are here.

Owns: building this process's routing state, index feed, token channels, metrics and services, and their end.
Does not: contain request logic; every method hands over to GrpcApi or the FastAPI application.
Invariants: the gRPC method names are those of the .proto services (Serve dispatches by method name); the replica
becomes ready only when the index snapshot is in or the wait for it has ended (then it routes by load alone).
"""

from __future__ import annotations

import asyncio
import logging
import random
import time
import uuid
from collections.abc import AsyncIterator
from contextlib import aclosing
from typing import Any

from fastapi import FastAPI
from ray.serve.handle import DeploymentHandle

from cluster.config import ClusterConfig
from cluster.core.hashing import RouteScheme
from cluster.garbage_collection import calm_garbage_collector
from cluster.index.background import end_task
from cluster.index.follower import IndexFollower
from cluster.index.instrumented import InstrumentedIndex
from cluster.index.memory import MemoryIndex
from cluster.index.redis_reader import RedisReader
from cluster.index.speculative import SpeculativeIndex
from cluster.metric_export import MetricExport
from cluster.model_source import resolve_model
from cluster.ray_metrics import RayMetrics
from cluster.route_scheme import route_scheme
from cluster.telemetry import configure_logging
from cluster.tokenizer import Tokenizer
from router import exclusive_port, process_services, routing_state
from router.attempts import Attempts
from router.estimated_ttft import TtftParameters
from router.front_door import FrontDoor
from router.grpc_api import GrpcApi
from router.http_api import Services, build_http_app
from router.own_work import OwnWork
from router.parity_watch import ParityWatch
from router.policies import create_policy
from router.request_metrics import RequestMetrics
from router.reuse_watch import ReuseWatch
from router.route_ledger import RouteLedger
from router.routing_state import RoutingState
from router.serve_dispatcher import ServeDispatcher
from router.token_channels import TokenChannels

logger = logging.getLogger(__name__)

READY_TIMEOUT_S = 20.0


def build_ingress_app() -> FastAPI:
    """Called by Serve inside the replica; the routes find the services of their process."""
    return build_http_app(process_services.get_services)


class Ingress:
    """`config` is a dumped ClusterConfig; `state_name` links this process's state to PrefixAwareRouter."""

    async def __init__(self, workers: DeploymentHandle, config: dict[str, Any], state_name: str) -> None:  # type: ignore[misc]  # Serve awaits it
        configure_logging("router")
        exclusive_port.install()  # Serve opens the ports once this is done
        self._config = ClusterConfig.model_validate(config)
        model_dir = await asyncio.to_thread(resolve_model, self._config.engine.model, weights=False)
        tokenizer = await asyncio.to_thread(Tokenizer.from_dir, model_dir)
        scheme = route_scheme(model_dir, tokenizer, self._config.engine.cache.chunk_tokens)
        self._state = self._build_state(scheme)
        routing_state.install(state_name, self._state)
        calm_garbage_collector()  # now: the snapshots to come shall not have it walk through all that was imported
        await self._state.follower.start()
        if not await self._state.follower.wait_ready(READY_TIMEOUT_S):
            logger.warning("the index is not readable yet: routing by load until it is")
        self._channels, metrics = TokenChannels(self._state.router_id), RayMetrics()
        front_door = FrontDoor(
            model=self._config.public_name,
            tokenizer=tokenizer,
            scheme=scheme,
            attempts=Attempts(
                ServeDispatcher(workers, self._state.ledger, self._channels, self._config.router.start_wait_s),
                self._state.mark_lost,
            ),
            accounting=self._state,
            router_id=self._state.router_id,
            max_model_len=self._state.max_model_len,
            metrics=RequestMetrics(metrics),
        )
        export = MetricExport(metrics, lambda: self._state.index_status().readings())
        self._exporting = asyncio.get_running_loop().create_task(export.run(), name="metrics")
        self._grpc = GrpcApi(
            front_door,
            self._state,
            front_door.models,
            explainer=front_door,
            router_id=self._state.router_id,
            recorder=front_door.recorder,
        )
        process_services.set_services(Services(generator=front_door, status=self._state))

    def _build_state(self, scheme: RouteScheme) -> RoutingState:
        router, scaling, parity = self._config.router, self._config.autoscaling, ParityWatch(time.monotonic)
        seats = self._config.engine.max_num_seqs
        reuse = ReuseWatch(time.monotonic, scheme.chunk_tokens)
        index = InstrumentedIndex(MemoryIndex(), scheme.chunk_tokens, observer=parity, reuse=reuse)
        assert self._config.index.redis_url is not None, "the launcher always sets redis_url"
        self._reader = RedisReader.open(self._config.index, self._config.index.redis_url, self._config.public_name)
        policy = create_policy(
            router.policy,
            default_rate=router.default_prefill_tokens_per_s,
            near_tie=router.near_tie,
            rng=random.Random(),
            parameters=TtftParameters(token_budget=self._config.engine.token_budget, max_num_seqs=seats),
        )
        return RoutingState(
            router_id=uuid.uuid4().hex,
            index=index,
            follower=IndexFollower(self._reader, index, self._config.index, scheme.digest, time.monotonic),
            ledger=RouteLedger(),
            policy=policy,
            chunk_tokens=scheme.chunk_tokens,
            speculative=SpeculativeIndex(time.monotonic),
            parity=parity,
            reuse=reuse,
            work=OwnWork(self._config.engine.ageing_s, seats),
            starts_replicas=scaling is not None and scaling.min_replicas == 0,
        )

    async def Generate(self, request: Any, grpc_context: Any = None) -> AsyncIterator[Any]:
        async with aclosing(self._grpc.generate(request, grpc_context)) as chunks:  # closing us must close it
            async for chunk in chunks:
                yield chunk

    async def GenerateOnce(self, request: Any, grpc_context: Any = None) -> Any:
        return await self._grpc.generate_once(request, grpc_context)

    async def Status(self, request: Any, grpc_context: Any = None) -> Any:
        return await self._grpc.status(request, grpc_context)

    async def ExplainRoute(self, request: Any, grpc_context: Any = None) -> Any:
        return await self._grpc.explain_route(request, grpc_context)

    async def Record(self, request: Any, grpc_context: Any = None) -> AsyncIterator[Any]:
        async with aclosing(self._grpc.record(request, grpc_context)) as chunks:
            async for chunk in chunks:
                yield chunk

    async def Check(self, request: Any, grpc_context: Any = None) -> Any:
        return await self._grpc.health_check(request, grpc_context)

    async def Watch(self, request: Any, grpc_context: Any = None) -> AsyncIterator[Any]:
        async with aclosing(self._grpc.health_watch(request, grpc_context)) as replies:
            async for reply in replies:
                yield reply

    async def List(self, request: Any, grpc_context: Any = None) -> Any:
        return await self._grpc.health_list(request, grpc_context)

    async def __del__(self) -> None:
        await end_task(self._exporting)
        await self._channels.close()
        await self._state.follower.close()
        await self._reader.close()
