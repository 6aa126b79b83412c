"""DecodeInputs: the buffers that a captured decode step reads, for a fixed number of rows.

    block_tables [B, width] | token_ids [B] | positions [B] | slots [B]     one piece of memory, filled by one copy

Owns: the layout, and filling it from StepRows with padding rows behind the real ones.
Does not: decide which steps fit (worker.models.graphed_executor).
Invariants: no buffer ever moves; fresh buffers hold padding rows only, which write no KV.
"""

from __future__ import annotations

import torch
from torch import Tensor

from worker.kernels.fixed_metadata import FixedMetadata
from worker.models.executor import StepRows

NOWHERE = -1


class DecodeInputs:
    def __init__(self, rows: int, width: int, block_size: int, device: torch.device) -> None:
        """`width`: blocks of a row's table."""
        self._rows, self._width, self._block_size = rows, width, block_size
        size = rows * (3 + width)
        self._host = torch.zeros(size, dtype=torch.int64, pin_memory=device.type == "cuda")
        self._device = torch.empty(size, dtype=torch.int64, device=device)
        self.token_ids, self.positions, self.slots, self.block_tables = self._parts(self._device)
        self.logit_rows = torch.arange(rows, device=device)
        self.fill(StepRows((), (), ()))

    def metadata(self) -> FixedMetadata:
        """A new one at every call: a backend plans anew for each, as it must in each run of the captured work."""
        return FixedMetadata(
            spans=(), slot_mapping=self.slots, positions=self.positions, block_tables=self.block_tables
        )

    def fill(self, step: StepRows) -> None:
        """At most as many spans as rows, of one row each, whose positions the tables hold."""
        token_ids, positions, slots, tables = self._parts(self._host.zero_())
        count = len(step.spans)
        token_ids[:count] = torch.tensor(step.token_ids, dtype=torch.int64)
        positions[:count] = torch.tensor([span.start for span in step.spans], dtype=torch.int64)
        slots.fill_(NOWHERE)
        for row, (_, start, block_ids) in enumerate(step.spans):
            block, offset = divmod(start, self._block_size)
            tables[row, : block + 1] = torch.tensor(block_ids[: block + 1], dtype=torch.int64)
            slots[row] = block_ids[block] * self._block_size + offset
        self._device.copy_(self._host)

    def _parts(self, flat: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """The tables come first, where memory is aligned, so that kernels are compiled once for all numbers of rows."""
        tables, others = flat.split((self._rows * self._width, 3 * self._rows))
        token_ids, positions, slots = others.view(3, self._rows).unbind()
        return token_ids, positions, slots, tables.view(self._rows, self._width)
