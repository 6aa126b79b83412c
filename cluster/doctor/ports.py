"""ports_check: can the front door listen where it should?

Owns: trying to bind each port for a moment, as a server would.
Does not: find out who listens there.
Invariants: every socket is closed again; nothing is ever connected to.
"""

from __future__ import annotations

import errno
import os
import socket
from collections.abc import Callable, Mapping

from cluster.doctor.check import Check

Try = Callable[[str, int], int]


def try_to_bind(host: str, port: int) -> int:
    """0, or the errno of what is in the way."""
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        with socket.socket(family, socket.SOCK_STREAM) as sock:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as servers do: closed connections linger
            sock.bind((host, port))
    except socket.gaierror:
        return errno.EADDRNOTAVAIL
    except OSError as error:
        return error.errno or errno.EIO
    return 0


def ports_check(host: str, ports: Mapping[str, int], *, ray_runs: bool, attempt: Try = try_to_bind) -> Check:
    """`ports`: by what listens there. `ray_runs`: then a port in use may well be ours."""
    found = {name: attempt(host, port) for name, port in ports.items()}
    shown = ", ".join(f"{name} {host}:{port}" for name, port in ports.items())
    if ports and len(set(ports.values())) < len(ports):
        return Check("ports", "failed", f"{shown}: the same port twice", "give each its own")
    if not any(found.values()):
        return Check("ports", "ok", f"{shown}: free")
    taken = ", ".join(
        f"{name} {host}:{ports[name]}: {os.strerror(code).lower()}" for name, code in found.items() if code
    )
    options = " or ".join(f"--{name.lower()}-port" if name != "HTTP" else "--port" for name in found if found[name])
    if ray_runs and set(found.values()) <= {0, errno.EADDRINUSE}:
        return Check("ports", "warning", taken, f"nothing, if it is kvray that runs; else choose another {options}")
    return Check("ports", "failed", taken, f"end what listens there, or choose another {options} or --host")
