"""StepResults: what a step's tokens do to their sequences, and which deltas tell of it."""

from __future__ import annotations

from typing import Any

import fake_engine as fakes
import pytest
from scheduling_world import SchedulingWorld

from cluster.core.errors import KvrayError
from cluster.core.request import FinishReason, TokenDelta

A, B = list(range(1, 14)), list(range(50, 55))


def book(world: SchedulingWorld, **changes: Any) -> list[TokenDelta]:
    """Run one step by hand; `changes`, by sequence id, replace fields of what the runner answered."""
    batch = world.scheduler.schedule()
    sampled = world.fake.runner.run(batch)
    rows = [seq.seq_id for seq in batch.seqs if seq.sample]
    results = [result._replace(**changes.get(row, {})) for row, result in zip(rows, sampled, strict=True)]
    return world.scheduler.complete(batch, results)


def test_a_piece_of_a_prompt_tells_nothing() -> None:
    world = SchedulingWorld(token_budget=6)
    world.add(A, max_tokens=2)
    assert book(world) == [] == book(world)
    (delta,) = book(world)
    assert (delta.token_ids, delta.cached_tokens) == ((fakes.expected_answer(A, 1)[0],), 0)


def test_cached_tokens_come_with_the_first_token_only_also_after_a_preemption() -> None:
    world = SchedulingWorld()
    world.add(A, max_tokens=1)
    world.steps()
    world.add(A, max_tokens=5)
    told = []
    for _ in range(5):
        told += [delta.cached_tokens for delta in book(world)]
        world.scheduler.preempt_one()
    assert told == [12, None, None, None, None]


def test_blocks_of_what_ended_are_free_when_the_step_is_booked() -> None:
    world = SchedulingWorld()
    one, two = world.add(A, max_tokens=1), world.add(B, max_tokens=2)
    deltas = {delta.request_id: delta for delta in book(world)}
    assert deltas[one].finish_reason is FinishReason.LENGTH and deltas[two].finish_reason is None
    assert list(world.fake.engine._manager._tables) == [two] == world.running


@pytest.mark.parametrize(("token", "options"), [(fakes.EOS, {}), (77, {"stop_token_ids": (77,)})], ids=["eos", "stop"])
def test_an_end_token_ends_its_sequence(token: int, options: dict[str, Any]) -> None:
    world = SchedulingWorld()
    one, two = world.add(A, max_tokens=9, **options), world.add(B, max_tokens=9, ignore_eos=True)
    deltas = book(world, **{name: {"token_id": token} for name in (one, two)})
    assert [delta.finish_reason for delta in deltas] == [FinishReason.STOP, None]
    assert world.running == [two]


def test_samples_end_one_by_one_and_the_last_one_ends_the_request() -> None:
    world = SchedulingWorld()
    group = world.add(A, max_tokens=9, n=2)
    book(world)
    ends = [book(world, **{f"{group}/{n}": {"token_id": fakes.EOS}}) for n in (0, 1)]
    assert [(d.choice, d.finish_reason, d.last) for d in ends[0]] == [
        (0, FinishReason.STOP, False),
        (1, None, False),
    ]
    assert [(d.choice, d.finish_reason, d.last) for d in ends[1]] == [(1, FinishReason.STOP, True)]
    assert not world.scheduler.has_work and world.fake.engine._manager.num_sequences == 0


class Strict:
    """A grammar progress that takes anything."""

    num_tokens = 0
    is_finished = False

    def accept(self, token_id: int) -> None: ...

    def replay(self, token_ids: Any) -> None: ...

    def fork(self) -> Strict:
        return self


@pytest.mark.parametrize("failing", [0, 1, 2])
def test_what_fails_ends_its_own_request_with_all_its_rows_and_one_delta(failing: int) -> None:
    world = SchedulingWorld()
    other = world.add(B, max_tokens=9)
    command = world.fake.command("g", A, 9, n=3)
    assert command.add is not None
    world.scheduler.add(command.add, Strict())
    book(world)
    error = KvrayError("no token is allowed")
    deltas = book(world, **{f"g/{failing}": {"error": error}})
    lasts = [delta for delta in deltas if delta.last]
    assert [(d.request_id, d.error) for d in lasts] == [("g", error)]
    assert len([d for d in deltas if d.request_id == "g"]) == failing + 1, "the rows behind it tell nothing any more"
    assert world.running == [other] and list(world.fake.engine._manager._tables) == [other]
