"""Peer: one thing that completes prompts and is compared with others; and TimedAnswer, what it returns.

Owns: the protocol, the answer with its times, and what is known about a peer's start.
Does not: talk to anything (http_peer, engine_peer).
Invariants: times are seconds since the request was sent; None means "not reported", never zero.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True, kw_only=True)
class TimedAnswer:
    """first_s, last_s: when the first and the last text came.  end_s: when the stream closed."""

    text: str
    first_s: float
    last_s: float
    end_s: float
    prompt_tokens: int
    answer_tokens: int
    cached_tokens: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerFacts:
    """What stays the same in all runs.  start_s and ready_rss: only of a peer that was started here."""

    name: str
    kind: str
    address: str
    model: str
    pid: int | None
    start_s: float | None = None
    ready_rss: int | None = None


class Peer(Protocol):
    @property
    def facts(self) -> PeerFacts: ...

    @property
    def is_local(self) -> bool:
        """Does its work burn this machine's CPU time?"""

    @property
    def can_defeat_cache(self) -> bool: ...

    async def complete(self, prompt: str, max_tokens: int, *, caching: bool) -> TimedAnswer:
        """Greedy, and never ending early. KvrayError says why there is no answer."""
