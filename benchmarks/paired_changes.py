"""paired_changes: what a benchmark says of many comparisons, each of two runs on the same requests.

Owns: mean and standard deviation of the changes, as text.
Does not: pair runs or run anything.
Invariants: the deviation is of the changes themselves, and is left out where there is one.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence


def told(changes: Sequence[float]) -> str:
    """`changes`: ours over the other's, less one."""
    noise = f" ± {statistics.stdev(changes):.1%}" if len(changes) > 1 else ""
    return f"{statistics.fmean(changes):+.1%}{noise}"
