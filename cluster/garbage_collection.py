"""calm_garbage_collector: for a process that makes many short-lived objects and hardly any cycles.

Owns: when such a process collects.
Does not: know what the process does; its main module calls this once, when everything is loaded.
Invariants: cycles are still found, later.
"""

from __future__ import annotations

import gc


def calm_garbage_collector() -> None:
    """What is loaded is never looked at again, and the rest is looked at rarely.

    By default the collector walks every live sequence of an engine several times a second, which costs as much as the
    bookkeeping itself (benchmarks/RESULTS.md), and in a router everything that Ray loaded, in one turn of its loop.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(50_000, 20, 100)
