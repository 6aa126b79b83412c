"""Every attention backend that is possible on this machine's CUDA device, against a full softmax on the CPU.

test_triton_attention asks more of the Triton kernels; this is what the others are held to, and that all are possible.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from attention_world import AttentionWorld
from on_device import OnDevice

from cluster.core.errors import ConfigError
from worker.kernels import select_backend
from worker.kernels.reference import ReferenceAttention

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="torch finds no CUDA device"),
]

F32, BF16, F16 = torch.float32, torch.bfloat16, torch.float16
PLAIN, ROUNDED = 2e-5, 2e-2
MIXED = [(0, 1), (0, 17), (12, 4), (250, 70), (256, 1), (700, 1)]
DECODES = [(0, 1), (15, 1), (255, 1), (511, 1), (900, 1)]

# dtype, heads, KV heads, head dim, block size, window, softcap, (cached, new) of every sequence
CASES: list[tuple[Any, ...]] = [
    (BF16, 9, 3, 64, 16, None, None, MIXED),
    (BF16, 32, 8, 128, 16, None, None, DECODES),
    (BF16, 14, 2, 80, 32, 37, None, MIXED),
    (F16, 8, 1, 128, 16, 300, None, DECODES),
    (F16, 4, 4, 256, 64, None, 4.0, MIXED),
    (F32, 9, 3, 64, 16, None, None, MIXED),
    (F32, 8, 2, 128, 16, 40, 4.0, DECODES),
]


@pytest.mark.parametrize("case", CASES, ids=lambda case: "-".join(str(part) for part in case[:7]))
@pytest.mark.parametrize("backend", ["flash", "triton", "reference"])
def test_equals_a_full_softmax(backend: str, case: Any) -> None:
    dtype, heads, kv_heads, head_dim, block_size, window, softcap, spans = case
    world = AttentionWorld(
        [cached + new for cached, new in spans],
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        block_size=block_size,
        dtype=dtype,
        window=window,
        softcap=softcap,
    )
    if before := [(s, 0, cached) for s, (cached, _) in enumerate(spans) if cached]:
        world.run(ReferenceAttention(), before, rows=dtype)
    parts = [(s, cached, cached + new) for s, (cached, new) in enumerate(spans)]
    try:
        chosen = select_backend("cuda", backend, 1, block_size, head_dim, dtype)
        outputs = world.run(OnDevice(chosen, torch.device("cuda")), parts, rows=dtype)
    except ConfigError as error:
        pytest.skip(error.message)
    assert world.largest_error(parts, [out.float() for out in outputs]) < (PLAIN if dtype == F32 else ROUNDED)
    assert world.pool[:, 0].isnan().all()
    assert world.layer[world.spare].isnan().all()
