"""step_shape: what a batch has to do, in the features of the step-time model.

Owns: telling prefill from decode in a batch: a decode row is one token that is sampled from and follows others.
Does not: know how long anything takes (cluster.core.step_time).
Invariants: reads only lengths, so it costs well under a microsecond per row.
"""

from __future__ import annotations

from cluster.core.step_time import StepShape
from worker.batch import Batch


def step_shape(batch: Batch) -> StepShape:
    """A prefill that has one token left looks like a decode row and costs the same."""
    prefill = decodes = context = 0
    attended = 0.0
    for item in batch.seqs:
        count, start = len(item.token_ids), item.start
        if count == 1 and start and item.sample:
            decodes += 1
            context += start + 1
        else:
            prefill += count
            attended += count * (start + (count + 1) / 2)
    return StepShape(prefill, attended, decodes, context)
