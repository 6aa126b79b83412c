"""The simulator against a real cluster: hit rate and mean time to first token of the same requests.

Only with KVRAY_LONG: it takes minutes, and times mean something only while the machine is quiet. A round is: one sample
of requests, from whose steps the replicas fit their step-time models; then 200 others, timed; then the same 200 in the
simulator, on the models as they were between. Rounds differ in their salt, so none finds what another left.
"""

from __future__ import annotations

import asyncio
import os
import random
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import grpc
import pytest

from cluster.core.step_time import StepTimeModel
from cluster.rpc import inference_pb2 as pb
from cluster.rpc import inference_pb2_grpc as rpc
from cluster.simulate.fleet_report import make_fleet_report
from cluster.simulate.fleet_simulation import FleetResult, FleetSettings, FleetSimulation
from cluster.simulate.mooncake_trace import TraceRequest
from cluster.simulate.policy_lineup import chosen_policies
from cluster.simulate.scaled_replica import ReplicaSettings

LONG = bool(os.environ.get("KVRAY_LONG"))
pytestmark = [
    pytest.mark.cluster,
    pytest.mark.model,
    pytest.mark.timeout(3600),
    pytest.mark.skipif(not LONG, reason="times a whole cluster: make test-long"),
]

BLOCK = 16
REQUESTS, CALIBRATION = 200, 80
ROUNDS = 3  # the median counts: others use the machine, too
UTILISATION = 0.5
FIRST_TOKEN_ID, TOKEN_IDS = 1000, 40_000
PUBLISH_INTERVAL_S = 0.05


@dataclass(frozen=True, slots=True)
class Outcome:
    hit_rate: float
    mean_ttft_s: float


def scaled_chats(count: int, seed: int, gap_s: float) -> list[TraceRequest]:
    """Like the conversation trace, a 64th as long: half of them are turns of conversations, behind one common block."""
    rng = random.Random(seed)
    open_chats: list[tuple[int, ...]] = []
    requests: list[TraceRequest] = []
    now, free = 0.0, 1
    for number in range(count):
        now += rng.expovariate(1 / gap_s)
        history = open_chats.pop(rng.randrange(len(open_chats))) if open_chats and rng.random() < 0.5 else (0,)
        new = min(max(1, round(rng.lognormvariate(1.7, 1.0))), 60)
        ids = (*history, *range(free, free + new))
        free += new
        prompt = len(ids) * BLOCK - rng.randrange(BLOCK)
        requests.append(TraceRequest(number, now, prompt, rng.randint(2, 10), ids, BLOCK))
        if len(ids) < 120:
            open_chats.append(ids if prompt == len(ids) * BLOCK else ids[:-1])
    return requests


def tokens_of(request: TraceRequest, salt: str) -> list[int]:
    tokens: list[int] = []
    for block in request.hash_ids:
        tokens += random.Random(f"{salt}/{block}").choices(range(FIRST_TOKEN_ID, TOKEN_IDS), k=BLOCK)
    return tokens[: request.prompt_tokens]


async def play(address: str, requests: Sequence[TraceRequest], salt: str) -> Outcome:
    """First tokens are timed from when a request was due, whenever it was sent."""
    async with grpc.aio.insecure_channel(address) as channel:
        stub = rpc.InferenceStub(channel)
        calls = [
            pb.GenerateRequest(
                token_ids=pb.TokenIds(ids=tokens_of(request, salt)),
                cache_salt=salt,
                sampling=pb.SamplingOptions(temperature=0, max_tokens=request.output_tokens, ignore_eos=True),
            )
            for request in requests
        ]
        began = time.perf_counter() + 0.5

        async def one(request: TraceRequest, call: pb.GenerateRequest) -> tuple[float, int]:
            due = began + request.arrival_s
            await asyncio.sleep(due - time.perf_counter())
            first_s, cached = 0.0, 0
            async for chunk in stub.Generate(call, timeout=900):
                first_s = first_s or time.perf_counter() - due
                cached = chunk.usage.cached_tokens
            return first_s, cached

        answers = await asyncio.gather(*(one(*pair) for pair in zip(requests, calls, strict=True)))
    prompt_tokens = sum(request.prompt_tokens for request in requests)
    return Outcome(
        sum(cached for _, cached in answers) / prompt_tokens, statistics.fmean(first_s for first_s, _ in answers)
    )


def step_times(status: pb.StatusResponse) -> list[StepTimeModel]:
    models = [StepTimeModel.from_wire(list(replica.step_time_model)) for replica in status.replicas]
    assert len(models) == 2, "both replicas have run enough steps for a model"
    return models


def simulated(requests: Sequence[TraceRequest], status: pb.StatusResponse) -> FleetResult:
    models = step_times(status)
    mean = StepTimeModel(*(statistics.fmean(values) for values in zip(*(m.to_wire() for m in models), strict=True)))
    kv_tokens = min(replica.total_blocks for replica in status.replicas) * BLOCK
    settings = FleetSettings(
        replicas=2,
        replica=ReplicaSettings(kv_tokens=kv_tokens, step_time=mean, block=BLOCK),
        event_lag_s=PUBLISH_INTERVAL_S,
    )
    return FleetSimulation(requests, settings, chosen_policies("estimated_ttft")[0]).run()


def gap_for(status: pb.StatusResponse) -> float:
    """Between requests, so that a replica would compute half of its time if nothing ran together."""
    alone = simulated(scaled_chats(REQUESTS, 99, 1000.0), status)
    return sum(alone.busy_s) / (2 * UTILISATION * REQUESTS)


def test_hit_rate_within_two_points_and_mean_ttft_within_a_quarter(fine_cluster: Any) -> None:
    asyncio.run(play(fine_cluster.grpc_address, scaled_chats(CALIBRATION, 1, 0.5), "warm-up"))
    ratios, apart = [], []
    for number in range(ROUNDS):
        gap_s = gap_for(fine_cluster.settled())
        asyncio.run(play(fine_cluster.grpc_address, scaled_chats(CALIBRATION, 100 + number, gap_s), f"sample {number}"))
        status = fine_cluster.settled()
        requests = scaled_chats(REQUESTS, 200 + number, gap_s)
        load = os.getloadavg()[0]
        real = asyncio.run(play(fine_cluster.grpc_address, requests, f"run {number}"))
        report = make_fleet_report("estimated_ttft", simulated(requests, status), wall_s=0.0)
        assert report.ttft is not None and report.hit_rate is not None
        ratios.append(report.ttft.mean / real.mean_ttft_s)
        apart.append(report.hit_rate - real.hit_rate)
        print(
            f"round {number}: load {load:.1f} to {os.getloadavg()[0]:.1f}, gap {gap_s:.2f} s, hit rate "
            f"{report.hit_rate:.1%} for {real.hit_rate:.1%}, mean TTFT {report.ttft.mean:.3f} s for "
            f"{real.mean_ttft_s:.3f} s (ratio {ratios[-1]:.2f})",
            flush=True,
        )
    assert max(map(abs, apart)) <= 0.02
    assert 0.75 <= statistics.median(ratios) <= 1.25
