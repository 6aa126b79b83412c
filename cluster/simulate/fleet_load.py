"""fleet_load: how fast a trace may arrive so that a policy's fleet is busy for a given share of its time.

Busy means: it prefills, or somebody waits there. A replica that only decodes has room for more. Below saturation the
share grows with the speed almost in proportion, so a few runs find it:

    speed 1.00   27 %      * 70 / 27
    speed 2.59   71 %      near enough

Owns: that search.
Does not: simulate.
Invariants: deterministic; a bounded number of runs. The speed belongs to the trace, the fleet and the policy it was
found with; a comparison uses it for all policies.
"""

from __future__ import annotations

import math
from collections.abc import Callable

_NEAR = 0.01
_RUNS = 5


def speed_for_utilisation(wanted: float, run: Callable[[float], float], start: float = 1.0) -> float:
    """`run`: a speed's utilisation. The best of the speeds that were tried."""
    speed, best, best_error = start, start, float("inf")
    before: tuple[float, float] | None = None
    for _ in range(_RUNS):
        share = run(speed)
        if abs(share - wanted) < best_error:
            best, best_error = speed, abs(share - wanted)
        if best_error <= _NEAR or share <= 0.0:
            break
        slope = 1.0  # of the share over the speed, both as logarithms
        if before is not None and speed != before[0]:
            slope = math.log(share / before[1]) / math.log(speed / before[0])
        before = (speed, share)
        speed *= min(max((wanted / share) ** (1.0 / min(max(slope, 0.3), 1.0)), 0.25), 4.0)
    return best
