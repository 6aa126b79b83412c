"""RoutingState: what a decision sees, what it books, and what a lost replica loses."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import replace

import pytest
from fake_routing import CHUNK, E1, E2, A, B, C, RoutingWorld, chunks, hint

from cluster.core.replica import WorkerId
from router import routing_state
from router.estimated_ttft import EstimatedTtft
from router.routing_state import NO_EPOCH


@pytest.fixture
def world() -> RoutingWorld:
    return RoutingWorld()


# --- what a decision sees ---


def test_own_requests_count_from_the_ledger_and_others_from_the_heartbeat(world: RoutingWorld) -> None:
    """Our share of the heartbeat is left out: the ledger has it already, and newer."""
    world.join(A, uncached_tokens={"me": 500, "other": 300, "third": 20})
    world.ledger.book("mine", A, E1, 120)
    world.decide(hint(), A)
    assert world.seen[A].ahead_tokens == 120 + 300 + 20


def test_a_heartbeat_older_than_our_first_tokens_does_not_count_them_again(world: RoutingWorld) -> None:
    world.join(A, uncached_tokens={"me": 500})
    world.ledger.book("mine", A, E1, 500)
    world.ledger.prefill_done("mine")
    world.decide(hint(), A)
    assert world.seen[A].ahead_tokens == 0


def test_the_busy_replica_loses_to_the_idle_one(world: RoutingWorld) -> None:
    world.join(A, uncached_tokens={"other": 300})
    world.join(B)
    assert world.decide(hint(), A, B) == [B, A]


def test_a_paused_replica_is_the_last_choice(world: RoutingWorld) -> None:
    world.join(A, paused=True)
    world.join(B, uncached_tokens={"other": 3000})
    assert world.decide(hint(), A, B) == [B, A]


def test_rate_and_running_come_from_the_heartbeat_or_from_more_own_requests(world: RoutingWorld) -> None:
    world.join(A, running=2, waiting=1, prefill_tokens_per_s=250.0)
    world.join(B, running=1)
    for number in range(4):
        world.ledger.book(f"mine-{number}", B, E1, 0)  # sent after the heartbeat
    world.decide(hint(), A, B)
    assert (world.seen[A].running, world.seen[A].prefill_tokens_per_s) == (3, 250.0)
    assert (world.seen[B].running, world.seen[B].prefill_tokens_per_s) == (4, 0.0)


def test_equal_idle_replicas_share_the_requests_although_their_models_differ_by_noise(world: RoutingWorld) -> None:
    """Once, all of a slow machine's requests went to the one replica that had measured itself 12 % faster."""
    world.state.policy = EstimatedTtft(default_rate=1000.0, near_tie=0.05, rng=random.Random(1))
    world.join(A, step_time_model=(0.020, 1e-3, 0.0, 1e-3, 0.0))
    world.join(B, step_time_model=(0.024, 1.1e-3, 0.0, 1e-3, 0.0))
    shares: Counter[WorkerId] = Counter()
    for number in range(40):
        world.now += 10
        shares[world.decide(hint(f"{number}", salt=f"{number}"), A, B)[0]] += 1
        world.state.answered(f"{number}", 0)
        world.state.release(f"{number}")
    assert min(shares[A], shares[B]) > 10


def test_a_request_goes_to_the_idle_replica_although_the_other_looks_a_little_faster(world: RoutingWorld) -> None:
    """Whether the first one's token has come, or is late: what runs there counts where the times are near."""
    world.state.policy = EstimatedTtft(default_rate=1000.0, near_tie=0.05, rng=random.Random(1))
    for fast, slow in ((A, B), (B, A)):
        world.join(fast, step_time_model=(0.020, 1e-3, 0.0, 1e-3, 0.0))
        world.join(slow, step_time_model=(0.026, 1e-3, 0.0, 1e-3, 0.0))
        for answered in (False, True):
            first = world.decide(hint("first"), A, B)[0]
            world.now += 0.1
            if answered:
                world.state.answered("first", 0)
            assert world.decide(hint("second", salt="x"), A, B)[0] != first
            world.state.release("first")
            world.state.release("second")


def test_bookings_of_an_earlier_life_are_not_load_of_the_next(world: RoutingWorld) -> None:
    world.join(A, epoch=E2)
    world.ledger.book("old", A, E1, 500)
    world.ledger.book("new", A, E2, 70)
    world.decide(hint(), A)
    assert (world.seen[A].ahead_tokens, world.seen[A].running) == (70, 1)


def test_overlap_is_in_whole_chunks_and_leaves_one_token_to_compute(world: RoutingWorld) -> None:
    world.join(A, held=3)
    world.join(B, held=10)
    assert world.decide(hint(tokens=40), A, B) == [B, A]
    assert (world.seen[A].overlap_tokens, world.seen[B].overlap_tokens) == (3 * CHUNK, 39)


def test_the_index_counts_only_once_its_snapshot_is_in(world: RoutingWorld) -> None:
    world.join(A, held=10, uncached_tokens={"other": 1})
    world.join(B)
    world.follower.ready = False
    assert world.decide(hint(), A, B) == [B, A]  # by load alone
    assert world.seen[A].overlap_tokens == 0
    world.follower.ready = True
    assert world.decide(hint(), A, B) == [A, B]


def test_another_salt_finds_nothing(world: RoutingWorld) -> None:
    world.join(A, held=10)
    world.decide(hint(salt="tenant"), A)
    assert world.seen[A].overlap_tokens == 0


def test_only_the_replicas_that_serve_offers_are_ranked(world: RoutingWorld) -> None:
    world.join(A, held=10)
    world.join(B)
    assert world.decide(hint(), B, C) in ([B, C], [C, B])  # nothing is known of C yet, and it can be chosen
    assert (world.seen[C].ahead_tokens, world.seen[C].prefill_tokens_per_s) == (0, 0.0)


def test_what_was_just_sent_to_a_replica_counts_like_what_it_holds(world: RoutingWorld) -> None:
    world.join(A, held=3)
    world.join(B)
    assert world.decide(hint("leader"), A, B) == [A, B]
    world.ledger.release("leader")  # only the load, to look at the overlap alone
    world.decide(hint("follower"), A, B)
    assert (world.seen[A].overlap_tokens, world.seen[B].overlap_tokens) == (39, 0)
    world.state.release("follower")
    world.decide(hint("salted", salt="tenant"), A, B)
    assert (world.seen[A].overlap_tokens, world.seen[B].overlap_tokens) == (0, 0)


def test_the_larger_of_held_and_expected_counts(world: RoutingWorld) -> None:
    world.join(A, held=8)
    world.decide(hint("short", tokens=20), A)  # 5 chunks
    world.decide(hint("long"), A)
    assert world.seen[A].overlap_tokens == 8 * CHUNK
    world.remove(A, *chunks(8)[2:])
    world.state.release("long")
    world.decide(hint("again"), A)
    assert world.seen[A].overlap_tokens == 5 * CHUNK


def test_a_request_does_not_expect_its_own_prompt_to_be_there(world: RoutingWorld) -> None:
    """Neither when Serve asks again, nor when it dispatched elsewhere."""
    world.join(A)
    world.join(B)
    for _ in range(3):
        first = world.decide(hint("r"), A, B)[0]
        assert (world.seen[A].overlap_tokens, world.seen[B].overlap_tokens) == (0, 0)
    world.state.routed(hint("r"), B if first == A else A)
    world.state.routed(hint("r"), first)
    assert world.ledger.uncached_tokens(first, E1) == 40


def test_a_replica_out_of_step_is_chosen_by_load_until_it_is_back(world: RoutingWorld) -> None:
    world.join(A, held=10)
    world.join(B)
    known = world.follower.workers[A]
    for in_step, overlap in ((False, 0), (True, 39)):
        world.follower.workers[A] = replace(known, in_step=in_step)
        world.decide(hint("r"), A, B)
        assert world.seen[A].overlap_tokens == overlap
        assert world.state.index_status().workers[0].affinity is in_step


# --- parity ---


@pytest.mark.parametrize(
    ("cached", "lost_first", "counted"),
    [(32, False, None), (0, False, "misses"), (0, True, "evicted")],
)
def test_an_overlap_that_the_engine_does_not_reuse(
    world: RoutingWorld, cached: int, lost_first: bool, counted: str | None
) -> None:
    world.join(A, held=8)
    world.decide(hint("r"), A)
    if lost_first:
        world.remove(A, *reversed(chunks(8)))
        world.store(A, *chunks(10))  # by the request itself
    world.state.answered("r", cached)
    world.state.release("r")
    world.now += 2
    metrics = world.state.index_status().metrics
    assert metrics["kvray_parity_checks"] == 1
    for name in ("misses", "evicted", "index_late", "unfulfilled"):
        assert metrics[f"kvray_parity_{name}"] == (name == counted)


def test_nothing_is_missed_where_nothing_was_promised(world: RoutingWorld) -> None:
    world.join(A)
    world.decide(hint("r"), A)
    world.state.answered("r", 0)
    world.state.release("r")
    world.now += 2
    assert world.state.index_status().metrics["kvray_parity_checks"] == 0


def test_a_leader_that_left_is_no_parity_miss_of_its_followers(world: RoutingWorld) -> None:
    world.join(A)
    world.decide(hint("leader"), A)
    world.decide(hint("follower"), A)
    world.state.release("leader")
    world.state.answered("follower", 0)
    metrics = world.state.index_status().metrics
    assert (metrics["kvray_parity_unfulfilled"], metrics["kvray_parity_checks"]) == (1, 1)


# --- what it books ---


def test_a_decision_books_the_uncached_tokens_on_the_best_and_is_remembered(world: RoutingWorld) -> None:
    world.join(A)
    world.join(B, held=5)
    world.now = 123.0
    assert world.decide(hint("r", tokens=40), A, B) == [B, A]
    assert world.ledger.booked_on("r") == (B, E1)
    assert (world.ledger.uncached_tokens(B, E1), world.ledger.uncached_tokens(A, E1)) == (40 - 5 * CHUNK, 0)
    decision = world.state.decisions[-1]
    assert (decision.hint, decision.at) == (hint("r", tokens=40), 123.0)
    assert [score.candidate.worker_id for score in decision.ranking] == [B, A]


def test_booked_work_turns_the_next_request_away(world: RoutingWorld) -> None:
    world.join(A)
    world.join(B)
    first = world.decide(hint("r1"), A, B)[0]
    second = world.decide(hint("r2", salt="another"), A, B)[0]
    assert {first, second} == {A, B}


def test_a_request_without_offers_is_not_booked(world: RoutingWorld) -> None:
    assert world.decide(hint("r")) == []
    assert world.ledger.booked_on("r") is None
    assert not world.state.decisions


def test_a_replica_without_a_heartbeat_is_booked_under_no_epoch(world: RoutingWorld) -> None:
    world.decide(hint("r"), A)
    assert world.ledger.booked_on("r") == (A, NO_EPOCH)


def test_asking_again_does_not_count_the_request_as_work_ahead_of_itself(world: RoutingWorld) -> None:
    """Serve asks again at every back-off; the first answer must not drive the next ones away."""
    world.join(A)
    world.join(B)
    world.ledger.book("else-a", A, E1, 7)
    for number in range(2):
        world.ledger.book(f"else-b-{number}", B, E1, 7 * number)
    assert world.decide(hint("r"), A, B) == [A, B]  # a tie in tokens; fewer running on A
    first = world.seen
    for _ in range(10):
        assert world.decide(hint("r"), A, B) == [A, B]
        assert world.seen == first
    assert (world.ledger.uncached_tokens(A, E1), world.ledger.requests(A, E1)) == (7 + 40, 2)


def test_routed_elsewhere_moves_the_booking(world: RoutingWorld) -> None:
    world.join(A, held=8)
    world.join(B, held=2)
    assert world.decide(hint("r", tokens=40), A, B) == [A, B]
    world.state.routed(hint("r", tokens=40), B)
    assert world.ledger.booked_on("r") == (B, E1)
    assert (world.ledger.uncached_tokens(A, E1), world.ledger.requests(A, E1)) == (0, 0)
    assert world.ledger.uncached_tokens(B, E1) == 40 - 2 * CHUNK  # by what B holds, not A


def test_routed_to_the_first_choice_changes_nothing(world: RoutingWorld) -> None:
    """Not even after the first token, when the booked tokens are done."""
    world.join(A)
    world.decide(hint("r"), A)
    world.ledger.prefill_done("r")
    world.state.routed(hint("r"), A)
    assert (world.ledger.booked_on("r"), world.ledger.uncached_tokens(A, E1)) == ((A, E1), 0)


def test_routed_after_the_request_ended_books_nothing(world: RoutingWorld) -> None:
    world.join(A)
    world.decide(hint("r"), A)
    world.ledger.release("r")
    world.state.routed(hint("r"), A)
    assert (world.ledger.booked_on("r"), world.ledger.requests(A, E1)) == (None, 0)


# --- lost and excluded replicas ---


def test_a_lost_replica_keeps_no_overlap_and_comes_last(world: RoutingWorld) -> None:
    world.join(A, held=10)
    world.join(B, uncached_tokens={"other": 5000})
    assert world.decide(hint("r1"), A, B) == [A, B]
    world.state.mark_lost(A)
    assert world.follower.dropped == [A]
    assert world.decide(hint("r2"), A, B) == [B, A]
    assert (world.seen[A].overlap_tokens, world.seen[A].lost) == (0, True)


def test_an_excluded_replica_comes_last_for_that_request_only(world: RoutingWorld) -> None:
    world.join(A, held=10)
    world.join(B, uncached_tokens={"other": 5000})
    assert world.decide(hint("r1", exclude=[A]), A, B) == [B, A]
    assert world.ledger.booked_on("r1") == (B, E1)
    assert world.decide(hint("r2"), A, B) == [A, B]
    assert world.follower.dropped == []


def test_excluding_everyone_still_gives_a_ranking(world: RoutingWorld) -> None:
    world.join(A)
    world.join(B)
    assert sorted(world.decide(hint(exclude=[A, B]), A, B)) == [A, B]


def test_keep_only_forgets_losses_of_replicas_that_are_gone(world: RoutingWorld) -> None:
    for worker_id in (A, B):
        world.state.mark_lost(worker_id)
    world.state.keep_only([B, C])
    assert world.state.lost == {B}


# --- status ---


def test_the_longest_request_is_what_every_replica_accepts(world: RoutingWorld) -> None:
    assert world.state.max_model_len() is None
    world.join(A, max_model_len=4096)
    world.join(B, max_model_len=2048)
    assert world.state.max_model_len() == 2048
    world.state.mark_lost(B)
    assert world.state.max_model_len() == 4096


def test_ready_needs_the_snapshot_and_a_replica(world: RoutingWorld) -> None:
    assert not world.state.ready()
    world.join(A)
    assert world.state.ready()
    world.follower.ready = False
    assert not world.state.ready()


def test_a_replica_that_drains_is_not_ready_and_the_last_choice(world: RoutingWorld) -> None:
    world.join(A, held=3, draining=True)
    assert not world.state.ready() and world.state.readiness().replicas == {A: "draining"}
    world.join(B)
    assert world.state.ready()
    assert world.decide(hint(), A, B) == [B, A]


def test_readiness_follows_what_serve_offers(world: RoutingWorld) -> None:
    world.join(A)
    world.state.keep_only([A, B])
    assert world.state.readiness().replicas == {A: "ready", B: "not registered"}
    world.state.mark_lost(A)
    assert world.state.readiness().replicas == {A: "lost", B: "not registered"} and not world.state.ready()
    world.join(A, epoch=E2)  # it registered again, and no request has asked about it since
    assert world.state.ready()
    world.state.keep_only([B])
    assert world.state.readiness().replicas == {A: "not offered", B: "not registered"}


def test_status_rows_tell_what_the_index_credits(world: RoutingWorld) -> None:
    world.join(A, held=3, epoch=E2, running=4)
    world.join(B)
    rows = {row.info.worker_id: row for row in world.state.replicas()}
    assert (rows[A].indexed_chunks, rows[A].epoch, rows[A].load.running) == (3, E2, 4)
    assert (rows[B].indexed_chunks, rows[B].epoch) == (0, E1)


def test_one_state_per_deployment_in_a_process(world: RoutingWorld, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(routing_state, "_states", {})
    routing_state.install("workers", world.state)
    assert routing_state.installed("workers") is world.state
    assert routing_state.installed("others") is None
