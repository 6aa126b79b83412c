"""A CPU as the device that the GPU check checks, with a clock that the test sets."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

import torch

from benchmarks.gpu.environment import GpuEnvironment, Setup, Work


@dataclass
class Clock:
    """A timed call takes the next of `times`, then always `seconds`; the section still has `left`."""

    seconds: float = 0.5
    left: float = 60.0
    times: list[float] = field(default_factory=list)

    def seconds_of(self, work: Work) -> float:
        work()
        return self.times.pop(0) if self.times else self.seconds


def cpu_environment(*setups: Setup, model: Path | None = None, clock: Clock | None = None) -> GpuEnvironment:
    torch.set_num_threads(1)
    clock = clock or Clock()
    return GpuEnvironment(
        device=torch.device("cpu"),
        setups=setups or (Setup("reference"),),
        half="bfloat16",
        model=model,
        seconds_of=clock.seconds_of,
        left=lambda: clock.left,
    )
