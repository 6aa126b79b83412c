"""Explanations through the front door: chats, dry runs, ids, headers; and nowhere a word of any prompt."""

from __future__ import annotations

import json
import logging
import random
from collections.abc import AsyncGenerator
from typing import Any

import pytest
from fake_dispatcher import CHUNK_TOKENS, TOKENIZER, byte_tokenizer, ids_of
from fake_routing import CHUNK, A, B, RoutingWorld
from starlette.testclient import TestClient

from cluster.core.hashing import RouteScheme
from cluster.core.replica import WorkerId
from cluster.core.request import FinishReason, GenerationRequest, TokenDelta
from cluster.rpc import inference_pb2 as pb
from router.attempts import Attempts
from router.front_door import FrontDoor
from router.generation import GenerationCall, GenerationEvent
from router.grpc_explanation import explanation_from, totals_from
from router.http_api import Services, build_http_app
from router.reuse_explanation import LossReason, ReuseExplanation
from router.reuse_watch import LATE_S
from router.route_explanation import RouteExplanation
from router.route_hint import RouteHint

assert CHUNK == CHUNK_TOKENS
SYSTEM, QUESTION = "secret rules of the house", "a private question"
TEMPLATE = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}<assistant>"


class World:
    """A front door on a real RoutingState; replicas answer with one token and reuse what they hold."""

    def __init__(self) -> None:
        self.routing = RoutingWorld()
        for worker_id in (A, B):
            self.routing.join(worker_id)
        self.held: dict[WorkerId, set[bytes]] = {A: set(), B: set()}
        self.dispatched = 0
        self.door = FrontDoor(
            model="demo",
            tokenizer=byte_tokenizer(TEMPLATE),
            scheme=RouteScheme(tokenizer_revision="t", model_revision="m", chunk_tokens=CHUNK),
            attempts=Attempts(self),
            accounting=self.routing.state,
            router_id="me",
            max_model_len=lambda: None,
            rng=random.Random(1),
        )

    async def dispatch(
        self, request: GenerationRequest, hint: RouteHint, *, whole: bool = False
    ) -> AsyncGenerator[tuple[WorkerId, TokenDelta], None]:
        self.dispatched += 1
        worker_id = self.routing.decide(hint, A, B)[0]
        held, chunks = self.held[worker_id], hint.chunk_hashes
        run = next((n for n, chunk in enumerate(chunks) if chunk not in held), len(chunks))
        cached = min(run * CHUNK, hint.prompt_tokens - 1)
        held.update(chunks)
        self.routing.store(worker_id, *chunks)
        yield (
            worker_id,
            TokenDelta("r", token_ids=ids_of("x"), cached_tokens=cached, finish_reason=FinishReason.LENGTH),
        )

    async def ask(self, **fields: Any) -> GenerationEvent:
        (event,) = [event async for event in self.door.generate(GenerationCall(**fields))]
        return event


def chat(system: str, question: str = QUESTION) -> list[dict[str, Any]]:
    return [{"role": "system", "content": system}, {"role": "user", "content": question}]


def reuse_of(explanation: RouteExplanation | None) -> ReuseExplanation:
    assert explanation is not None and explanation.reuse is not None
    return explanation.reuse


def metrics_of(world: World) -> dict[str, float]:
    """But for how often the index was asked."""
    metrics = world.routing.state.index_status().metrics
    asked = ("lookup", "query_tokens", "hit_tokens")
    return {name: value for name, value in metrics.items() if not any(word in name for word in asked)}


async def test_a_chat_diverges_in_a_message() -> None:
    world = World()
    first = await world.ask(messages=chat(SYSTEM))
    size = len(f"<system>{SYSTEM}<user>{QUESTION}<assistant>")
    assert first.route == f"prompt={size},seen=0,held=0,chosen=0,reused=0;never_seen={size}@0"
    for position in (0, 5, len(SYSTEM) - 1):
        stamped = await world.ask(messages=chat(SYSTEM[:position] + "#" + SYSTEM[position + 1 :]), request_id="mine")
        (loss,) = reuse_of(world.door.explained("mine")).losses
        assert (loss.reason, loss.position, loss.message) == (LossReason.DIVERGED, len("<system>") + position, 0)
        assert stamped.route is not None and stamped.route.endswith(f"@{loss.position}/m0")
    await world.ask(messages=chat(SYSTEM, QUESTION.replace("private", "public")), request_id="mine")
    (loss,) = reuse_of(world.door.explained("mine")).losses
    assert (loss.position, loss.message) == (len(f"<system>{SYSTEM}<user>a p"), 1)


async def test_every_event_but_the_first_is_silent_about_the_route() -> None:
    world = World()
    events = [event async for event in world.door.generate(GenerationCall(text=SYSTEM, sampling={"max_tokens": 2}))]
    assert [event.route is not None for event in events] == [True] + [False] * (len(events) - 1)


async def test_a_dry_run_books_nothing_and_asks_no_replica() -> None:
    world = World()
    event = await world.ask(messages=chat(SYSTEM))
    before = (metrics_of(world), len(world.routing.state.decisions))
    call = GenerationCall(messages=chat(SYSTEM, "a new question"))
    told = await world.door.explain(call)
    assert (told.dry_run, told.worker_id) == (True, event.replica)
    begin = len(f"<system>{SYSTEM}<user>a ")
    assert [str(loss) for loss in reuse_of(told).losses] == [
        f"diverged={reuse_of(told).prompt_tokens - begin // CHUNK * CHUNK}@{begin}/m1"
    ]
    assert reuse_of(told).reused_tokens is None
    assert [score.candidate.overlap_tokens for score in told.candidates] == [begin // CHUNK * CHUNK, 0]
    assert world.dispatched == 1
    assert len(world.routing.ledger) == 0 and len(world.routing.parity) == 0
    assert (metrics_of(world), len(world.routing.state.decisions)) == before
    assert reuse_of(await world.door.explain(call)) == reuse_of(told)  # and it was not seen by asking


async def test_a_dry_run_leaves_the_turn_of_the_policy() -> None:
    world = World()
    policy: Any = world.routing.state.policy
    before = policy._rng.getstate()
    await world.door.explain(GenerationCall(text=SYSTEM))
    assert policy._rng.getstate() == before


async def test_prompt_logprobs_take_nothing_from_the_cache_and_need_no_explanation() -> None:
    world = World()
    event = await world.ask(text=SYSTEM, sampling={"prompt_logprobs": 0, "max_tokens": 1}, request_id="mine")
    told = world.door.explained("mine")
    assert event.route is None
    assert told is not None and (told.worker_id, told.reuse) == (event.replica, None)


async def test_only_the_latest_requests_can_be_explained() -> None:
    world = World()
    for number in range(257):
        await world.ask(text=f"{number}", request_id=f"client-{number}")
    assert world.door.explained("client-0") is None
    told = world.door.explained("client-256")
    assert told is not None and world.door.explained(told.request_id) == told
    assert len(world.routing.state._log._by_id) == 2 * 256


async def test_no_text_and_no_tokens_in_any_output(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    world = World()
    http = TestClient(build_http_app(lambda: Services(generator=world.door, status=world.routing.state)))
    headers: list[str] = []
    for salt in ("", "salt of the house"):
        for question in (QUESTION, "another private matter"):
            body = {"messages": chat(SYSTEM, question), "cache_salt": salt, "max_tokens": 1}
            headers.append(http.post("/v1/chat/completions", content=json.dumps(body)).headers["x-kvray-route"])
    dry = await world.door.explain(GenerationCall(messages=chat(SYSTEM + "!"), cache_salt="salt of the house"))
    world.routing.now += LATE_S
    totals = totals_from(world.routing.state.misses())
    sent = [explanation_from(decision.explanation()) for decision in world.routing.state.decisions]
    assert {pb.LOSS_REASON_NAMESPACE, pb.LOSS_REASON_DIVERGED} <= {t.reason for t in totals.losses if t.tokens}
    metrics = repr(world.routing.state.index_status().metrics)
    kept = repr(world.routing.state.decisions)  # without tokens, so that nobody prints or pickles them by mistake
    told = [*headers, str(totals), *map(str, sent), str(explanation_from(dry)), metrics, kept, caplog.text]
    words = {"secret", "rules", "house", "private", "question", "another", "matter", "salt"}
    for word in words:
        assert not [text for text in told if word in text], word
    packed = repr(b"".join(token.to_bytes(4, "little") for token in TOKENIZER.encode("private")))[2:-1]
    assert packed not in kept


async def test_a_request_that_ends_before_an_engine_began_was_not_seen() -> None:
    world = World()
    hint = (await world.door.explain(GenerationCall(text=SYSTEM))).request_id
    stream = world.door.generate(GenerationCall(text=SYSTEM, timeout_s=0.0))
    with pytest.raises(Exception, match="deadline"):
        await anext(stream)
    assert hint and reuse_of(await world.door.explain(GenerationCall(text=SYSTEM))).seen_tokens == 0
    assert world.routing.reuse is not None and len(world.routing.reuse) == 0
