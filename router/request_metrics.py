"""RequestMetrics: how long the requests of one front door took and how they ended, under vLLM's names.

Owns: these metrics, and the time of each request's first and last token.
Does not: export them (cluster.metric_tools' library does).
Invariants: every request ends in exactly one of success and failure; a client that leaves is a failure called
cancelled; the time to first token is told with that token, the others at the end of a whole answer.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from cluster.core.errors import KvrayError
from cluster.metric_tools import MetricTools, NoMetrics
from router.generation import GenerationEvent
from router.status import INTERNAL, describe

# vLLM's own, so that its dashboards' quantiles look alike
_TTFT_S = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0)
_PER_TOKEN_S = (0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0)
_WHOLE_S = (0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 60.0, 120.0, 240.0, 480.0, 960.0)


class RequestTimes:
    """One request's. choices: answers that it asks for and that are not complete.  tokens: of all answers so far."""

    __slots__ = ("_clock", "_on_first", "began", "choices", "finish_reason", "first", "tokens")

    def __init__(self, clock: Callable[[], float], on_first: Callable[[float], None]) -> None:
        self._clock = clock
        self._on_first = on_first
        self.choices = 1
        self.began = clock()
        self.first: float | None = None
        self.tokens = 0
        self.finish_reason = ""

    def note(self, event: GenerationEvent) -> None:
        if self.first is None and event.token_ids:
            self.first = self._clock()
            self._on_first(self.first - self.began)
        self.tokens = event.usage.completion_tokens
        if event.finish_reason is not None:
            self.finish_reason = str(event.finish_reason)
            self.choices -= 1


class RequestMetrics:
    """`clock`: monotonic seconds."""

    def __init__(self, tools: MetricTools | None = None, clock: Callable[[], float] = time.monotonic) -> None:
        tools = NoMetrics() if tools is None else tools
        self.clock = clock
        self._ttft = tools.histogram("kvray_time_to_first_token_seconds", "Arrival to first token", _TTFT_S)
        self._per_token = tools.histogram(
            "kvray_request_time_per_output_token_seconds", "Mean time between an answer's tokens", _PER_TOKEN_S
        )
        self._whole = tools.histogram("kvray_e2e_request_latency_seconds", "Arrival to last token", _WHOLE_S)
        self._success = tools.counter(
            "kvray_request_success", "Answers that ended as they should", ("finished_reason",)
        )
        self._failure = tools.counter("kvray_request_failure", "Requests that ended otherwise", ("code",))

    @contextmanager
    def watched(self) -> Iterator[RequestTimes]:
        """Around all of a request; its events go to `note`."""
        times = RequestTimes(self.clock, self._ttft.observe)
        try:
            yield times
        except (GeneratorExit, asyncio.CancelledError):
            if not times.choices:  # leaving then is how readers of a generator end
                self._succeeded(times)
            else:
                self._failure.inc(1, {"code": "cancelled"})
            raise
        except Exception as error:
            self._failure.inc(1, {"code": _code(error)})
            raise
        self._succeeded(times)

    def _succeeded(self, times: RequestTimes) -> None:
        self._success.inc(1, {"finished_reason": times.finish_reason or "none"})
        if times.first is None:
            return
        now = self.clock()
        self._whole.observe(now - times.began)
        if times.tokens > 1:
            self._per_token.observe((now - times.first) / (times.tokens - 1))


def _code(error: Exception) -> str:
    return describe(error).code if isinstance(error, KvrayError) else INTERNAL.code  # logged where it is answered
