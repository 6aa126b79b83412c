"""Ending background tasks for certain.

Owns: `end_task`.
Does not: start or watch tasks.
Invariants: when `end_task` returns, the task is done.
"""

from __future__ import annotations

import asyncio

_AGAIN_S = 0.05


async def end_task(task: asyncio.Task[None]) -> None:
    """Cancel until it is over: up to Python 3.11 `asyncio.wait_for`, which the Redis client calls for every command,
    loses a cancellation that comes in the moment its inner call ends."""
    while not task.done():
        task.cancel()
        await asyncio.wait({task}, timeout=_AGAIN_S)
