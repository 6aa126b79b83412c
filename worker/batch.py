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
from worker.grammar_port import GrammarProgress
from worker.sampling.row_extras import RowExtras


class ScheduledSeq(NamedTuple):
    """One row of a step: one sequence's share.

    sample: the logits of the last scheduled token are wanted: it is the sequence's newest, so that they choose the next
    token, or the row tells its prompt's log probabilities.  end: the position of the sampled token, which keys the
    random stream (seed, position).  extras: what is wanted beyond a plain token.  grammar: says which tokens may come.
    """

    seq_id: str
    token_ids: Sequence[int]
    start: int
    block_ids: Sequence[int]
    sample: bool
    sampling: SamplingParams
    extras: RowExtras | None = None
    grammar: GrammarProgress | None = None

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
