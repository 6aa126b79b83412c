"""Sampling against a slow per-row oracle, independence of rows, and the shape of the drawn distribution."""

from __future__ import annotations

import math
import random
from collections import Counter
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import pytest
import sampling_oracle as oracle
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from cluster.core.sampling import SamplingParams
from worker.sampler import Sampler
from worker.sampling.drawing import uniform
from worker.sampling.row_extras import RowExtras
from worker.sampling.token_counts import TokenCounts

SAMPLER = Sampler()
GOLDEN = [0.6524484863740322, 0.7012121095215252, 0.36818951565166946]  # uniform(0, 0), uniform(0, 1), uniform(1, 0)
DRAWS = 20_000


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


@dataclass
class Row:
    """One row of a batch, with everything that decides its token."""

    logits: list[float]
    params: SamplingParams
    position: int
    prompt: list[int]
    answer: list[int]
    forbidden: frozenset[int]
    mask: list[bool] | None

    @property
    def extras(self) -> RowExtras | None:
        counts = None
        if self.params.penalised:
            counts = TokenCounts()
            counts.update([*self.prompt, *self.answer], len(self.prompt))
        extras = RowExtras(counts=counts, biased=bool(self.params.logit_bias), forbidden=self.forbidden)
        return extras if extras.adjusts else None

    def adjusted(self) -> list[float]:
        return oracle.adjusted(
            self.logits, self.params, self.prompt, self.answer, forbidden=self.forbidden, mask=self.mask
        )

    def expected(self) -> int:
        return oracle.sampled(self.adjusted(), self.params, self.position)


def sample(rows: list[Row]) -> list[int]:
    masks = [None if row.mask is None else torch.tensor(row.mask) for row in rows]
    logits = torch.tensor([row.logits for row in rows])
    before = logits.clone()
    tokens = SAMPLER.sample(
        logits,
        [row.params for row in rows],
        [row.position for row in rows],
        [row.extras for row in rows],
        masks if any(mask is not None for mask in masks) else (),
    )
    assert torch.equal(logits, before), "the model's logits were changed"
    return tokens


VOCAB = 23
tokens_of_vocab = st.integers(0, VOCAB - 1)
# fp32 values, so that the tensor holds the very numbers of the oracle; small ones too, so that there are ties
logit = st.one_of(st.floats(-20, 20, width=32), st.integers(-3, 3).map(float))
penalty = st.sampled_from([0.0, 0.0, 0.5, -1.5, 2.0, 0.123])


@st.composite
def sampling_params(draw: st.DrawFn) -> SamplingParams:
    biases = draw(st.dictionaries(tokens_of_vocab, st.sampled_from([-100.0, -1.5, 0.25, 7.0, 100.0]), max_size=4))
    return SamplingParams(
        temperature=draw(st.sampled_from([0.0, 0.3, 1.0, 2.5])),
        top_k=draw(st.sampled_from([0, 0, 1, 3, 15, 10**6])),
        top_p=draw(st.sampled_from([1.0, 1.0, 0.05, 0.51, 0.953])),
        min_p=draw(st.sampled_from([0.0, 0.0, 0.1003, 0.7, 1.0])),
        repetition_penalty=draw(st.sampled_from([1.0, 1.0, 1.3, 0.5, 2.0])),
        presence_penalty=draw(penalty),
        frequency_penalty=draw(penalty),
        logit_bias=tuple(sorted(biases.items())),
        seed=draw(st.integers(-(2**63), 2**63 - 1)),
    )


@st.composite
def any_row(draw: st.DrawFn) -> Row:
    mask = draw(st.none() | st.lists(st.booleans(), min_size=VOCAB, max_size=VOCAB))
    forbidden = draw(st.frozensets(tokens_of_vocab, max_size=3))
    if mask is not None:
        allowed = next(token for token in range(VOCAB) if token not in forbidden)
        mask[allowed] = True
    return Row(
        logits=draw(st.lists(logit, min_size=VOCAB, max_size=VOCAB)),
        params=draw(sampling_params()),
        position=draw(st.integers(0, 2**31)),
        prompt=draw(st.lists(tokens_of_vocab, max_size=8)),
        answer=draw(st.lists(tokens_of_vocab, max_size=8)),
        forbidden=forbidden,
        mask=mask,
    )


@settings(deadline=None)
@given(st.lists(any_row(), min_size=1, max_size=6))
def test_every_row_equals_the_oracle_alone_and_in_company(rows: list[Row]) -> None:
    together = sample(rows)
    assert together == [sample([row])[0] for row in rows]
    for token, row in zip(together, rows, strict=True):
        if token != row.expected():
            assert near_a_boundary(row), (token, row.expected(), row)


def near_a_boundary(row: Row) -> bool:
    """The number drawn, or a filter's limit, lies where sums of fp64 in another order may differ in the last bits."""
    logits = row.adjusted()
    close = set()
    for scale in (1 - 1e-12, 1 + 1e-12):
        top_p = row.params.top_p if row.params.top_p == 1.0 else row.params.top_p * scale
        values = {"top_p": top_p, "min_p": min(row.params.min_p * scale, 1.0)}
        close.add(tuple(oracle.distribution(logits, replaced(row.params, **values))))
    draw = uniform(row.params.seed, row.position)
    running, near = 0.0, False
    for _, probability in oracle.distribution(logits, row.params):
        running += probability
        near = near or abs(running - draw) < 1e-12
    return near or len(close) > 1


def replaced(params: SamplingParams, **values: Any) -> SamplingParams:
    return SamplingParams.from_wire({**params.to_wire(), **values})


def random_params(rng: random.Random) -> SamplingParams:
    return SamplingParams(
        temperature=rng.choice([0.0, 0.3, 1.0, 2.5]),
        top_k=rng.choice([0, 0, 1, 3, 40, 10**6]),
        top_p=rng.choice([1.0, 1.0, 0.05, 0.5, 0.95]),
        min_p=rng.choice([0.0, 0.0, 0.01, 0.3]),
        repetition_penalty=rng.choice([1.0, 1.2]),
        seed=rng.randrange(-(2**63), 2**63),
    )


@pytest.mark.parametrize("vocab", [1, 7, 300, 3001])
def test_vocabularies_of_every_size(vocab: int) -> None:
    rng = random.Random(vocab)
    torch.manual_seed(vocab)
    logits = torch.randn(40, vocab) * 3
    rows = [
        Row(
            logits=values,
            params=random_params(rng),
            position=rng.randrange(1, 10_000),
            prompt=[rng.randrange(vocab) for _ in range(50)],
            answer=[rng.randrange(vocab) for _ in range(9)],
            forbidden=frozenset(),
            mask=None,
        )
        for values in logits.tolist()
    ]
    together = sample(rows)
    assert together == [sample([row])[0] for row in rows]
    assert together == [row.expected() for row in rows]


def test_flat_rows_that_need_the_whole_vocabulary_ranked() -> None:
    torch.manual_seed(0)
    logits = torch.randn(6, 5000) * 0.01
    params = [SamplingParams(top_p=0.9, seed=s) for s in range(3)] + [
        SamplingParams(top_k=2000, seed=s) for s in range(3)
    ]
    wanted = [oracle.sampled(logits[r].tolist(), params[r], 5) for r in range(6)]
    assert SAMPLER.sample(logits, params, [5] * 6) == wanted


@pytest.mark.parametrize("options", [{"top_k": 3}, {"top_p": 0.0005}, {"top_k": 1500, "top_p": 0.9}])
def test_ties_beyond_the_candidates_go_to_the_lowest_ids(options: dict[str, Any]) -> None:
    logits = torch.zeros(20, 5000)
    params = [SamplingParams(seed=seed, **options) for seed in range(20)]
    wanted = [oracle.sampled(logits[0].tolist(), each, 5) for each in params]
    assert SAMPLER.sample(logits, params, [5] * 20) == wanted


def test_ties_go_to_the_lowest_id() -> None:
    logits = torch.tensor([[1.0, 3.0, 3.0, 3.0]]).repeat(3, 1)
    greedy, one, tiny = SamplingParams(temperature=0.0), SamplingParams(top_k=1), SamplingParams(top_p=1e-9)
    assert SAMPLER.sample(logits, [greedy, one, tiny], [1, 1, 1]) == [1, 1, 1]


def test_extreme_temperatures_and_masked_logits() -> None:
    logits = torch.tensor([[0.0, 80.0, float("-inf"), 79.0]]).repeat(3, 1)
    cold, hot = SamplingParams(temperature=1e-300), SamplingParams(temperature=100.0, top_p=0.999)
    assert SAMPLER.sample(logits[:1], [cold], [9]) == [1]
    drawn = {SAMPLER.sample(logits[:1], [hot], [position])[0] for position in range(300)}
    assert drawn == {0, 1, 3}


def test_half_precision_logits() -> None:
    logits = torch.randn(4, 50).to(torch.bfloat16)
    params = [SamplingParams(seed=s, top_k=5) for s in range(4)]
    assert SAMPLER.sample(logits, params, [3] * 4) == SAMPLER.sample(logits.float(), params, [3] * 4)


def test_the_repetition_penalty_is_that_of_transformers() -> None:
    from transformers import RepetitionPenaltyLogitsProcessor

    torch.manual_seed(3)
    logits, history = torch.randn(4, 60) * 5, torch.randint(0, 60, (4, 30))
    processed = RepetitionPenaltyLogitsProcessor(penalty=1.7)(history, logits.clone())
    params = [SamplingParams(temperature=0.0, repetition_penalty=1.7)] * 4
    extras = []
    for row in history.tolist():
        counts = TokenCounts()
        counts.update(row, 20)  # prompt and answer count alike
        extras.append(RowExtras(counts=counts))
    assert SAMPLER.sample(logits, params, [30] * 4, extras) == processed.argmax(-1).tolist()


@given(st.lists(tokens_of_vocab, max_size=40), st.integers(0, 40), st.lists(st.integers(0, 40), max_size=4))
def test_counts_do_not_depend_on_when_they_are_brought_up_to_date(
    tokens: list[int], num_prompt_tokens: int, stops: list[int]
) -> None:
    counts = TokenCounts()
    for stop in sorted(stops):
        counts.update(tokens[:stop], num_prompt_tokens)
        counts = counts.copy()
    counts.update(tokens, num_prompt_tokens)
    generated = Counter(tokens[num_prompt_tokens:])
    assert dict(zip(counts.ids, counts.generated, strict=True)) == {token: generated[token] for token in tokens}
    assert len(set(counts.ids)) == len(counts.ids)


# The 99.9 % points of chi-square for 1 to 15 degrees of freedom (any table of the distribution has them).
CHI_SQUARE_999 = [
    10.83,
    13.82,
    16.27,
    18.47,
    20.52,
    22.46,
    24.32,
    26.12,
    27.88,
    29.59,
    31.26,
    32.91,
    34.53,
    36.12,
    37.7,
]
SHAPE = [2.0, 1.0, 0.5, 0.0, -1.0, -1.2, 1.5, 0.9, -0.3, 0.2, 1.0, -1.5]
PARAMETER_SETS: list[dict[str, Any]] = [
    {},
    {"temperature": 0.5},
    {"temperature": 2.5},
    {"top_k": 4},
    {"top_p": 0.8},
    {"min_p": 0.2},
    {"top_k": 7, "top_p": 0.9, "min_p": 0.1, "temperature": 1.5},
    {"repetition_penalty": 1.5},
    {"presence_penalty": 1.0, "frequency_penalty": 0.4, "temperature": 0.7},
    {"logit_bias": ((0, -2.0), (5, 3.0)), "repetition_penalty": 0.8, "top_p": 0.95},
]


@pytest.mark.parametrize("options", PARAMETER_SETS, ids=str)
def test_frequencies_follow_the_exact_distribution(options: dict[str, Any]) -> None:
    """Chi-square of 20,000 draws: one at each position, as a long answer would make them."""
    prompt, answer = [0, 3, 3], [1, 1, 7, 0]
    rows = [
        Row(SHAPE, SamplingParams(seed=4, **options), position, prompt, answer, frozenset(), None)
        for position in range(1, DRAWS + 1)
    ]
    drawn = Counter(token for begin in range(0, DRAWS, 5000) for token in sample(rows[begin : begin + 5000]))
    expected = dict(oracle.distribution(rows[0].adjusted(), rows[0].params))
    assert set(drawn) <= set(expected)
    assert min(expected.values()) * DRAWS >= 5
    chi_square = sum((drawn[token] - p * DRAWS) ** 2 / (p * DRAWS) for token, p in expected.items())
    assert len(expected) > 1
    assert chi_square < CHI_SQUARE_999[len(expected) - 2]


def test_log_probabilities_are_those_of_the_raw_logits() -> None:
    torch.manual_seed(1)
    logits = torch.randn(3, 40) * 4
    tokens, counts = [7, 0, 39], [None, 0, 5]
    found = SAMPLER.logprobs(logits, tokens, counts)
    assert found[0] is None
    for row, one in list(enumerate(found))[1:]:
        assert one is not None
        wanted = oracle.log_softmax(logits[row].tolist())
        assert one.logprob == pytest.approx(wanted[tokens[row]], abs=1e-5)
        best = sorted(range(40), key=lambda token: (-wanted[token], token))[: counts[row]]
        assert [token for token, _ in one.top] == best
        assert [value for _, value in one.top] == pytest.approx([wanted[token] for token in best], abs=1e-5)


def test_alternatives_of_equal_probability_come_by_token_id() -> None:
    logits = torch.zeros(2, 3000)
    logits[1, 2000] = logits[1, 77] = 1.0
    found = SAMPLER.logprobs(logits, [5, 5], [4, 4])
    assert [[token for token, _ in one.top] for one in found if one is not None] == [[0, 1, 2, 3], [77, 2000, 0, 1]]


def test_more_alternatives_than_tokens() -> None:
    (one,) = SAMPLER.logprobs(torch.tensor([[0.0, math.log(3.0)]]), [0], [20])
    assert one is not None
    assert [(token, round(math.exp(value), 5)) for token, value in one.top] == [(1, 0.75), (0, 0.25)]


@settings(max_examples=200)
@given(st.integers(-(2**63), 2**63 - 1), st.integers(0, 2**31))
def test_uniform_is_in_range_and_pure(seed: int, position: int) -> None:
    u = uniform(seed, position)
    assert 0.0 <= u < 1.0
    assert u == uniform(seed, position)


def test_uniform_golden_values_and_spread() -> None:
    assert [uniform(0, 0), uniform(0, 1), uniform(1, 0)] == GOLDEN
    by_position = [uniform(5, p) for p in range(4000)]
    by_seed = [uniform(s, 5) for s in range(4000)]
    for values in (by_position, by_seed):
        assert abs(sum(values) / len(values) - 0.5) < 0.02
        assert len(set(values)) == len(values)
        neighbours = sum((a - 0.5) * (b - 0.5) for a, b in pairwise(values)) / len(values)
        assert abs(neighbours) < 0.01


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_forbidden_tokens_come_where_the_mask_allows_nothing_else(temperature: float) -> None:
    """A grammar that can only end goes before min_tokens."""
    params = SamplingParams(temperature=temperature)
    mask = [token in (4, 5) for token in range(VOCAB)]
    row = Row([9.0] * VOCAB, params, 0, [], [], frozenset({4, 5}), mask)
    half = Row([9.0] * VOCAB, params, 0, [], [], frozenset({4, 7}), mask)
    free = Row([9.0, 10.0] + [0.0] * (VOCAB - 2), params, 0, [], [], frozenset({1}), None)
    tokens = sample([row, half, free])
    assert tokens[0] in (4, 5)
    assert tokens[1] == 5
    assert tokens[2] != 1
