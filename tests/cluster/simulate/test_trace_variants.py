"""What an infinite cache saves, before and after a trace is changed."""

from __future__ import annotations

import random

import pytest
from sim_world import chats, request

from cluster.core.errors import ConfigError
from cluster.simulate.engine_simulation import EngineSimulation
from cluster.simulate.ideal_hits import ideal_hits, is_cold
from cluster.simulate.mooncake_trace import TraceRequest
from cluster.simulate.prompt_tokens import PromptTokens
from cluster.simulate.sim_settings import SimSettings
from cluster.simulate.trace_variants import at_speed, shared_burst, with_cold_share


def conversations(count: int, seed: int = 0) -> list[TraceRequest]:
    """As in the public trace: one shared first block, then documents nobody has seen; a third has further turns."""
    rng = random.Random(seed)
    free = 1
    requests: list[TraceRequest] = []
    for _ in range(count):
        ids: tuple[int, ...] = (0,)
        for _ in range(1 if rng.random() < 0.67 else rng.randint(2, 4)):
            more = rng.randint(1, 12)
            ids = (*ids, *range(free, free + more))
            free += more
            tokens = (len(ids) - 1) * 512 + rng.randint(1, 512)
            requests.append(TraceRequest(len(requests), float(len(requests)), tokens, 5, ids))
            ids = ids[:-1] if len(ids) > 2 else ids
    return requests


def cold_share(requests: list[TraceRequest]) -> float:
    return sum(map(is_cold, ideal_hits(requests))) / len(requests)


def test_ideal_hits_by_hand() -> None:
    trace = [
        request(0, 0, 20, 1, 0, 1, 2),  # 8 + 8 + 4
        request(1, 1, 20, 1, 0, 1, 2),  # the same: all but the last token
        request(2, 2, 24, 1, 0, 1, 2),  # the third segment was seen in part
        request(3, 3, 30, 1, 0, 1, 2, 3),
        request(4, 4, 30, 1, 0, 9, 2, 3),  # differs in the second segment: what follows does not count
        request(5, 5, 6, 1, 0),
    ]
    assert ideal_hits(trace) == [0, 19, 20, 24, 8, 5]


def test_an_engine_with_room_for_everything_reaches_the_ideal() -> None:
    trace = [one._replace(arrival_s=1000.0 * one.number) for one in chats(40)]
    settings = SimSettings(block_size=4, num_blocks=20_000, engine={"token_budget": 512})
    records = EngineSimulation(trace, settings).run().log.records
    assert [records[one.request_id].cached_tokens for one in trace] == ideal_hits(trace)


@pytest.mark.parametrize("share", [0.05, 0.2])
def test_only_the_wanted_share_is_cold_and_the_rest_is_as_before(share: float) -> None:
    trace = conversations(2000)
    assert cold_share(trace) > 0.5
    changed = with_cold_share(trace, share)
    assert cold_share(changed) == pytest.approx(share, abs=0.002)
    for before, after in zip(trace, changed, strict=True):
        assert before._replace(hash_ids=()) == after._replace(hash_ids=())
        assert after.hash_ids[8:] == before.hash_ids[8:]
        assert len(after.hash_ids) == len(before.hash_ids)


def test_turns_of_one_conversation_still_continue_each_other() -> None:
    trace = conversations(400)
    changed = with_cold_share(trace, 0.05)
    for before, after in ((trace[i : i + 2], changed[i : i + 2]) for i in range(len(trace) - 1)):
        if before[0].hash_ids[:2] == before[1].hash_ids[:2]:
            same = [a == b for a, b in zip(before[0].hash_ids, before[1].hash_ids, strict=False)]
            still = [a == b for a, b in zip(after[0].hash_ids, after[1].hash_ids, strict=False)]
            assert all(new for old, new in zip(same, still, strict=True) if old)


def test_who_stays_cold_is_drawn_by_the_seed() -> None:
    trace = conversations(500)
    assert with_cold_share(trace, 0.1) == with_cold_share(trace, 0.1)
    assert with_cold_share(trace, 0.1) != with_cold_share(trace, 0.1, seed=1)


def test_prompts_of_a_hot_document_begin_with_the_same_tokens() -> None:
    changed = with_cold_share(conversations(300), 0.1, documents=1)
    tokens = PromptTokens(changed)
    hot = max({one.hash_ids[1] for one in changed})
    prompts = [tokens.prompt(one)[:1024] for one in changed if one.hash_ids[1] == hot and one.prompt_tokens >= 1024]
    assert len(prompts) > 100 and len(set(prompts)) == 1


def test_a_trace_cannot_be_made_colder() -> None:
    with pytest.raises(ConfigError, match="cold"):
        with_cold_share(conversations(200), 0.99)


def test_speed_moves_arrivals_only() -> None:
    (one,) = at_speed([request(0, 12.0, 8, 1, 0)], 4.0)
    assert one == request(0, 3.0, 8, 1, 0)


def test_a_burst_shares_exactly_its_prefix() -> None:
    burst = shared_burst(3, prefix_tokens=40, tail_tokens=7)
    prompts = [PromptTokens(burst).prompt(one) for one in burst]
    assert [len(prompt) for prompt in prompts] == [47] * 3
    assert len({prompt[:40] for prompt in prompts}) == 1
    assert len({prompt[40] for prompt in prompts}) == 3
