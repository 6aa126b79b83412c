"""Beam search over real logits finds what transformers' generate() finds: sequences, order and scores.

The tiny models run in float64, so that both sides round alike wherever the tests run; log_softmax is float32 on both.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from cluster.core.request import FinishReason
from worker.beam_search import BeamParams, BeamResult, BeamSearch, EarlyStopping

Tokens = tuple[int, ...]
Found = list[tuple[Tokens, float]]

PROMPTS = {"llama": 7, "qwen2": 1, "mistral": 19, "gemma2": 3, "phi3": 12}  # family -> prompt length
EARLY: list[EarlyStopping] = [True, False, "never"]
PENALTIES = [-0.5, 0.0, 1.0, 2.0]


class Driver:
    """One model and one prompt; the logits of a text are computed once, by a full forward pass."""

    def __init__(self, model: Any, prompt: list[int]) -> None:
        self.model = model
        self.prompt = prompt
        self._logprobs: dict[Tokens, torch.Tensor] = {}

    @torch.inference_mode()
    def search(self, params: BeamParams, ends: Callable[[Tokens], bool] | None = None) -> list[BeamResult]:
        search = BeamSearch(params, ends)
        while not search.done:
            rows = [beam.tokens for beam in search.live]
            if missing := [tokens for tokens in rows if tokens not in self._logprobs]:
                logits = self.model(torch.tensor([[*self.prompt, *tokens] for tokens in missing])).logits[:, -1]
                self._logprobs.update(zip(missing, torch.log_softmax(logits.float(), dim=-1), strict=True))
            best = torch.topk(torch.stack([self._logprobs[tokens] for tokens in rows]), search.num_candidates)
            search.advance(
                [
                    list(zip(tokens, values, strict=True))
                    for tokens, values in zip(best.indices.tolist(), best.values.tolist(), strict=True)
                ]
            )
        return search.results()

    def generate(self, params: BeamParams, **options: Any) -> Found:
        ids = torch.tensor([self.prompt])
        self.model.generation_config.eos_token_id = sorted(params.eos_token_ids) or None
        out = self.model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            do_sample=False,
            num_beams=params.width,
            num_return_sequences=params.width,
            max_new_tokens=params.max_tokens,
            length_penalty=params.length_penalty,
            early_stopping=params.early_stopping,
            pad_token_id=0,
            return_dict_in_generate=True,
            output_scores=True,
            **options,
        )
        rows = out.sequences[:, len(self.prompt) :].tolist()
        lengths = (out.beam_indices >= 0).sum(dim=1).tolist()  # the rest of a row is filler
        texts = [tuple(row[:length]) for row, length in zip(rows, lengths, strict=True)]
        return list(zip(texts, out.sequences_scores.tolist(), strict=True))


def assert_equal(found: list[BeamResult], expected: Found) -> None:
    assert [result.tokens for result in found] == [tokens for tokens, _ in expected]
    assert [result.score for result in found] == pytest.approx([score for _, score in expected], rel=0, abs=1e-4)


@pytest.fixture(scope="module", params=sorted(PROMPTS))
def driver(request: pytest.FixtureRequest, tiny_model_dir: Callable[[str], Path]) -> Driver:
    family: str = request.param
    model = transformers.AutoModelForCausalLM.from_pretrained(tiny_model_dir(family), dtype=torch.float64)
    return Driver(model, [4 + (37 * i + 11) % 92 for i in range(PROMPTS[family])])


def params(
    width: int, eos: set[int], penalty: float = 1.0, early: EarlyStopping = False, tokens: int = 14
) -> BeamParams:
    return BeamParams(
        width=width, max_tokens=tokens, eos_token_ids=frozenset(eos), length_penalty=penalty, early_stopping=early
    )


@pytest.mark.parametrize("width", [2, 4, 8])
def test_tiny_models_equal_generate(driver: Driver, width: int) -> None:
    free = driver.search(params(width, set()))
    assert_equal(free, driver.generate(params(width, set())))
    late, early = free[0].tokens[9], free[1].tokens[4]  # tokens that these texts really come to
    reasons, lengths = set(), set()
    for i, (penalty, early_stopping) in enumerate(itertools.product(PENALTIES, EARLY)):
        wanted = params(width, {late} if i % 2 else {early, late}, penalty, early_stopping)
        found = driver.search(wanted)
        assert_equal(found, driver.generate(wanted))
        reasons |= {result.finish_reason for result in found}
        lengths |= {len(result.tokens) for result in found}
    assert FinishReason.STOP in reasons and len(lengths) > 2


@pytest.mark.parametrize("tokens", [1, 20])
def test_other_lengths_equal_generate(driver: Driver, tokens: int) -> None:
    wanted = params(3, {driver.search(params(3, set()))[0].tokens[-1]}, tokens=tokens)
    assert_equal(driver.search(wanted), driver.generate(wanted))


def test_texts_that_the_caller_ends_equal_generate(driver: Driver) -> None:
    """Against a stopping criterion of the caller's own, which ends one text in seven."""

    def ends(tokens: Tokens) -> bool:
        return sum(tokens[-2:]) % 7 == 2

    class Ends(transformers.StoppingCriteria):  # type: ignore[misc]
        def __call__(self, input_ids: torch.Tensor, scores: object, **options: object) -> torch.Tensor:
            return torch.tensor([ends(tuple(row)) for row in input_ids[:, len(driver.prompt) :].tolist()])

    reasons = set()
    for penalty, early in itertools.product([-0.5, 1.0], EARLY):
        wanted = params(4, set(), penalty, early)
        found = driver.search(wanted, ends)
        criteria = transformers.StoppingCriteriaList([Ends()])
        assert_equal(found, driver.generate(wanted, stopping_criteria=criteria))
        reasons |= {result.finish_reason for result in found}
    assert FinishReason.STOP in reasons


def test_width_one_equals_greedy(driver: Driver) -> None:
    (free,) = driver.search(params(1, set()))
    ids = torch.tensor([driver.prompt])
    for eos, early in itertools.product((free.tokens[6], free.tokens[-1], None), EARLY):
        driver.model.generation_config.eos_token_id = eos
        out = driver.model.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=14)
        (found,) = driver.search(params(1, set() if eos is None else {eos}, early=early))
        assert list(found.tokens) == out[0, len(driver.prompt) :].tolist()
