"""step_shape: prefill and decode told apart, and their contexts."""

from __future__ import annotations

from cluster.core.sampling import SamplingParams
from cluster.core.step_time import StepShape
from worker.batch import Batch, ScheduledSeq
from worker.step_shape import step_shape


def row(count: int, start: int, *, sample: bool = True) -> ScheduledSeq:
    return ScheduledSeq("s", [1] * count, start, [], sample, SamplingParams())


def attended(count: int, start: int) -> int:
    return sum(position + 1 for position in range(start, start + count))


def test_nothing_to_do_has_no_shape() -> None:
    assert step_shape(Batch(())) == StepShape(0, 0.0, 0, 0)


def test_a_step_with_pieces_and_decode_rows() -> None:
    batch = Batch((row(1, 99), row(1, 7), row(30, 0, sample=False), row(5, 64)))
    assert step_shape(batch) == StepShape(35, attended(30, 0) + attended(5, 64), 2, 100 + 8)


def test_single_tokens_that_are_prefill() -> None:
    assert step_shape(Batch((row(1, 0), row(1, 50, sample=False)))) == StepShape(2, 1 + 51, 0, 0)
