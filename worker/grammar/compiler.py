"""GrammarCompiler: constraints to compiled grammars, off the engine's thread, each once.

Owns: the thread that builds the vocabulary and then compiles, and the grammars used last.
Does not: hold requests back until their grammar is there (the engine does).
Invariants: the cache never has more than `capacity` entries; equal constraints that are in the cache compile once,
whoever asks at the same time; a constraint that was refused stays refused with the same message; without a vocabulary
every constraint is refused, and the reason is logged once. Any thread may call.
"""

from __future__ import annotations

import logging
import threading
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor

from cluster.core.constraint import Constraint
from cluster.core.errors import ConfigError, InvalidRequest
from worker.grammar.compiled_grammar import CompiledGrammar
from worker.grammar.vocabulary import Vocabulary

logger = logging.getLogger(__name__)

DEFAULT_CAPACITY = 128
# The library recurses through chains of rules: 33 KB of them overflow 8 MiB, and with it the process.
_STACK_BYTES = 256 * 1024 * 1024


class GrammarCompiler:
    def __init__(self, load: Callable[[], Vocabulary], *, capacity: int = DEFAULT_CAPACITY) -> None:
        """load: gives the vocabulary, or ConfigError; it begins at once, on the compiler's thread.

        capacity: compiled grammars to keep; the least recently used one goes first.
        """
        self._capacity = capacity
        self._grammars: OrderedDict[Constraint, Future[CompiledGrammar]] = OrderedDict()
        self._lock = threading.Lock()
        self._thread = _large_stack_thread()
        self._vocabulary = self._thread.submit(_loaded, load)

    def __len__(self) -> int:
        return len(self._grammars)

    def submit(self, constraint: Constraint) -> Future[CompiledGrammar]:
        """The grammar, or `InvalidRequest`, once it is compiled. Others may wait for it too: do not cancel it."""
        with self._lock:
            future = self._grammars.get(constraint)
            if future is None:
                future = self._thread.submit(self._compiled, constraint)
                self._grammars[constraint] = future
                if len(self._grammars) > self._capacity:
                    self._grammars.popitem(last=False)
            self._grammars.move_to_end(constraint)
            return future

    def compile(self, constraint: Constraint) -> CompiledGrammar:
        """`submit`, and wait."""
        return self.submit(constraint).result()

    def close(self) -> None:
        self._thread.shutdown(wait=True, cancel_futures=True)

    def _compiled(self, constraint: Constraint) -> CompiledGrammar:
        """On the thread that has loaded the vocabulary before."""
        try:
            vocabulary = self._vocabulary.result()
        except ConfigError as error:
            raise InvalidRequest(constraint.field, f"{constraint.field} is refused: {error.message}") from error
        return CompiledGrammar(constraint, vocabulary)


def _loaded(load: Callable[[], Vocabulary]) -> Vocabulary:
    try:
        return load()
    except ConfigError as error:
        logger.warning("no structured output: %s", error.message)
        raise
    except Exception as error:
        logger.exception("no structured output")
        raise ConfigError(f"the vocabulary cannot be read: {type(error).__name__}") from error


def _large_stack_thread() -> ThreadPoolExecutor:
    """An executor whose one thread runs already: a thread's stack has the size that is set when it starts."""
    executor = ThreadPoolExecutor(max_workers=1, thread_name_prefix="grammar-compiler")
    usual = threading.stack_size(_STACK_BYTES)
    try:
        executor.submit(int).result()
    finally:
        threading.stack_size(usual)
    return executor
