"""`python -m cluster.bench.busy_child SHARE SECONDS`: take a share of one core's time until the input is closed.

It spins until it has had its share of CPU time, which takes longer on a busy machine, and then sleeps.

Owns: the duty cycle of one process.
Does not: know how many of them there are.
Invariants: says "ready" before it spins and its CPU seconds at the end; lives no longer than SECONDS, and no longer
than whoever holds the other end of its input.
"""

from __future__ import annotations

import select
import sys
import time

_PERIOD_S = 0.02
_MOST_OWED_S = 0.1  # when others keep it from running it does not make up for more


def main() -> None:
    share, longest_s = float(sys.argv[1]), float(sys.argv[2])
    print("ready", flush=True)
    started_cpu = time.process_time()
    until = time.monotonic() + longest_s
    owed, last = share * _PERIOD_S, time.monotonic()
    while time.monotonic() < until:
        spin_until = time.process_time() + owed
        while time.process_time() < spin_until:
            pass
        if select.select([sys.stdin], [], [], (1 - share) * _PERIOD_S)[0]:
            break
        now = time.monotonic()
        owed, last = min(share * (now - last), _MOST_OWED_S), now
    print(time.process_time() - started_cpu, flush=True)


if __name__ == "__main__":
    main()
