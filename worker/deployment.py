"""LLMWorker: one replica as a Ray Serve deployment: Serve, health, Redis and streaming around an engine child.

Owns: the life of the engine process, of the token channel, of the cache reporter and of the export of metrics; one
Serve call per request; seeing that Serve stops it (what follows is worker.replica_drain's).
Does not: schedule, compute or choose; it contains no logic of its own (a request's is in worker.request_service).
Invariants: the engine's death deregisters the replica at once and makes it unhealthy; the replica registers, with
warm kernels, before it takes traffic; a start that fails ends what it began, and its error is one line.
"""

from __future__ import annotations

import asyncio
import logging
import time
import uuid
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, aclosing
from pathlib import Path
from typing import Any

import ray
from ray import serve

from cluster.config import ClusterConfig
from cluster.core.errors import KvrayError
from cluster.core.replica import ReplicaInfo, WorkerId
from cluster.core.replica_demand import demand_of
from cluster.core.replica_metrics import replica_readings
from cluster.index.background import end_task
from cluster.index.redis_writer import RedisWriter
from cluster.metric_export import MetricExport
from cluster.model_source import resolve_model
from cluster.ray_metrics import RayMetrics
from cluster.route_scheme import route_scheme
from cluster.telemetry import configure_logging
from cluster.tokenizer import Tokenizer
from worker.cache_heat import CacheHeat
from worker.cache_reporter import CacheReporter
from worker.engine_client import EngineClient
from worker.engine_process import ProcessEnginePort
from worker.frame import EngineFrame
from worker.late_answers import LateAnswers
from worker.replica_drain import ReplicaDrain
from worker.request_service import RequestService
from worker.runner import ModelFacts
from worker.token_channel_server import TokenChannelServer

logger = logging.getLogger(__name__)

_DRAIN_END_S = 3.0  # the index's timeout, and a little


class LLMWorker:
    """`config` is a dumped ClusterConfig."""

    async def __init__(self, config: dict[str, Any]) -> None:  # type: ignore[misc]  # Serve awaits it
        configure_logging("worker")
        self._config = ClusterConfig.model_validate(config)
        self._tasks: set[asyncio.Task[None]] = set()
        self._ends = AsyncExitStack()  # what was started, to be ended in reverse order, also after a failed start
        self._worker_id = WorkerId(serve.get_replica_context().replica_id.unique_id)
        try:
            await self._start()
        except BaseException as error:
            if isinstance(error, KvrayError):  # in Serve's own message it stands below a traceback
                logger.error("replica %s cannot start: %s", self._worker_id, error)
            await self._ends.aclose()
            raise

    async def _start(self) -> None:
        model_dir = await asyncio.to_thread(resolve_model, self._config.engine.model)
        self._channel = TokenChannelServer(self._worker_id)
        self._ends.push_async_callback(self._channel.close)
        self._port = ProcessEnginePort(self._config.engine, str(model_dir))
        scaling = self._config.autoscaling
        self._late = LateAnswers(None if scaling is None else scaling.ttft_target_s)
        self._engine = EngineClient(self._port, on_frame=self._on_frame, on_exit=self._on_exit, late_answers=self._late)
        self._ends.push_async_callback(self._engine.close)
        self._facts = await self._engine.start()
        await self._channel.start(ray.util.get_node_ip_address())
        self._requests = RequestService(self._engine, self._channel)
        assert self._config.index.redis_url is not None, "the launcher always sets redis_url"
        self._writer = RedisWriter.open(self._config.index, self._config.index.redis_url, self._config.public_name)
        self._ends.push_async_callback(self._writer.close)
        self._reporter = CacheReporter(
            self._writer,
            await asyncio.to_thread(self._replica_info, model_dir),
            self._config.index,
            time.monotonic,
        )
        self._ends.push_async_callback(self._reporter.close)
        self._heat = CacheHeat()
        self._reporter.set_load(self._engine.load)
        await self._reporter.start()
        if not self._engine.alive:  # it died while we registered, when nobody could deregister yet
            raise RuntimeError("the engine process is gone")
        self._watch_for_the_stop()
        export = MetricExport(RayMetrics(), lambda: replica_readings(self._engine.load))
        exporting = asyncio.get_running_loop().create_task(export.run(), name="metrics")
        self._ends.push_async_callback(end_task, exporting)
        logger.info("replica %s is ready", self._worker_id)

    async def generate(self, payload: bytes) -> AsyncIterator[bytes]:
        async with aclosing(self._requests.answer(payload)) as replies:  # closing us must close it
            async for reply in replies:
                yield reply

    async def record_autoscaling_stats(self) -> dict[str, float]:
        """Serve asks for it where the deployment scales. `async`, because Serve may run plain methods in a thread."""
        engine = self._config.engine
        demand = demand_of(
            self._engine.load,
            token_budget=engine.token_budget,
            max_num_seqs=engine.max_num_seqs,
            block_size=self._facts.block_size,
            answered=self._late.answered,
            late=self._late.late,
        )
        return demand.to_numbers()

    async def record_routing_stats(self) -> dict[str, float]:
        """Serve asks every few seconds, and tells every router when the answer changes."""
        scaling = self._config.autoscaling
        if scaling is None or not scaling.coldest_victim:
            return {}
        return {"heat": self._heat.level(time.monotonic(), self._engine.load.hit_tokens)}

    async def check_health(self) -> None:
        if not self._engine.alive:
            raise RuntimeError("the engine process is gone")

    async def __del__(self) -> None:
        if self._tasks:  # Serve is stopping us, so the drain ends by itself, and must be let to leave the index
            await asyncio.wait(self._tasks, timeout=_DRAIN_END_S)
        for task in self._tasks:
            task.cancel()
        await self._ends.aclose()

    def _replica_info(self, model_dir: Path) -> ReplicaInfo:
        facts: ModelFacts = self._facts
        chunk_tokens = self._config.engine.cache.chunk_tokens
        scheme = route_scheme(model_dir, Tokenizer.from_dir(model_dir), chunk_tokens)
        return ReplicaInfo(
            worker_id=self._worker_id,
            route_digest=scheme.digest,
            kv_fingerprint=facts.kv_fingerprint,
            block_size=facts.block_size,
            chunk_tokens=chunk_tokens,
            num_blocks=facts.num_blocks,
            max_model_len=facts.max_model_len,
            model=self._config.public_name,
            weight_bytes=facts.weight_bytes,
            kv_bytes_per_token=facts.kv_bytes_per_token,
            dtype=facts.dtype,
            incarnation=uuid.uuid4().hex,
        )

    def _on_frame(self, frame: EngineFrame) -> None:
        if hasattr(self, "_reporter"):
            self._reporter.set_load(frame.load)
            if frame.events:
                self._reporter.record(frame.events)

    def _on_exit(self, reason: str) -> None:
        logger.error("%s: this replica takes no more requests", reason)
        if not hasattr(self, "_reporter"):
            return  # not registered yet; the start finds the engine gone
        self._tasks.add(asyncio.get_running_loop().create_task(self._reporter.close()))

    def _watch_for_the_stop(self) -> None:
        is_stopping = serve_is_stopping()
        if is_stopping is None:
            logger.warning("Ray does not show when it stops a replica: this one will refuse nothing before it leaves")
            return
        drain = ReplicaDrain(self._engine, is_stopping, self._reporter.close, self._config.serve.drain_s)
        self._tasks.add(asyncio.get_running_loop().create_task(drain.run(), name="replica-drain"))


def serve_is_stopping() -> Callable[[], bool] | None:
    """Whether Serve has begun to stop the replica of this process; None where that cannot be seen.

    Serve says so by the destructor, and calls that when the last answer has ended or never: too late to refuse new
    requests or to end answers in time. Its own flag is private, so it is only read, and may be missing.
    """
    worker = ray._private.worker.global_worker
    replica: Any = getattr(worker.actors.get(worker.actor_id), "_replica_impl", None)
    if not isinstance(getattr(replica, "_shutting_down", None), bool):
        return None
    return lambda: bool(replica._shutting_down)
