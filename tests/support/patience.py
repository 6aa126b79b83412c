"""Waiting for something that happens in other processes."""

from __future__ import annotations

import time
from collections.abc import Callable


def eventually(condition: Callable[[], object], what: str, timeout_s: float, poll_s: float = 0.1) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, f"not within {timeout_s} s: {what}"
        time.sleep(poll_s)
