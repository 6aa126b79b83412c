"""What the scheduler hands to the model runner, and what comes back.

Owns: ScheduledSeq and Batch, plain values without tensors.
Does not: know sequences' lives or allocate blocks.
Invariants: `token_ids` are the tokens at positions [start, start + len); every one of these positions has a slot
in `block_ids`, which is the live table and valid until the step is booked; KV of positions [0, start) is in those
blocks once `copies` are done.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from cluster.core.sampling import SamplingParams


class ScheduledSeq(NamedTuple):
    """One row of a step: one sequence's share.

    sample: True when the last scheduled token is the sequence's newest, so that its logits choose the next token.
    position: the sampled token's position, which keys the random stream (seed, position).
    candidates: how many of the best next tokens are wanted (beams).  logprob: the sampled token's is wanted (best_of).
    """

    seq_id: str
    token_ids: Sequence[int]
    start: int
    block_ids: Sequence[int]
    sample: bool
    sampling: SamplingParams
    candidates: int = 0
    logprob: bool = False

    @property
    def end(self) -> int:
        return self.start + len(self.token_ids)


@dataclass(frozen=True, slots=True)
class Batch:
    """One step: prefill pieces and decode rows together, in schedule order.

    copies: blocks to copy, (source, target), one after the other, before anything is written.
    """

    seqs: tuple[ScheduledSeq, ...]
    copies: tuple[tuple[int, int], ...] = ()

    @property
    def num_tokens(self) -> int:
        return sum(len(seq.token_ids) for seq in self.seqs)
