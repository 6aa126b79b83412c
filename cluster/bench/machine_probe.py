"""MachineProbe: the machine's memory bandwidth and multiplication rate, measured in the same hour as the runs.

A fresh process for each reading: bandwidth may differ from process to process, and torch stays out of the client.

Owns: when it was measured, all readings, and the reason when there are none.
Does not: measure (limits_child), or say what the limits mean (model_costs).
Invariants: a reading that failed is left out, never zero; after the first failure it is not tried again.
"""

from __future__ import annotations

import asyncio
import json
import statistics
import sys
import time
from dataclasses import dataclass, field

from cluster.bench.model_costs import ModelCosts

_LONGEST_S = 120.0


@dataclass(frozen=True, slots=True)
class LimitReading:
    """Bytes per second and operations per second."""

    at: float
    bandwidth: float
    gemm_rate: float


@dataclass(slots=True)
class MachineProbe:
    costs: ModelCosts | None
    threads: int
    command: tuple[str, ...] = (sys.executable, "-m", "cluster.bench.limits_child")
    readings: list[LimitReading] = field(default_factory=list)
    missing: str = ""

    def __post_init__(self) -> None:
        if self.costs is None:
            self.missing = "the model is no plain decoder"

    @property
    def bandwidth(self) -> float | None:
        return statistics.median(r.bandwidth for r in self.readings) if self.readings else None

    @property
    def gemm_rate(self) -> float | None:
        return statistics.median(r.gemm_rate for r in self.readings) if self.readings else None

    async def read(self) -> None:
        if self.missing or self.costs is None:
            return
        at = time.time()
        options = (str(self.costs.packed_bytes), self.costs.dtype, str(self.threads))
        process = await asyncio.create_subprocess_exec(
            *self.command,
            *options,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.DEVNULL,
        )
        try:
            async with asyncio.timeout(_LONGEST_S):
                said, _ = await process.communicate()
            values = json.loads(said.decode().strip().splitlines()[-1])
        except (TimeoutError, ValueError, IndexError):
            values = {"missing": "the measurement failed"}
        finally:
            if process.returncode is None:
                process.kill()
                await process.wait()
        if "missing" in values:
            self.missing = str(values["missing"])
            return
        self.readings.append(LimitReading(at, float(values["bandwidth"]), float(values["gemm_rate"])))
