"""The error table."""

from __future__ import annotations

import logging

import grpc
import pytest

from cluster.core import errors
from router.status import INTERNAL, MAX_RETRY_AFTER_S, describe

CASES = [
    (errors.InvalidRequest("top_p", "too big"), 400, grpc.StatusCode.INVALID_ARGUMENT, "invalid_request", "top_p"),
    (
        errors.RequestTooLong("prompt", "9 tokens, at most 8", limit=8),
        400,
        grpc.StatusCode.INVALID_ARGUMENT,
        "context_length_exceeded",
        "prompt",
    ),
    (errors.Unauthenticated("no key"), 401, grpc.StatusCode.UNAUTHENTICATED, "invalid_api_key", None),
    (errors.ModelNotFound("no such model"), 404, grpc.StatusCode.NOT_FOUND, "model_not_found", "model"),
    (errors.UnknownRequest("forgotten"), 404, grpc.StatusCode.NOT_FOUND, "unknown_request", None),
    (errors.Overloaded("full"), 429, grpc.StatusCode.RESOURCE_EXHAUSTED, "overloaded", None),
    (errors.RequestCancelled("gone"), 499, grpc.StatusCode.CANCELLED, "cancelled", None),
    (errors.ReplicaLost("died", tokens=3), 503, grpc.StatusCode.UNAVAILABLE, "replica_lost", None),
    (errors.NoReplica("none"), 503, grpc.StatusCode.UNAVAILABLE, "no_replica", None),
    (errors.DeadlineExceeded("late"), 504, grpc.StatusCode.DEADLINE_EXCEEDED, "deadline_exceeded", None),
]


@pytest.mark.parametrize(
    ("error", "http", "code", "name", "param"), CASES, ids=lambda value: getattr(value, "code", "")
)
def test_table(error: errors.KvrayError, http: int, code: grpc.StatusCode, name: str, param: str | None) -> None:
    problem = describe(errors.from_wire(error.to_wire()))
    assert (problem.http_status, problem.grpc_code) == (http, code)
    body = problem.body()["error"]
    assert set(body) >= {"message", "type", "param", "code"}
    assert (body["message"], body["code"], body["param"]) == (error.message, name, param)


def test_every_request_error_has_a_row() -> None:
    """Errors that other modules derive never reach a client, and this process may or may not have loaded them."""
    covered = {type(error) for error, *_ in CASES}

    def tree(cls: type[errors.KvrayError]) -> set[type[errors.KvrayError]]:
        subs = [sub for sub in cls.__subclasses__() if sub.__module__ == errors.__name__]
        return {cls}.union(*(tree(sub) for sub in subs))

    assert tree(errors.KvrayError) - covered == {errors.KvrayError, errors.ConfigError}


def test_subclasses_inherit_their_row() -> None:
    class StopTooLong(errors.InvalidRequest):
        pass

    assert describe(StopTooLong("stop", "x")).http_status == 400


@pytest.mark.parametrize(
    "error", [RuntimeError("secret /etc/x"), errors.KvrayError("secret"), errors.ConfigError("secret")]
)
def test_the_rest_is_internal_logged_and_tells_nothing(error: Exception, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.ERROR, logger="router.status"):
        assert describe(error) is INTERNAL
    assert "secret" not in str(INTERNAL.body()) + INTERNAL.details()
    assert caplog.records[0].exc_info is not None


@pytest.mark.parametrize(
    ("hint", "header"),
    [
        *((0.2, "1"), (1.0, "1"), (2.1, "3"), (12.3, "13"), (12, "12")),
        *((0, "1"), (-5.0, "1"), (float("nan"), "1"), (float("inf"), str(MAX_RETRY_AFTER_S))),
    ],
)
def test_retry_after_is_in_whole_seconds(hint: float, header: str) -> None:
    assert describe(errors.Overloaded("full", retry_after_s=hint)).headers() == {"retry-after": header}
    assert describe(errors.ReplicaLost("died")).headers() == {}


def test_limit_and_field_are_told() -> None:
    assert describe(errors.RequestTooLong("prompt", "long", limit=8)).body()["error"]["limit"] == 8
    assert describe(errors.InvalidRequest("stop", "too many")).details() == "stop: too many"
    assert describe(errors.InvalidRequest("stop", "stop is too long")).details() == "stop is too long"
