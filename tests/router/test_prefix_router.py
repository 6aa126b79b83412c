"""PrefixAwareRouter on its own: Serve's base class without a cluster, and a state that the test installs."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import Any

import pytest
from fake_routing import CHUNK, E1, A, B, RoutingWorld, hint
from ray.serve.request_router import PendingRequest, ReplicaID

from router import routing_state
from router.prefix_router import TICKET_KEYWORD, PrefixAwareRouter
from router.route_hint import RouteTicket


@dataclass(frozen=True)
class Deployment:
    name: str = "workers"
    app_name: str = "kvray"


@dataclass(frozen=True)
class Source:
    value: str = "replica"


@dataclass(frozen=True)
class Replica:
    replica_id: Any

    async def get_queue_len(self, *, deadline_s: float) -> int:
        return 0


def replica_id(worker_id: str) -> Any:
    return ReplicaID(worker_id, Deployment())


def replicas(*worker_ids: str) -> list[Any]:
    return [Replica(replica_id(worker_id)) for worker_id in worker_ids]


def pending(**kwargs: Any) -> Any:
    return PendingRequest(args=[b"payload"], kwargs=kwargs, metadata=None)


def names(ranks: list[list[Any]]) -> list[list[str]]:
    return [[replica.replica_id.unique_id for replica in rank] for rank in ranks]


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> RoutingWorld:
    """The state of this process, with B the holder of the prompt."""
    monkeypatch.setattr(routing_state, "_states", {})
    made = RoutingWorld()
    made.join(A)
    made.join(B, held=5)
    routing_state.install("state", made.state)
    return made


def make_router(state_name: str = "state") -> Any:
    """Any: the base class is untyped. No Ray is started by this."""
    router = PrefixAwareRouter(Deployment(), Source())
    router.initialize_state(state_name=state_name)
    return router


async def test_one_replica_per_rank_best_first(world: RoutingWorld) -> None:
    """Two in one rank would let Serve choose between them by queue length."""
    request = pending(route_ticket=RouteTicket(hint("r")))
    ranks = await make_router().choose_replicas(replicas(A, B), request)
    assert names(ranks) == [[B], [A]]
    assert world.ledger.booked_on("r") == (B, E1)
    assert request.routing_context.should_backoff


async def test_the_ticket_never_reaches_the_worker_and_is_there_when_serve_asks_again(world: RoutingWorld) -> None:
    router, request = make_router(), pending(other=1, **{TICKET_KEYWORD: RouteTicket(hint("r"))})
    for _ in range(3):
        assert names(await router.choose_replicas(replicas(A, B), request)) == [[B], [A]]
        assert request.kwargs == {"other": 1}
    assert len(world.state.decisions) == 3
    assert world.ledger.requests(B, E1) == 1


async def test_a_handle_elsewhere_keeps_serves_order_and_still_loses_the_ticket(world: RoutingWorld) -> None:
    for state_name in ("", "another"):
        request = pending(route_ticket=RouteTicket(hint("r")))
        ranks = await make_router(state_name).choose_replicas(replicas(A, B), request)
        assert names(ranks) == [[A], [B]]
        assert request.kwargs == {}
    assert not world.state.decisions


@pytest.mark.parametrize("request_without_ticket", [True, False])
async def test_without_a_ticket_serves_order_is_kept(world: RoutingWorld, request_without_ticket: bool) -> None:
    request = pending(other=1) if request_without_ticket else None
    ranks = await make_router().choose_replicas(replicas(A, B), request)
    assert names(ranks) == [[A], [B]]
    assert not world.state.decisions


async def test_where_serve_really_sent_it_is_where_it_is_booked(world: RoutingWorld) -> None:
    router, request = make_router(), pending(route_ticket=RouteTicket(hint("r", tokens=40)))
    await router.choose_replicas(replicas(A, B), request)
    assert world.ledger.uncached_tokens(B, E1) == 40 - 5 * CHUNK
    router.on_request_routed(request, replica_id(A), None)
    assert world.ledger.booked_on("r") == (A, E1)
    router.on_request_routed(pending(), replica_id(B), None)  # not one of ours
    assert world.ledger.booked_on("r") == (A, E1)


async def test_a_call_that_is_over_is_not_booked_again(world: RoutingWorld) -> None:
    """Serve may ask once more in the few turns that a cancellation takes; nobody would release that booking."""
    router, ticket = make_router(), RouteTicket(hint("r"))
    request = pending(route_ticket=ticket)
    await router.choose_replicas(replicas(A, B), request)
    world.state.release("r")
    ticket.open = False
    assert names(await router.choose_replicas(replicas(A, B), request)) == [[A], [B]]
    router.on_request_routed(request, replica_id(A), None)
    assert (len(world.ledger), world.speculative.overlaps(hint().chunk_hashes)) == (0, {})


async def test_a_call_that_serve_has_placed_is_not_moved_by_a_late_question(world: RoutingWorld) -> None:
    router, request = make_router(), pending(route_ticket=RouteTicket(hint("r")))
    await router.choose_replicas(replicas(A, B), request)
    router.on_request_routed(request, replica_id(A), None)
    request.future.set_result(None)
    assert names(await router.choose_replicas(replicas(A, B), request)) == [[A], [B]]
    assert world.ledger.booked_on("r") == (A, E1)


async def test_two_applications_keep_their_states_apart(world: RoutingWorld) -> None:
    """A replica of another application is nobody's loss, and never a candidate."""
    other = RoutingWorld("other")
    other.join(A, held=9)
    routing_state.install("other", other.state)
    mine, theirs = make_router(), make_router("other")
    assert names(await mine.choose_replicas(replicas(A, B), pending(route_ticket=RouteTicket(hint("r"))))) == [[B], [A]]
    assert names(await theirs.choose_replicas(replicas(A), pending(route_ticket=RouteTicket(hint("r"))))) == [[A]]
    assert (world.ledger.booked_on("r"), other.ledger.booked_on("r")) == ((B, E1), (A, E1))
    theirs.update_replicas(replicas(A))
    theirs.on_replica_actor_died(replica_id("stranger"))
    assert (world.state.lost, world.follower.dropped) == (set(), [])
    assert other.decide(hint("r2"), A) == [A]
    await asyncio.sleep(0)


async def test_a_death_that_serve_sees_is_a_loss(world: RoutingWorld) -> None:
    router = make_router()
    router.update_replicas(replicas(A, B))
    router.on_replica_actor_died(replica_id(B))
    assert world.follower.dropped == [B]
    assert world.state.lost == {B}
    assert [known.unique_id for known in router.curr_replicas] == [A]  # the base class has heard of it too
    await asyncio.sleep(0)


async def test_losses_end_with_the_replica(world: RoutingWorld) -> None:
    router = make_router()
    for worker_id in (A, B):
        world.state.mark_lost(worker_id)
    router.update_replicas(replicas(A))
    assert world.state.lost == {A}
    assert [known.unique_id for known in router.curr_replicas] == [A]
    await asyncio.sleep(0)


async def test_serves_callbacks_elsewhere_touch_no_state(world: RoutingWorld) -> None:
    router = make_router("another")
    router.update_replicas(replicas(A, B))
    router.on_request_routed(pending(route_ticket=RouteTicket(hint("r"))), replica_id(A), None)
    router.on_replica_actor_died(replica_id(A))
    assert (world.follower.dropped, world.state.lost) == ([], set())
    await asyncio.sleep(0)
