"""policies: the routing policies that a cluster can be told to use, by name.

Owns: `create_policy`.
Does not: define policies (scoring, estimated_ttft; cluster.simulate.policies has those of others, to compare with).
Invariants: an unknown name is a ValueError.
"""

from __future__ import annotations

import random

from router.estimated_ttft import EstimatedTtft, TtftParameters
from router.scoring import LeastUncached, Policy, RoundRobin


def create_policy(
    name: str,
    *,
    default_rate: float,
    near_tie: float,
    rng: random.Random,
    parameters: TtftParameters | None = None,
) -> Policy:
    if name == "estimated_ttft":
        return EstimatedTtft(default_rate, near_tie, rng, parameters)
    if name == "least_uncached":
        return LeastUncached(rng)
    if name == "round_robin":
        return RoundRobin()
    raise ValueError(f"unknown routing policy {name!r}")
