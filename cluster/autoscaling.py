"""ServeAutoscaling: the autoscaling policy as Ray Serve calls it in its controller, and Serve's own options beside it.

Serve's delays, factors and look-back would act after ours, so they are neutral: whatever the policy says is done.

Owns: reading Serve's context, telling fresh reports from old ones, these options, and how many replicas there are at
first: Serve's own `initial_replicas` would be the number after every redeploy, too.
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
    last_scale_up_time: float | None
    last_scale_down_time: float | None

    @property
    def total_queued_requests(self) -> float | None: ...
    @property
    def raw_metrics(self) -> Mapping[str, Mapping[Any, Sequence[Point]]] | None: ...


class ServeAutoscaling:
    """Serve makes one for each deploy and calls it a few times per second. `options`: of a dumped AutoscalingConfig.

    initial_replicas: how many there are when the deployment is new.
    """

    def __init__(
        self, *, initial_replicas: int = 0, clock: Callable[[], float] = time.monotonic, **options: Any
    ) -> None:
        self._policy = AutoscalingPolicy(AutoscalingConfig.model_validate(options).parameters())
        self._clock = clock
        self._initial = initial_replicas
        self._heard: dict[str, tuple[float, float]] = {}  # the report's own time, and when we saw it first

    def __call__(self, context: ServeContext) -> tuple[int, dict[str, Any]]:
        initial, self._initial = self._initial, 0
        if initial > context.target_num_replicas and _is_new(context):
            return initial, {}
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


def _is_new(context: ServeContext) -> bool:
    """Nothing runs and nothing ever changed: a deployment that is at zero came there."""
    return not context.running_replicas and context.last_scale_up_time is None and context.last_scale_down_time is None


def serve_options(config: AutoscalingConfig, initial_replicas: int) -> dict[str, Any]:
    """`autoscaling_config` of a deployment."""
    return {
        "min_replicas": config.min_replicas,
        "max_replicas": config.max_replicas,
        "look_back_period_s": _SERVE_WINDOW_S,
        "upscale_delay_s": 0.0,
        "downscale_delay_s": 0.0,
        "downscale_to_zero_delay_s": 0.0,
        "upscaling_factor": 1.0,
        "downscaling_factor": 1.0,
        "policy": {
            "policy_function": POLICY_PATH,
            "policy_kwargs": {"initial_replicas": initial_replicas, **config.model_dump()},
        },
    }
