"""A fluid fleet for the autoscaler: work arrives as seconds of prefill per second, replicas take time to start."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Any

from cluster.config import AutoscalingConfig
from cluster.core.autoscaling_policy import AutoscalingPolicy, Fleet
from cluster.core.replica_demand import ReplicaDemand


def policy(**options: Any) -> AutoscalingPolicy:
    values = {"min_replicas": 1, "max_replicas": 32, "start_s": 0.0, "look_back_s": 30.0, "down_delay_s": 120.0}
    values |= {"utilisation": 0.65, "margin": 0.0}
    return AutoscalingPolicy(AutoscalingConfig(**{**values, **options}).parameters())


class ScalingWorld:
    """One tick is a second. `rate(t)`: arriving work. `kv(t)`: what all report. `late(t)`: of ten answers a second."""

    def __init__(
        self,
        rate: Callable[[float], float],
        *,
        replicas: int = 1,
        start_s: float = 0.0,
        kv: Callable[[float], float] = lambda t: 0.0,
        late: Callable[[float], float] = lambda t: 0.0,
        **options: Any,
    ) -> None:
        self.policy = policy(**options)
        self.now = 0.0
        self.target = replicas
        self.targets: list[int] = []
        self.silent: set[str] = set()
        self.lies: dict[str, dict[str, float]] = {}
        self.outside = 0.0
        self.served = 0.0
        self._rate, self._start_s, self._kv, self._late = rate, start_s, kv, late
        self._answers = self._late_ones = 0.0
        self._numbers = 0
        self._starting: list[float] = []
        self._replicas: dict[str, list[float]] = {}  # queue, loaded
        for _ in range(replicas):
            self._join()

    @property
    def running(self) -> int:
        return len(self._replicas)

    @property
    def names(self) -> list[str]:
        return list(self._replicas)

    def _join(self) -> None:
        self._replicas[f"r{self._numbers}"] = [0.0, 0.0]
        self._numbers += 1

    def run(self, seconds: int) -> ScalingWorld:
        for _ in range(seconds):
            self.tick()
        return self

    def tick(self) -> None:
        self.now += 1.0
        arriving = self._rate(self.now)
        if not self._replicas:
            self.outside += arriving
        for state in self._replicas.values():
            state[0] += (arriving + self.outside) / len(self._replicas)
            done = min(state[0], 1.0)
            state[0] -= done
            state[1] += done
            self.served += done
        if self._replicas:
            self.outside = 0.0
        while self._starting and self._starting[0] <= self.now:
            self._starting.pop(0)
            self._join()  # it reports before it has done anything
        self._scale(self.policy.decide(self.now, Fleet(self._heard(), self.target, self.outside)))

    def _heard(self) -> dict[str, ReplicaDemand | None]:
        kv, busy = self._kv(self.now), self._rate(self.now) > 0
        self._answers += 10.0
        self._late_ones += 10.0 * self._late(self.now)
        heard: dict[str, ReplicaDemand | None] = {}
        for name, (queue, loaded) in self._replicas.items():
            numbers = {
                "queued_s": queue,
                "loaded_s": loaded,
                "kv_share": kv,
                "seat_share": 0.1 if queue or busy else 0.0,
                "answered": self._answers,
                "late": self._late_ones,
            }
            heard[name] = None if name in self.silent else ReplicaDemand.from_numbers(numbers | self.lies.get(name, {}))
        return heard

    def _scale(self, wanted: int) -> None:
        for _ in range(wanted - self.target):
            self._starting.append(self.now + self._start_s)
        for _ in range(self.target - wanted):
            if self._starting:
                self._starting.pop()
            else:
                self._replicas.pop(next(iter(self._replicas)))
        self.target = wanted
        self.targets.append(wanted)

    def turns(self, since: int = 0) -> int:
        """How often the target changed its direction."""
        targets = self.targets[since:]
        steps = [b - a for a, b in pairwise(targets) if b != a]
        return sum(a * b < 0 for a, b in pairwise(steps))
