"""Every way a request can end leaves its router's books at zero, and none leaves them empty while it runs.

A real FrontDoor on a real RoutingState; the calls to replicas follow a script.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field

import pytest
from fake_dispatcher import HANG, SCHEME, TOKENIZER, Step, delta
from fake_routing import E1, E2, A, B, RoutingWorld

from cluster.core.errors import DeadlineExceeded, InvalidRequest, KvrayError, Overloaded, ReplicaLost
from cluster.core.hashing import hash_prompt, root_hash
from cluster.core.replica import Epoch, WorkerId
from cluster.core.request import FinishReason, GenerationRequest, TokenDelta
from router.attempts import Attempts
from router.front_door import FrontDoor
from router.generation import GenerationCall
from router.routing_state import RouteHint
from router.scoring import Candidate, Score

PROMPT = "forty characters of a prompt, about that"
HASHES = tuple(hash_prompt(root_hash(SCHEME), TOKENIZER.encode(PROMPT), SCHEME.chunk_tokens))
ASK_AGAIN, PLACED_ELSEWHERE = "ask again", "placed elsewhere"


def lost(worker: WorkerId, dead: bool = True) -> ReplicaLost:
    return ReplicaLost("the replica died", worker_id=worker, dead=dead)


def full(worker: WorkerId) -> Overloaded:
    return Overloaded("the queue is full", retry_after_s=1.0, worker_id=worker)


class ByName:
    """A policy without a will of its own, so that scripts know who is asked."""

    def rank(self, prompt_tokens: int, candidates: Sequence[Candidate]) -> list[Score]:
        return [Score(c, 0.0) for c in sorted(candidates, key=lambda c: (c.lost, c.worker_id))]


@dataclass
class Books:
    """A front door, its routing state, and replicas that do what the scripts say, one script per call."""

    scripts: list[list[Step]]
    world: RoutingWorld = field(default_factory=lambda: RoutingWorld(policy=ByName()))
    at_dispatch: list[tuple[int, int]] = field(default_factory=list)
    chosen: list[WorkerId] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.world.join(A)
        self.world.join(B)
        self.door = FrontDoor(
            model="demo",
            tokenizer=TOKENIZER,
            scheme=SCHEME,
            attempts=Attempts(self, self.world.state.mark_lost),
            accounting=self.world.state,
            router_id="me",
            max_model_len=self.world.state.max_model_len,
            rng=random.Random(1),
        )

    async def dispatch(
        self, request: GenerationRequest, hint: RouteHint, *, whole: bool = False
    ) -> AsyncGenerator[tuple[WorkerId, TokenDelta], None]:
        worker_id = self.world.decide(hint, A, B)[0]
        self.chosen.append(worker_id)
        self.at_dispatch.append(self.load())
        for step in self.scripts[len(self.chosen) - 1]:
            if step == ASK_AGAIN:
                worker_id = self.world.decide(hint, A, B)[0]
            elif step == PLACED_ELSEWHERE:
                worker_id = B if worker_id == A else A
                self.world.state.routed(hint, worker_id)
            elif step == HANG:
                await asyncio.Event().wait()
            elif isinstance(step, Exception):
                raise step
            else:
                assert isinstance(step, TokenDelta)
                yield worker_id, step

    def load(self) -> tuple[int, int]:
        """Tokens and requests on all lives."""
        loads = [self.world.ledger.load(w, e) for w in (A, B) for e in (Epoch(0), E1, E2)]
        return sum(load.tokens for load in loads), sum(load.requests for load in loads)

    def expected(self) -> dict[WorkerId, int]:
        """Chunks of the prompt that replicas are expected to hold soon."""
        return self.world.speculative.overlaps(HASHES)

    async def run(self, timeout_s: float | None = None, until: Callable[[], bool] = lambda: False) -> KvrayError | None:
        """The error of the call, if any; it is closed as soon as `until`."""
        stream = self.door.generate(GenerationCall(text=PROMPT, timeout_s=timeout_s))
        try:
            async for _ in stream:
                if until():
                    break
        except KvrayError as error:
            return error
        finally:
            await stream.aclose()
        return None


DONE: list[Step] = [delta("o", cached=0), delta("k", FinishReason.LENGTH)]
ENDINGS: dict[str, tuple[list[list[Step]], type[KvrayError] | None, bool]] = {
    # scripts, the client's error, whether the prompt was prefilled
    "finished": ([DONE], None, True),
    "asked again and again": ([[ASK_AGAIN, ASK_AGAIN, ASK_AGAIN, *DONE]], None, True),
    "placed elsewhere": ([[PLACED_ELSEWHERE, *DONE]], None, True),
    "refused once": ([[full(A)], DONE], None, True),
    "refused twice": ([[full(A)], [full(B)]], Overloaded, False),
    "bad request": ([[InvalidRequest("top_k", "no")]], InvalidRequest, False),
    "died before an answer": ([[lost(A)], DONE], None, True),
    "died twice": ([[lost(A)], [lost(B)]], ReplicaLost, False),
    "call broken": ([[lost(A, dead=False)], DONE], None, True),
    "died after tokens": ([[delta("o", cached=0), lost(A)]], ReplicaLost, False),
    "errored after tokens": ([[delta("o", cached=0), InvalidRequest("x", "late")]], InvalidRequest, True),
    "stream just ends": ([[], [], []], ReplicaLost, False),
    "cancelled by the engine": ([[TokenDelta(request_id="r", finish_reason=FinishReason.CANCELLED)]], None, False),
}


@pytest.mark.parametrize("name", ENDINGS)
async def test_every_ending_brings_the_books_back_to_zero(name: str) -> None:
    scripts, error, prefilled = ENDINGS[name]
    books = Books(scripts)
    failed = await books.run()
    assert type(failed) is error if error else failed is None
    assert books.at_dispatch == [(len(TOKENIZER.encode(PROMPT)), 1)] * len(scripts)
    assert (books.load(), len(books.world.ledger), len(books.world.parity)) == ((0, 0), 0, 0)
    assert bool(books.expected()) is prefilled
    books.world.now += 2
    assert books.expected() == {}


async def test_a_client_that_leaves_before_the_placement_leaves_nothing() -> None:
    books = Books([[ASK_AGAIN, HANG]])
    call = asyncio.create_task(books.run())
    while not books.chosen:
        await asyncio.sleep(0)
    assert books.load()[1] == 1
    assert len(books.expected()) == 1
    call.cancel()
    with suppress(asyncio.CancelledError):
        await call
    assert (books.load(), books.expected()) == ((0, 0), {})


async def test_a_client_that_leaves_while_tokens_come_leaves_only_what_is_cached() -> None:
    books = Books([[delta("a", cached=0), delta("b"), HANG]])
    assert await books.run(until=lambda: True) is None
    assert books.load() == (0, 0)
    assert books.expected() == {books.chosen[0]: len(HASHES)}


async def test_a_deadline_that_passes_in_the_queue_leaves_nothing() -> None:
    books = Books([[HANG]])
    assert isinstance(await books.run(timeout_s=0.03), DeadlineExceeded)
    assert (len(books.chosen), books.load(), books.expected()) == (1, (0, 0), {})


async def test_a_refusing_replica_is_expected_to_hold_nothing() -> None:
    """While the second attempt is under way, nobody may be sent to the first replica for this prompt."""
    books = Books([[full(A)], [HANG]])
    call = asyncio.create_task(books.run())
    while len(books.chosen) < 2:
        await asyncio.sleep(0)
    assert books.chosen == [A, B]
    assert books.expected() == {B: len(HASHES)}
    call.cancel()
    with suppress(asyncio.CancelledError):
        await call


async def test_bad_requests_and_full_replicas_do_not_count_against_a_replica() -> None:
    """Only a death does: else one bad client takes the fleet out of service."""
    for error in (InvalidRequest("prompt", "no"), full(A), full(B), lost(A, dead=False)):
        books = Books([[error], [error], [error]])
        await books.run()
        assert books.world.state.lost == set()
    books = Books([[lost(A)], DONE])
    await books.run()
    assert books.world.state.lost == {A}


def test_a_worker_recreated_under_its_name_inherits_no_load_and_gives_none_back() -> None:
    """10 in flight when it is killed; they end after its successor has taken 3."""
    world = RoutingWorld()
    world.join(A, incarnation="p")
    for number in range(10):
        world.decide(RouteHint(request_id=f"old-{number}", chunk_hashes=(), prompt_tokens=100), A)
    world.join(A, epoch=E2, incarnation="q")
    for number in range(3):
        world.decide(RouteHint(request_id=f"new-{number}", chunk_hashes=(), prompt_tokens=50), A)
        assert world.seen[A].ahead_tokens == 50 * number
    for number in range(10):
        world.state.answered(f"old-{number}", 0)
        world.state.release(f"old-{number}")
        assert world.ledger.load(A, E2) == (150, 3)
    for number in range(3):
        world.state.release(f"new-{number}")
    assert len(world.ledger) == 0


def test_health_checks_and_replica_updates_leave_the_counters_alone() -> None:
    world = RoutingWorld()
    world.join(A)
    world.join(B)
    for number in range(50):
        world.decide(RouteHint(request_id=f"r{number}", chunk_hashes=(), prompt_tokens=10), A, B)
    before = [world.ledger.load(worker_id, E1) for worker_id in (A, B)]
    assert sum(load.requests for load in before) == 50
    for _ in range(5):
        for look in (world.state.ready, world.state.replicas, world.state.index_status, world.state.max_model_len):
            look()
        world.state.keep_only([A, B])
        world.state.keep_only([A])  # a blip of readiness
        world.state.keep_only([A, B])
        for worker_id in (A, B):
            world.beat(worker_id, running=7)
    assert [world.ledger.load(worker_id, world.state.epoch_of(worker_id)) for worker_id in (A, B)] == before


def test_a_lost_replica_is_used_again_when_it_registers_a_new_life() -> None:
    """Else an idle worker stays excluded for ever."""
    world = RoutingWorld()
    world.join(A, incarnation="p")
    world.join(B, uncached_tokens={"other": 500})
    world.state.mark_lost(A)
    request = RouteHint(request_id="r", chunk_hashes=(), prompt_tokens=10)
    assert world.decide(request, A, B) == [B, A]
    world.join(A, epoch=E2, incarnation="q")
    assert world.decide(request, A, B) == [A, B]
    assert world.state.lost == set()
