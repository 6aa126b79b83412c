"""GpuEnvironment: the device that is checked, and how a section measures there and gives up.

Owns: the setups to compare, timing a piece of device work, and turning what went wrong into a row.
Does not: know any section, or print.
Invariants: sections reach the device, the clock and the model through this object only, so that they run on a CPU too.
"""

from __future__ import annotations

import contextlib
import gc
import statistics
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from benchmarks.gpu.report import Row, first_line
from cluster.config import CacheConfig, EngineConfig
from cluster.core.errors import ConfigError

Work = Callable[[], object]

WARM_UPS, REPEATS = 3, 10
SLOW = "reference"  # correct everywhere; its speed is no figure of interest


@dataclass(frozen=True, slots=True)
class Setup:
    """One way to run a model."""

    backend: str
    cuda_graphs: bool = False

    def __str__(self) -> str:
        return f"{self.backend} with CUDA graphs" if self.cuda_graphs else self.backend


ON_CUDA = (Setup("flash"), Setup("triton"), Setup("triton", cuda_graphs=True), Setup(SLOW))


class Skip(Exception):
    """What is asked for is not possible here; the message says why."""


class Failed(Exception):
    """It ran, and the answer is wrong; the message says what was found."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuEnvironment:
    device: torch.device
    setups: tuple[Setup, ...]
    half: str  # the 16-bit type that the device computes fast
    model: Path | None  # a model on disk; None: random ones are made
    seconds_of: Callable[[Work], float]  # what one call takes on the device
    left: Callable[[], float]  # seconds until the section must end

    def attempt(self, what: str, work: Callable[[], str]) -> Row:
        """A row with what `work` says, or with the reason why it says nothing."""
        if self.left() <= 0:
            return Row(what, "skipped", "no time left")
        try:
            return Row(what, "ok", work())
        except Skip as reason:
            return Row(what, "skipped", str(reason))
        except ConfigError as error:
            return Row(what, "skipped", error.message)
        except Failed as found:
            return Row(what, "failed", str(found))
        except Exception as error:
            return Row(what, "failed", f"{type(error).__name__}: {first_line(error)}")
        finally:
            self._release()

    def median_seconds(self, work: Work) -> float:
        """Of several calls, after some that are not timed."""
        for _ in range(WARM_UPS):
            work()
        return statistics.median(self.seconds_of(work) for _ in range(REPEATS))

    def _release(self) -> None:
        """Give back what nobody holds, so that it counts as free for the next one."""
        gc.collect()
        if self.device.type == "cuda":
            with contextlib.suppress(RuntimeError):  # a broken context has been said already
                torch.cuda.empty_cache()

    def fast_setups(self) -> tuple[Setup, ...]:
        """Those whose speed is of interest; all when there is no such."""
        return tuple(setup for setup in self.setups if setup.backend != SLOW) or self.setups

    def engine(self, model_dir: Path, setup: Setup, dtype: str, kv_memory: int) -> EngineConfig:
        return EngineConfig.model_validate(
            {
                "model": str(model_dir),
                "dtype": dtype,
                "device": self.device.type,
                "attention_backend": setup.backend,
                "cuda_graphs": setup.cuda_graphs,
                "threads": 1,
                "cache": CacheConfig(kv_memory=kv_memory),
            }
        )


def cuda_seconds(work: Work) -> float:
    """Between two events around the call: device work, and what the device waits for the host meanwhile."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    work()
    end.record()
    end.synchronize()
    return float(start.elapsed_time(end)) / 1e3


def cuda_environment(model: Path | None, left: Callable[[], float]) -> GpuEnvironment:
    return GpuEnvironment(
        device=torch.device("cuda"),
        setups=ON_CUDA,
        half="bfloat16" if torch.cuda.get_device_capability()[0] >= 8 else "float16",
        model=model,
        seconds_of=cuda_seconds,
        left=left,
    )
