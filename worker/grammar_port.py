"""GrammarPort: structured output as the engine sees it: who compiles constraints, and what follows an answer.

Owns: the protocols.
Does not: know grammars, masks or the grammar library (worker.grammar implements them).
Invariants: a progress is moved by `accept` and `replay` alone, and is at the answer's newest token between steps; a
pending grammar is shared by all who asked for it, so nobody may cancel it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

from cluster.core.constraint import Constraint


class GrammarProgress(Protocol):
    """How far one answer has come in its grammar."""

    @property
    def num_tokens(self) -> int: ...

    @property
    def is_finished(self) -> bool:
        """Nothing but an end can follow."""

    def accept(self, token_id: int) -> None:
        """Move on by a token; KvrayError when the grammar does not allow it."""

    def replay(self, token_ids: Sequence[int]) -> None:
        """Start over and accept `token_ids`."""

    def fork(self) -> GrammarProgress:
        """An independent one at the same place."""


class Grammar(Protocol):
    def start(self) -> GrammarProgress:
        """Of an answer that has no token yet."""


class PendingGrammar(Protocol):
    """A grammar that is being compiled; `concurrent.futures.Future` is one."""

    def done(self) -> bool: ...

    def exception(self) -> BaseException | None:
        """Why there is none, once it is done."""

    def result(self) -> Grammar: ...

    def add_done_callback(self, fn: Callable[[Any], object]) -> None:
        """`fn` is called once it is done, on whatever thread that happens."""


class GrammarPort(Protocol):
    def warm_up(self) -> None:
        """Begin with what takes long and needs no constraint; does not wait for it."""

    def submit(self, constraint: Constraint) -> PendingGrammar:
        """Never blocks."""

    def prepare(self, states: Sequence[GrammarProgress]) -> None:
        """Begin with the masks of their next tokens; they do not move before the next step uses these."""

    def close(self) -> None: ...
