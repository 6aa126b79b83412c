"""FrontDoor before dispatch: what it refuses and how it names it, seeds, and the hint for the router."""

from __future__ import annotations

import asyncio
import random
import threading
from collections.abc import Sequence
from typing import Any

import pytest
from fake_dispatcher import CHUNK_TOKENS, SCHEME, TOKENIZER, Attempt, DoorWorld, answer, ids_of

from cluster.core.constraint import Constraint
from cluster.core.errors import InvalidRequest, ModelNotFound, RequestTooLong
from cluster.core.hashing import ChunkHash, hash_prompt, root_hash
from cluster.core.sampling import MAX_SEED
from router.generation import GenerationCall


def text(prompt: str, **sampling: Any) -> GenerationCall:
    return GenerationCall(text=prompt, sampling=sampling)


def chat(content: str, **sampling: Any) -> GenerationCall:
    messages = [{"role": "user", "content": content}]
    return GenerationCall(messages=messages, sampling=sampling, prompt_field="messages")


def ids(token_ids: Sequence[Any], **sampling: Any) -> GenerationCall:
    return GenerationCall(token_ids=token_ids, sampling=sampling)


async def accepted(call: GenerationCall, limit: int | None = None) -> DoorWorld:
    world = DoorWorld([Attempt("a", answer("x"))], limit=limit)
    async for _ in world.door.generate(call):
        pass
    return world


async def refused(call: GenerationCall, limit: int | None = None) -> InvalidRequest:
    """The error of a request that never reaches a replica."""
    world = DoorWorld([], limit=limit)
    with pytest.raises(InvalidRequest) as caught:
        await anext(world.door.generate(call))
    return caught.value


# --- models and prompts ---


@pytest.mark.parametrize("model", ["", "demo"])
async def test_the_model_by_name_or_as_the_only_one(model: str) -> None:
    world = await accepted(GenerationCall(model=model, text="hello"))
    assert world.door.models == ["demo"]
    assert world.request.prompt_token_ids == ids_of("hello")


async def test_an_unknown_model_is_named() -> None:
    with pytest.raises(ModelNotFound, match="'demo-2' is not served here; served: demo"):
        await anext(DoorWorld([]).door.generate(GenerationCall(model="demo-2", text="hello")))


async def test_every_form_of_a_prompt_becomes_the_same_tokens() -> None:
    worlds = [await accepted(call) for call in (text("hello"), ids(ids_of("hello")), chat("hello"))]
    assert [world.request.prompt_token_ids for world in worlds] == [ids_of("hello")] * 3


@pytest.mark.parametrize(
    ("call", "field", "says"),
    [
        (text(""), "prompt", "empty"),
        (ids([]), "prompt", "empty"),
        (chat(""), "messages", "empty"),
        (GenerationCall(messages=[], prompt_field="messages"), "messages", "empty"),
        (GenerationCall(text="", prompt_field="text"), "text", "empty"),
        (GenerationCall(), "prompt", "required"),
        (text("a\ud800"), "prompt", "surrogate"),
    ],
)
async def test_a_prompt_without_tokens_is_refused(call: GenerationCall, field: str, says: str) -> None:
    error = await refused(call)
    assert error.field == field
    assert says in error.message


@pytest.mark.parametrize("bad", [-1, TOKENIZER.vocab_size, 2**70, True, False, 1.0, "1", None])
async def test_token_ids_must_be_in_the_vocabulary(bad: Any) -> None:
    error = await refused(ids([1, bad, 2]))
    assert error.field == "prompt"
    assert f"0 to {TOKENIZER.vocab_size - 1}" in error.message


async def test_the_first_and_last_token_id_are_accepted() -> None:
    edge = (0, TOKENIZER.vocab_size - 1)
    assert (await accepted(ids(edge))).request.prompt_token_ids == edge


# --- the limit ---


@pytest.mark.parametrize(
    ("call", "field"),
    [
        (text("x" * 20), "prompt"),
        (text("x" * 21), "prompt"),
        (text("x" * 20, max_tokens=1), "prompt"),
        (ids([1] * 20), "prompt"),
        (chat("x" * 20), "messages"),
        (text("x" * 15, max_tokens=6), "max_tokens"),
        (chat("x" * 19, max_tokens=2), "max_tokens"),
        (text("x", max_tokens=10**6), "max_tokens"),
    ],
)
async def test_too_many_tokens_name_the_field_and_the_limit(call: GenerationCall, field: str) -> None:
    error = await refused(call, limit=20)
    assert isinstance(error, RequestTooLong)
    assert (error.field, error.limit) == (field, 20)
    assert "limit of 20 tokens" in error.message


@pytest.mark.parametrize("call", [text("x" * 19), text("x" * 19, max_tokens=1), text("x", max_tokens=19)])
async def test_a_request_of_exactly_the_limit_is_accepted(call: GenerationCall) -> None:
    assert (await accepted(call, limit=20)).request


async def test_no_known_limit_leaves_the_check_to_the_replica() -> None:
    assert (await accepted(text("x" * 500, max_tokens=10**6), limit=None)).request


async def test_the_limit_is_read_on_the_event_loop_and_text_is_tokenised_off_it() -> None:
    """The limit comes from state that is used on one event loop; tokenising would block that loop."""
    world = DoorWorld([Attempt("a", answer("x"))], tokenizer=(spy := SpyTokenizer()))  # type: ignore[arg-type]
    async for _ in world.door.generate(text("hello")):
        pass
    assert world.limit_asked_in == [threading.get_ident()]
    assert len(spy.called_in) == 1
    assert spy.called_in[0] != threading.get_ident()


class SpyTokenizer:
    def __init__(self) -> None:
        self.called_in: list[int] = []
        self.decode, self.is_silent = TOKENIZER.decode, TOKENIZER.is_silent

    def encode(self, prompt: str, *, field: str) -> list[int]:
        self.called_in.append(threading.get_ident())
        return TOKENIZER.encode(prompt, field=field)


# --- sampling ---


@pytest.mark.parametrize(
    ("sampling", "field"),
    [
        ({"max_tokens": -1}, "max_tokens"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"temperature": -1}, "temperature"),
        ({"temperature": float("nan")}, "temperature"),
        ({"seed": MAX_SEED + 1}, "seed"),
        ({"stop": [""]}, "stop"),
        ({"best_off": 2}, "sampling"),
    ],
)
async def test_a_bad_sampling_value_names_its_field(sampling: dict[str, Any], field: str) -> None:
    assert (await refused(text("hello", **sampling))).field == field


async def test_a_seed_is_drawn_for_every_request_without_one() -> None:
    world = DoorWorld([Attempt("a", answer("x")), Attempt("a", answer("x"))], seed=7)
    for call in (text("hello"), text("hello", seed=None)):
        async for _ in world.door.generate(call):
            pass
    rng = random.Random(7)
    seeds = [attempt.request.sampling.seed for attempt in world.dispatcher.used if attempt.request]
    assert seeds == [rng.getrandbits(62), rng.getrandbits(62)]
    assert len(set(seeds)) == 2


@pytest.mark.parametrize("seed", [0, 42, -1, MAX_SEED])
async def test_a_given_seed_is_kept(seed: int) -> None:
    assert (await accepted(text("hello", seed=seed))).request.sampling.seed == seed


async def test_requests_have_ids_of_their_own() -> None:
    first, second = await asyncio.gather(accepted(text("hello")), accepted(text("hello")))
    assert first.request.request_id != second.request.request_id


# --- the hint ---


async def hashes(call: GenerationCall) -> tuple[ChunkHash, ...]:
    return (await accepted(call)).hints[0].chunk_hashes


@pytest.mark.parametrize("size", [1, CHUNK_TOKENS - 1, CHUNK_TOKENS, 2 * CHUNK_TOKENS, 2 * CHUNK_TOKENS + 3])
async def test_the_hint_holds_the_hashes_of_full_chunks(size: int) -> None:
    prompt = "abcdefghijklmnop"[:size]
    found = await hashes(text(prompt))
    full = ids_of(prompt)[: size // CHUNK_TOKENS * CHUNK_TOKENS]
    assert len(found) == size // CHUNK_TOKENS
    assert found == tuple(hash_prompt(root_hash(SCHEME), full, CHUNK_TOKENS))


async def test_a_cache_salt_changes_every_hash_and_reaches_the_replica() -> None:
    plain = await hashes(text("abcdefgh"))
    salted = [await accepted(GenerationCall(text="abcdefgh", cache_salt=salt)) for salt in ("s", "s", "t")]
    one, same, other = (world.hints[0].chunk_hashes for world in salted)
    assert one == same == tuple(hash_prompt(root_hash(SCHEME.with_salt("s")), ids_of("abcdefgh"), CHUNK_TOKENS))
    assert not set(one) & set(plain)
    assert not set(one) & set(other)
    assert [world.request.cache_salt for world in salted] == ["s", "s", "t"]


# --- sampling ---


@pytest.mark.parametrize(
    ("sampling", "field"),
    [
        ({"presence_penalty": 2.5}, "presence_penalty"),
        ({"frequency_penalty": -3}, "frequency_penalty"),
        ({"repetition_penalty": 0}, "repetition_penalty"),
        ({"min_p": 1.5}, "min_p"),
        ({"logit_bias": ((1, 101),)}, "logit_bias"),
        ({"logit_bias": ((1, "much"),)}, "logit_bias"),
        ({"logit_bias": ((2**31, 1),)}, "logit_bias"),
        ({"min_tokens": 9, "max_tokens": 8}, "min_tokens"),
        ({"logprobs": 21}, "logprobs"),
        ({"prompt_logprobs": -1}, "prompt_logprobs"),
        ({"length_penalty": 0.5}, "length_penalty"),
        ({"early_stopping": True}, "early_stopping"),
        ({"include_stop_str_in_output": 1}, "include_stop_str_in_output"),
    ],
)
async def test_wrong_sampling_values_name_their_field(sampling: dict[str, Any], field: str) -> None:
    assert (await refused(text("hello", **sampling))).field == field


async def test_a_prompt_that_is_scored_goes_wherever_there_is_least_to_do() -> None:
    (hint,) = (await accepted(text("hello there", prompt_logprobs=1))).hints
    assert (hint.chunk_hashes, hint.prompt_tokens) == ((), len(ids_of("hello there")))


async def test_a_constraint_reaches_the_replica_and_its_sampling_must_go_with_it() -> None:
    constraint = Constraint.regex("a+")
    assert (await accepted(GenerationCall(text="hello", constraint=constraint))).request.constraint == constraint
    for field, value in (("ignore_eos", True), ("beam_width", 2)):
        error = await refused(GenerationCall(text="hello", constraint=constraint, sampling={field: value}))
        assert error.field == field


async def test_a_constraint_that_the_replica_refuses_is_the_clients_mistake_and_not_tried_again() -> None:
    error = InvalidRequest("json_schema", "json_schema is refused at #/a: no", at="#/a")
    world = DoorWorld([Attempt("a", [error]), Attempt("b", answer("x"))])
    with pytest.raises(InvalidRequest) as caught:
        await anext(world.door.generate(GenerationCall(text="hello", constraint=Constraint.json_schema("{}"))))
    assert caught.value.details["at"] == "#/a"
    assert len(world.dispatcher.used) == 1
    assert world.live() == 0
