"""What the order of the queue does to cold requests, and holding back to a burst, on traces in virtual time."""

from __future__ import annotations

import math
import os
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from sim_world import request

from cluster.simulate.engine_simulation import EngineSimulation
from cluster.simulate.load_search import speed_for
from cluster.simulate.mooncake_trace import TraceRequest, read_trace
from cluster.simulate.sim_report import SimReport, make_report
from cluster.simulate.sim_settings import SimSettings
from cluster.simulate.trace_variants import at_speed, shared_burst, with_cold_share

TRACE = Path(__file__).parents[4] / "shared/traces/mooncake/conversation_trace.jsonl"
LONG = bool(os.environ.get("KVRAY_LONG"))


def report(requests: Sequence[TraceRequest], settings: SimSettings) -> SimReport:
    return make_report(requests, EngineSimulation(requests, settings).run(), speed=1.0, wall_s=0.0)


def hot_with_few_cold(count: int, seed: int) -> list[TraceRequest]:
    """Questions about four long documents, one a second on average, and 5 % prompts that nobody has seen."""
    rng = random.Random(seed)
    requests: list[TraceRequest] = []
    now, free = 0.0, 1000
    for number in range(count):
        now += rng.expovariate(1.0)
        document = 100 * (1 + rng.randrange(4))
        known = () if rng.random() < 0.05 else range(document, document + 8)
        ids = (*known, *range(free, free + 9 - len(known)))
        free += 9
        requests.append(request(number, now, len(ids) * 512, 40, *ids, segment=512))
    return requests


def check(starving: SimReport, ageing: SimReport) -> None:
    assert starving.ttft_new is not None and ageing.ttft_new is not None
    assert starving.hit_rate is not None and ageing.hit_rate is not None
    assert starving.ttft_new.p99 >= 3 * ageing.ttft_new.p99
    assert ageing.hit_rate >= 0.95 * starving.hit_rate


def compare(requests: Sequence[TraceRequest], ageing_s: float, engine: dict[str, Any], **settings: Any) -> None:
    """At 85 % load, the same arrivals in the two orders; the load is what longest-prefix-first can do."""
    both = [SimSettings(block_size=128, engine={**engine, "ageing_s": s}, **settings) for s in (math.inf, ageing_s)]
    arriving = at_speed(requests, speed_for(0.85, requests, both[0]))
    check(report(arriving, both[0]), report(arriving, both[1]))


def test_ageing_ends_the_starving_of_cold_requests() -> None:
    """The whole public trace is the long form below."""
    compare(hot_with_few_cold(800, seed=1), 0.2, {"max_num_seqs": 8}, num_blocks=700)


if LONG:

    @pytest.mark.timeout(1800)
    def test_ageing_on_the_conversation_trace_with_few_cold_requests() -> None:
        if not TRACE.exists():
            pytest.skip("needs the public traces in ../shared/traces")
        compare(with_cold_share(read_trace(TRACE), 0.05), 2.0, {"max_num_seqs": 128})


@pytest.mark.parametrize("token_budget", [2048, 8192, 256_000])
def test_holding_back_computes_a_new_prefix_of_a_burst_once(token_budget: int) -> None:
    """32 requests at once behind one new prefix of 4,000 tokens: no more than a tenth of what would be duplicated."""
    burst = shared_burst(32, prefix_tokens=4000)

    def duplicated(hold_back: bool) -> int:
        engine = {"token_budget": token_budget, "hold_back": hold_back, "max_num_seqs": 64}
        done = report(burst, SimSettings(block_size=16, num_blocks=10_000, engine=engine))
        assert done.finished == 32
        return done.duplicated_prefill_tokens

    assert duplicated(True) <= 0.1 * duplicated(False)
    if token_budget > 4000:
        assert duplicated(False) >= 4000
