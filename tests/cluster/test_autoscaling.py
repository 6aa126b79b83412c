"""ServeAutoscaling with Serve's own context, and what Serve makes of the answer."""

from __future__ import annotations

from typing import Any

import pytest
from ray.serve._private.common import DeploymentID, ReplicaID, TimeStampedValue
from ray.serve.autoscaling_policy import _apply_autoscaling_config
from ray.serve.config import AutoscalingConfig as ServeConfigOfScaling
from ray.serve.config import AutoscalingContext

from cluster.autoscaling import POLICY_PATH, ServeAutoscaling, serve_options
from cluster.config import AutoscalingConfig
from cluster.core.replica_demand import ReplicaDemand

DEPLOYMENT = DeploymentID(name="LLMWorker", app_name="kvray")
CONFIG = AutoscalingConfig(
    utilisation=0.65,
    margin=0.0,
    min_replicas=0,
    max_replicas=9,
    look_back_s=5,
    up_delay_s=0,
    down_delay_s=10,
    to_zero_delay_s=20,
    start_s=0,
)


class World:
    """Serve's controller: it passes contexts and does at once what the wrapped policy answers."""

    def __init__(self, config: AutoscalingConfig = CONFIG, replicas: int = 2) -> None:
        self.now = 1000.0
        self.scaling = ServeAutoscaling(clock=lambda: self.now, **config.model_dump())
        self.options = ServeConfigOfScaling(**serve_options(config, replicas))
        self.policy = _apply_autoscaling_config(self.scaling)
        self.state: dict[str, Any] = {}
        self.target = replicas
        self.clock_error = 0.0
        self.demand = ReplicaDemand()
        self.reports: dict[str, float] = {}
        self.loaded: dict[str, float] = {}
        self.queued = 0.0
        self.reads = 0

    def tick(self, *, silent: tuple[str, ...] = (), rate: float = 0.0, every: float = 1.0) -> int:
        self.now += every
        ids = [ReplicaID(f"r{n}", DEPLOYMENT) for n in range(self.target)]
        numbers = self.demand._replace(seat_share=0.1 if rate else 0.0).to_numbers()
        for replica in ids:
            self.loaded[replica.unique_id] = self.loaded.get(replica.unique_id, 0.0) + rate * every / len(ids)
        for replica in ids:
            if replica.unique_id not in silent:
                self.reports[replica.unique_id] = self.now + self.clock_error

        def raw() -> dict[str, dict[ReplicaID, list[TimeStampedValue]]]:
            self.reads += 1
            return {
                name: {r: self.series(r.unique_id, name, value) for r in ids if r.unique_id in self.reports}
                for name, value in numbers.items()
            }

        context = AutoscalingContext(
            deployment_id=DEPLOYMENT,
            deployment_name=DEPLOYMENT.name,
            app_name=DEPLOYMENT.app_name,
            current_num_replicas=len(ids),
            target_num_replicas=self.target,
            running_replicas=ids,
            total_num_requests=lambda: self.queued,
            total_queued_requests=lambda: self.queued,
            aggregated_metrics=lambda: pytest.fail("worked out for nothing"),
            raw_metrics=raw,
            capacity_adjusted_min_replicas=self.options.min_replicas,
            capacity_adjusted_max_replicas=self.options.max_replicas,
            policy_state=self.state,
            last_scale_up_time=None,
            last_scale_down_time=None,
            current_time=self.now,
            config=self.options,
        )
        decided, self.state = self.policy(context)
        self.target = min(max(decided, self.options.min_replicas), self.options.max_replicas)
        return self.target

    def series(self, replica: str, name: str, value: float) -> list[TimeStampedValue]:
        value = self.loaded[replica] if name == "loaded_s" else value
        return [TimeStampedValue(1.0, 99.0), TimeStampedValue(self.reports[replica], value)]

    def run(self, seconds: int, **options: Any) -> int:
        for _ in range(seconds):
            self.tick(**options)
        return self.target


def test_what_the_policy_wants_is_done_at_once_in_both_directions() -> None:
    """Serve's delays and factors add nothing."""
    world = World()
    assert world.run(30, rate=1.3) == 2
    for _ in range(8):
        world.tick(rate=3.9)
    assert world.target == 6
    assert world.run(12, rate=3.9) == 6
    assert world.run(9, rate=1.3) == 6
    assert world.run(12, rate=1.3) == 3


def test_to_zero_and_back() -> None:
    world = World(replicas=1)
    world.run(10, rate=0.5)
    assert world.run(19) == 1
    assert world.run(5) == 0
    assert world.run(50) == 0
    world.queued = 1.0
    assert world.tick() == 1
    assert world.tick(every=0.1) == 1


def test_reports_that_stop_are_no_reports_whatever_the_clocks_say() -> None:
    for error in (0.0, -5000.0, 5000.0):
        world = World()
        world.clock_error = error
        world.run(30, rate=1.3)
        assert world.run(100, silent=("r0",), rate=1.3) == 2, "counted like the other one"
        assert world.run(100, silent=("r0", "r1"), rate=0.0) == 2, "nobody tells anything: everything stays"
        assert world.run(100) == 0, "they are back, and idle"


def test_replicas_that_never_reported_keep_the_target() -> None:
    world = World()
    world.reports = {"r0": 0.0, "r1": 0.0}
    world.demand = ReplicaDemand(queued_s=float("nan"))
    assert world.run(200, rate=9.0) == 2


def test_metrics_are_worked_out_once_per_second() -> None:
    world = World()
    for _ in range(100):
        world.tick(every=0.1, rate=1.0)
    assert 9 <= world.reads <= 11


def test_serve_accepts_the_options_and_builds_the_policy_from_what_it_pickled() -> None:
    options = ServeConfigOfScaling(**serve_options(CONFIG, 3))
    assert (options.min_replicas, options.initial_replicas, options.max_replicas) == (0, 3, 9)
    assert options.policy.policy_function == POLICY_PATH
    again = options.policy.from_serialized_policy_def(
        {"policy_function": options.policy.policy_function, "policy_kwargs": options.policy.policy_kwargs},
        options.policy.get_serialized_policy_def(),
    )
    made = again.get_policy()(**again.policy_kwargs)
    assert type(made).__name__ == "ServeAutoscaling"
    assert made._policy._parameters == CONFIG.parameters()
