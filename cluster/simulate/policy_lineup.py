"""policy_lineup: every policy of the comparison by name, with what it may know.

    events        what replicas really hold, from their events, as late as those are; and what was sent and is not
                  confirmed yet
    events only   the same without the second part
    history       what this router sent where, whether it is still there or not
    nothing       no overlap

Owns: names, constructors, and what each policy's router knows in its published form.
Does not: choose (router.estimated_ttft, router.scoring, peer_policies).
Invariants: names are unique; `ours` comes first.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum, auto

from cluster.core.errors import ConfigError
from cluster.core.step_time import StepTimeModel
from cluster.simulate import peer_policies as peers
from router.estimated_ttft import EstimatedTtft, TtftParameters
from router.scoring import LeastUncached, Policy, RoundRobin

OURS = "estimated_ttft"
BASELINE = "least_uncached"
_NEAR_TIE = 0.05  # as RouterConfig.near_tie


class Knowledge(Enum):
    EVENTS = auto()
    EVENTS_ONLY = auto()
    HISTORY = auto()
    NOTHING = auto()


@dataclass(frozen=True, slots=True)
class PolicyContext:
    rng: random.Random
    clock: Callable[[], float]
    step_time: StepTimeModel
    token_budget: int
    max_num_seqs: int
    parameters: TtftParameters | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyEntry:
    """history_chunks: how much of its history the router keeps, in chunks of 512.  load_age_s: of loads, at most.

    A history is counted in whole prompts here, so a bound holds less than one over distinct blocks would.
    """

    name: str
    make: Callable[[PolicyContext], Policy]
    knows: Knowledge
    history_chunks: int = 1 << 22
    load_age_s: float = 0.5


def _ours(context: PolicyContext) -> Policy:
    parameters = context.parameters or TtftParameters(
        token_budget=context.token_budget, max_num_seqs=context.max_num_seqs
    )
    rate = 1.0 / context.step_time.per_prefill_token if context.step_time.per_prefill_token else 1000.0
    return EstimatedTtft(rate, _NEAR_TIE, context.rng, parameters)


def _preble(context: PolicyContext) -> Policy:
    model = context.step_time
    return peers.PrebleE2(context.rng, context.clock, model.per_prefill_token + model.base / context.token_budget)


LINEUP = tuple(
    PolicyEntry(name=name, make=make, knows=knows, **more)
    for name, make, knows, more in (
        (OURS, _ours, Knowledge.EVENTS, {}),
        (BASELINE, lambda c: LeastUncached(c.rng), Knowledge.NOTHING, {}),
        ("round_robin", lambda _: RoundRobin(), Knowledge.NOTHING, {}),
        ("least_requests", lambda c: peers.LeastRequests(c.rng), Knowledge.NOTHING, {}),
        ("power_of_two", lambda c: peers.PowerOfTwo(c.rng), Knowledge.NOTHING, {}),
        ("longest_prefix", lambda c: peers.LongestPrefix(c.rng), Knowledge.HISTORY, {}),
        ("ray_affinity", lambda c: peers.RayAffinity(c.rng), Knowledge.HISTORY, {}),
        ("sglang", lambda c: peers.SglangThreshold(c.rng), Knowledge.HISTORY, {}),
        # 200,000 blocks of 16 tokens are 6,250 chunks of 512; prompts share about a third of theirs
        ("aibrix", lambda c: peers.Aibrix(c.rng), Knowledge.HISTORY, {"history_chunks": 10_000}),
        ("dynamo", lambda c: peers.DynamoCost(c.rng), Knowledge.EVENTS_ONLY, {}),
        ("llm_d", lambda c: peers.LlmD(c.rng), Knowledge.EVENTS, {"load_age_s": 0.05}),
        ("preble", _preble, Knowledge.HISTORY, {}),
    )
)


def chosen_policies(name: str) -> tuple[PolicyEntry, ...]:
    """`all`, one name, or several with commas between. ConfigError for an unknown one."""
    if name == "all":
        return LINEUP
    by_name = {entry.name: entry for entry in LINEUP}
    wanted = [one.strip() for one in name.split(",")]
    for one in wanted:
        if one not in by_name:
            raise ConfigError(f"unknown policy {one!r}; there are all, {', '.join(by_name)}")
    return tuple(by_name[one] for one in dict.fromkeys(wanted))
