"""DeltaSink: where the deltas of one request go, and the sink that makes few of many.

Owns: the protocol and CollectingSink.
Does not: write sockets (token_channel_server) or hand frames to requests (engine_client).
Invariants: a sink is used on one event loop; what comes out has the tokens, order and last delta of what went in.
"""

from __future__ import annotations

from typing import Protocol

from cluster.core.request import TokenDelta

# Tokens that wait at most, so that a router still sees a long answer grow.
COLLECTED_TOKENS = 64


class DeltaSink(Protocol):
    def put(self, delta: TokenDelta) -> None:
        """Must not block or raise; after the sink broke it does nothing."""

    async def ended(self) -> None:
        """Returns once the last delta was put. Raises ReplicaLost when nobody can read the sink any more."""

    def close(self) -> None:
        """Nothing more will be put, whether the last delta was or not."""


class CollectingSink:
    """For an answer that is read as a whole: the first delta passes at once, later ones as pieces of many tokens."""

    def __init__(self, sink: DeltaSink, tokens: int = COLLECTED_TOKENS) -> None:
        self._sink = sink
        self._limit = tokens
        self._begun = False
        self._waiting: dict[int, TokenDelta] = {}
        self._tokens = 0

    def put(self, delta: TokenDelta) -> None:
        if delta.error is None:
            before = self._waiting.pop(delta.choice, None)  # the newest goes to the end, so that the last stays last
            self._waiting[delta.choice] = delta if before is None else _joined(before, delta)
            self._tokens += len(delta.token_ids)
        if delta.last or not self._begun or self._tokens >= self._limit:
            self._flush()
        if delta.error is not None:
            self._sink.put(delta)

    async def ended(self) -> None:
        await self._sink.ended()

    def close(self) -> None:
        self._sink.close()

    def _flush(self) -> None:
        self._begun = True
        for delta in self._waiting.values():
            self._sink.put(delta)
        self._waiting.clear()
        self._tokens = 0


def _joined(first: TokenDelta, second: TokenDelta) -> TokenDelta:
    """Two deltas of one choice as one."""
    return second._replace(
        token_ids=first.token_ids + second.token_ids,
        cached_tokens=first.cached_tokens if second.cached_tokens is None else second.cached_tokens,
        logprobs=second.logprobs if first.logprobs is None else first.logprobs + (second.logprobs or ()),
        prompt_logprobs=second.prompt_logprobs if first.prompt_logprobs is None else first.prompt_logprobs,
    )
