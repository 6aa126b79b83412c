"""The one error table: what each error looks like to an HTTP client and to a gRPC client.

Owns: Problem (an error as clients see it) and `describe`, the only mapping from exceptions to status codes.
Does not: send anything; router.http_api and router.grpc_api do.
Invariants: an error that is not in the table is INTERNAL/500, is logged here once, and tells the client nothing
about the inside.
"""

from __future__ import annotations

import logging
import math
from dataclasses import dataclass
from typing import Any

import grpc

from cluster.core import errors

logger = logging.getLogger(__name__)

MAX_RETRY_AFTER_S = 3600


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """One error, ready for either protocol.

    kind: OpenAI's `type`.  code: stable machine-readable name.  param: the field to change.
    limit: the most tokens allowed (too long only).  retry_after_s: when to come back (overload only).
    """

    http_status: int
    grpc_code: grpc.StatusCode
    kind: str
    code: str
    message: str
    param: str | None = None
    limit: int | None = None
    retry_after_s: int | None = None

    def body(self) -> dict[str, Any]:
        """The JSON body, in OpenAI's form."""
        error: dict[str, Any] = {"message": self.message, "type": self.kind, "param": self.param, "code": self.code}
        if self.limit is not None:
            error["limit"] = self.limit
        return {"error": error}

    def headers(self) -> dict[str, str]:
        """HTTP headers, which are also the gRPC trailing metadata."""
        return {} if self.retry_after_s is None else {"retry-after": str(self.retry_after_s)}

    def details(self) -> str:
        """The gRPC status message; it names the field even where the message does not."""
        if self.param is None or self.param in self.message:
            return self.message
        return f"{self.param}: {self.message}"


@dataclass(frozen=True, slots=True)
class _Row:
    http_status: int
    grpc_code: grpc.StatusCode
    kind: str
    code: str


_TABLE: dict[type[errors.KvrayError], _Row] = {
    errors.InvalidRequest: _Row(400, grpc.StatusCode.INVALID_ARGUMENT, "invalid_request_error", "invalid_request"),
    # OpenAI's own name for it: client libraries look for this code to shorten a conversation.
    errors.RequestTooLong: _Row(
        400, grpc.StatusCode.INVALID_ARGUMENT, "invalid_request_error", "context_length_exceeded"
    ),
    errors.Unauthenticated: _Row(401, grpc.StatusCode.UNAUTHENTICATED, "authentication_error", "invalid_api_key"),
    errors.ModelNotFound: _Row(404, grpc.StatusCode.NOT_FOUND, "invalid_request_error", "model_not_found"),
    errors.UnknownRequest: _Row(404, grpc.StatusCode.NOT_FOUND, "invalid_request_error", "unknown_request"),
    errors.Overloaded: _Row(429, grpc.StatusCode.RESOURCE_EXHAUSTED, "rate_limit_error", "overloaded"),
    errors.RequestCancelled: _Row(499, grpc.StatusCode.CANCELLED, "request_cancelled", "cancelled"),
    errors.ReplicaLost: _Row(503, grpc.StatusCode.UNAVAILABLE, "server_error", "replica_lost"),
    errors.NoReplica: _Row(503, grpc.StatusCode.UNAVAILABLE, "server_error", "no_replica"),
    errors.DeadlineExceeded: _Row(504, grpc.StatusCode.DEADLINE_EXCEEDED, "timeout_error", "deadline_exceeded"),
}

INTERNAL = Problem(
    http_status=500,
    grpc_code=grpc.StatusCode.INTERNAL,
    kind="server_error",
    code="internal",
    message="internal error; the server's log says more",
)


def describe(error: BaseException) -> Problem:
    """The client's view of `error`. Unknown errors are logged with their traceback."""
    row = next((_TABLE[cls] for cls in type(error).__mro__ if cls in _TABLE), None)
    if row is None or not isinstance(error, errors.KvrayError):
        logger.error("request failed inside the server", exc_info=error)
        return INTERNAL
    return Problem(
        http_status=row.http_status,
        grpc_code=row.grpc_code,
        kind=row.kind,
        code=row.code,
        message=error.message,
        param=_param(error),
        limit=error.limit if isinstance(error, errors.RequestTooLong) else None,
        retry_after_s=_whole_seconds(error.retry_after_s) if isinstance(error, errors.Overloaded) else None,
    )


def _whole_seconds(hint: float) -> int:
    """Rounded up. An engine that does not get on computes no useful hint, perhaps not even a finite one."""
    return math.ceil(min(max(1.0, hint), MAX_RETRY_AFTER_S))


def _param(error: errors.KvrayError) -> str | None:
    if isinstance(error, errors.InvalidRequest):
        return error.field
    return "model" if isinstance(error, errors.ModelNotFound) else None
