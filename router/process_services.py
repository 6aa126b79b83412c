"""What the ingress of this process serves: set once by the ingress replica, read by the HTTP application.

Serve pickles the FastAPI application into the replica, so the routes cannot hold live objects; they ask here.

Owns: one reference per process.  Does not: build the services (router.ingress).
Invariants: reading before the ingress is ready raises ReplicaLost (503), never AttributeError.
"""

from __future__ import annotations

from cluster.core.errors import ReplicaLost
from router.http_api import Services

_current: list[Services] = []


def set_services(services: Services) -> None:
    _current[:] = [services]


def get_services() -> Services:
    if not _current:
        raise ReplicaLost("the front door is still starting")
    return _current[0]
