"""`python -m cluster.bench.limits_child BYTES DTYPE THREADS`: measure this machine's limits once, print them as JSON.

Owns: one measurement in a fresh process.
Does not: know how to measure (worker.kernels.machine_limits).
Invariants: prints one object, with "missing" in place of the figures when they cannot be measured here.
"""

from __future__ import annotations

import importlib
import json
import sys


def main() -> None:
    num_bytes, dtype, threads = int(sys.argv[1]), sys.argv[2], int(sys.argv[3])
    try:
        limits = importlib.import_module("worker.kernels.machine_limits")
    except ImportError as error:
        print(json.dumps({"missing": str(error)}))
        return
    bandwidth = limits.read_bandwidth(num_bytes, threads)
    print(json.dumps({"bandwidth": bandwidth, "gemm_rate": limits.gemm_rate(dtype, threads)}))


if __name__ == "__main__":
    main()
