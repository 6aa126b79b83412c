"""GenerationRequest and TokenDelta: their wire forms and what makes a delta the last one."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cluster.core.constraint import Constraint
from cluster.core.errors import InvalidRequest, KvrayError, Overloaded, RequestTooLong
from cluster.core.logprobs import PromptLogprobs, TokenLogprob
from cluster.core.request import FinishReason, GenerationRequest, TokenDelta
from cluster.core.sampling import SamplingParams

tokens = st.integers(0, 2**32 - 1)
values = st.floats(max_value=0.0, allow_nan=False)
token_logprobs = st.builds(TokenLogprob, values, st.lists(st.tuples(tokens, values), max_size=3).map(tuple))


def through_json(wire: Any) -> Any:
    return json.loads(json.dumps(wire))


@given(
    request_id=st.text(),
    prompt=st.lists(tokens, min_size=1, max_size=20),
    router_id=st.text(),
    salt=st.text(),
    max_tokens=st.none() | st.integers(1, 100),
    constraint=st.none() | st.sampled_from([Constraint.json_object(), Constraint.choice(["a", "é"])]),
)
def test_requests_survive_the_wire(
    request_id: str,
    prompt: list[int],
    router_id: str,
    salt: str,
    max_tokens: int | None,
    constraint: Constraint | None,
) -> None:
    request = GenerationRequest(
        request_id=request_id,
        prompt_token_ids=tuple(prompt),
        sampling=SamplingParams(max_tokens=max_tokens, stop=("x",)),
        router_id=router_id,
        cache_salt=salt,
        constraint=constraint,
    )
    assert GenerationRequest.from_wire(through_json(request.to_wire())) == request


def test_an_empty_prompt_names_its_field_also_from_the_wire() -> None:
    with pytest.raises(InvalidRequest) as caught:
        GenerationRequest(request_id="a", prompt_token_ids=(), sampling=SamplingParams())
    assert caught.value.field == "prompt"
    wire = GenerationRequest(request_id="a", prompt_token_ids=(1,), sampling=SamplingParams()).to_wire()
    wire["prompt_token_ids"] = []
    with pytest.raises(InvalidRequest, match="no tokens"):
        GenerationRequest.from_wire(wire)


@pytest.mark.parametrize(("field", "value"), [("ignore_eos", True), ("beam_width", 2)])
def test_sampling_that_no_constraint_can_follow_names_its_field(field: str, value: Any) -> None:
    sampling = SamplingParams(**{field: value})
    assert GenerationRequest(request_id="a", prompt_token_ids=(1,), sampling=sampling).constraint is None
    with pytest.raises(InvalidRequest) as caught:
        GenerationRequest(request_id="a", prompt_token_ids=(1,), sampling=sampling, constraint=Constraint.json_object())
    assert caught.value.field == field
    assert "json_object" in caught.value.message


def test_wrong_sampling_values_on_the_wire_name_their_field() -> None:
    wire = GenerationRequest(request_id="a", prompt_token_ids=(1,), sampling=SamplingParams()).to_wire()
    wire["sampling"]["top_p"] = 2
    with pytest.raises(InvalidRequest) as caught:
        GenerationRequest.from_wire(wire)
    assert caught.value.field == "top_p"


@given(
    request_id=st.text(),
    token_ids=st.lists(tokens, max_size=5),
    cached=st.none() | st.integers(0, 10**6),
    reason=st.none() | st.sampled_from(FinishReason),
    logprobs=st.none() | st.lists(token_logprobs, max_size=3).map(tuple),
    prompt_logprobs=st.none() | st.lists(st.none() | token_logprobs, max_size=3).map(tuple),
)
def test_deltas_survive_the_wire(
    request_id: str,
    token_ids: list[int],
    cached: int | None,
    reason: FinishReason | None,
    logprobs: tuple[TokenLogprob, ...] | None,
    prompt_logprobs: PromptLogprobs | None,
) -> None:
    delta = TokenDelta(
        request_id=request_id,
        token_ids=tuple(token_ids),
        cached_tokens=cached,
        finish_reason=reason,
        logprobs=logprobs,
        prompt_logprobs=prompt_logprobs,
    )
    back = TokenDelta.from_wire(through_json(delta.to_wire()))
    assert back == delta
    assert back.finish_reason is reason
    assert back.last is (reason is not None)


@pytest.mark.parametrize("error", [Overloaded("full", retry_after_s=3.0), RequestTooLong("prompt", "long", limit=5)])
def test_an_error_ends_a_request_and_keeps_its_type(error: KvrayError) -> None:
    delta = TokenDelta(request_id="a", error=error)
    assert delta.last
    back = TokenDelta.from_wire(through_json(delta.to_wire()))
    assert back.last
    assert type(back.error) is type(error)
    assert back.error is not None and back.error.details == error.details


def test_zero_cached_tokens_are_told_apart_from_none() -> None:
    assert TokenDelta.from_wire(TokenDelta(request_id="a", cached_tokens=0).to_wire()).cached_tokens == 0
    assert TokenDelta.from_wire(TokenDelta(request_id="a").to_wire()).cached_tokens is None


def test_reasons_are_the_words_that_clients_know() -> None:
    assert [str(reason) for reason in FinishReason] == ["stop", "length", "cancelled"]
