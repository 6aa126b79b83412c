"""RouteLedger: every call idempotent, loads never negative, nothing crosses from one life of a replica to the next."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from cluster.core.replica import Epoch, WorkerId
from router.route_ledger import RouteLedger

A, B = WorkerId("a"), WorkerId("b")
E1, E2 = Epoch(1), Epoch(2)


def test_booking_counts_until_the_first_token_and_the_request_until_release() -> None:
    ledger = RouteLedger()
    ledger.book("r", A, E1, 100)
    assert (ledger.uncached_tokens(A, E1), ledger.requests(A, E1)) == (100, 1)
    ledger.prefill_done("r")
    ledger.prefill_done("r")
    assert (ledger.uncached_tokens(A, E1), ledger.requests(A, E1)) == (0, 1)
    ledger.release("r")
    ledger.release("r")
    assert ledger.requests(A, E1) == 0


def test_booking_again_moves_the_request() -> None:
    """Serve asks the chooser again at every back-off; two bookings would count the load twice."""
    ledger = RouteLedger()
    ledger.book("r", A, E1, 100)
    ledger.book("r", B, E1, 60)
    assert (ledger.uncached_tokens(A, E1), ledger.uncached_tokens(B, E1)) == (0, 60)
    assert ledger.booked_on("r") == (B, E1)


def test_completion_of_a_dead_life_does_not_touch_the_next_one() -> None:
    """A worker comes back under the same name while old requests still end: its load must not become negative."""
    ledger = RouteLedger()
    ledger.book("old", A, E1, 100)
    ledger.book("new", A, E2, 40)
    ledger.release("old")
    assert ledger.uncached_tokens(A, E2) == 40
    ledger.release("new")
    assert ledger.uncached_tokens(A, E2) == 0


def test_bookings_go_on_with_their_process_under_its_new_epoch() -> None:
    ledger = RouteLedger()
    ledger.book("r1", A, E1, 100)
    ledger.book("r2", A, E1, 20)
    ledger.book("b", B, E1, 5)
    ledger.book("r3", A, E2, 3)
    ledger.prefill_done("r2")
    for _ in range(2):
        ledger.carry_over(A, E1, E2)
        ledger.carry_over(A, E2, E2)
        assert (ledger.load(A, E1), ledger.load(A, E2), ledger.load(B, E1)) == ((0, 0), (103, 3), (5, 1))
    assert ledger.booked_on("r1") == (A, E2)
    for request_id in ("r1", "r2", "r3"):
        ledger.release(request_id)
    assert (ledger.load(A, E1), ledger.load(A, E2), len(ledger)) == ((0, 0), (0, 0), 1)


def test_unknown_requests_are_ignored() -> None:
    ledger = RouteLedger()
    ledger.prefill_done("nobody")
    ledger.release("nobody")
    assert ledger.booked_on("nobody") is None


@given(
    st.lists(
        st.tuples(
            st.sampled_from(["book", "done", "release", "carry"]),
            st.integers(0, 4),
            st.sampled_from([A, B]),
            st.sampled_from([E1, E2]),
            st.integers(-5, 50),
        )
    )
)
def test_any_order_of_calls_equals_a_plain_recount(calls: list[tuple[str, int, WorkerId, Epoch, int]]) -> None:
    ledger = RouteLedger()
    naive: dict[str, tuple[WorkerId, Epoch, int]] = {}
    for name, number, worker, epoch, tokens in calls:
        request = str(number)
        if name == "book":
            ledger.book(request, worker, epoch, tokens)
            naive[request] = (worker, epoch, max(tokens, 0))
        elif name == "done":
            ledger.prefill_done(request)
            if request in naive:
                naive[request] = (*naive[request][:2], 0)
        elif name == "carry":
            ledger.carry_over(worker, E1, E2)
            naive = {key: (w, E2 if w == worker else e, t) for key, (w, e, t) in naive.items()}
        else:
            ledger.release(request)
            naive.pop(request, None)
        assert len(ledger) == len(naive)
        for w in (A, B):
            for e in (E1, E2):
                mine = [t for (nw, ne, t) in naive.values() if (nw, ne) == (w, e)]
                assert ledger.uncached_tokens(w, e) == sum(mine)
                assert ledger.requests(w, e) == len(mine)
