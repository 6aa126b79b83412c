"""LateAnswers, and that EngineClient counts each request once, at its first token."""

from __future__ import annotations

import pytest

from worker.late_answers import LateAnswers


@pytest.mark.parametrize(("target_s", "late"), [(2.0, 1), (0.5, 3), (None, 0)])
def test_what_came_after_the_target_is_late(target_s: float | None, late: int) -> None:
    counts = LateAnswers(target_s)
    for ttft_s in (1.0, 2.0, 2.5):
        counts.note(ttft_s)
    assert (counts.answered, counts.late) == (3, late)
