"""The first steps of a model: both shapes through the real engine path, and nothing of them left behind."""

from __future__ import annotations

from dataclasses import replace

import fake_engine as fakes
import pytest

from cluster.config import CacheConfig, EngineConfig
from cluster.core.hashing import RouteScheme
from worker.batch import Batch
from worker.engine_assembly import assemble_engine
from worker.runner import Sampled
from worker.warm_up import CPU_PREFILL_TOKENS, PREFILL_TOKENS, warm_up

CACHE = CacheConfig(block_size=4, chunk_tokens=8)
SCHEME = RouteScheme(tokenizer_revision="t", model_revision="m", chunk_tokens=8)


class Recorder(fakes.FingerprintRunner):
    """Keeps the shape of every batch: the number of tokens of each row."""

    def __init__(self, num_blocks: int = 256, max_model_len: int = 1024) -> None:
        super().__init__(num_blocks, 4, max_model_len)
        self.shapes: list[list[int]] = []
        self.greedy: set[bool] = set()

    def run(self, batch: Batch) -> list[Sampled]:
        self.shapes.append([len(seq.token_ids) for seq in batch.seqs])
        for seq in batch.seqs:
            if seq.seq_id.startswith("warm-up"):
                self.histories.setdefault(seq.seq_id, [])
        self.greedy |= {seq.sampling.temperature == 0.0 for seq in batch.seqs}
        return super().run(batch)


@pytest.mark.parametrize("device,tokens", [("cpu", CPU_PREFILL_TOKENS), ("cuda", PREFILL_TOKENS)])
def test_a_prefill_piece_and_decode_steps_of_both_kinds(device: str, tokens: int) -> None:
    runner = Recorder()
    runner.facts = replace(runner.facts, device=device)
    warm_up(EngineConfig(cache=CACHE), runner, SCHEME)
    assert runner.shapes == [[tokens], [1, tokens // 4], [1, 1], [1]]
    assert runner.greedy == {True, False}


def test_the_engine_that_serves_has_seen_nothing() -> None:
    runner = Recorder()
    config = EngineConfig(cache=CACHE, check_invariants=True, strict_blocks=True, token_budget=64)
    warm_up(config, runner, SCHEME)
    engine = assemble_engine(config, runner, SCHEME)
    fresh = assemble_engine(config, Recorder(), SCHEME)
    assert engine.step() == fresh.step()
    assert engine.last_step == fresh.last_step and engine.load().free_blocks == 256
    fake = fakes.FakeEngine(engine, runner)
    prompt = [1 + n for n in range(40)]  # as the warm-up's: a block of it would be found
    name = fake.add(prompt, 5)
    fake.finish()
    assert (fake.cached[name], fake.answers[name]) == (0, fakes.expected_answer(prompt, 5))


@pytest.mark.parametrize("prefix_cache", ["radix", "chunk", "off"])
@pytest.mark.parametrize("max_num_seqs,token_budget,max_queue", [(1, 1, 1), (2, 7, 1), (64, 2048, 1024)])
def test_whatever_the_limits(prefix_cache: str, max_num_seqs: int, token_budget: int, max_queue: int) -> None:
    cache = CACHE.model_copy(update={"prefix_cache": prefix_cache})
    config = EngineConfig(cache=cache, max_num_seqs=max_num_seqs, token_budget=token_budget, max_queue=max_queue)
    runner = Recorder(num_blocks=16, max_model_len=64)
    warm_up(config, runner, SCHEME)
    assert max(map(sum, runner.shapes)) <= token_budget and [1] in runner.shapes


@pytest.mark.parametrize("length,steps", [(3, 0), (4, 6)])
def test_a_model_that_can_hardly_answer(length: int, steps: int) -> None:
    runner = Recorder(num_blocks=4, max_model_len=length)
    warm_up(EngineConfig(cache=CACHE), runner, SCHEME)
    assert len(runner.shapes) <= steps and bool(runner.shapes) == bool(steps)


def test_what_fails_ends_the_start() -> None:
    class Broken(Recorder):
        def run(self, batch: Batch) -> list[Sampled]:
            raise RuntimeError("no kernel image is available")

    with pytest.raises(RuntimeError, match="no kernel image"):
        warm_up(EngineConfig(cache=CACHE), Broken(), SCHEME)
