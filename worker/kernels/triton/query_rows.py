"""The query rows of one program: the queries of a span times the heads that share a KV head.

    row r of the program = query r // GROUP of its queries, head r % GROUP of the group

Owns: the packing of grouped heads into rows, and where each row lies in [T, num_heads, head_dim].
Does not: compute.
Invariants: a row that does not exist has the position of the last that does, and is neither loaded nor stored.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def query_rows(
    first_row: tl.tensor,  # of the span in the flat batch
    count: tl.tensor,
    start: tl.tensor,
    first_query: tl.tensor,
    kv_head: tl.tensor,
    strides: tl.tuple,  # of [T, num_heads, head_dim], without the last, which is 1
    GROUP: tl.constexpr,
    ROWS: tl.constexpr,
) -> tl.tensor:
    """(offset, exists, here): int64 elements to each row, whether it exists, and its position in the sequence."""
    row = tl.arange(0, ROWS)
    query = first_query + row // GROUP
    stop = tl.minimum(first_query + ROWS // GROUP, count)
    head = kv_head * GROUP + row % GROUP
    offset = (first_row + query).to(tl.int64) * strides[0] + head.to(tl.int64) * strides[1]
    return offset, query < stop, start + tl.minimum(query, stop - 1)
