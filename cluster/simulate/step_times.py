"""step_times: the step-time model that a simulation uses: an example, or one that `kvray bench calibrate` wrote.

Owns: the example's coefficients and where they come from, and reading a calibration.
Does not: measure (cluster.bench.calibration).
Invariants: a file that is no calibration is a ConfigError.
"""

from __future__ import annotations

import json
from pathlib import Path

from cluster.core.errors import ConfigError
from cluster.core.step_time import StepTimeModel

# A model of 8.0e9 parameters (32 layers, 32 heads, 8 KV heads, head dim 128, bfloat16) on one GPU of the H200 class,
# 989e12 FLOP/s and 4.8e12 B/s, from first principles. Not a measurement.
#   a step       16.1e9 B of weights at 80 % of the bandwidth (4.2 ms) + 1 ms around it
#   per token    2 * 8.0e9 FLOP at half of the peak (32 us)
#   per context  4 * 32 layers * 32 heads * 128 FLOP at 40 % of the peak (1.3 ns)
#   per row      sampling and bookkeeping (10 us); its matrix products hide behind the weights
#   per read     2 * 32 layers * 8 heads * 128 * 2 B = 131,072 B at 80 % of the bandwidth (34 ns)
EXAMPLE = StepTimeModel(5.2e-3, 3.2e-5, 1.3e-9, 1.0e-5, 3.4e-8)

# The same GPU: 141e9 B * 0.9 - 16.1e9 B of weights, at 131,072 B per token.
EXAMPLE_KV_TOKENS = 845_000


def read_step_time(path: Path) -> StepTimeModel:
    """`step_time` of a JSON object, the five coefficients in seconds."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(value, dict) or "step_time" not in value:
            raise ValueError('it has no "step_time"')
        return StepTimeModel.from_wire(value["step_time"])
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(f"{path.name} is no calibration: {error}") from None
