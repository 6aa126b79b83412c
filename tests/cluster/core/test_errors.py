"""The error tree: every type survives the wire and pickle with its message and its details."""

from __future__ import annotations

import copy
import json
import pickle
from typing import Any

import pytest

from cluster.core import errors
from cluster.core.errors import (
    ConfigError,
    DeadlineExceeded,
    InvalidRequest,
    KvrayError,
    ModelNotFound,
    NoReplica,
    Overloaded,
    ReplicaLost,
    RequestCancelled,
    RequestTooLong,
    Unauthenticated,
    UnknownRequest,
    from_wire,
)

ERRORS: list[KvrayError] = [
    KvrayError("something broke", step=3),
    InvalidRequest("top_p", "top_p must be between 0 and 1"),
    InvalidRequest("messages", "the template says no", index=2),
    RequestTooLong("prompt", "the prompt has 40 tokens", limit=32),
    ModelNotFound("there is no model x"),
    UnknownRequest("forgotten"),
    Unauthenticated("no key"),
    Overloaded("the queue is full", retry_after_s=2.5),
    DeadlineExceeded("too late"),
    RequestCancelled("the client went away"),
    ReplicaLost("the engine is gone", tokens=7),
    NoReplica("none in time"),
    ConfigError("no such model: '漢'"),
]


def same(left: KvrayError, right: KvrayError) -> bool:
    facts = [(type(e), e.code, e.message, str(e), e.args, e.details) for e in (left, right)]
    return facts[0] == facts[1]


def name_of(error: KvrayError) -> str:
    return type(error).__name__


def test_every_type_of_the_module_is_tested_and_has_its_own_code() -> None:
    types = {v for v in vars(errors).values() if isinstance(v, type) and issubclass(v, KvrayError)}
    assert types == {type(e) for e in ERRORS}
    assert len({cls.code for cls in types}) == len(types)
    assert all(cls.__name__ in (errors.__doc__ or "") for cls in types), "the drawn tree is complete"


@pytest.mark.parametrize("error", ERRORS, ids=name_of)
def test_wire_keeps_type_message_and_details(error: KvrayError) -> None:
    wire = json.loads(json.dumps(error.to_wire()))
    assert set(wire) == {"code", "message", "details"}
    assert same(from_wire(wire), error)
    assert from_wire(wire).to_wire() == error.to_wire()


@pytest.mark.parametrize("error", ERRORS, ids=name_of)
def test_pickle_and_copy_keep_them_too(error: KvrayError) -> None:
    """Ray pickles what a replica raises."""
    assert same(pickle.loads(pickle.dumps(error)), error)
    assert same(copy.copy(error), error)


def test_fields_are_read_from_the_details() -> None:
    back: Any = [from_wire(e.to_wire()) for e in ERRORS]
    assert [e.field for e in back if isinstance(e, InvalidRequest)] == ["top_p", "messages", "prompt"]
    assert [e.limit for e in back if isinstance(e, RequestTooLong)] == [32]
    assert [e.retry_after_s for e in back if isinstance(e, Overloaded)] == [2.5]
    assert [e.tokens for e in back if isinstance(e, ReplicaLost)] == [7]


def test_details_that_were_not_given_have_defaults() -> None:
    assert Overloaded("full").retry_after_s == 1.0
    assert ReplicaLost("gone").tokens == 0


def test_the_tree_is_what_callers_catch() -> None:
    assert issubclass(RequestTooLong, InvalidRequest)
    assert not issubclass(ConfigError, InvalidRequest)
    for error in ERRORS:
        with pytest.raises(KvrayError):
            raise error


def test_an_unknown_code_becomes_the_base_class() -> None:
    """A newer process may know more errors than this one."""
    back = from_wire({"code": "quota", "message": "no more", "details": {"left": 0}})
    assert type(back) is KvrayError
    assert (back.message, back.details) == ("no more", {"left": 0})
