"""Every loss of reuse is named rightly, with the exact position: requests through a RoutingState, as a router has it.

A chunk is 4 tokens here.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import pytest
from fake_routing import CHUNK, A, B, RoutingWorld, hashes_of, hint_of
from routing_fleet import RoutingFleet

from cluster.core.events import CacheEvent, CacheEventKind
from cluster.core.replica import WorkerId
from cluster.index.known import FollowerState
from router.reuse_explanation import Loss, LossReason, ReuseExplanation
from router.reuse_watch import LATE_S
from router.route_explanation import RouteExplanation

R = LossReason
PROMPT = list(range(1000, 1100))  # 25 chunks


@dataclass
class Asked:
    worker_id: WorkerId
    reuse: ReuseExplanation

    @property
    def losses(self) -> list[tuple[LossReason, int, int]]:
        return [(loss.reason, loss.tokens, loss.position) for loss in self.reuse.losses]

    @property
    def counts(self) -> tuple[int, ...]:
        """prompt, seen, held, chosen, reused"""
        reuse = self.reuse
        reused = reuse.reused_tokens or 0
        counts = (reuse.prompt_tokens, reuse.seen_tokens, reuse.held_tokens, reuse.chosen_tokens, reused)
        assert list(counts) == sorted(counts, reverse=True)
        lost = sum(loss.tokens for loss in reuse.losses)
        assert 0 <= reuse.prompt_tokens - lost - reused <= CHUNK
        return counts


class World(RoutingWorld):
    """Replicas that reuse what their events say they hold, and store at once what they were sent."""

    def __init__(self, *worker_ids: WorkerId) -> None:
        super().__init__()
        self.held: dict[WorkerId, set[bytes]] = {}
        for worker_id in worker_ids or (A, B):
            self.join(worker_id)
            self.held[worker_id] = set()

    def ask(
        self,
        name: str,
        tokens: Sequence[int],
        *,
        salt: str = "",
        ends: tuple[int, ...] = (),
        cached: int | None = None,
        later: float = 60.0,
    ) -> Asked:
        """Route, prefill and answer a request; then let `later` seconds pass. cached: what the engine reuses."""
        hint = hint_of(name, tokens, salt=salt, message_ends=ends)
        worker_id = self.decide(hint, *self.held)[0]
        held = self.held[worker_id]
        run = next((n for n, chunk in enumerate(hint.chunk_hashes) if chunk not in held), len(hint.chunk_hashes))
        self.state.answered(name, min(run * CHUNK, len(tokens) - 1) if cached is None else cached)
        self.state.release(name)
        held.update(hint.chunk_hashes)
        self.store(worker_id, *hint.chunk_hashes)
        self.now += later
        return Asked(worker_id, reuse_of(self.state.explained(name)))

    def evict(self, worker_id: WorkerId, tokens: Sequence[int], down_to: int) -> None:
        """All chunks from this one on, the last first."""
        gone = hashes_of(tokens)[down_to:][::-1]
        self.held[worker_id] -= set(gone)
        self.remove(worker_id, *gone)


def reuse_of(explanation: RouteExplanation | None) -> ReuseExplanation:
    assert explanation is not None and explanation.reuse is not None
    return explanation.reuse


def changed(tokens: Sequence[int], position: int) -> list[int]:
    return [*tokens[:position], 9, *tokens[position + 1 :]]


def test_a_first_prompt_was_never_seen() -> None:
    first = World().ask("r", PROMPT)
    assert first.losses == [(R.NEVER_SEEN, 100, 0)]
    assert first.counts == (100, 0, 0, 0, 0)


def test_the_same_prompt_again_loses_nothing() -> None:
    world = World()
    one = world.ask("r", PROMPT)
    again = world.ask("s", PROMPT)
    assert (again.worker_id, again.losses) == (one.worker_id, [])
    assert again.counts == (100, 100, 99, 99, 99)
    odd = world.ask("t", PROMPT[:98])  # two tokens more than whole chunks
    assert (odd.losses, odd.counts) == ([], (98, 98, 96, 96, 96))


def test_a_longer_conversation_loses_what_is_new() -> None:
    world = World()
    world.ask("r", PROMPT)
    longer = world.ask("s", [*PROMPT, *range(10)])
    assert (longer.losses, longer.counts) == ([(R.NEVER_SEEN, 10, 100)], (110, 100, 100, 100, 100))


@pytest.mark.parametrize("position", [1, 3, 4, 37, 40, 95, 98, 99])
def test_a_timestamp_is_where_the_prompt_diverged(position: int) -> None:
    world = World()
    world.ask("r", PROMPT)
    stamped = world.ask("s", changed(PROMPT, position), ends=(20, 60, 95))
    begin = position - position % CHUNK
    assert stamped.losses == [(R.DIVERGED, 100 - begin, position)]
    assert stamped.counts == (100, position, begin, begin, begin)
    message = sum(position >= end for end in (20, 60, 95))
    assert stamped.reuse.losses[0].message == (message if message < 3 else None)


def test_a_divergence_is_from_the_longest_beginning_ever_seen() -> None:
    world = World()
    for number in range(50):
        world.ask(f"r{number}", [*PROMPT[:30], *[5000 + number] * 40, 7 + number])
    near = world.ask("s", [*PROMPT[:30], *[5017] * 13, 1, 2, 3, 4])
    assert near.losses == [(R.DIVERGED, 7, 43)]
    assert world.ask("t", [*PROMPT[:30], 1, 2, 3, 4]).losses == [(R.DIVERGED, 6, 30)]


def test_a_divergence_in_the_incomplete_last_chunk_is_exact_too() -> None:
    world = World()
    world.ask("r", PROMPT[:19])
    assert world.ask("s", [*PROMPT[:18], 1]).losses == [(R.DIVERGED, 3, 18)]
    assert world.ask("t", [*PROMPT[:19], 1]).losses == [(R.NEVER_SEEN, 4, 16)]


def test_reordered_tools_diverge_in_the_message_that_has_them() -> None:
    """The system message is tokens 0 to 9, the tools are in the next, in the order 1, 2, 3."""
    system, tools, question = PROMPT[:10], [[100 * n + k for k in range(15)] for n in (1, 2, 3)], [7, 8, 9]
    world = World()
    ends = (10, 55, 58)
    world.ask("r", [*system, *tools[0], *tools[1], *tools[2], *question], ends=ends)
    swapped = world.ask("s", [*system, *tools[0], *tools[2], *tools[1], *question], ends=ends)
    assert swapped.reuse.losses == (Loss(reason=R.DIVERGED, tokens=58 - 24, position=25, message=1),)


def test_another_salt_is_another_namespace() -> None:
    world = World()
    world.ask("r", PROMPT, salt="one")
    for salt in ("two", ""):
        other = world.ask(f"s{salt}", PROMPT, salt=salt)
        assert (other.losses, other.counts) == ([(R.NAMESPACE, 100, 0)], (100, 0, 0, 0, 0))
    assert world.ask("t", [*PROMPT, 1, 2], salt="three").losses == [(R.NAMESPACE, 100, 0), (R.NEVER_SEEN, 2, 100)]
    assert world.ask("u", PROMPT, salt="two").losses == []


def test_what_others_salts_saw_is_not_for_the_client() -> None:
    world = World()
    world.ask("r", PROMPT, salt="one")
    other = world.ask("s", [*PROMPT, 1, 2], salt="two")
    assert other.reuse.compact() == "prompt=102,seen=0,held=0,chosen=0,reused=0;never_seen=102@0"


def test_an_evicted_prefix() -> None:
    world = World(A)
    world.ask("r", PROMPT)
    world.evict(A, PROMPT, down_to=5)
    cut = world.ask("s", PROMPT)
    assert (cut.losses, cut.counts) == ([(R.EVICTED, 79, 20)], (100, 100, 20, 20, 20))
    world.evict(A, PROMPT, down_to=0)
    then = world.ask("t", changed(PROMPT, 37))
    assert then.losses == [(R.EVICTED, 36, 0), (R.DIVERGED, 64, 37)]
    assert then.counts == (100, 37, 0, 0, 0)


def test_a_chunk_that_the_router_never_saw_itself_is_evicted_all_the_same() -> None:
    """Another router's prompt; of its tokens this one knows nothing."""
    world = World(A)
    world.store(A, *hashes_of(PROMPT))
    world.evict(A, PROMPT, down_to=0)
    assert world.ask("s", [*PROMPT, 1]).losses == [(R.EVICTED, 100, 0), (R.NEVER_SEEN, 1, 100)]


def test_a_replica_that_is_gone_took_its_cache_along() -> None:
    world = World()
    gone = world.ask("r", PROMPT).worker_id
    world.state.mark_lost(gone)
    del world.held[gone]
    assert world.ask("s", PROMPT).losses == [(R.EVICTED, 99, 0)]


def test_a_busy_holder() -> None:
    world = World()
    holder = world.ask("r", PROMPT).worker_id
    world.beat(holder, uncached_tokens={"other": 100_000})
    away = world.ask("s", [*PROMPT, 1, 2])
    assert away.worker_id != holder
    assert away.losses == [(R.ROUTED_ELSEWHERE, 100, 0), (R.NEVER_SEEN, 2, 100)]
    assert away.counts == (102, 100, 100, 0, 0)


def test_what_was_evicted_while_the_request_was_on_its_way() -> None:
    world = World(A)
    world.ask("r", PROMPT)
    world.decide(hint_of("s", PROMPT), A)
    world.now += 0.1
    world.evict(A, PROMPT, down_to=10)
    world.state.answered("s", 40)
    assert [str(loss) for loss in reuse_of(world.state.explained("s")).losses] == ["evicted=59@40"]


def test_an_eviction_that_the_index_had_not_heard_of() -> None:
    """The event is 200 ms late: the replica was chosen for what it had given up."""
    world = World(A)
    world.ask("r", PROMPT)
    world.decide(hint_of("s", PROMPT), A)
    world.now += 0.05
    world.state.answered("s", 40)
    world.now += 0.15
    world.evict(A, PROMPT, down_to=10)
    assert [str(loss) for loss in reuse_of(world.state.explained("s")).losses] == ["index_late=59@40"]


def test_an_entry_that_came_200_ms_late() -> None:
    """Another router sent the prompt to A; ours does not know yet and chooses B."""
    world = World()
    world.beat(A, uncached_tokens={"other": 1000})
    late = world.ask("r", PROMPT, later=0.2)
    assert (late.worker_id, late.losses) == (B, [(R.NEVER_SEEN, 100, 0)])
    world.store(A, *hashes_of(PROMPT)[:20])
    now = Asked(B, reuse_of(world.state.explained("r")))
    assert (now.losses, now.counts) == ([(R.INDEX_LATE, 80, 0), (R.NEVER_SEEN, 20, 80)], (100, 80, 0, 0, 0))
    world.now += LATE_S
    totals = world.state.misses().by_reason
    assert (totals[R.INDEX_LATE].tokens, totals[R.NEVER_SEEN].tokens) == (80, 20)


def test_an_entry_that_comes_after_the_account_was_closed_changes_nothing() -> None:
    world = World()
    world.beat(A, uncached_tokens={"other": 1000})
    world.ask("r", PROMPT, later=LATE_S + 0.1)
    world.store(A, *hashes_of(PROMPT))
    assert Asked(B, reuse_of(world.state.explained("r"))).losses == [(R.NEVER_SEEN, 100, 0)]


def test_what_we_ourselves_sent_elsewhere_later_was_not_late() -> None:
    world = World()
    first = hint_of("r", PROMPT)
    chosen = world.decide(first, A, B)[0]
    other = B if chosen == A else A
    world.decide(hint_of("s", PROMPT, exclude=[chosen]), A, B)
    world.now += 0.1
    world.store(other, *hashes_of(PROMPT))
    world.state.answered("r", 0)
    assert [loss.reason for loss in reuse_of(world.state.explained("r")).losses] == [R.NEVER_SEEN]


def test_a_feed_that_is_behind_is_named_where_nothing_else_explains_a_loss() -> None:
    world = World(A)
    hint = hint_of("r", PROMPT)
    world.decide(hint, A)
    world.state.answered("r", 0)  # and its entries never come
    world.now += 60
    world.follower.state = FollowerState.STALE
    assert world.ask("s", PROMPT, cached=0).losses == [(R.INDEX_LATE, 99, 0)]


def test_with_200_ms_of_event_lag_a_router_knows_what_it_sent_itself() -> None:
    fleet = RoutingFleet(workers=4, lag_s=0.2, rate=100_000.0)
    fleet.at(0.0, lambda: fleet.send("r", PROMPT))
    fleet.at(0.05, lambda: fleet.send("s", PROMPT))
    fleet.run()
    assert fleet.jobs[0].worker is fleet.jobs[1].worker
    assert reuse_of(fleet.routers[0].state.explained("s")).losses == ()


def test_with_200_ms_of_event_lag_another_router_learns_that_it_was_late() -> None:
    fleet = RoutingFleet(workers=2, routers=2, lag_s=0.2, rate=100_000.0)
    fleet.at(0.0, lambda: fleet.send("r", PROMPT))
    fleet.at(0.05, lambda: fleet.routers[1].beat(fleet.jobs[0].worker.worker_id, waiting=1, uncached_tokens={"x": 500}))
    fleet.at(0.1, lambda: fleet.send("s", PROMPT, router=1))
    fleet.run()
    assert fleet.jobs[0].worker is not fleet.jobs[1].worker
    assert [str(loss) for loss in reuse_of(fleet.routers[1].state.explained("s")).losses] == ["index_late=99@0"]
    fleet.at(fleet.now + 60, lambda: fleet.send("t", PROMPT, router=1))
    fleet.run()
    assert reuse_of(fleet.routers[1].state.explained("t")).losses == ()


def test_an_engine_that_reuses_more_than_the_index_knows_is_believed() -> None:
    world = World(A)
    partial = world.ask("r", PROMPT, cached=37)
    assert (partial.losses, partial.counts) == ([(R.NEVER_SEEN, 63, 37)], (100, 37, 37, 37, 37))


def test_serve_may_place_a_request_elsewhere_than_it_was_decided() -> None:
    world = World()
    holder = world.ask("r", PROMPT).worker_id
    other = B if holder == A else A
    hint = hint_of("s", PROMPT)
    assert world.decide(hint, A, B)[0] == holder
    world.state.routed(hint, other)
    world.state.answered("s", 0)
    explanation = world.state.explained("s")
    assert explanation is not None and explanation.worker_id == other
    assert [str(loss) for loss in reuse_of(explanation).losses] == ["routed_elsewhere=99@0"]


def test_a_cleared_cache_is_an_evicted_one() -> None:
    world = World(A)
    world.ask("r", PROMPT)
    world.index.apply(A, world.follower.workers[A].epoch, [CacheEvent(CacheEventKind.CLEARED)])
    world.held[A].clear()
    assert world.ask("s", PROMPT).losses == [(R.EVICTED, 99, 0)]
