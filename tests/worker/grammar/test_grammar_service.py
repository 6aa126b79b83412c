"""GrammarService: nothing happens before it is needed, and nothing waits for the vocabulary."""

from __future__ import annotations

import threading
from typing import Any

import torch

from cluster.core.constraint import Constraint
from worker.grammar.grammar_service import GrammarService
from worker.grammar.vocabulary import Vocabulary


class Loading:
    """A vocabulary that is there when the test says so."""

    def __init__(self, world: Any) -> None:
        self.begun, self.there = threading.Event(), threading.Event()
        self._world = world

    def __call__(self) -> Vocabulary:
        self.begun.set()
        assert self.there.wait(30)
        vocabulary: Vocabulary = self._world.vocabulary
        return vocabulary


def test_the_vocabulary_is_built_when_it_is_wanted_and_once(small_world: Any) -> None:
    before = threading.active_count()
    loading = Loading(small_world)
    service = GrammarService(loading)
    assert threading.active_count() == before and not loading.begun.is_set()
    service.warm_up()
    assert loading.begun.wait(30)
    pending = service.submit(Constraint.regex("[ab]"))
    service.warm_up()
    assert not pending.done()
    loading.there.set()
    state = pending.result(30).start()
    service.prepare([state])
    (mask,), failed = service.masks.masks([state], small_world.vocab_size, torch.device("cpu"))
    assert failed == {} and mask is not None and mask.sum() == 2
    service.close()
    assert threading.active_count() == before


def test_a_constraint_begins_it_too_and_closing_an_unused_one_is_nothing(small_world: Any) -> None:
    GrammarService(Loading(small_world)).close()
    service = GrammarService(lambda: small_world.vocabulary)
    assert service.submit(Constraint.json_object()).result(30).start().num_tokens == 0
    service.close()
