"""GrammarService: the GrammarPort of an engine with a real model: the compiler and the masks.

Owns: both, and when the vocabulary is built: at `warm_up`, or when the first constraint comes.
Does not: hold requests back (worker.grammar_queue) or apply masks (worker.model_runner asks `masks` for them).
Invariants: starting an engine waits for nothing here, and an engine that never sees a constraint and is not warmed up
has no thread of it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import cast

from cluster.core.constraint import Constraint
from worker.grammar.compiled_grammar import CompiledGrammar
from worker.grammar.compiler import GrammarCompiler
from worker.grammar.grammar_state import GrammarState
from worker.grammar.mask_worker import MaskWorker
from worker.grammar.vocabulary import Vocabulary
from worker.grammar_port import GrammarProgress


class GrammarService:
    """Used by the engine's thread alone; `load` gives the vocabulary, on another thread."""

    def __init__(self, load: Callable[[], Vocabulary]) -> None:
        self.masks = MaskWorker()
        self._load = load
        self._compiler: GrammarCompiler | None = None

    def warm_up(self) -> None:
        self._started()

    def submit(self, constraint: Constraint) -> Future[CompiledGrammar]:
        return self._started().submit(constraint)

    def prepare(self, states: Sequence[GrammarProgress]) -> None:
        self.masks.prepare(cast("Sequence[GrammarState]", states))  # all of them are from here

    def close(self) -> None:
        if self._compiler is not None:
            self._compiler.close()
        self.masks.close()

    def _started(self) -> GrammarCompiler:
        if self._compiler is None:
            self._compiler = GrammarCompiler(self._load)
        return self._compiler
