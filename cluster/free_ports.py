"""free_ports: where something of ours may listen, on a machine that others use, too.

Owns: that choice.
Does not: keep the ports: between the choice and whoever listens somebody else may listen there. Who can, tries again.
Invariants: no port that the system may give to an outgoing connection meanwhile, which happens all the time.
"""

from __future__ import annotations

import random
import socket
from contextlib import ExitStack, suppress

# Above those of Ray's workers, below Serve's own, and below 32,768, from which on Linux takes outgoing connections'.
_PORTS = range(20_000, 30_000)


def free_ports(count: int) -> list[int]:
    """Distinct ports of this machine that nobody has now, of those that no outgoing connection takes in the meantime.

    OSError if there are not so many."""
    with ExitStack() as stack:
        found: list[int] = []
        for port in random.Random().sample(_PORTS, len(_PORTS)):
            sock = stack.enter_context(socket.socket())
            with suppress(OSError):
                sock.bind(("", port))
                found.append(port)
            if len(found) == count:
                return found
    raise OSError(f"no {count} free ports from {_PORTS.start} to {_PORTS.stop - 1}")
