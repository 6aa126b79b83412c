"""exclusive_port: the gRPC port of a front door belongs to it alone.

Ray Serve gives every front door two ports out of ranges that are the same in every cluster (HTTP from 30000 on, gRPC
from 40000 on), and the next one when that is taken. It asks gRPC for a port of its own in a form that gRPC ignores: "0"
instead of 0. So a second server binds the same gRPC port without an error, and the kernel shares the connections out
among both. Of two clusters on one machine each then answered some requests of the other, with its own model.

    cluster A   HAProxy ──▶ 40000 ◀── front door of A
                                  ◀── front door of B      bound too, and nobody noticed
    cluster B   HAProxy ──▶ 40000

`install` runs before Serve starts these servers and makes the option a number. What Serve does about a port that is
taken, it then does: it tries the next one.

The risk: it replaces a private class of Serve. Where that looks different nothing is changed, and one line says so.

Owns: this option of the gRPC servers of this process.
Does not: choose ports (Serve does), or touch HTTP (bound alone already) and HAProxy (-dR) or servers that ask to share.
Invariants: installed once, however often it is called; a front door starts also where it cannot be installed.
"""

from __future__ import annotations

import inspect
import logging
from typing import Any

logger = logging.getLogger(__name__)

_OPTION = "grpc.so_reuseport"
_PARAMETERS = ("self", "service_handler_factory", "extra_options")


def install() -> None:
    """From now on a gRPC server that Serve starts in this process without sharing its port does not share it."""
    try:
        _install()
    except Exception as error:
        logger.warning("another cluster on this machine may get requests of this front door over gRPC: %s", error)


def _install() -> None:
    from ray.serve._private import grpc_util

    server: Any = grpc_util.gRPCGenericServer
    if getattr(server, "exclusive", False):
        return
    if tuple(inspect.signature(server.__init__).parameters) != _PARAMETERS:
        raise RuntimeError("Ray Serve's gRPC server is not as expected")
    grpc_util.gRPCGenericServer = _exclusive(server)


def _exclusive(server: Any) -> Any:
    class ExclusiveServer(server):  # type: ignore[misc]
        exclusive = True

        def __init__(self, service_handler_factory: Any, *, extra_options: Any = None) -> None:
            super().__init__(service_handler_factory, extra_options=[_as_number(one) for one in extra_options or ()])

    return ExclusiveServer


def _as_number(option: tuple[str, Any]) -> tuple[str, Any]:
    name, value = option
    return (name, int(value)) if name == _OPTION else option
