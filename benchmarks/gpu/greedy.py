"""answer_greedily: several prompts through one ModelRunner, long ones in pieces beside the others' decode steps.

Owns: scattered block tables over a poisoned pool, and the loop.
Does not: schedule as the engine does, or stop at a model's end.
Invariants: every answer has the same number of tokens.
"""

from __future__ import annotations

import random
from collections.abc import Sequence

from benchmarks.gpu.environment import Skip
from cluster.core.sampling import SamplingParams
from worker.batch import Batch, ScheduledSeq
from worker.model_runner import ModelRunner

GREEDY = SamplingParams(temperature=0.0)


def block_tables(runner: ModelRunner, lengths: Sequence[int]) -> list[list[int]]:
    """Blocks for sequences of these lengths, in no order."""
    facts = runner.facts
    sizes = [-(-length // facts.block_size) for length in lengths]
    if sum(sizes) > facts.num_blocks:
        raise Skip(f"it needs {sum(sizes)} blocks, and the pool has {facts.num_blocks}")
    if max(lengths) > facts.max_model_len:
        raise Skip(f"the model ends at {facts.max_model_len} tokens")
    blocks = random.Random(0).sample(range(facts.num_blocks), sum(sizes))
    ends = [sum(sizes[: number + 1]) for number in range(len(sizes))]
    return [blocks[end - size : end] for end, size in zip(ends, sizes, strict=True)]


def answer_greedily(
    runner: ModelRunner, prompts: Sequence[Sequence[int]], new_tokens: int, piece: int
) -> list[list[int]]:
    """`new_tokens` tokens for each prompt; a step takes at most `piece` tokens of one."""
    tables = block_tables(runner, [len(prompt) + new_tokens for prompt in prompts])
    runner.pool.tensor.fill_(float("nan"))
    texts, starts = [list(prompt) for prompt in prompts], [0] * len(prompts)
    while waiting := [i for i, prompt in enumerate(prompts) if len(texts[i]) < len(prompt) + new_tokens]:
        rows = []
        for i in waiting:
            end = min(len(texts[i]), starts[i] + piece)
            tokens = tuple(texts[i][starts[i] : end])
            rows.append(ScheduledSeq(str(i), tokens, starts[i], tables[i], end == len(texts[i]), GREEDY))
            starts[i] = end
        sampled = iter(runner.run(Batch(tuple(rows))))
        for i, row in zip(waiting, rows, strict=True):
            if row.sample:
                texts[i].append(next(sampled).token_id)
    return [text[len(prompt) :] for text, prompt in zip(texts, prompts, strict=True)]
