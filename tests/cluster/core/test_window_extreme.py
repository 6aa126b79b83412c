"""WindowExtreme against the plain maximum of the same window."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from cluster.core.window_extreme import WindowExtreme


@given(st.lists(st.tuples(st.integers(0, 5), st.integers(-9, 9)), min_size=1), st.integers(0, 12))
def test_it_is_the_largest_of_the_window(steps: list[tuple[int, int]], window: int) -> None:
    extreme, now, past = WindowExtreme(float(window)), 0, []
    for pause, value in steps:
        now += pause
        past.append((now, value))
        largest = max(one for at, one in past if at >= now - window)
        assert extreme.push(float(now), float(value)) == largest
        assert len(extreme) <= len([one for at, one in past if at >= now - window])
