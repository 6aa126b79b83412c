"""ServeAutoscaling: the autoscaling policy as Ray Serve calls it in its controller, and Serve's own options beside it.

Serve's delays, factors and look-back would act after ours, so they are neutral: whatever the policy says is done.

Owns: reading Serve's context, telling fresh reports from old ones, and these options.
Does not: decide (cluster.core.autoscaling_policy), or import Ray: Serve passes the context in.
Invariants: a replica whose report does not change for `_SILENT_S` tells nothing, whatever its clock says; a context
that is not as expected keeps the present target.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from cluster.config import AutoscalingConfig
from cluster.core.autoscaling_policy import AutoscalingPolicy, Fleet
from cluster.core.replica_demand import ReplicaDemand

POLICY_PATH = "cluster.autoscaling:ServeAutoscaling"
_SILENT_S = 10.0
_SERVE_WINDOW_S = 20.0  # Serve warns of less than its 10 s between reports, which it has not here


class Point(Protocol):
    timestamp: float
    value: float


class ServeContext(Protocol):
    """What is read of ray.serve.config.AutoscalingContext; the last two are worked out by Serve when they are read."""

    target_num_replicas: int
    running_replicas: Sequence[Any]

    @property
    def total_queued_requests(self) -> float | None: ...
    @property
    def raw_metrics(self) -> Mapping[str, Mapping[Any, Sequence[Point]]] | None: ...


class ServeAutoscaling:
    """Serve makes one per deployment and calls it a few times per second. `options`: of a dumped AutoscalingConfig."""

    def __init__(self, *, clock: Callable[[], float] = time.monotonic, **options: Any) -> None:
        self._policy = AutoscalingPolicy(AutoscalingConfig.model_validate(options).parameters())
        self._clock = clock
        self._heard: dict[str, tuple[float, float]] = {}  # the report's own time, and when we saw it first

    def __call__(self, context: ServeContext) -> tuple[int, dict[str, Any]]:
        now = self._clock()
        if not self._policy.due(now) and context.target_num_replicas:
            return context.target_num_replicas, {}
        fleet = Fleet(self._replicas(context, now), context.target_num_replicas, context.total_queued_requests or 0.0)
        return self._policy.decide(now, fleet), {}

    def _replicas(self, context: ServeContext, now: float) -> dict[str, ReplicaDemand | None]:
        raw, heard = context.raw_metrics or {}, self._heard
        found: dict[str, ReplicaDemand | None] = {}
        self._heard = {}
        for replica in context.running_replicas:
            name = str(getattr(replica, "unique_id", replica))
            points = {kind: series[replica][-1] for kind, series in raw.items() if series.get(replica)}
            sent = max((point.timestamp for point in points.values()), default=0.0)
            before = heard.get(name)
            since = before[1] if before is not None and before[0] == sent else now
            self._heard[name] = (sent, since)
            fresh = points and now - since < _SILENT_S
            numbers = {kind: point.value for kind, point in points.items()}
            found[name] = ReplicaDemand.from_numbers(numbers) if fresh else None
        return found


def serve_options(config: AutoscalingConfig, initial_replicas: int) -> dict[str, Any]:
    """`autoscaling_config` of a deployment."""
    return {
        "min_replicas": config.min_replicas,
        "max_replicas": config.max_replicas,
        "initial_replicas": initial_replicas,
        "look_back_period_s": _SERVE_WINDOW_S,
        "upscale_delay_s": 0.0,
        "downscale_delay_s": 0.0,
        "downscale_to_zero_delay_s": 0.0,
        "upscaling_factor": 1.0,
        "downscaling_factor": 1.0,
        "policy": {"policy_function": POLICY_PATH, "policy_kwargs": config.model_dump()},
    }
