"""`kvray serve`: resolve the model, start the cluster, say how to use it, wait for Ctrl-C, stop everything.

Owns: what the user sees and the process's signals.
Does not: start processes itself (cluster.launcher).
Invariants: SIGINT and SIGTERM end it the same way; whatever was started is stopped, also after a failed start.
"""

from __future__ import annotations

import os
import signal
import threading
from pathlib import Path
from types import FrameType

from rich.console import Console

from cluster.config import ClusterConfig
from cluster.core.replica import ReplicaInfo
from cluster.index.redis_url import hide_secrets
from cluster.launcher import LocalCluster
from cluster.progress import resolve_with_progress
from cluster.serve_file import read_serve_file
from worker.kv_sizing import KvPlan, account_text


class _Interrupted(Exception):
    """A signal arrived while something was starting."""


def run_serve(config: ClusterConfig) -> int:
    return _serve_until_told(LocalCluster(with_threads(config)))


def run_serve_file(
    path: Path, *, host: str | None, port: int | None, grpc_port: int | None, redis_url: str | None
) -> int:
    """`kvray serve --config`. The other arguments, where given, replace what the file says."""
    file = read_serve_file(path, host=host, port=port, grpc_port=grpc_port)
    replicas = sum(model.config.serve.replicas for model in file.models)
    configs = [with_threads(model.config, replicas) for model in file.models]
    if redis_url is not None:
        configs = [c.model_copy(update={"index": c.index.model_copy(update={"redis_url": redis_url})}) for c in configs]
    return _serve_until_told(LocalCluster(configs[0], file=file.with_configs(configs)))


def _serve_until_told(cluster: LocalCluster) -> int:
    console = Console(stderr=True)
    stop = threading.Event()
    starting = True

    def on_signal(number: int, frame: FrameType | None) -> None:
        first = not stop.is_set()
        stop.set()
        if starting and first:
            raise _Interrupted

    def listen() -> None:
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, on_signal)

    listen()
    try:
        _resolve_models(cluster, console)
        with console.status("starting") as line:
            cluster.start(lambda phase: line.update(phase))
        listen()  # Ray has put its own handler for SIGTERM before ours
        starting = False
        _welcome(console, cluster)
        stop.wait()
    except _Interrupted:
        pass
    finally:
        starting = False
        signal.alarm(0)  # with which Ray's handler would abort this process after 3 s
        console.print("stopping (a few seconds)")
        cluster.stop()
    console.print("stopped")
    return 0


def _resolve_models(cluster: LocalCluster, console: Console) -> None:
    configs = [
        with_absolute_model(model.config, resolve_with_progress(model.config.engine.model, console))
        for model in cluster.models
    ]
    cluster.config = configs[0]
    if cluster.file is not None:
        cluster.file = cluster.file.with_configs(configs)


def with_threads(config: ClusterConfig, replicas: int | None = None) -> ClusterConfig:
    """Share the cores between the replicas (default: those of `config`) unless the user said otherwise."""
    if config.engine.threads is not None:
        return config
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    most = config.serve.replicas if config.autoscaling is None else config.autoscaling.max_replicas
    engine = config.engine.model_copy(update={"threads": max(1, cores // (replicas or most))})
    return config.model_copy(update={"engine": engine})


def with_absolute_model(config: ClusterConfig, model_dir: Path) -> ClusterConfig:
    """A relative directory means another place in Ray's processes; its name stays the public one."""
    if not Path(config.engine.model).expanduser().is_dir():
        return config  # demo, or an id of the hub
    engine = config.engine.model_copy(update={"model": str(model_dir)})
    return config.model_copy(update={"engine": engine, "served_model_name": config.public_name})


def _welcome(console: Console, cluster: LocalCluster) -> None:
    several = len(cluster.models) > 1
    for model in cluster.models:
        config, url = model.config, cluster.url_of(model)
        replicas = cluster.replicas(config)
        console.rule(f"{config.public_name}: {len(replicas)} replicas")
        if replicas:
            console.print("KV account of each replica")
            console.print(account_of(replicas[0]), highlight=False)
        metadata = f" (metadata application: {model.name})" if several else ""
        redis = hide_password(config.index.redis_url or "")
        where = f"HTTP {url}/v1   gRPC {cluster.grpc_address}{metadata}   Redis {redis}"
        console.print(where, soft_wrap=True)
        console.print("\nTry it:")
        message = '{"role": "user", "content": "What is the capital of France?"}'
        body = f'{{"model": "{config.public_name}", "temperature": 0, "messages": [{message}]}}'
        curl = f"curl -s {url}/v1/chat/completions -H 'Content-Type: application/json' -d '{body}'"
        console.print(f"  {curl}", highlight=False, soft_wrap=True, markup=False)
        if not several:
            client = (
                f".venv/bin/python examples/grpc_client.py --address {cluster.grpc_address} 'Tell me about the sea.'"
            )
            console.print(f"  {client}", highlight=False, soft_wrap=True, markup=False)
    fleets = ", ".join(f"{cluster.url_of(model)}/metrics" for model in cluster.models)
    console.print(f"\nMetrics: {fleets} (the fleet), {cluster.metrics_url} (each process)", soft_wrap=True)
    console.print("Ctrl-C stops everything.")


def hide_password(url: str) -> str:
    """`redis://user:secret@host` -> `redis://***@host`; the values of options go too."""
    return hide_secrets(url)


def account_of(info: ReplicaInfo) -> str:
    plan = KvPlan(
        num_blocks=info.num_blocks,
        block_size=info.block_size,
        max_model_len=info.max_model_len,
        bytes_per_token=info.kv_bytes_per_token,
    )
    return account_text(plan, weight_bytes=info.weight_bytes, weights_dtype=info.dtype)
