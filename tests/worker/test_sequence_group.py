"""Groups: n samples and beams on forked block tables: the right answers, few blocks, nothing left behind."""

from __future__ import annotations

import fake_engine as fakes
import pytest

from cluster.core.errors import InvalidRequest, RequestTooLong
from cluster.core.request import FinishReason
from worker.beam_search import BeamParams
from worker.group_stops import stop_finder

PROMPT = list(range(100, 113))  # three blocks of four and one token
CACHES = ("radix", "off")


def settled(fake: fakes.FakeEngine, cached: bool = True) -> None:
    load = fake.frames[-1].load
    assert (load.in_use_blocks, load.waiting, load.running, load.uncached_tokens) == (0, 0, 0, {})
    assert load.free_blocks + load.cached_blocks == load.total_blocks
    assert cached or load.cached_blocks == 0


@pytest.mark.parametrize("cache", CACHES)
@pytest.mark.parametrize("length", [1, 2, 3, 4, 5, 8, 13])
def test_n_samples_are_those_of_n_seeds_alone(length: int, cache: str) -> None:
    fake = fakes.make_fake_engine(prefix_cache=cache)
    prompt = PROMPT[:length]
    request = fake.add(prompt, max_tokens=9, n=3, seed=5)
    fake.finish()
    assert fake.choices[request] == {i: fakes.expected_sample(prompt, 9, 5 + i) for i in range(3)}
    assert [fake.ends[request, i].finish_reason for i in range(3)] == [FinishReason.LENGTH] * 3
    settled(fake, cached=cache == "radix")


def test_the_prompt_is_computed_once_and_its_blocks_are_shared() -> None:
    fake = fakes.make_fake_engine(prefix_cache="off")
    fake.add(PROMPT, max_tokens=8, n=4, seed=1)
    fake.step()
    assert fake.runner.computed_tokens == len(PROMPT) - 1
    fake.step()
    assert fake.runner.computed_tokens == len(PROMPT) - 1 + 4  # each row computes the prompt's last token
    assert fake.frames[-1].load.in_use_blocks == 3 + 4
    fake.finish()
    settled(fake)


def test_samples_end_one_by_one_and_only_the_last_delta_is_the_last() -> None:
    fake = fakes.make_fake_engine()
    stops = [fakes.expected_sample(PROMPT, 4, 1)[3], fakes.expected_sample(PROMPT, 2, 2)[1]]
    request = fake.add(PROMPT, max_tokens=20, n=3, seed=0, stop_token_ids=tuple(stops))
    fake.finish()
    lengths = [len(fake.choices[request][i]) for i in range(3)]
    assert lengths[1] <= 4 and lengths[2] <= 2
    reasons = [fake.ends[request, i].finish_reason for i in range(3)]
    assert reasons[1:] == [FinishReason.STOP] * 2
    assert [fake.ends[request, i].more for i in range(3)].count(False) == 1
    assert fake.last[request].last
    settled(fake)


def test_best_of_returns_the_likeliest_per_token() -> None:
    fake = fakes.make_fake_engine()
    request = fake.add(PROMPT, max_tokens=6, n=2, best_of=5, seed=3)
    fake.finish()
    drawn = [fakes.expected_sample(PROMPT, 6, 3 + i) for i in range(5)]
    mean = [sum(-(token % 7) / 7 for token in tokens) / 6 for tokens in drawn]
    best = sorted(range(5), key=lambda i: (-mean[i], i))[:2]
    assert fake.choices[request] == {place: drawn[i] for place, i in enumerate(best)}
    assert sum(len(frame.deltas) for frame in fake.frames) == 2  # nothing is known before the last one ended
    settled(fake)


@pytest.mark.parametrize("cache", CACHES)
@pytest.mark.parametrize("width", [1, 2, 4, 8])
@pytest.mark.parametrize("early", [True, False, "never"])
def test_beams_are_those_of_a_search_without_blocks(width: int, early: bool | str, cache: str) -> None:
    fake = fakes.make_fake_engine(num_blocks=96, prefix_cache=cache)
    request = fake.add(PROMPT, max_tokens=14, beam_width=width, length_penalty=0.7, early_stopping=early)
    check_bound(fake, width)
    check_beams(fake, request, PROMPT, width, early)
    settled(fake, cached=cache == "radix")


def check_beams(
    fake: fakes.FakeEngine, request: str, prompt: list[int], width: int, early: bool | str, max_tokens: int = 14
) -> None:
    params = BeamParams(
        width=width,
        max_tokens=max_tokens,
        eos_token_ids=frozenset({fakes.EOS}),
        length_penalty=0.7,
        early_stopping=early,  # type: ignore[arg-type]
    )
    expected = fakes.expected_beams(prompt, params)
    assert [tuple(fake.choices[request][i]) for i in range(width)] == [beam.tokens for beam in expected]
    assert [fake.ends[request, i].score for i in range(width)] == [beam.score for beam in expected]
    assert [fake.ends[request, i].finish_reason for i in range(width)] == [beam.finish_reason for beam in expected]


def check_bound(fake: fakes.FakeEngine, width: int, block_size: int = 4) -> None:
    """Blocks in use at step ends never exceed prompt blocks + width * (blocks behind the prompt + 1)."""
    prompt_blocks = -(-len(PROMPT) // block_size)
    step = 0
    while fake.engine.has_work:
        fake.step()
        step += 1
        assert fake.frames[-1].load.in_use_blocks <= prompt_blocks + width * (-(-step // block_size) + 1)


@pytest.mark.parametrize("preempt_at", range(1, 12))
def test_a_search_preempted_in_the_middle_finds_the_same_beams(preempt_at: int) -> None:
    fake = fakes.make_fake_engine(num_blocks=32, max_num_seqs=8)
    blocker = fake.add(list(range(50, 58)), max_tokens=56)
    fake.step()
    beams = fake.add(PROMPT, max_tokens=14, beam_width=4, length_penalty=0.7)
    for _ in range(preempt_at):
        fake.step()
    scheduler = fake.engine._scheduler
    if any(seq.group is not None for seq in scheduler.running):
        scheduler.preempt_one()
        fake.engine._manager.check_invariants()
    fake.finish()
    assert fake.answers[blocker] == fakes.expected_answer(list(range(50, 58)), 56)
    check_beams(fake, beams, PROMPT, 4, False)
    settled(fake)


def test_two_searches_that_do_not_fit_together_both_finish() -> None:
    """The newer group is preempted as a whole when blocks run out."""
    fake = fakes.make_fake_engine(num_blocks=24, max_num_seqs=8)
    first = fake.add(PROMPT, max_tokens=14, beam_width=4, length_penalty=0.7)
    other = list(range(300, 313))
    second = fake.add(other, max_tokens=14, beam_width=4, length_penalty=0.7)
    fake.finish()
    check_beams(fake, first, PROMPT, 4, False)
    check_beams(fake, second, other, 4, False)
    settled(fake)


@pytest.mark.parametrize("options", [{"n": 3}, {"beam_width": 3}, {"n": 1, "best_of": 3}])
@pytest.mark.parametrize("steps", [0, 1, 2, 3, 7])
def test_cancel_in_every_state_frees_everything(steps: int, options: dict[str, int]) -> None:
    fake = fakes.make_fake_engine(token_budget=6)
    request = fake.add(PROMPT, max_tokens=20, **options)
    for _ in range(steps):
        fake.step()
    fake.cancel(request)
    fake.cancel(request)
    fake.step()
    assert fake.last[request].finish_reason is FinishReason.CANCELLED
    assert not fake.engine.has_work
    settled(fake)


def test_a_row_cannot_be_cancelled_by_its_own_name() -> None:
    fake = fakes.make_fake_engine()
    request = fake.add(PROMPT, max_tokens=4, n=2)
    fake.step()
    fake.step()
    fake.cancel(f"{request}/0")
    fake.finish()
    assert len(fake.choices[request]) == 2


def test_groups_and_plain_requests_share_the_seats() -> None:
    fake = fakes.make_fake_engine(max_num_seqs=4, num_blocks=64)
    requests = [fake.add([i, i, i, i, i], max_tokens=6, n=1 + i % 3, seed=i) for i in range(8)]
    while fake.engine.has_work:
        fake.step()
        assert fake.frames[-1].load.running <= 4
    for i, request in enumerate(requests):
        expected = {k: fakes.expected_sample([i] * 5, 6, i + k) for k in range(1 + i % 3)}
        assert fake.choices[request] == expected
    settled(fake)


@pytest.mark.parametrize(
    ("options", "field"),
    [
        ({"n": 9, "max_tokens": 4}, "n"),
        ({"beam_width": 9, "max_tokens": 4}, "beam_width"),
        ({"best_of": 9, "n": 1, "max_tokens": 4}, "best_of"),
        ({"n": 4, "max_tokens": 40}, "max_tokens"),
    ],
)
def test_what_can_never_fit_is_refused_at_the_door(options: dict[str, int], field: str) -> None:
    fake = fakes.make_fake_engine(num_blocks=24, max_num_seqs=8)
    request = fake.add(PROMPT, **options)
    fake.step()
    error = fake.last[request].error
    assert isinstance(error, InvalidRequest) and error.field == field
    assert not fake.engine.has_work


def test_rows_that_have_no_room_at_all_are_refused() -> None:
    fake = fakes.make_fake_engine(num_blocks=8, max_num_seqs=8)
    request = fake.add(PROMPT, max_tokens=1, n=4)
    fake.step()
    assert isinstance(fake.last[request].error, RequestTooLong)


def test_without_max_tokens_rows_go_as_far_as_all_of_them_fit() -> None:
    fake = fakes.make_fake_engine(num_blocks=16)
    request = fake.add(PROMPT, max_tokens=None, n=3, seed=9)
    fake.finish()
    assert {len(tokens) for tokens in fake.choices[request].values()} == {3 * 4}  # 12 blocks for 3 rows, one to spare
    settled(fake)


def test_a_stop_string_ends_a_beam_within_the_search() -> None:
    """What ended is a finished text: it takes no live row's place, and competes with its own length."""
    fake = fakes.make_fake_engine(num_blocks=64)
    free = fake.add(PROMPT, max_tokens=14, beam_width=4)
    fake.finish()
    token = fake.choices[free][0][5]  # the best text comes to it
    stopped = fake.add(PROMPT, max_tokens=14, beam_width=4, stop=(f"<{token}>",))
    fake.finish()
    as_id = fake.add(PROMPT, max_tokens=14, beam_width=4, stop_token_ids=(token,))
    fake.finish()
    assert fake.choices[stopped] == fake.choices[as_id] != fake.choices[free]
    assert any(tokens[-1] == token and len(tokens) < 14 for tokens in fake.choices[stopped].values())
    settled(fake)


def test_a_stop_string_ends_a_sample_in_the_engine_and_best_of_ranks_what_ended() -> None:
    fake = fakes.make_fake_engine(num_blocks=64)
    drawn = [fakes.expected_sample(PROMPT, 10, 3 + i) for i in range(4)]
    stop = f"<{drawn[1][2]}>"
    ended = [tokens[: tokens.index(drawn[1][2]) + 1] if drawn[1][2] in tokens else tokens for tokens in drawn]
    samples = fake.add(PROMPT, max_tokens=10, n=4, seed=3, stop=(stop,))
    best = fake.add(PROMPT, max_tokens=10, n=4, best_of=4, seed=3, stop=(stop,))
    ranked = fake.add(PROMPT, max_tokens=10, n=2, best_of=4, seed=3, stop=(stop,))
    fake.finish()
    assert fake.choices[samples] == fake.choices[best] == dict(enumerate(ended))
    assert fake.ends[samples, 1].finish_reason is FinishReason.STOP
    mean = [sum(-(token % 7) / 7 for token in tokens) / len(tokens) for tokens in ended]
    order = sorted(range(4), key=lambda i: (-mean[i], i))[:2]
    assert fake.choices[ranked] == {place: ended[i] for place, i in enumerate(order)}
    settled(fake)


def test_the_last_seed_wraps_around() -> None:
    fake = fakes.make_fake_engine()
    request = fake.add(PROMPT, max_tokens=3, n=2, seed=2**63 - 1)
    fake.finish()
    assert fake.choices[request][1] == fakes.expected_sample(PROMPT, 3, -(2**63))


@pytest.mark.parametrize("cache", CACHES)
@pytest.mark.parametrize("length", [25, 29, 30, 31])
def test_one_beam_may_fill_the_whole_pool(length: int, cache: str) -> None:
    """Its only row takes the leader's last block over; no spare one is needed."""
    fake = fakes.make_fake_engine(num_blocks=8, prefix_cache=cache)
    prompt = list(range(100, 100 + length))
    request = fake.add(prompt, max_tokens=32 - length, beam_width=1)
    fake.finish(limit=200)
    assert len(fake.choices[request][0]) <= 32 - length
    settled(fake, cached=cache == "radix")


@pytest.mark.parametrize("num_blocks", [12, 14, 16])
def test_a_one_token_prompt_resumes_from_its_rows_own_blocks(num_blocks: int) -> None:
    fake = fakes.make_fake_engine(num_blocks=num_blocks)
    older = fake.add(list(range(50, 54)), max_tokens=4 * num_blocks - 8)
    fake.step()
    request = fake.add([5], max_tokens=16, n=2, seed=4)
    fake.finish()
    assert fake.choices[request] == {i: fakes.expected_sample([5], 16, 4 + i) for i in range(2)}
    assert fake.answers[older] == fakes.expected_answer(list(range(50, 54)), 4 * num_blocks - 8)
    assert fake.cached[request] == 0
    settled(fake)


def test_a_search_keeps_the_seats_of_the_rows_it_will_have() -> None:
    fake = fakes.make_fake_engine(num_blocks=64, max_num_seqs=4)
    fake.add(PROMPT, max_tokens=12, beam_width=4)
    for number in range(6):
        fake.add([number, number, number], max_tokens=6)
    while fake.engine.has_work:
        assert fake.step().load.running <= 4


def test_a_request_id_cannot_be_mistaken_for_a_row() -> None:
    fake = fakes.make_fake_engine()
    fake.engine.execute([fake.command("a/0", PROMPT)])
    (delta,) = fake.engine.step().deltas
    assert isinstance(delta.error, InvalidRequest) and delta.error.field == "request_id"


@pytest.mark.parametrize(("cache", "cached"), [("radix", 16), ("chunk", 16), ("off", 0)])
def test_a_prompt_in_the_cache_is_not_computed_again_for_its_rows(cache: str, cached: int) -> None:
    fake = fakes.make_fake_engine(prefix_cache=cache)
    prompt = list(range(17))
    fake.add(prompt, max_tokens=1)
    fake.finish()
    before = fake.runner.computed_tokens
    request = fake.add(prompt, max_tokens=1, n=3, seed=2)
    fake.finish()
    assert fake.cached[request] == cached
    assert fake.runner.computed_tokens - before == 16 - cached + 3
    assert fake.choices[request] == {i: fakes.expected_sample(prompt, 1, 2 + i) for i in range(3)}
    settled(fake, cached=cache != "off")


def test_stop_strings_of_rows_do_not_count_in_the_first_tokens() -> None:
    found = stop_finder(("bc", "x"), lambda tokens: "".join(chr(token) for token in tokens), min_tokens=3)
    assert found is not None
    texts = ["abc", "abcd", "abcbc", "abcx", "xxxa", "xxxx", "aaab", "aabc"]
    assert [found(tuple(map(ord, text))) for text in texts] == [False, False, True, True, False, True, False, True]
    assert stop_finder((), str, 3) is None and stop_finder(("a",), None) is None
