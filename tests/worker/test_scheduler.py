"""Scheduler and cache together on a model-free engine whose pages hold fingerprints."""

from __future__ import annotations

import fake_engine as fakes
import pytest

from cluster.core.errors import InvalidRequest, Overloaded, RequestTooLong
from cluster.core.events import CacheEventKind
from cluster.core.request import FinishReason

PROMPT = list(range(1, 14))


def test_answer_is_the_models_own() -> None:
    fake = fakes.make_fake_engine()
    request = fake.add(PROMPT, max_tokens=9)
    fake.finish()
    assert fake.answers[request] == fakes.expected_answer(PROMPT, 9)
    assert fake.last[request].finish_reason is FinishReason.LENGTH


@pytest.mark.parametrize("length", [1, 3, 4, 5, 7, 8, 9])
def test_full_hit_computes_at_least_one_token(length: int) -> None:
    """engine.md 4.1: a prompt of exactly n blocks must not become a step without tokens."""
    fake = fakes.make_fake_engine()
    prompt = list(range(1, length + 1))
    cold = fake.add(prompt)
    fake.finish()
    warm = fake.add(prompt)
    fake.finish()
    assert fake.answers[warm] == fake.answers[cold]
    assert fake.cached[cold] == 0
    assert fake.cached[warm] == length - 1  # exact to the token


def test_prompts_shorter_than_a_block_leave_nothing_behind() -> None:
    """engine.md 4.7"""
    fake = fakes.make_fake_engine()
    for _ in range(200):
        fake.add([1], max_tokens=1)
        fake.add([1, 2, 3], max_tokens=1)
        fake.finish()
    counts = fake.frames[-1].load
    assert (counts.free_blocks, counts.cached_blocks, counts.in_use_blocks) == (
        31,
        1,
        0,
    )  # one tail holds both


def test_without_partial_reuse_short_prompts_leave_nothing_at_all() -> None:
    fake = fakes.make_fake_engine(partial_reuse=False)
    for _ in range(3):
        fake.add([1, 2, 3], max_tokens=1)
        fake.finish()
    assert fake.frames[-1].load.free_blocks == 32


def test_long_prompts_run_in_pieces_within_the_budget() -> None:
    fake = fakes.make_fake_engine(token_budget=5)
    request = fake.add(PROMPT, max_tokens=3)
    fake.step()
    assert fake.runner.computed_tokens == 5 and fake.answers[request] == []
    fake.step()
    fake.step()
    assert fake.runner.computed_tokens == 13 and len(fake.answers[request]) == 1
    fake.finish()
    assert fake.answers[request] == fakes.expected_answer(PROMPT, 3)


def test_decode_goes_on_while_a_long_prompt_is_prefilled() -> None:
    fake = fakes.make_fake_engine(token_budget=4)
    first = fake.add([1, 2], max_tokens=20)
    fake.step()
    fake.add(list(range(100, 130)), max_tokens=1)
    before = len(fake.answers[first])
    for _ in range(5):
        fake.step()
    assert len(fake.answers[first]) == before + 5


def test_equal_prompts_at_the_same_time_are_computed_once() -> None:
    """The second waits until the first has computed what they share, then computes one token."""
    fake = fakes.make_fake_engine()
    a = fake.add(PROMPT, max_tokens=12)
    b = fake.add(PROMPT, max_tokens=12)
    fake.step()
    assert fake.frames[-1].load.waiting == 1
    fake.step()
    assert fake.runner.computed_tokens == len(PROMPT) + 1 + 1  # the second's last prompt token, the first's next
    assert fake.cached[b] == len(PROMPT) - 1
    assert fake.frames[-1].load.in_use_blocks == 3 + 2  # three shared prompt blocks, one open block each
    c = fake.add([9, 8, 7, 6, 5], max_tokens=12)
    fake.finish()
    assert fake.answers[a] == fake.answers[b] == fakes.expected_answer(PROMPT, 12)
    assert fake.answers[c] == fakes.expected_answer([9, 8, 7, 6, 5], 12)


@pytest.mark.parametrize("length", range(4, 13))
def test_preempted_answer_is_identical(length: int) -> None:
    """engine.md 4.3: the pool is too small for both; the newer one is preempted and resumes from its own blocks."""
    fake = fakes.make_fake_engine(num_blocks=8)
    older, newer = list(range(1, length + 1)), list(range(50, 50 + length))
    a = fake.add(older, max_tokens=18)
    b = fake.add(newer, max_tokens=18)
    fake.finish()
    assert fake.answers[a] == fakes.expected_answer(older, 18)
    assert fake.answers[b] == fakes.expected_answer(newer, 18)
    assert fake.frames[-1].load.preemptions >= 1
    assert fake.frames[-1].load.in_use_blocks == 0


def test_preemption_is_not_a_cache_hit() -> None:
    fake = fakes.make_fake_engine(num_blocks=8)
    fake.add(list(range(1, 9)), max_tokens=18)
    fake.add(list(range(50, 58)), max_tokens=18)
    fake.finish()
    load = fake.frames[-1].load
    assert load.preemptions >= 1
    assert (load.query_tokens, load.hit_tokens) == (16, 0)


def test_hit_blocks_are_not_free_capacity() -> None:
    """engine.md 4.12: six idle blocks are the newcomer's own prefix; two free ones are not enough for three more."""
    fake = fakes.make_fake_engine(num_blocks=9)
    prefix = list(range(1, 25))
    fake.add(prefix, max_tokens=1)
    fake.finish()
    holder = fake.add([500, 501, 502], max_tokens=8)
    fake.step()
    late = fake.add([*prefix, *range(100, 109)], max_tokens=1)
    fake.step()
    assert fake.frames[-1].load.waiting == 1
    assert fake.frames[-1].load.cached_blocks == 6
    fake.finish()
    assert fake.cached[late] == 24
    assert fake.answers[holder] == fakes.expected_answer([500, 501, 502], 8)


def test_two_long_prompts_cannot_block_each_other() -> None:
    """engine.md 4.11: the whole prompt is reserved at admission."""
    fake = fakes.make_fake_engine(num_blocks=8, token_budget=4)
    prompts = [list(range(1, 25)), list(range(100, 124))]
    ids = [fake.add(p, max_tokens=4) for p in prompts]
    fake.finish()
    for prompt, request in zip(prompts, ids, strict=True):
        assert fake.answers[request] == fakes.expected_answer(prompt, 4)


def test_too_long_is_refused_at_the_door_and_the_next_request_runs() -> None:
    """engine.md 4.10"""
    fake = fakes.make_fake_engine(num_blocks=8, max_model_len=1000)
    big = fake.add(list(range(1, 41)), max_tokens=1)
    grows = fake.add([1, 2, 3], max_tokens=30)
    small = fake.add([1, 2, 3], max_tokens=2)
    fake.finish()
    for request, field in ((big, "prompt"), (grows, "max_tokens")):
        error = fake.last[request].error
        assert isinstance(error, RequestTooLong)
        assert (error.field, error.limit) == (field, 32)
    assert len(fake.answers[small]) == 2


def test_unbounded_request_ends_at_the_model_length() -> None:
    fake = fakes.make_fake_engine(num_blocks=8)
    request = fake.add([1, 2, 3], max_tokens=None)
    fake.finish()
    assert len(fake.answers[request]) == 29
    assert fake.last[request].finish_reason is FinishReason.LENGTH


def test_token_outside_the_vocabulary_is_refused() -> None:
    fake = fakes.make_fake_engine()
    request = fake.add([1, 1000])
    fake.finish()
    error = fake.last[request].error
    assert isinstance(error, InvalidRequest) and error.field == "token_ids"


def test_queue_is_bounded() -> None:
    fake = fakes.make_fake_engine(max_queue=2, max_num_seqs=1)
    ids = [fake.add([1, 2, 3], max_tokens=2) for _ in range(4)]
    fake.finish()
    refused = [i for i in ids if isinstance(fake.last[i].error, Overloaded)]
    assert len(refused) == 2
    assert all(len(fake.answers[i]) == 2 for i in ids if i not in refused)


def test_stop_ids_and_ignore_eos() -> None:
    fake = fakes.make_fake_engine()
    answer = fakes.expected_answer(PROMPT, 8)
    stopped = fake.add(PROMPT, stop_token_ids=(answer[3],))
    fake.finish()
    assert fake.answers[stopped] == answer[: answer.index(answer[3]) + 1]
    assert fake.last[stopped].finish_reason is FinishReason.STOP


@pytest.mark.parametrize("state", ["waiting", "mid-prefill", "decoding", "preempted", "finished", "unknown"])
def test_cancel_in_every_state_gives_all_blocks_back(state: str) -> None:
    """engine.md 4.5 and 4.23"""
    fake = fakes.make_fake_engine(num_blocks=8, token_budget=6, max_num_seqs=1 if state == "waiting" else 8)
    other = fake.add(list(range(50, 58)), max_tokens=18)
    request = fake.add(list(range(1, 14)), max_tokens=18)
    if state == "mid-prefill":
        fake.step()
        fake.step()
    elif state == "decoding":
        for _ in range(5):
            fake.step()
        assert fake.answers[request]
    elif state == "preempted":
        while not fake.frames or fake.frames[-1].load.preemptions == 0:
            fake.step()
    elif state == "finished":
        fake.finish()
    fake.cancel("nobody" if state == "unknown" else request)
    fake.step()
    if state not in ("finished", "unknown"):
        assert fake.last[request].finish_reason is FinishReason.CANCELLED
    fake.finish()
    load = fake.frames[-1].load
    assert (load.in_use_blocks, load.waiting, load.running) == (0, 0, 0)
    again = fake.add(list(range(1, 14)), max_tokens=6)
    fake.finish()
    assert fake.answers[again] == fakes.expected_answer(list(range(1, 14)), 6)
    assert fake.answers[other] == fakes.expected_answer(list(range(50, 58)), 18)


def test_salts_never_share() -> None:
    """engine.md 4.19"""
    fake = fakes.make_fake_engine()
    for salt, hit in (("a", 0), ("b", 0), ("a", 12), ("", 0)):
        request = fake.add(PROMPT, cache_salt=salt)
        fake.finish()
        assert fake.cached[request] == hit


def test_switched_off_cache_never_hits() -> None:
    fake = fakes.make_fake_engine(prefix_cache="off")
    for _ in range(2):
        request = fake.add(PROMPT)
        fake.finish()
        assert fake.cached[request] == 0
        assert fake.answers[request] == fakes.expected_answer(PROMPT, 8)
    assert all(frame.events == () for frame in fake.frames)


def test_reset_while_running_keeps_answers_and_reports_once() -> None:
    """engine.md 4.20"""
    fake = fakes.make_fake_engine()
    request = fake.add(PROMPT, max_tokens=12)
    fake.step()
    fake.engine.reset_cache()
    fake.step()
    assert fake.frames[-1].events[0].kind is CacheEventKind.CLEARED
    fake.finish()
    assert fake.answers[request] == fakes.expected_answer(PROMPT, 12)
    again = fake.add(PROMPT)
    fake.finish()
    assert fake.cached[again] == 12  # what was computed after the reset is found again


def test_load_counts_uncached_tokens_per_router() -> None:
    fake = fakes.make_fake_engine(token_budget=4)
    fake.add(PROMPT)
    assert fake.engine.load().uncached_tokens == {"router": 13}
    fake.step()
    assert fake.engine.load().uncached_tokens == {"router": 9}
    fake.finish()
    assert fake.engine.load().uncached_tokens == {}
    fake.add(PROMPT)
    assert fake.engine.load().uncached_tokens == {"router": 1}
