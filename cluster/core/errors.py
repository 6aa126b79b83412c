"""Every error kvray raises on purpose, in one tree.

    KvrayError
    |-- InvalidRequest        the client's mistake; names the field            400
    |   `-- RequestTooLong    prompt (+ max_tokens) over the limit             400
    |-- ModelNotFound         unknown model name                               404
    |-- UnknownRequest        nothing is known of a request any more           404
    |-- Unauthenticated       no key, or a wrong one                           401
    |-- Overloaded            a bounded queue is full; carries retry_after_s   429
    |-- DeadlineExceeded      the client's deadline passed                     504
    |-- RequestCancelled      the client went away                             499
    |-- ReplicaLost           the replica died; carries the tokens so far      503
    |-- NoReplica             there was none in time                           503
    `-- ConfigError           a process cannot start as configured             (start-up only)

Owns: the classes and their wire form (a plain dict), so that an error keeps its type across process borders.
Does not: map errors to HTTP or gRPC codes; that table is `router.status`.
Invariants: `from_wire(e.to_wire())` has the type, the message and the fields of `e`.
"""

from __future__ import annotations

from typing import Any, ClassVar


class KvrayError(Exception):
    """Base class. `code` is the stable name used on the wire and in logs."""

    code: ClassVar[str] = "internal"

    def __init__(self, message: str, **details: Any) -> None:
        super().__init__(message)
        self.message = message
        self.details: dict[str, Any] = details

    def to_wire(self) -> dict[str, Any]:
        """A dict of plain values: code, message, details."""
        return {"code": self.code, "message": self.message, "details": self.details}

    def __reduce__(self) -> tuple[Any, ...]:
        return (from_wire, (self.to_wire(),))


class InvalidRequest(KvrayError):
    """The request is wrong; `field` names what to change."""

    code = "invalid_request"

    def __init__(self, field: str, message: str, **details: Any) -> None:
        super().__init__(message, field=field, **details)

    @property
    def field(self) -> str:
        return str(self.details["field"])


class RequestTooLong(InvalidRequest):
    """More tokens than the model length or the KV pool can ever hold; `limit` is in tokens."""

    code = "request_too_long"

    @property
    def limit(self) -> int:
        return int(self.details["limit"])


class ModelNotFound(KvrayError):
    code = "model_not_found"


class UnknownRequest(KvrayError):
    code = "unknown_request"


class Unauthenticated(KvrayError):
    code = "unauthenticated"


class Overloaded(KvrayError):
    """A bounded queue is full. `retry_after_s` is a hint in seconds."""

    code = "overloaded"

    @property
    def retry_after_s(self) -> float:
        return float(self.details.get("retry_after_s", 1.0))


class DeadlineExceeded(KvrayError):
    code = "deadline_exceeded"


class RequestCancelled(KvrayError):
    code = "cancelled"


class ReplicaLost(KvrayError):
    """The replica that ran the request is gone. `tokens` counts what the client already received."""

    code = "replica_lost"

    @property
    def tokens(self) -> int:
        return int(self.details.get("tokens", 0))


class NoReplica(KvrayError):
    """There was no replica to send the request to, for as long as it may wait for one."""

    code = "no_replica"


class ConfigError(KvrayError):
    """A process cannot start as configured; the message says what to change."""

    code = "config"


_BY_CODE: dict[str, type[KvrayError]] = {
    cls.code: cls
    for cls in (
        KvrayError,
        InvalidRequest,
        RequestTooLong,
        ModelNotFound,
        UnknownRequest,
        Unauthenticated,
        Overloaded,
        DeadlineExceeded,
        RequestCancelled,
        ReplicaLost,
        NoReplica,
        ConfigError,
    )
}


def from_wire(wire: dict[str, Any]) -> KvrayError:
    """Rebuild an error from `to_wire()`. An unknown code becomes a plain `KvrayError`."""
    cls = _BY_CODE.get(wire["code"], KvrayError)
    error = cls.__new__(cls)
    KvrayError.__init__(error, wire["message"], **wire["details"])
    return error
