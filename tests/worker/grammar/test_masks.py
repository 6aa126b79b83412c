"""Masks on logits: what is not allowed is minus infinity, all else is untouched; beside the model or not."""

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
from worker.grammar.logits_mask import apply_bitmasks, apply_masks
from worker.grammar.mask_worker import MaskWorker

PATTERNS = ["[a-z]{3,9}", "[0-9]+", "(yes|no)", "é.*"]


@pytest.fixture
def worker(world: Any) -> Iterator[MaskWorker]:
    made = MaskWorker(world.vocabulary.num_words)
    yield made
    made.close()


def states(world: Any) -> list[GrammarState]:
    return [world.compiler.compile(Constraint.regex(pattern)).start() for pattern in PATTERNS]


def logits_for(world: Any, rows: int) -> torch.Tensor:
    return torch.randn(rows, world.vocab_size, generator=torch.Generator().manual_seed(7))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("size", [1, 31, 32, 33, 64, 90])
def test_bits_become_minus_infinity(dtype: torch.dtype, size: int) -> None:
    """Vocabularies shorter than the mask, and longer: ids beyond a mask are not allowed."""
    rng = np.random.default_rng(size)
    masks = list(rng.integers(-(2**31), 2**31, (2, 2), dtype=np.int32))
    logits = torch.randn(3, size).to(dtype)
    before = logits.clone()
    apply_bitmasks(logits, [0, 2], masks)
    assert torch.equal(logits[1], before[1])
    for row, mask in ((0, masks[0]), (2, masks[1])):
        for token in range(size):
            allowed = token < 64 and (int(mask[token // 32]) >> (token % 32)) & 1
            assert logits[row, token] == (before[row, token] if allowed else -torch.inf)


def test_a_device_unpacks_as_the_cpu_does() -> None:
    packed = np.random.default_rng(3).integers(-(2**31), 2**31, (5, 9), dtype=np.int32)
    on_device = logits_mask._forbidden_on_device(packed, torch.device("cpu"))
    assert torch.equal(on_device, logits_mask._forbidden_on_cpu(packed))


def test_rows_without_a_state_are_untouched(world: Any) -> None:
    some: list[GrammarState | None] = [*states(world), None]
    some[1] = None
    logits = logits_for(world, len(some))
    before = logits.clone()
    apply_masks(logits, some)
    for row, state in enumerate(some):
        if state is None:
            assert torch.equal(logits[row], before[row])
        else:
            allowed = torch.from_numpy(world.allowed(state))
            assert torch.equal(torch.nonzero(logits[row] > -torch.inf)[:, 0], allowed)
            assert torch.equal(logits[row, allowed], before[row, allowed])
    apply_masks(before, [None] * len(some))


def test_padded_ids_are_never_allowed(small_world: Any) -> None:
    state = small_world.compiler.compile(Constraint.grammar("start: <[*]>")).start()
    logits = torch.zeros(1, small_world.vocab_size)
    apply_masks(logits, [state])
    assert torch.isneginf(logits[0, small_world.tokenizer.get_vocab_size() :]).all()


def test_prepared_masks_equal_immediate_ones(world: Any, worker: MaskWorker) -> None:
    """Step after step, with rows that come, go and change places."""
    live = states(world)
    for step in range(6):
        current: list[GrammarState | None] = [*live[step % 2 :], None, *live[: step % 2]]
        if step % 3:
            worker.prepare(live)
        logits = logits_for(world, len(current))
        expected = logits.clone()
        apply_masks(expected, current)
        assert worker.apply(logits, current) == {}
        assert torch.equal(logits, expected)
        for state in live:
            if not state.is_finished:
                state.accept(int(world.allowed(state)[-1]))


def test_a_mask_of_an_earlier_position_is_not_used(world: Any, worker: MaskWorker) -> None:
    state = world.compiler.compile(Constraint.regex("ab")).start()
    worker.prepare([state])
    state.accept(world.tokenizer.token_to_id("a"))
    logits = logits_for(world, 1)
    assert worker.apply(logits, [state]) == {}
    assert torch.nonzero(logits[0] > -torch.inf)[:, 0].tolist() == [world.tokenizer.token_to_id("b")]


@pytest.mark.parametrize("prepared", [True, False])
def test_a_failure_stays_in_its_row(small_world: Any, prepared: bool) -> None:
    good = small_world.compiler.compile(Constraint.regex("[a-z]{3}")).start()
    bad = small_world.compiler.compile(Constraint.grammar('start: "aaaaa" <|end|> "b"')).start()
    bad.replay([small_world.tokenizer.token_to_id("a")] * 5)
    worker = MaskWorker(small_world.vocabulary.num_words)
    if prepared:
        worker.prepare([bad, good])
    logits = logits_for(small_world, 2)
    before = logits.clone()
    failed = worker.apply(logits, [bad, good])
    worker.close()
    assert list(failed) == [0]
    assert isinstance(failed[0], InvalidRequest)
    assert torch.equal(logits[0], before[0])
    assert torch.isneginf(logits[1]).any()
    with pytest.raises(InvalidRequest):
        apply_masks(logits, [bad])
