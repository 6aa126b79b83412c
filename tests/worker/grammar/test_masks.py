"""Masks for the sampler: exactly what the states allow, computed beside the model or not."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

from cluster.core.constraint import Constraint
from cluster.core.errors import InvalidRequest
from worker.grammar import logits_mask
from worker.grammar.grammar_state import GrammarState
from worker.grammar.logits_mask import allowed_tokens
from worker.grammar.mask_worker import MaskWorker

CPU = torch.device("cpu")
PATTERNS = ["[a-z]{3,9}", "[0-9]+", "(yes|no)", "é.*"]


@pytest.fixture
def worker() -> Iterator[MaskWorker]:
    made = MaskWorker()
    yield made
    made.close()


def states(world: Any) -> list[GrammarState]:
    return [world.compiler.compile(Constraint.regex(pattern)).start() for pattern in PATTERNS]


def allowed(worker: MaskWorker, state: GrammarState, size: int) -> torch.Tensor:
    (mask,), failed = worker.masks([state], size, CPU)
    assert mask is not None and failed == {}
    return mask


@pytest.mark.parametrize("size", [1, 31, 32, 33, 64, 90])
def test_bits_become_flags(size: int) -> None:
    """Vocabularies shorter than the mask, and longer: ids beyond a mask are not allowed."""
    rng = np.random.default_rng(size)
    masks = list(rng.integers(-(2**31), 2**31, (2, 2), dtype=np.int32))
    allowed = allowed_tokens(masks, size, CPU)
    assert allowed.dtype == torch.bool and allowed.shape == (2, size)
    for row, mask in enumerate(masks):
        for token in range(size):
            assert allowed[row, token].item() == (token < 64 and bool((int(mask[token // 32]) >> (token % 32)) & 1))


def test_a_device_unpacks_as_the_cpu_does() -> None:
    packed = np.random.default_rng(3).integers(-(2**31), 2**31, (5, 9), dtype=np.int32)
    assert torch.equal(logits_mask._unpacked_on_device(packed, CPU), logits_mask._unpacked_on_cpu(packed))


def test_rows_without_a_state_have_no_mask(world: Any, worker: MaskWorker) -> None:
    some: list[GrammarState | None] = [*states(world), None]
    some[1] = None
    masks, failed = worker.masks(some, world.vocab_size, CPU)
    assert failed == {}
    for mask, state in zip(masks, some, strict=True):
        assert (mask is None) == (state is None)
        if mask is not None:
            assert torch.nonzero(mask)[:, 0].tolist() == list(world.allowed(state))
    assert worker.masks([None, None], world.vocab_size, CPU) == ([None, None], {})


def test_padded_ids_are_never_allowed(small_world: Any, worker: MaskWorker) -> None:
    state = small_world.compiler.compile(Constraint.grammar("start: <[*]>")).start()
    assert not allowed(worker, state, small_world.vocab_size)[small_world.tokenizer.get_vocab_size() :].any()


def test_prepared_masks_equal_immediate_ones(world: Any, worker: MaskWorker) -> None:
    """Step after step, with rows that come, go and change places."""
    live = states(world)
    for step in range(6):
        current: list[GrammarState | None] = [*live[step % 2 :], None, *live[: step % 2]]
        if step % 3:
            worker.prepare(live)
        masks, failed = worker.masks(current, world.vocab_size, CPU)
        assert failed == {}
        for mask, state in zip(masks, current, strict=True):
            if mask is None:
                assert state is None
            else:
                assert torch.nonzero(mask)[:, 0].tolist() == list(world.allowed(state))
        for state in live:
            if not state.is_finished:
                state.accept(int(world.allowed(state)[-1]))


def test_a_mask_of_an_earlier_position_is_not_used(world: Any, worker: MaskWorker) -> None:
    state = world.compiler.compile(Constraint.regex("ab")).start()
    worker.prepare([state])
    state.accept(world.tokenizer.token_to_id("a"))
    mask = allowed(worker, state, world.vocab_size)
    assert torch.nonzero(mask)[:, 0].tolist() == [world.tokenizer.token_to_id("b")]


@pytest.mark.parametrize("prepared", [True, False])
def test_a_failure_stays_in_its_row(small_world: Any, worker: MaskWorker, prepared: bool) -> None:
    good = small_world.compiler.compile(Constraint.regex("[a-z]{3}")).start()
    bad = small_world.compiler.compile(Constraint.grammar('start: "aaaaa" <|end|> "b"')).start()
    bad.replay([small_world.tokenizer.token_to_id("a")] * 5)
    if prepared:
        worker.prepare([bad, good])
    masks, failed = worker.masks([bad, good], small_world.vocab_size, CPU)
    assert list(failed) == [0]
    assert isinstance(failed[0], InvalidRequest)
    assert masks[0] is None and masks[1] is not None and masks[1].any()
