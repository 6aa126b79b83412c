"""The workloads' shapes are those that were agreed on, and their texts depend on the seed alone."""

from __future__ import annotations

import pytest

from cluster.bench.workloads import WORKLOADS, choose, write_texts
from cluster.core.errors import ConfigError

WORDS = [f"word{letter}" for letter in "abcdefghij"]


@pytest.mark.parametrize(
    ("name", "requests", "prompt_words", "answer_tokens", "concurrency"),
    [
        ("W1", 1, 64, 128, 1),
        ("W2", 32, 32 * 1088, 32 * 32, 8),
        ("W2_off", 32, 32 * 1088, 32 * 32, 8),
        ("W3", 48, 48 * 64, 48 * 48, 4),
        ("W5", 1, 4096, 64, 1),
    ],
)
def test_shapes(name: str, requests: int, prompt_words: int, answer_tokens: int, concurrency: int) -> None:
    workload = WORKLOADS[name]
    assert sum(len(turns) for turns in workload.conversations) == requests
    assert workload.prompt_words == prompt_words
    assert workload.answer_tokens == answer_tokens
    assert workload.concurrency == concurrency
    assert workload.caching is (name != "W2_off")


def test_mixed_lengths_are_fixed_and_within_bounds() -> None:
    turns = [conversation[0] for conversation in WORKLOADS["W4"].conversations]
    assert len(turns) == 32
    assert all(32 <= turn.words <= 1024 and 16 <= turn.max_tokens <= 128 for turn in turns)
    # The same lengths as in the measured tables of other servers.
    assert (WORKLOADS["W4"].prompt_words, WORKLOADS["W4"].answer_tokens) == (16950, 2189)


@pytest.mark.parametrize("name", WORKLOADS)
def test_texts_have_the_shape_and_depend_on_the_seed_alone(name: str) -> None:
    workload = WORKLOADS[name]
    texts = write_texts(workload, WORDS, "seed")
    assert texts == write_texts(workload, WORDS, "seed")
    assert texts != write_texts(workload, WORDS, "another")
    assert sum(len(turn.text.split()) for turns in texts for turn in turns) == workload.prompt_words
    assert sum(turn.max_tokens for turns in texts for turn in turns) == workload.answer_tokens


def test_a_shared_beginning_is_shared_and_the_rest_is_not() -> None:
    prompts = [turns[0].text.split() for turns in write_texts(WORKLOADS["W2"], WORDS, "seed")]
    assert len({tuple(prompt[:1024]) for prompt in prompts}) == 1
    assert len({tuple(prompt[1024:]) for prompt in prompts}) == len(prompts)


def test_choosing_keeps_the_order_and_refuses_unknown_names() -> None:
    assert [workload.name for workload in choose("W3, W1,W3")] == ["W3", "W1"]
    with pytest.raises(ConfigError, match="no workload 'W9'; there are W1, W2"):
        choose("W1,W9")
    with pytest.raises(ConfigError, match="no workload named"):
        choose(" , ")
