"""Beam search against brute force over all texts, and its rules one by one on hand-made vocabularies."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Callable, Sequence

import pytest

from cluster.core.request import FinishReason
from worker.beam_search import BeamParams, BeamResult, BeamSearch, EarlyStopping

Tokens = tuple[int, ...]
Model = Callable[[Tokens], list[float]]  # the log probability of every token after these
EARLY: list[EarlyStopping] = [True, False, "never"]
EOS = 0


def random_model(seed: int, vocab: int) -> Model:
    def logprobs(tokens: Tokens) -> list[float]:
        rng = random.Random(f"{seed} {tokens}")
        weights = [rng.expovariate(1.0) for _ in range(vocab)]
        return [math.log(weight / sum(weights)) for weight in weights]

    return logprobs


def table_model(table: dict[Tokens, list[float]], default: list[float]) -> Model:
    return lambda tokens: table.get(tokens, default)  # not a true distribution: only the order counts


def best_tokens(logprobs: list[float], count: int) -> list[tuple[int, float]]:
    return sorted(enumerate(logprobs), key=lambda entry: (-entry[1], entry[0]))[:count]


def run(search: BeamSearch, model: Model, *, count: int | None = None) -> int:
    """Search to the end, with `count` tokens per row; the number of steps."""
    steps = 0
    while not search.done:
        before = [beam.tokens for beam in search.live]
        rows = [best_tokens(model(tokens), count or search.num_candidates) for tokens in before]
        extensions = search.advance(rows)
        steps += 1
        assert [(*before[row], token) for row, token in extensions] == [beam.tokens for beam in search.live]
        assert {len(beam.tokens) for beam in search.live} <= {steps}
        scores = [beam.logprob for beam in search.live]
        assert scores == sorted(scores, reverse=True)
    return steps


def params(
    width: int, max_tokens: int, eos: Sequence[int] = (EOS,), penalty: float = 1.0, early: EarlyStopping = False
) -> BeamParams:
    ends = frozenset(eos)
    return BeamParams(
        width=width, max_tokens=max_tokens, eos_token_ids=ends, length_penalty=penalty, early_stopping=early
    )


def results(model: Model, wanted: BeamParams) -> list[BeamResult]:
    search = BeamSearch(wanted)
    run(search, model)
    return search.results()


def assert_texts(found: Sequence[BeamResult], expected: Sequence[tuple[Tokens, float]]) -> None:
    assert [result.tokens for result in found] == [tokens for tokens, _ in expected]
    assert [result.score for result in found] == pytest.approx([score for _, score in expected])


def all_texts(model: Model, vocab: int, wanted: BeamParams) -> list[tuple[Tokens, float]]:
    """Every text that ends in an end token or has max_tokens, best score first."""
    texts = []
    for length in range(1, wanted.max_tokens + 1):
        for tokens in itertools.product(range(vocab), repeat=length):
            ended = tokens[-1] in wanted.eos_token_ids
            if wanted.eos_token_ids.isdisjoint(tokens[:-1]) and (ended or length == wanted.max_tokens):
                logprob = sum(model(tokens[:i])[token] for i, token in enumerate(tokens))
                texts.append((tokens, logprob / length**wanted.length_penalty))
    return sorted(texts, key=lambda text: -text[1])


@pytest.mark.parametrize("early", EARLY)
@pytest.mark.parametrize("penalty", [-0.5, 0.0, 1.0, 2.0])
def test_a_width_that_holds_every_text_finds_them_all_in_order(penalty: float, early: EarlyStopping) -> None:
    for seed, (vocab, max_tokens, eos) in enumerate([(3, 4, (0,)), (4, 3, (1, 3)), (3, 3, ()), (2, 5, (1,))]):
        model = random_model(seed, vocab)
        wanted = params(vocab**max_tokens, max_tokens, eos, penalty, early)
        expected = all_texts(model, vocab, wanted)
        found = results(model, wanted)
        assert_texts(found, expected)
        for result in found:
            ended = result.tokens[-1] in eos
            assert result.finish_reason is (FinishReason.STOP if ended else FinishReason.LENGTH)


@pytest.mark.parametrize("early", EARLY)
@pytest.mark.parametrize("penalty", [-0.5, 0.0, 1.0, 2.0])
def test_width_one_is_greedy(penalty: float, early: EarlyStopping) -> None:
    ends = set()
    for seed in range(30):
        model = random_model(seed, 5)
        tokens: Tokens = ()
        while len(tokens) < 8 and tokens[-1:] != (EOS,):
            tokens += (best_tokens(model(tokens), 1)[0][0],)
        (found,) = results(model, params(1, 8, (EOS,), penalty, early))
        assert found.tokens == tokens
        ends.add(found.finish_reason)
    assert ends == {FinishReason.STOP, FinishReason.LENGTH}


@pytest.mark.parametrize("eos", [(), (0,), (0, 3), (0, 1, 2, 5)])
def test_more_candidates_than_asked_for_change_nothing(eos: tuple[int, ...]) -> None:
    for seed, width in itertools.product(range(8), (1, 2, 3)):
        model, wanted = random_model(seed, 14), params(width, 6, eos)
        few, many = BeamSearch(wanted), BeamSearch(wanted)
        assert few.num_candidates == 2 * width + len(eos)
        run(few, model)
        run(many, model, count=14)
        assert few.results() == many.results() and len(few.results()) == width


def test_an_end_token_ranked_beyond_the_width_does_not_finish() -> None:
    first = best_tokens([-2.0, -0.5, -1.0, -3.0], 4)
    cases: list[tuple[int, Tokens, list[Tokens], list[tuple[Tokens, float]]]] = [
        (2, (EOS,), [(1,), (2,)], []),
        (3, (EOS,), [(1,), (2,), (3,)], [((EOS,), -2.0)]),  # the rows behind move up
        (2, (EOS, 2), [(1,), (3,)], [((2,), -1.0)]),  # between them EOS, third and so not finished
    ]
    for width, eos, live, finished in cases:
        search = BeamSearch(params(width, 3, eos))
        search.advance([first])
        assert [beam.tokens for beam in search.live] == live
        assert_texts(search.results(), finished)


def test_the_length_penalty_divides_by_a_power_of_the_generated_length() -> None:
    model = table_model({(): [-1.0, -0.9, -9.0]}, [-0.3, -9.0, -9.0])
    short, long = (EOS,), (1, EOS)
    for penalty, expected in [
        (0.0, [(short, -1.0), (long, -1.2)]),
        (1.0, [(long, -1.2 / 2), (short, -1.0)]),
        (2.0, [(long, -1.2 / 4), (short, -1.0)]),
        (-1.0, [(short, -1.0), (long, -1.2 * 2)]),
    ]:
        found = results(model, params(2, 2, penalty=penalty))
        assert_texts(found, expected)
        assert sorted(result.logprob for result in found) == pytest.approx([-1.2, -1.0])


def test_the_three_ways_to_stop() -> None:
    table = {(): [-1.0, -0.5, -3.0], (1,): [-2.0, -0.1, -5.0], (1, 1): [-6.0, -4.0, -9.0]}
    model = table_model({**table, **{(1,) * n: [-9.0, -0.1, -9.0] for n in range(3, 9)}}, [-9.0, -9.0, -9.0])
    short, middle = (EOS,), (1, EOS)
    cases: list[tuple[float, EarlyStopping, int, list[tuple[Tokens, float]]]] = [
        (1.0, True, 2, [(short, -1.0), (middle, -1.25)]),  # two are finished
        (1.0, False, 3, [(short, -1.0), (middle, -1.25)]),  # -0.6 / 2 could still beat -1.25, -4.6 / 3 could not
        (1.0, "never", 9, [((1,) * 9, -5.2 / 9), (short, -1.0)]),  # but -4.6 / 9 could, and does
        (0.0, True, 2, [(short, -1.0), (middle, -2.5)]),
        (0.0, "never", 3, [(short, -1.0), (middle, -2.5)]),  # a longer text is worth no more
        (-1.0, "never", 3, [(short, -1.0), (middle, -5.0)]),  # it is worth less: -0.6 * 2 counts, not -0.6 * 9
    ]
    for penalty, stopping, steps, expected in cases:
        search = BeamSearch(params(2, 9, penalty=penalty, early=stopping))
        assert run(search, model) == steps
        assert_texts(search.results(), expected)


def test_rows_still_running_at_the_end_compete_with_finished_ones() -> None:
    model = table_model({(): [-1.0, -0.1, -0.2], (1,): [-9.0, -0.1, -0.3]}, [-9.0, -2.5, -9.0])
    found = results(model, params(2, 2, penalty=0.0))
    assert_texts(found, [((1, 1), -0.2), ((1, 2), -0.4)])
    assert {result.finish_reason for result in found} == {FinishReason.LENGTH}
    model = table_model({(): [-0.15, -0.1, -0.2], (1,): [-0.05, -0.1, -0.3]}, [-9.0, -2.5, -9.0])
    found = results(model, params(2, 2, penalty=0.0))
    assert [result.tokens for result in found] == [(EOS,), (1, EOS)]
    assert found[1].finish_reason is FinishReason.STOP  # an end token in the last place still is one


def test_equal_scores_go_by_row_then_token_then_age() -> None:
    flat = [(3, -1.0), (0, -1.0), (2, -1.0), (1, -1.0)]
    search = BeamSearch(params(2, 3, penalty=0.0, eos=(3,)))
    assert search.advance([flat]) == [(0, 0), (0, 1)]
    assert search.advance([flat] * 2) == [(0, 0), (0, 1)]
    assert search.advance([flat] * 2) == [] and search.done
    assert [result.tokens for result in search.results()] == [(0, 0, 0), (0, 0, 1)]

    search = BeamSearch(params(1, 2, penalty=0.0, eos=(0,)))  # the end token is first among equals
    assert search.advance([flat]) == [] and search.results()[0].tokens == (0,)

    free = [(0, 0.0), (1, -9.0), (2, -9.0), (3, 0.0)]
    search = BeamSearch(params(2, 3, penalty=0.0, eos=(3,)))
    assert search.advance([free]) == [(0, 0), (0, 1)]
    assert search.advance([free] * 2) == []  # what goes on cannot do better than the two texts at 0.0
    assert [result.tokens for result in search.results()] == [(3,), (0, 3)]


def test_a_vocabulary_smaller_than_the_width_gives_fewer_rows_at_first() -> None:
    model, wanted = random_model(3, 2), params(4, 4, eos=())
    search, sizes = BeamSearch(wanted), []
    while not search.done:
        sizes.append(len(search.live))
        search.advance([best_tokens(model(beam.tokens), search.num_candidates) for beam in search.live])
    assert sizes == [1, 2, 4, 4] and len(search.results()) == 4

    found = results(random_model(3, 2), params(8, 3))  # one token goes on, one ends: only four texts exist
    assert sorted(result.tokens for result in found) == [(0,), (1, 0), (1, 1, 0), (1, 1, 1)]
    assert [result.tokens for result in results(random_model(3, 1), params(4, 3))] == [(0,)]


def test_tokens_of_probability_zero_are_never_taken() -> None:
    never = -math.inf
    model = table_model({(): [never, -0.5, never], (1,): [-1.0, never, never]}, [never] * 3)
    search = BeamSearch(params(2, 5))
    assert run(search, model) == 2
    assert_texts(search.results(), [((1, EOS), -0.75)])
    search = BeamSearch(params(2, 5))
    assert run(search, table_model({}, [never] * 3)) == 1 and search.results() == []


def test_texts_that_the_caller_ends_finish_like_end_tokens() -> None:
    """Ending at token 3 by `ends` is the same as having token 3 among the end tokens, and it sees whole texts."""
    for seed, early in itertools.product(range(10), EARLY):
        model = random_model(seed, 12)
        asked = BeamSearch(params(3, 6, early=early), ends=lambda tokens: tokens[-1] == 3)
        run(asked, model)
        assert asked.results() == results(model, params(3, 6, (EOS, 3), early=early))
    asked_about: list[Tokens] = []

    def ends(tokens: Tokens) -> bool:
        asked_about.append(tokens)
        return tokens[-2:] == (1, 2)

    pair = BeamSearch(params(2, 4, eos=(), penalty=0.0), ends)
    run(pair, table_model({}, [-3.0, -0.2, -0.4]))
    best = pair.results()[0]
    assert best.tokens == (1, 2) and best.score == pytest.approx(-0.6) and best.finish_reason is FinishReason.STOP
    assert all((1, 2) not in itertools.pairwise(tokens[:-1]) for tokens in asked_about)
    assert [len(tokens) for tokens in asked_about].count(4) <= 2  # in the last step, only what can finish


def test_a_search_that_is_over_takes_no_step() -> None:
    search = BeamSearch(params(1, 1))
    with pytest.raises(ValueError):  # a row without candidates
        BeamSearch(params(1, 1)).advance([])
    search.advance([[(1, -1.0)]])
    with pytest.raises(AssertionError):
        search.advance([])
