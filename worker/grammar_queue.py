"""GrammarQueue: requests whose constraint is being compiled, before the scheduler sees them.

Owns: these requests, in the order in which they came, and waking the engine when one of them can go on.
Does not: compile (GrammarPort) or judge requests (scheduler).
Invariants: compiling holds up nobody else; a grammar that is not wanted any more is forgotten, never cancelled, for
others may wait for it; whatever goes wrong with a grammar ends its own request only.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator

from cluster.core.errors import InvalidRequest, KvrayError, from_wire
from cluster.core.request import GenerationRequest
from worker.grammar_port import GrammarPort, GrammarProgress, PendingGrammar

logger = logging.getLogger(__name__)


class GrammarQueue:
    """Used by the engine's thread alone. `port` None: an engine without structured output."""

    def __init__(self, port: GrammarPort | None = None) -> None:
        self._port = port
        self._waiting: dict[str, tuple[GenerationRequest, PendingGrammar]] = {}
        self._wakes: list[Callable[[], None]] = []

    def __len__(self) -> int:
        return len(self._waiting)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._waiting

    def wake_with(self, wake: Callable[[], None]) -> None:
        """`wake` is called, from any thread, when a grammar is there."""
        self._wakes[:] = [wake]

    @property
    def num_tokens(self) -> int:
        """Prompt tokens that wait here."""
        return sum(len(request.prompt_token_ids) for request, _ in self._waiting.values())

    @property
    def has_ready(self) -> bool:
        return any(pending.done() for _, pending in self._waiting.values())

    def requests(self) -> Iterator[GenerationRequest]:
        return (request for request, _ in self._waiting.values())

    def add(self, request: GenerationRequest) -> None:
        """Raises InvalidRequest, and then nothing has changed."""
        assert request.constraint is not None, "nothing to compile"
        if self._port is None:
            field = request.constraint.field
            raise InvalidRequest(field, f"{field} is refused: this engine has no structured output")
        pending = self._port.submit(request.constraint)
        self._waiting[request.request_id] = (request, pending)
        if not pending.done():
            wakes = self._wakes  # a grammar lives long, and shall not keep the engine with it
            pending.add_done_callback(lambda _: [wake() for wake in wakes])

    def remove(self, request_id: str) -> bool:
        """False when it is not here (any more)."""
        return self._waiting.pop(request_id, None) is not None

    def take_ready(self) -> list[tuple[GenerationRequest, GrammarProgress | KvrayError]]:
        """Requests whose grammar is compiled, or cannot be."""
        ready = [(request, pending) for request, pending in self._waiting.values() if pending.done()]
        for request, _ in ready:
            del self._waiting[request.request_id]
        return [(request, _outcome(pending)) for request, pending in ready]


def _outcome(pending: PendingGrammar) -> GrammarProgress | KvrayError:
    error = pending.exception()
    if error is None:
        return pending.result().start()
    if isinstance(error, KvrayError):
        return from_wire(error.to_wire())  # the same error is kept for whoever asks next
    logger.error("a constraint could not be compiled", exc_info=error)
    return KvrayError(f"the constraint could not be compiled: {type(error).__name__}")
