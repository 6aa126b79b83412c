"""A GrammarPort without a grammar library: grammars are compiled when the test says so, and allow what it says."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from concurrent.futures import Future

from cluster.core.constraint import Constraint
from cluster.core.errors import KvrayError
from worker.grammar_port import GrammarProgress

ENDLESS = 10**9


class FakeProgress:
    """Finished after `length` tokens; refuses the tokens in `refused`."""

    def __init__(self, length: int, refused: Sequence[int], family: list[FakeProgress]) -> None:
        self.tokens: list[int] = []
        self._length, self._refused = length, refused
        self._family = family
        family.append(self)

    @property
    def num_tokens(self) -> int:
        return len(self.tokens)

    @property
    def is_finished(self) -> bool:
        return len(self.tokens) >= self._length

    def accept(self, token_id: int) -> None:
        if token_id in self._refused:
            raise KvrayError(f"token {token_id} is not allowed")
        self.tokens.append(token_id)

    def replay(self, token_ids: Sequence[int]) -> None:
        self.tokens = list(token_ids)

    def fork(self) -> FakeProgress:
        twin = FakeProgress(self._length, self._refused, self._family)
        twin.tokens = list(self.tokens)
        return twin


class FakeGrammar:
    def __init__(self, length: int = ENDLESS, refused: Sequence[int] = ()) -> None:
        self.length, self.refused = length, refused
        self.started: list[FakeProgress] = []

    def start(self) -> FakeProgress:
        return FakeProgress(self.length, self.refused, self.started)


class FakePort:
    def __init__(self) -> None:
        self.pending: dict[Constraint, Future[FakeGrammar]] = {}
        self.prepared: list[list[GrammarProgress]] = []
        self.warm = self.closed = 0
        self.submitted = threading.Event()

    def warm_up(self) -> None:
        self.warm += 1

    def submit(self, constraint: Constraint) -> Future[FakeGrammar]:
        future = self.pending.setdefault(constraint, Future())
        self.submitted.set()
        return future

    def compiled(self, constraint: Constraint, length: int = ENDLESS, refused: Sequence[int] = ()) -> FakeGrammar:
        """The grammar is there from now on, for all who wait for it and all who will ask."""
        grammar = FakeGrammar(length, refused)
        self.pending.setdefault(constraint, Future()).set_result(grammar)
        return grammar

    def failed(self, constraint: Constraint, error: BaseException) -> None:
        self.pending.setdefault(constraint, Future()).set_exception(error)

    def prepare(self, states: Sequence[GrammarProgress]) -> None:
        self.prepared.append(list(states))

    def close(self) -> None:
        self.closed += 1
