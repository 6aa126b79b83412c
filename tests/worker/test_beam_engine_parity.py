"""Beams of the whole engine (paged pool, forks, copy-on-write, batching) are those of transformers' generate()."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from cluster.config import CacheConfig, EngineConfig
from cluster.core.hashing import RouteScheme
from cluster.core.request import GenerationRequest, TokenDelta
from cluster.core.sampling import SamplingParams
from worker.engine import Engine
from worker.engine_assembly import assemble_engine
from worker.engine_factory import build_engine
from worker.frame import EngineCommand
from worker.model_runner import ModelRunner

FAMILIES = ("llama", "qwen2", "qwen3", "mistral", "gemma2")
PROMPT = [4 + (29 * i + 7) % 92 for i in range(21)]
NEW_TOKENS = 10

Found = list[tuple[list[int], float]]


def make_engine(path: Path) -> Engine:
    cache = CacheConfig(block_size=8, chunk_tokens=16, kv_memory=2**22)
    config = EngineConfig(
        model=str(path), dtype="float32", cache=cache, check_invariants=True, strict_blocks=True, max_model_len=256
    )
    scheme = RouteScheme(tokenizer_revision="t", model_revision="m", chunk_tokens=cache.chunk_tokens)
    return assemble_engine(config, ModelRunner(config, path), scheme)


def run(
    engine: Engine, name: str, prompt: list[int], preempt_at: int | None = None, **sampling: Any
) -> list[TokenDelta]:
    """The answers of one request; `preempt_at`: the step after which its group is preempted."""
    request = GenerationRequest(
        request_id=name, prompt_token_ids=tuple(prompt), sampling=SamplingParams(max_tokens=NEW_TOKENS, **sampling)
    )
    engine.execute([EngineCommand(add=request)])
    deltas: list[TokenDelta] = []
    step = 0
    while engine.has_work:
        deltas += engine.step().deltas
        step += 1
        if step == preempt_at:
            engine._scheduler.preempt_one()
    return deltas


def generate(model: Any, prompt: list[int], width: int, eos: int | None, **options: Any) -> Found:
    ids = torch.tensor([prompt])
    model.generation_config.eos_token_id = eos
    with torch.inference_mode():
        out = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            do_sample=False,
            num_beams=width,
            num_return_sequences=width,
            max_new_tokens=NEW_TOKENS,
            pad_token_id=0,
            return_dict_in_generate=True,
            output_scores=True,
            **options,
        )
    lengths = (out.beam_indices >= 0).sum(dim=1).tolist()
    rows = out.sequences[:, len(prompt) :].tolist()
    texts = [row[:length] for row, length in zip(rows, lengths, strict=True)]
    return list(zip(texts, out.sequences_scores.tolist(), strict=True))


def assert_equal(found: list[TokenDelta], expected: Found) -> None:
    assert [list(delta.token_ids) for delta in found] == [tokens for tokens, _ in expected]
    assert [delta.score for delta in found] == pytest.approx([score for _, score in expected], rel=0, abs=1e-4)
    assert [delta.choice for delta in found] == list(range(len(expected)))


@pytest.mark.parametrize("family", FAMILIES)
def test_tiny_models(family: str, tiny_model_dir: Callable[[str], Path]) -> None:
    path = tiny_model_dir(family)
    engine = make_engine(path)
    model = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    free = generate(model, PROMPT, 4, None)
    assert_equal(run(engine, "free", PROMPT, beam_width=4, ignore_eos=True), free)
    eos = free[0][0][5]  # a token that the best text really comes to
    for width, penalty, early in ((2, 0.0, True), (4, 1.0, False), (8, 2.0, "never")):
        options: dict[str, Any] = {"length_penalty": penalty, "early_stopping": early}
        found = run(engine, "stop", PROMPT, beam_width=width, ignore_eos=True, stop_token_ids=(eos,), **options)
        assert_equal(found, generate(model, PROMPT, width, eos, **options))
    assert engine.load().in_use_blocks == 0


@pytest.mark.parametrize("preempt_at", [1, 2, 5, 10])
def test_preempted_and_resumed_in_the_middle(preempt_at: int, tiny_model_dir: Callable[[str], Path]) -> None:
    path = tiny_model_dir("llama")
    engine = make_engine(path)
    whole = run(engine, "a", PROMPT, beam_width=4, ignore_eos=True)
    again = run(make_engine(path), "b", PROMPT, preempt_at=preempt_at, beam_width=4, ignore_eos=True)
    assert [d.token_ids for d in again] == [d.token_ids for d in whole]
    assert [d.score for d in again] == pytest.approx([d.score for d in whole], abs=1e-5)


def test_samples_equal_those_of_single_requests(tiny_model_dir: Callable[[str], Path]) -> None:
    path = tiny_model_dir("qwen2")
    engine = make_engine(path)
    together = run(engine, "n", PROMPT, n=3, seed=5, ignore_eos=True)
    for index in range(3):
        alone = run(engine, f"one{index}", PROMPT, seed=5 + index, ignore_eos=True)
        tokens = [token for delta in together if delta.choice == index for token in delta.token_ids]
        assert tokens == [token for delta in alone for token in delta.token_ids]


@pytest.mark.model
def test_the_demo_model(demo_model_dir: Path) -> None:
    path = demo_model_dir
    cache = CacheConfig(kv_memory=2**28)
    config = EngineConfig(model=str(path), dtype="float32", cache=cache, strict_blocks=True, max_model_len=512)
    engine = build_engine(config, str(path))[0]
    model = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    prompt = [9906 + i for i in range(20)]
    for width in (2, 4, 8):
        found = run(engine, "demo", prompt, beam_width=width, ignore_eos=True)
        assert_equal(found, generate(model, prompt, width, None))
