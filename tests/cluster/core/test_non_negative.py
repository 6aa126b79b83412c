"""solve_non_negative: against an exhaustive search over which coefficients are zero."""

from __future__ import annotations

import itertools
import random
from fractions import Fraction

import pytest

from cluster.core.non_negative import solve_non_negative


def exact(matrix: list[list[float]], right: list[float]) -> list[float]:
    """The best of all supports, in exact arithmetic."""
    size = len(right)
    best: tuple[Fraction, list[Fraction]] = (Fraction(0), [Fraction(0)] * size)
    for count in range(1, size + 1):
        for free in itertools.combinations(range(size), count):
            x = _eliminate([[Fraction(matrix[i][j]) for j in free] + [Fraction(right[i])] for i in free])
            if min(x) < 0:
                continue
            full = [Fraction(0)] * size
            for i, value in zip(free, x, strict=True):
                full[i] = value
            cost = sum(
                (full[i] * Fraction(matrix[i][j]) * full[j] for i in range(size) for j in range(size)), Fraction(0)
            )
            cost = cost / 2 - sum((full[i] * Fraction(right[i]) for i in range(size)), Fraction(0))
            best = min(best, (cost, full), key=lambda pair: pair[0])
    return [float(value) for value in best[1]]


def _eliminate(rows: list[list[Fraction]]) -> list[Fraction]:
    for i in range(len(rows)):
        rows[i] = [value / rows[i][i] for value in rows[i]]
        for j in range(len(rows)):
            if i != j:
                rows[j] = [b - rows[j][i] * a for a, b in zip(rows[i], rows[j], strict=True)]
    return [row[-1] for row in rows]


@pytest.mark.parametrize("seed", range(40))
def test_it_finds_the_best_point(seed: int) -> None:
    rng = random.Random(seed)
    columns = [[rng.gauss(0, 1) for _ in range(5)] for _ in range(8)]
    matrix = [[sum(row[i] * row[j] for row in columns) for j in range(5)] for i in range(5)]
    right = [rng.gauss(0, 3) for _ in range(5)]
    assert solve_non_negative(matrix, right) == pytest.approx(exact(matrix, right), abs=1e-7)


def test_where_everything_pulls_below_zero_nothing_is_left() -> None:
    assert solve_non_negative([[1.0, 0.5], [0.5, 1.0]], [-1.0, 0.0]) == [0.0, 0.0]


def test_equal_columns_end_in_something_finite() -> None:
    found = solve_non_negative([[1.0, 1.0], [1.0, 1.0]], [1.0, 1.0])
    assert sum(found) == pytest.approx(1.0)
    assert min(found) >= 0
