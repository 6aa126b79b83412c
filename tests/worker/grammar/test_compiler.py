"""GrammarCompiler: each constraint once, off the caller's thread, in a bounded cache."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest

from cluster.core.constraint import Constraint
from cluster.core.errors import ConfigError, InvalidRequest
from worker.grammar import compiler as module
from worker.grammar.compiled_grammar import CompiledGrammar
from worker.grammar.compiler import GrammarCompiler
from worker.grammar.vocabulary import Vocabulary


@pytest.fixture
def counted(small_world: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[GrammarCompiler, Counter[str]]]:
    """A compiler of three entries that counts what it compiles, slowly."""
    counts: Counter[str] = Counter()

    def compile_slowly(constraint: Constraint, vocabulary: Vocabulary) -> CompiledGrammar:
        counts[constraint.text] += 1
        assert threading.current_thread() is not threading.main_thread()
        time.sleep(0.01)
        return CompiledGrammar(constraint, vocabulary)

    monkeypatch.setattr(module, "CompiledGrammar", compile_slowly)
    compiler = GrammarCompiler(lambda: small_world.vocabulary, capacity=3)
    yield compiler, counts
    compiler.close()


def test_threads_that_ask_at_once_share_one_compilation(counted: tuple[GrammarCompiler, Counter[str]]) -> None:
    compiler, counts = counted
    found: list[CompiledGrammar] = []
    threads = [
        threading.Thread(target=lambda: found.append(compiler.compile(Constraint.regex("a+")))) for _ in range(8)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert counts == {"a+": 1}
    assert len(found) == 8
    assert len(set(map(id, found))) == 1


def test_the_least_recently_used_goes_first(counted: tuple[GrammarCompiler, Counter[str]]) -> None:
    compiler, counts = counted
    for text in ("a", "b", "c", "a", "d", "a", "b"):  # d drops b, then b drops c
        compiler.compile(Constraint.regex(text))
        assert len(compiler) <= 3
    assert counts == {"a": 1, "b": 2, "c": 1, "d": 1}


def test_the_kind_is_part_of_the_key(small_world: Any) -> None:
    text = '["a"]'
    regex = small_world.compiler.compile(Constraint.regex(text))
    choice = small_world.compiler.compile(Constraint.choice(["a"]))
    assert choice.constraint.text == regex.constraint.text == text
    assert choice is not regex


def test_submit_does_not_wait_and_a_refusal_stays(counted: tuple[GrammarCompiler, Counter[str]]) -> None:
    compiler, counts = counted
    first = compiler.submit(Constraint.regex("(x"))
    assert not first.done()
    for _ in range(2):
        with pytest.raises(InvalidRequest, match="unclosed group"):
            compiler.submit(Constraint.regex("(x")).result()
    assert counts == {"(x": 1}


def test_other_threads_keep_the_usual_stack(small_world: Any) -> None:
    before = threading.stack_size()
    GrammarCompiler(lambda: small_world.vocabulary).close()
    assert threading.stack_size() == before


def test_a_vocabulary_needs_ends_of_its_tokenizer(small_world: Any) -> None:
    for wrong in ((), (small_world.vocab_size + 5,)):
        with pytest.raises(ConfigError, match="end-of-sequence"):
            Vocabulary(small_world.tokenizer, vocab_size=small_world.vocab_size, eos_token_ids=wrong)


@pytest.mark.parametrize("error", [ConfigError("an odd tokenizer"), ValueError("a bug")])
def test_without_a_vocabulary_all_constraints_are_refused_and_one_line_says_why(
    error: Exception, caplog: pytest.LogCaptureFixture
) -> None:
    def load() -> Vocabulary:
        raise error

    compiler = GrammarCompiler(load)
    for constraint in (Constraint.regex("a"), Constraint.json_object(), Constraint.regex("a")):
        with pytest.raises(InvalidRequest) as caught:
            compiler.compile(constraint)
        assert caught.value.field == constraint.field
        assert "odd tokenizer" in caught.value.message or "vocabulary cannot be read" in caught.value.message
    compiler.close()
    assert len([record for record in caplog.records if record.name == module.__name__]) == 1


def test_constraints_wait_for_the_vocabulary_and_asking_does_not(small_world: Any) -> None:
    there = threading.Event()

    def load() -> Vocabulary:
        assert there.wait(30)
        vocabulary: Vocabulary = small_world.vocabulary
        return vocabulary

    compiler = GrammarCompiler(load)
    future = compiler.submit(Constraint.regex("a"))
    assert not future.done()
    there.set()
    assert future.result(30).start().num_tokens == 0
    compiler.close()
