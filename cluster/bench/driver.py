"""drive: send one run's conversations to one peer, so many at a time.

Owns: the order, the concurrency, and growing each conversation's history.
Does not: measure the machine (run_meter) or judge the answers (measures).
Invariants: conversations start in order; a turn is sent when the one before it has ended; the first failure ends all.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from cluster.bench.peer import Peer, TimedAnswer
from cluster.bench.workloads import Turn


@dataclass(frozen=True, slots=True)
class Drive:
    """answers[conversation][turn], and the seconds from the first request to the last answer."""

    answers: list[list[TimedAnswer]]
    wall_s: float


async def drive(peer: Peer, conversations: Sequence[Sequence[Turn]], concurrency: int, *, caching: bool) -> Drive:
    answers: list[list[TimedAnswer]] = [[] for _ in conversations]
    waiting = deque(zip(conversations, answers, strict=True))

    async def client() -> None:
        while waiting:
            turns, replies = waiting.popleft()
            await _talk(peer, turns, replies, caching=caching)

    started = time.perf_counter()
    try:
        async with asyncio.TaskGroup() as clients:
            for _ in range(min(concurrency, len(conversations))):
                clients.create_task(client())
    except BaseExceptionGroup as failures:
        raise failures.exceptions[0] from None
    return Drive(answers, time.perf_counter() - started)


async def _talk(peer: Peer, turns: Sequence[Turn], replies: list[TimedAnswer], *, caching: bool) -> None:
    history = ""
    for turn in turns:
        history += turn.text
        replies.append(await peer.complete(history, turn.max_tokens, caching=caching))
        history += replies[-1].text
