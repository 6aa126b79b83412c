"""scalers: who decides how many replicas an elastic fleet has: kvray's policy, Ray Serve's, or a fixed number.

Serve's default policy, as of Ray 2.60, with its published defaults:

    total      requests that run or wait, recorded every `look_back_s` / 5, pushed every 10 s, the mean of 30 s
    desired    total / `target_ongoing_requests`, times the factor, rounded up
    up, down   when it was wanted at every look for 30 s, or 600 s; then what is wanted at that moment is done

Owns: these scalers.
Does not: simulate replicas (elastic_fleet), or contain kvray's policy (cluster.core.autoscaling_policy).
Invariants: ServeDefault decides as ray.serve.autoscaling_policy does on the same numbers.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass

from cluster.core.autoscaling_policy import AutoscalingPolicy, Fleet, ScalingParameters
from cluster.simulate.elastic_fleet import FleetState


@dataclass(frozen=True, slots=True)
class FixedReplicas:
    replicas: int

    def decide(self, now: float, state: FleetState) -> int:
        return self.replicas


class KvrayScaler:
    def __init__(self, parameters: ScalingParameters) -> None:
        self._policy = AutoscalingPolicy(parameters)

    def decide(self, now: float, state: FleetState) -> int:
        return self._policy.decide(now, Fleet(state.demands, state.target, state.queued))


@dataclass(frozen=True, slots=True, kw_only=True)
class ServeSettings:
    """ray.serve.config.AutoscalingConfig, by its names, with its defaults."""

    min_replicas: int
    max_replicas: int
    target_ongoing_requests: float = 2.0
    upscaling_factor: float = 1.0
    downscaling_factor: float = 1.0
    upscale_delay_s: float = 30.0
    downscale_delay_s: float = 600.0
    look_back_period_s: float = 30.0
    push_interval_s: float = 10.0


class ServeDefault:
    """Decides at every tick, where Serve does ten times as often; that shortens no delay."""

    def __init__(self, settings: ServeSettings) -> None:
        self._settings = settings
        self._recorded: deque[tuple[float, float]] = deque()
        self._pushed: list[tuple[float, float]] = []
        self._record_at = self._push_at = 0.0
        self._direction = 0
        self._since = 0.0

    def decide(self, now: float, state: FleetState) -> int:
        self._hear(now, state.ongoing)
        settings, total, running = self._settings, self.total(now), len(state.demands)
        if not running and total > 0:
            wanted = max(math.ceil(settings.upscaling_factor), state.target)
        else:
            wanted = self._delayed(now, self._desired(total, running, state.target), state.target)
        return min(max(wanted, settings.min_replicas), settings.max_replicas)

    def total(self, now: float) -> float:
        """The mean over the window; the last value counts until now."""
        points = self._pushed
        if not points:
            return 0.0
        ends = [at_s for at_s, _ in points[1:]] + [max(now, points[-1][0] + 1e-3)]
        weighted = math.fsum(value * (end - at_s) for (at_s, value), end in zip(points, ends, strict=True))
        return weighted / (ends[-1] - points[0][0])

    def _hear(self, now: float, ongoing: int) -> None:
        settings = self._settings
        if now >= self._record_at:
            self._record_at = now + min(settings.look_back_period_s / 5, settings.push_interval_s)
            self._recorded.append((now, float(ongoing)))
        if now >= self._push_at:
            self._push_at = now + settings.push_interval_s
            while self._recorded[0][0] < now - settings.look_back_period_s:
                self._recorded.popleft()
            self._pushed = list(self._recorded)

    def _desired(self, total: float, running: int, target: int) -> int:
        settings = self._settings
        if not running:
            return target
        desired = running * (total / (settings.target_ongoing_requests * running))
        factor = settings.upscaling_factor if desired > running else settings.downscaling_factor
        scaled = math.ceil(running + factor * (desired - running))
        if math.ceil(desired) < running and scaled == running:
            scaled -= 1
        return max(scaled, 0)

    def _delayed(self, now: float, desired: int, target: int) -> int:
        settings = self._settings
        direction = (desired > target) - (desired < target)
        if direction != self._direction:
            self._direction, self._since = direction, now
        if not direction:
            return target
        delay_s = settings.upscale_delay_s if direction > 0 else settings.downscale_delay_s
        if now - self._since < delay_s:
            return target
        self._direction = 0
        return desired if direction > 0 or target == 1 else max(desired, 1)
