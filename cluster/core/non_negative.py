"""Least squares with coefficients that are not negative, for a handful of them.

Owns: minimising 1/2 x'Ax - b'x over x >= 0 for a symmetric positive definite A (Lawson and Hanson, 1974).
Does not: build the normal equations or choose how they are scaled.
Invariants: the result is finite and >= 0; at a zero of it the gradient points outwards; it ends after a bounded number
of small solves whatever rounding does.
"""

from __future__ import annotations

from collections.abc import Sequence

_TOLERANCE = 1e-12


def solve_non_negative(matrix: Sequence[Sequence[float]], right: Sequence[float]) -> list[float]:
    """`matrix`: positive definite, with a diagonal of about 1."""
    size = len(right)
    found = [0.0] * size
    free: list[int] = []
    for _ in range(3 * size):
        slope = [right[i] - sum(a * x for a, x in zip(matrix[i], found, strict=True)) for i in range(size)]
        best = max((i for i in range(size) if i not in free), key=slope.__getitem__, default=None)
        if best is None or slope[best] <= _TOLERANCE * abs(right[best]):
            break
        free.append(best)
        found = _settle(matrix, right, found, free)
    return found


def _settle(
    matrix: Sequence[Sequence[float]], right: Sequence[float], found: list[float], free: list[int]
) -> list[float]:
    """The best point with only `free` above zero. Those that want to be negative leave `free`, nearest first."""
    while free:
        target = dict(zip(free, _solve(matrix, right, free), strict=True))
        falling = [i for i in free if target[i] <= 0.0]
        if not falling:
            return [target.get(i, 0.0) for i in range(len(right))]
        step = min(found[i] / (found[i] - target[i]) if found[i] > 0.0 else 0.0 for i in falling)
        found = [x + step * (target[i] - x) if i in target else 0.0 for i, x in enumerate(found)]
        leaving = [i for i in falling if found[i] <= _TOLERANCE] or falling[:1]
        for i in leaving:
            found[i] = 0.0
            free.remove(i)
    return [0.0] * len(right)


def _solve(matrix: Sequence[Sequence[float]], right: Sequence[float], free: Sequence[int]) -> list[float]:
    """Cholesky, on the rows and columns of `free`."""
    size = len(free)
    lower: list[list[float]] = []
    half: list[float] = []
    for i in range(size):
        row: list[float] = []
        for j in range(i):
            done = sum(a * b for a, b in zip(row, lower[j], strict=False))
            row.append((matrix[free[i]][free[j]] - done) / lower[j][j])
        pivot = matrix[free[i]][free[i]] - sum(a * a for a in row)
        row.append(max(pivot, 1e-15) ** 0.5)
        half.append((right[free[i]] - sum(a * b for a, b in zip(row, half, strict=False))) / row[i])
        lower.append(row)
    result = half
    for i in reversed(range(size)):
        result[i] = (result[i] - sum(lower[k][i] * result[k] for k in range(i + 1, size))) / lower[i][i]
    return result
