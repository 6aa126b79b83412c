"""The pieces of the kernel experiments: one case for all kernels, and bytes counted from tensors."""

from __future__ import annotations

import pytest
import torch

from cluster.lab.attention_case import AttentionCase, CaseShape, HeadShape, quickest
from cluster.lab.gathered_attention import GatheredAttention
from cluster.lab.torch_traffic import TorchTraffic
from worker.kernels import native
from worker.kernels.base import AttentionBackend
from worker.kernels.cpu import CpuAttention
from worker.kernels.reference import ReferenceAttention

HEADS = HeadShape(heads=4, kv_heads=2, head_dim=16)


@pytest.mark.parametrize("rows", [1, 24])
def test_all_kernels_see_the_same_numbers(rows: int) -> None:
    case = AttentionCase(HEADS, CaseShape(sequences=2, length=64, rows=rows, layers=2))
    backends: list[AttentionBackend] = [ReferenceAttention(), GatheredAttention()]
    if native.instruction_set(16, 16) is not None:
        backends.append(CpuAttention(1))
    expected, *others = (case.prepared(backend, case.pool().layer)() for backend in backends)
    assert others
    for other in others:
        torch.testing.assert_close(other, expected, atol=1e-5, rtol=1e-5)


def test_gathering_copies_all_kv() -> None:
    case = AttentionCase(HEADS, CaseShape(sequences=2, length=64, rows=1, layers=2))
    gathered = GatheredAttention()
    case.prepared(gathered, case.pool().layer)()
    assert gathered.copied_bytes == case.kv_bytes == 2 * 64 * 2 * 2 * 16 * 4


def test_traffic_counts_reads_and_writes_and_no_views() -> None:
    a, b = torch.zeros(8, 4), torch.zeros(8, 4)
    with TorchTraffic() as traffic:
        a.view(4, 8).transpose(0, 1)
    assert traffic.num_bytes == 0
    with TorchTraffic() as traffic:
        a + b
    assert traffic.num_bytes == 3 * 8 * 4 * 4
    with TorchTraffic() as traffic:
        a.index_select(0, torch.tensor([1]))
    assert traffic.num_bytes == 2 * 4 * 4
    with TorchTraffic() as traffic:
        a.copy_(b)
    assert traffic.num_bytes == 2 * 8 * 4 * 4


def test_the_quickest_call_of_each_counts() -> None:
    calls: list[str] = []
    works = {name: (lambda name=name: calls.append(name)) for name in "ab"}
    assert set(quickest(works, 2)) == {"a", "b"}
    assert calls == list("ababab")
