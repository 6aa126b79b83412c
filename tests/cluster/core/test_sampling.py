"""SamplingParams: every wrong value names its field, and the wire loses nothing."""

from __future__ import annotations

import json
from typing import Any

import pytest

from cluster.core.errors import InvalidRequest
from cluster.core.sampling import (
    MAX_LOGIT_BIASES,
    MAX_LOGPROBS,
    MAX_SEED,
    MAX_STOP_LENGTH,
    MAX_STOP_STRINGS,
    SamplingParams,
)

NAN, INF = float("nan"), float("inf")
WRONG: dict[str, list[Any]] = {
    "temperature": [-0.1, 100.5, NAN, INF, -INF, 10**400, "1", None, True],
    "top_p": [0, 0.0, -0.1, 1.1, NAN, "0.5", None, False],
    "top_k": [-1, 2**31, 1.0, "5", None, True],
    "min_p": [-0.1, 1.1, NAN, INF, "0.5", None, True],
    "repetition_penalty": [0, 0.0, -0.5, 2.01, NAN, "1", None, True],
    "presence_penalty": [-2.01, 2.01, NAN, INF, "1", None, True],
    "frequency_penalty": [-2.01, 2.01, NAN, -INF, "1", None, True],
    "logit_bias": [
        ((-1, 1.0),),
        ((2**31, 1.0),),
        ((1.0, 1.0),),
        (("1", 1.0),),
        ((True, 1.0),),
        ((1, 100.5),),
        ((1, -100.5),),
        ((1, NAN),),
        ((1, "2"),),
        ((1, True),),
        ((1, None),),
        ((1, 1.0), (1, 2.0)),
        (1, 2),
        ((1,),),
        ((1, 2, 3),),
        ([1, 2],),
        {1: 2},
        "12",
        None,
        tuple((token, 1.0) for token in range(MAX_LOGIT_BIASES + 1)),
    ],
    "min_tokens": [-1, 2**31, 1.0, "5", None, True],
    "include_stop_str_in_output": [1, 0, "true", None],
    "logprobs": [-1, MAX_LOGPROBS + 1, 1.0, "5", True],
    "prompt_logprobs": [-1, MAX_LOGPROBS + 1, 1.0, "5", True],
    "seed": [-(2**63) - 1, MAX_SEED + 1, 1.5, "1", None, True],
    "max_tokens": [0, -1, 2**31, 1.0, "5", True],
    "stop": [
        ("",),
        ("x" * (MAX_STOP_LENGTH + 1),),
        ("a",) * (MAX_STOP_STRINGS + 1),
        (1,),
        (None,),
        (b"a",),
        "abc",
        None,
        5,
    ],
    "stop_token_ids": [(-1,), (2**31,), (1.0,), ("1",), (True,), (1,) * 257, 5, None, "12"],
    "ignore_eos": [1, 0, "true", None],
    "n": [0, -1, 129, 1.0, "2", True],
    "best_of": [0, -1, 129, 1.0, "2", True],
    "beam_width": [-1, 129, 1.0, "2", None, True],
    "length_penalty": [-10.5, 80, NAN, INF, "1", None, True],
    "early_stopping": [1, 0, "always", "", None],
}
EDGES: dict[str, list[Any]] = {
    "temperature": [0, 0.0, 1, 100.0],
    "top_p": [1, 1.0, 1e-9],
    "top_k": [0, 1, 2**31 - 1],
    "min_p": [0, 0.0, 1, 1e-9],
    "repetition_penalty": [1e-9, 1, 2, 2.0],
    "presence_penalty": [-2, 0, 2.0],
    "frequency_penalty": [-2.0, 0, 2],
    "logit_bias": [
        (),
        ((0, -100), (2**31 - 1, 100.0)),
        tuple((token, 1.0) for token in range(MAX_LOGIT_BIASES)),
    ],
    "min_tokens": [0, 1, 2**31 - 1],
    "include_stop_str_in_output": [True, False],
    "logprobs": [None, 0, MAX_LOGPROBS],
    "prompt_logprobs": [None, 0, MAX_LOGPROBS],
    "seed": [-(2**63), 0, MAX_SEED],
    "max_tokens": [None, 1, 2**31 - 1],
    "stop": [(), ("x" * MAX_STOP_LENGTH,), ("a",) * MAX_STOP_STRINGS],
    "stop_token_ids": [(), (0,), (2**31 - 1,), (1,) * 256],
    "ignore_eos": [True, False],
    "n": [None, 1],
    "best_of": [None, 1, 128],
    "beam_width": [0, 1, 128],
    "length_penalty": [-10.0, 0, 1, 10.0],
    "early_stopping": [True, False, "never"],
}


def cases(table: dict[str, list[Any]]) -> list[Any]:
    return [pytest.param(f, v, id=f"{f}-{str(v)[:20]}") for f, values in table.items() for v in values]


@pytest.mark.parametrize(("field", "value"), cases(WRONG))
def test_wrong_values_name_their_field(field: str, value: Any) -> None:
    with pytest.raises(InvalidRequest) as caught:
        SamplingParams(**{field: value})
    assert caught.value.field == field
    assert field in caught.value.message


@pytest.mark.parametrize(("field", "value"), cases(EDGES))
def test_edges_are_allowed_and_survive_the_wire(field: str, value: Any) -> None:
    beams = {"beam_width": 2} if field in ("length_penalty", "early_stopping") else {}
    params = SamplingParams(**{field: value, **beams})
    assert getattr(params, field) == value
    assert SamplingParams.from_wire(json.loads(json.dumps(params.to_wire()))) == params


def test_the_tables_cover_every_field() -> None:
    fields = set(SamplingParams.__dataclass_fields__)
    assert fields == set(WRONG) == set(EDGES)


def test_the_wire_loses_nothing() -> None:
    params = SamplingParams(
        temperature=0.3,
        top_k=4,
        top_p=0.5,
        min_p=0.1,
        repetition_penalty=1.5,
        presence_penalty=-0.5,
        frequency_penalty=0.25,
        logit_bias=((3, -1.5), (4, 2.0)),
        seed=-6,
        max_tokens=7,
        min_tokens=2,
        stop=("a", "\n"),
        stop_token_ids=(8, 9),
        ignore_eos=True,
        include_stop_str_in_output=True,
        logprobs=3,
        prompt_logprobs=0,
        n=2,
        beam_width=3,
        length_penalty=0.5,
        early_stopping="never",
    )
    changed = {f for f in SamplingParams.__dataclass_fields__ if getattr(params, f) != getattr(SamplingParams(), f)}
    assert changed == set(SamplingParams.__dataclass_fields__) - {"best_of"}  # it excludes beam_width
    back = SamplingParams.from_wire(json.loads(json.dumps(params.to_wire())))
    assert back == params
    assert hash(back) == hash(params)


def test_wire_values_are_validated_and_unknown_ones_ignored() -> None:
    """A newer router may send more than this worker knows."""
    assert SamplingParams.from_wire({"smoothness": 0.1, "top_k": 3}) == SamplingParams(top_k=3)
    with pytest.raises(InvalidRequest) as caught:
        SamplingParams.from_wire({"top_k": -3})
    assert caught.value.field == "top_k"


def test_greedy_is_temperature_zero() -> None:
    assert SamplingParams(temperature=0).greedy
    assert not SamplingParams(temperature=1e-9).greedy


@pytest.mark.parametrize(
    ("values", "choices", "rows"),
    [
        ({}, 1, 1),
        ({"n": 3}, 3, 3),
        ({"best_of": 3}, 1, 3),
        ({"n": 2, "best_of": 5}, 2, 5),
        ({"beam_width": 4}, 4, 4),
        ({"beam_width": 4, "n": 2}, 2, 4),
    ],
)
def test_choices_and_the_rows_that_run_for_them(values: dict[str, Any], choices: int, rows: int) -> None:
    params = SamplingParams(**values)
    assert (params.num_choices, params.num_rows) == (choices, rows)


@pytest.mark.parametrize(
    ("values", "field"),
    [
        ({"n": 3, "best_of": 2}, "best_of"),
        ({"n": 3, "beam_width": 2}, "beam_width"),
        ({"best_of": 2, "beam_width": 2}, "best_of"),
        ({"length_penalty": 0.5}, "length_penalty"),
        ({"early_stopping": True}, "early_stopping"),
        ({"early_stopping": "never", "n": 2}, "early_stopping"),
        ({"max_tokens": 4, "min_tokens": 5}, "min_tokens"),
    ],
)
def test_values_that_contradict_each_other(values: dict[str, Any], field: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        SamplingParams(**values)
    assert caught.value.field == field


def test_the_defaults_of_beam_search_are_no_request_for_one() -> None:
    assert SamplingParams(length_penalty=1, early_stopping=False) == SamplingParams()
