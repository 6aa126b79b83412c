"""The environment variables every Ray process of kvray needs, and the folders of HAProxy.

Owns: these variables and why each is set: `serve_flags` for every cluster, `cluster_environment` for one of several
machines (`ray up`, Kubernetes), `ray_environment` for `kvray serve` on one; and the variable with Redis's address.
Does not: apply them to a running Ray; they must be in the environment before Ray is imported.
Invariants: a variable that the user has set is kept.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

from cluster.free_ports import free_ports

_NOTICE_S, _CLUSTER_NOTICE_S = 2.0, 10.0  # until a front door that stops gets no more requests
REDIS_URL_VARIABLE = "KVRAY_REDIS_URL"


def serve_flags(drain_s: float, notice_s: float = _NOTICE_S) -> dict[str, str]:
    """What every Ray process of every cluster needs. `drain_s`: how long a stopping replica may finish its streams."""
    return {
        # User code, router and handle share one loop, and deployments talk gRPC: 5 to 10 times less CPU per token.
        "RAY_SERVE_THROUGHPUT_OPTIMIZED": "1",
        # A front door that is stopped waits so long, at least, for HAProxy to hear of it. Its answers may take longer.
        "RAY_SERVE_DIRECT_INGRESS_MIN_DRAINING_PERIOD_S": f"{min(drain_s, notice_s):g}",
        "RAY_SERVE_LOG_TO_STDERR": "0",
        # Ray lets its workers give way to everything else (15); but here they are what everything else waits for.
        "RAY_worker_niceness": "0",
        # 0.1 s by default: too short for a replica on a busy machine, which would look dead.
        "RAY_SERVE_QUEUE_LENGTH_RESPONSE_DEADLINE_S": "2.0",
        "RAY_SERVE_MAX_QUEUE_LENGTH_RESPONSE_DEADLINE_S": "5.0",
        # 5 s by default: too short for HAProxy to start on a busy machine; Serve would kill it, and `serve.start` fail.
        "RAY_SERVE_PROXY_READY_CHECK_TIMEOUT_S": "30",
        # Serve's controller looks round 10 times a second by default, for 5 % of a core without any request, and every
        # process exports its metrics as often. So a dead replica is replaced 0.4 s later; routers hear of it at once.
        "RAY_SERVE_CONTROL_LOOP_INTERVAL_S": "0.5",
        "RAY_SERVE_METRICS_EXPORT_INTERVAL_MS": "2000",
        # Only with autoscaling: every 10 s by default, which alone makes the autoscaler as late. A report holds one
        # record, because the record interval is this share of the look-back of 20 s (cluster.autoscaling).
        "RAY_SERVE_REPLICA_AUTOSCALING_METRIC_PUSH_INTERVAL_S": "1.0",
        "RAY_SERVE_HANDLE_AUTOSCALING_METRIC_PUSH_INTERVAL_S": "1.0",
        "RAY_SERVE_AUTOSCALING_METRIC_RECORD_INTERVAL_FACTOR": "0.05",
        "RAY_USAGE_STATS_ENABLED": "0",
        "TOKENIZERS_PARALLELISM": "false",
    }


def cluster_environment(drain_s: float) -> dict[str, str]:
    """For a cluster of several Linux machines. The token itself is a secret and comes from elsewhere."""
    return {
        **serve_flags(drain_s, _CLUSTER_NOTICE_S),
        "RAY_AUTH_MODE": "token",
        # Serve's own HAProxy on the fixed ports, so that tokens never cross its Python proxy.
        "RAY_SERVE_ENABLE_HA_PROXY": "1",
        # An old HAProxy lives on after a reload until its streams end, 120 s by default: not less than a drain.
        "RAY_SERVE_HAPROXY_HARD_STOP_AFTER_S": f"{max(120.0, drain_s):.0f}",
    }


def ray_environment(scratch: Path, drain_s: float, *, coldest_victim: bool = False) -> dict[str, str]:
    """For one machine. `scratch`: an existing private folder for HAProxy's files.  coldest_victim: as in
    AutoscalingConfig."""
    env = {**serve_flags(drain_s), "RAY_AUTH_MODE": "disabled"}
    if coldest_victim:
        env["RAY_SERVE_CONTROLLER_CALLBACK_IMPORT_PATH"] = "cluster.coldest_victim.install"
    if sys.platform == "linux":
        metrics, stats, http, grpc = free_ports(4)
        env |= {
            "RAY_SERVE_ENABLE_HA_PROXY": "1",
            "RAY_SERVE_HAPROXY_NBTHREAD": "1",
            "RAY_SERVE_HAPROXY_HARD_STOP_AFTER_S": "5",
            "RAY_SERVE_HAPROXY_CONFIG_FILE_LOC": str(scratch / "haproxy.cfg"),
            "RAY_SERVE_HAPROXY_SOCKET_PATH": str(scratch / "admin.sock"),
            "RAY_SERVE_HAPROXY_SERVER_STATE_BASE": str(scratch),
            "RAY_SERVE_HAPROXY_SERVER_STATE_FILE": str(scratch / "server-state"),
            "RAY_SERVE_HAPROXY_METRICS_PORT": str(metrics),
            "RAY_SERVE_HAPROXY_STATS_PORT": str(stats),
            # Where HAProxy sends requests while there is no front door: two clusters would share the usual ports.
            "RAY_SERVE_FALLBACK_PROXY_HTTP_PORT": str(http),
            "RAY_SERVE_FALLBACK_PROXY_GRPC_PORT": str(grpc),
        }
    return env


def redis_url_from_environment() -> str | None:
    """$KVRAY_REDIS_URL: there, a password is in no file, argument or log."""
    return os.environ.get(REDIS_URL_VARIABLE) or None


def put_redis_url(url: str) -> None:
    """For the processes that this one starts."""
    os.environ[REDIS_URL_VARIABLE] = url


def apply_environment(variables: dict[str, str]) -> None:
    for name, value in variables.items():
        os.environ.setdefault(name, value)
