"""SpeculativeIndex: what was promised of what was just routed, for as long as it can come true, and at what cost."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, overload

from hypothesis import given, settings
from hypothesis import strategies as st

from cluster.core.hashing import ChunkHash, RouteScheme, hash_prompt, root_hash
from cluster.core.replica import Epoch, WorkerId
from cluster.index.speculative import LINGER_S, SpeculativeIndex

A, B = WorkerId("a"), WorkerId("b")
E1, E2 = Epoch(1), Epoch(2)


def hashes(*tokens: int, salt: str = "") -> tuple[ChunkHash, ...]:
    """One chunk per token."""
    scheme = RouteScheme(tokenizer_revision="t", model_revision="m", chunk_tokens=1, salt=salt)
    return tuple(hash_prompt(root_hash(scheme), tokens, 1))


PROMPT = hashes(*range(8))


class World:
    def __init__(self, max_chunks: int = 1000) -> None:
        self.now = 50.0
        self.index = SpeculativeIndex(lambda: self.now, max_chunks=max_chunks)

    def metric(self, name: str) -> float:
        return self.index.snapshot()[f"kvray_index_speculative_{name}"]


# --- what is promised ---


def test_a_prompt_on_its_way_counts_up_to_where_another_parts_from_it() -> None:
    index = World().index
    index.routed("r", A, E1, PROMPT)
    assert index.overlaps(PROMPT) == {A: 8}
    assert index.overlaps(PROMPT[:3]) == {A: 3}
    assert index.overlaps(hashes(0, 1, 2, 9, 4)) == {A: 3}
    assert index.overlaps(hashes(9)) == {}
    assert index.overlaps(()) == {}


def test_it_counts_who_shares_a_beginning_on_any_worker() -> None:
    index = World().index
    prompts = (hashes(0, 1, 2, 3, 4), hashes(0, 1, 2, 3), hashes(0, 1, 7), hashes(5, 1))
    for number, prompt in enumerate(prompts):
        index.routed(f"r{number}", A if number % 2 else B, E1, prompt)
    assert [index.num_sharing(PROMPT, depth) for depth in range(1, 7)] == [3, 3, 2, 2, 1, 0]
    assert index.num_sharing(hashes(9), 1) == 0
    index.withdraw("r0")
    assert [index.num_sharing(PROMPT, depth) for depth in (2, 4, 5)] == [2, 1, 0]


def test_the_longest_of_a_workers_prompts_counts() -> None:
    index = World().index
    index.routed("r1", A, E1, PROMPT[:2])
    index.routed("r2", A, E1, PROMPT[:5])
    index.routed("r3", B, E1, PROMPT[:4])
    assert index.overlaps(PROMPT) == {A: 5, B: 4}
    index.check_invariants()


def test_another_salt_shares_nothing() -> None:
    index = World().index
    index.routed("r", A, E1, hashes(*range(8), salt="tenant"))
    assert index.overlaps(PROMPT) == {}
    assert index.overlaps(hashes(*range(8), salt="tenant")) == {A: 8}


def test_routing_again_moves_the_promise() -> None:
    index = World().index
    index.routed("r", A, E1, PROMPT)
    index.routed("r", A, E1, PROMPT)
    index.routed("r", B, E1, PROMPT)
    assert index.overlaps(PROMPT) == {B: 8}
    index.routed("r", B, E1, ())
    assert index.overlaps(PROMPT) == {}


# --- how it ends ---


def test_it_lives_while_queued_or_prefilling_and_a_little_longer() -> None:
    world = World()
    world.index.routed("r", A, E1, PROMPT)
    world.now += 3600
    assert world.index.overlaps(PROMPT) == {A: 8}
    world.index.prefilled("r")
    world.now += LINGER_S - 0.01
    world.index.prefilled("r")  # once more does not prolong it
    assert world.index.overlaps(PROMPT) == {A: 8}
    world.now += 0.01
    assert world.index.overlaps(PROMPT) == {}
    assert (world.metric("entries"), world.metric("expired")) == (0, 1)


def test_a_request_that_is_not_prefilled_leaves_at_once_and_one_that_was_does_not() -> None:
    world = World()
    for request_id in ("refused", "prefilled"):
        world.index.routed(request_id, A, E1, PROMPT)
    world.index.prefilled("prefilled")
    world.index.withdraw("prefilled")
    world.index.withdraw("refused")
    world.index.withdraw("unknown")
    assert world.index.overlaps(PROMPT) == {A: 8}
    assert (world.metric("entries"), world.metric("withdrawn")) == (1, 1)


def test_the_end_of_a_life_ends_all_its_promises() -> None:
    world = World()
    world.index.routed("r1", A, E1, PROMPT)
    world.index.routed("r2", A, E1, PROMPT[:2])
    world.index.prefilled("r2")
    world.index.routed("r3", B, E1, PROMPT[:1])
    world.index.end_life(A)
    assert world.index.overlaps(PROMPT) == {B: 1}
    world.index.prefilled("r1")  # its answer was on the way
    world.now += LINGER_S
    assert world.index.overlaps(PROMPT) == {B: 1}
    world.index.check_invariants()


def test_a_new_life_ends_the_old_one_and_the_old_one_cannot_come_back() -> None:
    index = World().index
    index.routed("old", A, E1, PROMPT)
    index.routed("new", A, E2, PROMPT[:2])
    assert index.overlaps(PROMPT) == {A: 2}
    index.routed("late", A, E1, PROMPT)
    assert index.overlaps(PROMPT) == {A: 2}


def test_the_same_process_under_another_epoch_keeps_its_promises() -> None:
    index = World().index
    index.routed("before", A, E1, PROMPT)
    index.carry_over(A, E2)
    index.routed("after", A, E2, PROMPT[:2])
    assert index.overlaps(PROMPT) == {A: 8}
    index.carry_over(B, E2)  # of whom nothing is known
    index.routed("b", B, E1, PROMPT)
    assert index.overlaps(PROMPT) == {A: 8, B: 8}


# --- what it costs ---


def test_memory_is_bounded_and_the_next_to_expire_leave_first() -> None:
    world = World(max_chunks=20)
    for number in range(4):
        world.index.routed(f"r{number}", A, E1, hashes(number, *range(4)))
    world.index.prefilled("r2")
    world.index.routed("r4", A, E1, hashes(4, *range(4)))
    assert [world.index.overlaps(hashes(n)) for n in range(5)] == [{A: 1}, {A: 1}, {}, {A: 1}, {A: 1}]
    world.index.routed("r5", A, E1, hashes(5, *range(4)))  # nobody is about to leave: the oldest does
    assert [world.index.overlaps(hashes(n)) for n in (0, 1, 5)] == [{}, {A: 1}, {A: 1}]
    world.index.routed("too long", A, E1, hashes(6, *range(20)))
    assert world.index.overlaps(hashes(6)) == {}
    assert (world.metric("chunks"), world.metric("crowded_out")) == (20, 2)
    world.index.check_invariants()


class Counted(Sequence[ChunkHash]):
    """A prompt that counts how often one looks at it."""

    def __init__(self, chunks: Sequence[ChunkHash]) -> None:
        self.chunks, self.looks = chunks, 0

    def __len__(self) -> int:
        return len(self.chunks)

    @overload
    def __getitem__(self, at: int) -> ChunkHash: ...
    @overload
    def __getitem__(self, at: slice) -> Sequence[ChunkHash]: ...
    def __getitem__(self, at: Any) -> Any:
        self.looks += 1
        return self.chunks[at]

    def __iter__(self) -> Iterator[ChunkHash]:
        raise AssertionError("a lookup does not go through the whole prompt")


def test_a_lookup_costs_a_few_steps_however_many_requests_share_a_long_prefix() -> None:
    world, prefix = World(max_chunks=10**7), range(2000)
    for number in range(300):
        world.index.routed(f"r{number}", A, E1, hashes(*prefix, 5000 + number))
    for prompt, overlap in ((hashes(*prefix, 9999), 2000), (hashes(*range(1234), 9999, *range(900)), 1234)):
        counted = Counted(prompt)
        assert world.index.overlaps(counted) == {A: overlap}
        assert counted.looks < 20
        world.index.routed("mine", B, E1, counted)
        assert counted.looks < 60
        world.index.withdraw("mine")
    world.index.check_invariants()


def test_forks_fold_again_when_their_reason_is_gone() -> None:
    """Else one long-lived prompt would be cut into ever more pieces by others that come and go."""
    world, long = World(max_chunks=10**6), hashes(*range(300))
    world.index.routed("stays", A, E1, Counted(long))
    for fork in range(1, 299):
        world.index.routed("comes", B, E1, hashes(*range(fork), 9999))
        world.index.withdraw("comes")
    world.index.check_invariants()
    counted = Counted(long)
    assert world.index.overlaps(counted) == {A: 300}
    assert counted.looks < 5


# --- against a plain list ---

prompts = st.lists(st.integers(0, 1), min_size=1, max_size=6).map(lambda tokens: hashes(*tokens))
operations = st.lists(
    st.tuples(
        st.sampled_from(["route", "route", "route", "prefilled", "withdraw", "end", "tick"]),
        st.integers(0, 5),
        st.sampled_from([A, B]),
        prompts,
    ),
    max_size=40,
)


@settings(max_examples=200)
@given(operations)
def test_any_order_of_calls_equals_a_plain_list(calls: list[tuple[str, int, WorkerId, tuple[ChunkHash, ...]]]) -> None:
    world = World()
    plain: dict[str, tuple[WorkerId, tuple[ChunkHash, ...], float]] = {}
    for name, number, worker_id, path in calls:
        request_id = f"r{number}"
        if name == "route":
            world.index.routed(request_id, worker_id, E1, path)
            plain[request_id] = (worker_id, path, float("inf"))
        elif name == "prefilled":
            world.index.prefilled(request_id)
            if request_id in plain and plain[request_id][2] == float("inf"):
                plain[request_id] = (*plain[request_id][:2], world.now + LINGER_S)
        elif name == "withdraw":
            world.index.withdraw(request_id)
            if request_id in plain and plain[request_id][2] == float("inf"):
                del plain[request_id]
        elif name == "end":
            world.index.end_life(worker_id)
            plain = {key: value for key, value in plain.items() if value[0] != worker_id}
        else:
            world.now += 0.8
        plain = {key: value for key, value in plain.items() if value[2] > world.now}
        expected: dict[WorkerId, int] = {}
        for holder, held, _ in plain.values():
            common = next((i for i, (x, y) in enumerate(zip(held, path, strict=False)) if x != y), None)
            common = min(len(held), len(path)) if common is None else common
            if common:
                expected[holder] = max(expected.get(holder, 0), common)
        assert world.index.overlaps(path) == expected
        assert world.metric("entries") == len(plain)
        world.index.check_invariants()
