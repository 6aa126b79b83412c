"""ModelRunner over a tiny model: facts, account, steps, and that batching and pieces change no token."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from cluster.config import CacheConfig, EngineConfig
from cluster.core.errors import ConfigError
from cluster.core.sampling import SamplingParams
from worker.batch import Batch, ScheduledSeq
from worker.kernels import native
from worker.model_runner import ModelRunner, free_bytes
from worker.runner import ModelFacts, Sampled

GREEDY = SamplingParams(temperature=0.0)
NATIVE = "reference" if native.module() is None else "cpu"


def make_runner(path: Path, **changes: Any) -> ModelRunner:
    cache = CacheConfig(
        kv_memory=changes.pop("kv_memory", 2**20),
        block_size=changes.pop("block_size", 8),
        chunk_tokens=changes.pop("chunk_tokens", 8),
    )
    values: dict[str, Any] = {"model": str(path), "device": "cpu", "dtype": "float32", "threads": 1, "cache": cache}
    return ModelRunner(EngineConfig(**{**values, **changes}), path)


def seq(
    tokens: list[int], start: int, blocks: list[int], sampling: SamplingParams = GREEDY, sample: bool = True
) -> ScheduledSeq:
    return ScheduledSeq("r", tuple(tokens[start:]), start, tuple(blocks), sample, sampling)


def ids(sampled: list[Sampled]) -> list[int]:
    return [row.token_id for row in sampled]


def complete(
    runner: ModelRunner, prompt: list[int], blocks: list[int], sampling: SamplingParams, count: int
) -> list[int]:
    """One sequence alone, the whole prompt at once."""
    tokens, start = list(prompt), 0
    for _ in range(count):
        new = ids(runner.run(Batch((seq(tokens, start, blocks, sampling),))))
        start = len(tokens)
        tokens += new
    return tokens[len(prompt) :]


def test_facts(tiny_model_dir: Callable[[str], Path]) -> None:
    path = tiny_model_dir("llama")
    facts = make_runner(path).facts
    assert facts.model == "llama"
    assert (facts.num_layers, facts.num_heads, facts.num_kv_heads, facts.head_dim) == (3, 4, 2, 8)
    assert (facts.vocab_size, facts.max_model_len, facts.eos_token_ids) == (96, 512, (2,))
    assert (facts.dtype, facts.device, facts.attention) == (
        "float32",
        "cpu",
        "reference" if native.module() is None else "cpu",
    )
    assert facts.kv_bytes_per_token == 3 * 2 * 2 * 8 * 4
    assert facts.num_blocks == 2**20 // (facts.kv_bytes_per_token * 8)
    assert ModelFacts.from_wire(facts.to_wire()) == facts
    other = make_runner(path, block_size=4).facts
    assert other.model_revision == facts.model_revision
    assert other.kv_fingerprint != facts.kv_fingerprint


def test_account_is_logged_once(tiny_model_dir: Callable[[str], Path], caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO", logger="worker.model_runner"):
        make_runner(tiny_model_dir("llama"), kv_memory=100_000)
    levels = [record.levelname for record in caplog.records]
    assert levels == ["WARNING", "INFO"]
    assert "max_model_len is lowered to 256" in caplog.messages[0]
    for part in ("llama on cpu", "KV per token", "32 blocks of 8 tokens", "256 tokens"):
        assert part in caplog.messages[1]


def test_explicit_length_that_does_not_fit(tiny_model_dir: Callable[[str], Path]) -> None:
    with pytest.raises(ConfigError, match="--max-model-len 256"):
        make_runner(tiny_model_dir("llama"), kv_memory=100_000, max_model_len=500)


def test_batches_and_pieces_change_no_token(tiny_model_dir: Callable[[str], Path]) -> None:
    runner = make_runner(tiny_model_dir("qwen2"))
    runner.pool.tensor.fill_(float("nan"))
    prompts = [list(range(3, 40)), [9], list(range(50, 90))]
    blocks = [[5, 1, 9, 30, 31, 32, 33], [2, 8, 7], [20, 21, 22, 23, 24, 25, 26, 27]]
    params = [GREEDY, SamplingParams(seed=4, temperature=0.8), SamplingParams(seed=5, top_k=20, top_p=0.9)]
    wanted = [complete(runner, p, b, s, 10) for p, b, s in zip(prompts, blocks, params, strict=True)]
    assert len(set(map(tuple, wanted))) == 3

    runner.pool.tensor.fill_(float("nan"))
    texts, starts, piece = [list(p) for p in prompts], [0, 0, 0], [10, 10, 16]
    for _ in range(12):
        batch = []
        for i in range(3):
            end = min(len(texts[i]), starts[i] + piece[i])
            batch.append(seq(texts[i][:end], starts[i], blocks[i], params[i], sample=end == len(texts[i])))
            starts[i] = end
        new = iter(ids(runner.run(Batch(tuple(batch)))))
        for i, part in enumerate(batch):
            if part.sample:
                texts[i].append(next(new))
        assert next(new, None) is None
    for text, prompt, tokens in zip(texts, prompts, wanted, strict=True):
        made = text[len(prompt) :]
        assert made[:10] == tokens[: len(made)]


def test_every_backend_and_block_size_gives_the_same_tokens(tiny_model_dir: Callable[[str], Path]) -> None:
    prompt, found = list(range(3, 40)), []
    for backend, block_size in (("reference", 8), ("auto", 8), ("auto", 4), ("cpu", 64)):
        runner = make_runner(
            tiny_model_dir("llama"), attention_backend=backend, block_size=block_size, chunk_tokens=block_size
        )
        runner.pool.tensor.fill_(float("nan"))
        assert runner.facts.attention == ("reference" if backend == "reference" or block_size == 4 else NATIVE)
        found.append(complete(runner, prompt, list(range(80 // block_size + 1)), GREEDY, 40))
    assert found == found[:1] * 4
    assert len(set(found[0])) > 1


def test_a_shared_prefix_in_other_blocks_gives_the_same_tokens(tiny_model_dir: Callable[[str], Path]) -> None:
    runner = make_runner(tiny_model_dir("llama"))
    prompt = list(range(3, 30))
    wanted = complete(runner, prompt, [1, 2, 3, 4, 5], GREEDY, 8)
    runner.pool.copy_block(3, 40)  # copy-on-write of the third block; blocks 1 and 2 are shared
    made: list[int] = []
    tokens, start = list(prompt), 20
    for _ in range(8):
        new = ids(runner.run(Batch((seq(tokens, start, [1, 2, 40, 41, 42]),))))
        start, made = len(tokens), made + new
        tokens += new
    assert made == wanted


def test_steps_without_samples(tiny_model_dir: Callable[[str], Path]) -> None:
    runner = make_runner(tiny_model_dir("llama"))
    assert runner.run(Batch(())) == []
    assert runner.run(Batch((seq([3, 4, 5], 0, [0], sample=False),))) == []


def test_cuda_is_refused_where_there_is_none(
    tiny_model_dir: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ConfigError, match="finds no CUDA device"):
        make_runner(tiny_model_dir("llama"), device="cuda")


def test_free_bytes_of_this_machine() -> None:
    assert 2**20 < free_bytes(torch.device("cpu")) < 2**50
