"""ScaledReplica: the same requests through the exact engine give the same times and hits, within a stated bound."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest

from cluster.config import CacheConfig
from cluster.core.step_time import StepTimeModel
from cluster.simulate.engine_simulation import EngineSimulation
from cluster.simulate.fleet_simulation import FleetResult, FleetSettings, FleetSimulation
from cluster.simulate.mooncake_trace import TraceRequest
from cluster.simulate.policy_lineup import chosen_policies
from cluster.simulate.scaled_replica import ReplicaSettings
from cluster.simulate.sim_settings import SimSettings

BLOCK = 16
TIMES = StepTimeModel(5e-3, 1e-3, 1e-6, 1e-4, 1e-6)
BOUND_S = 0.02  # of a time, where a prefill with one token left counts as a decode row in the exact form


def chats(count: int, seed: int, rate: float) -> list[TraceRequest]:
    """Conversations whose turns repeat and continue the ones before, all with the same first block."""
    rng = random.Random(seed)
    histories: list[tuple[int, ...]] = []
    requests: list[TraceRequest] = []
    now, free = 0.0, 1
    for number in range(count):
        now += rng.expovariate(rate)
        history = rng.choice(histories[-12:]) if histories and rng.random() < 0.6 else (0,)
        more = rng.randint(1, 6)
        ids = (*(history if len(history) < 20 else (0,)), *range(free, free + more))
        free += more
        histories.append(ids[:-1])
        prompt = (len(ids) - 1) * BLOCK + rng.randint(1, BLOCK)
        requests.append(TraceRequest(number, now, prompt, rng.randint(1, 60), ids, BLOCK))
    return requests


def scaled(requests: Sequence[TraceRequest], num_blocks: int, **settings: object) -> FleetResult:
    replica = ReplicaSettings(
        kv_tokens=num_blocks * BLOCK,
        step_time=TIMES,
        token_budget=64,
        block=BLOCK,
        **settings,  # type: ignore[arg-type]
    )
    fleet = FleetSettings(replicas=1, replica=replica)
    return FleetSimulation(requests, fleet, chosen_policies("round_robin")[0]).run()


@pytest.mark.parametrize(("num_blocks", "rate"), [(400, 3.0), (400, 8.0), (60, 3.0), (40, 8.0)])
@pytest.mark.parametrize("order", ["prefix", "fcfs"])
def test_the_scaled_form_agrees_with_the_exact_engine(num_blocks: int, rate: float, order: str) -> None:
    requests = chats(150, seed=num_blocks, rate=rate)
    cache = CacheConfig(block_size=BLOCK, chunk_tokens=BLOCK, partial_reuse=False)
    engine = {"cache": cache, "token_budget": 64, "scheduling": order}
    settings = SimSettings(block_size=BLOCK, num_blocks=num_blocks, step_time=TIMES, engine=engine)
    exact = EngineSimulation(requests, settings).run()
    ours = scaled(requests, num_blocks, prefix_first=order == "prefix")
    assert ours.virtual_s == pytest.approx(exact.virtual_s, rel=0.01)
    assert ours.busy_s[0] == pytest.approx(exact.busy_s, rel=0.01)
    pairs = [(ours.records[name], record) for name, record in exact.log.records.items()]
    asked = sum(one.request.prompt_tokens for one, _ in pairs)
    hits = [sum(pair[side].cached_tokens for pair in pairs) / asked for side in (0, 1)]
    assert hits[0] == pytest.approx(hits[1], abs=0.01)
    means = [sum(pair[side].ttft_s or 0.0 for pair in pairs) / len(pairs) for side in (0, 1)]
    assert means[0] == pytest.approx(means[1], rel=0.02)
    if not exact.preemptions:
        late = [abs((one.ttft_s or 0.0) - (two.ttft_s or 0.0)) for one, two in pairs]
        assert sorted(late)[int(0.95 * len(late))] < BOUND_S


def test_one_request_takes_the_time_of_its_steps() -> None:
    result = scaled([TraceRequest(0, 5.0, 70, 3, (0, 1, 2, 3, 4), BLOCK)], 400)
    prefill = 2 * 5e-3 + 70e-3 + 1e-6 * (70 * 71 / 2)
    record = result.records["r0"]
    assert record.first_token_s == pytest.approx(5.0 + prefill)
    assert record.finished_s == pytest.approx(5.0 + prefill + 2 * 5.1e-3 + 1e-6 * (71 + 72))
    assert (list(result.gap_counts), result.prefill_tokens) == ([2], 70)


def test_a_request_that_can_never_fit_is_shed() -> None:
    requests = [TraceRequest(0, 0.0, 100, 1, tuple(range(7)), BLOCK), TraceRequest(1, 0.0, 10, 1, (9,), BLOCK)]
    result = scaled(requests, 5)
    assert (result.records["r0"].shed, result.records["r1"].shed) == (True, False)
    assert result.records["r1"].finished_s is not None
