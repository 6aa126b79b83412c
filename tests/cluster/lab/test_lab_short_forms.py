"""The short forms of the experiments that need a model, on a tiny one: they run, and their figures add up."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from cluster.lab import beam, block_sizes, kernels, prefix
from cluster.lab.findings import Findings, LabContext, Verdict


@pytest.fixture(autouse=True)
def threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.fixture
def context(tiny_llama_dir: Path) -> LabContext:
    return LabContext(model_dir=tiny_llama_dir, short=True, threads=1)


def check(findings: Findings) -> None:
    """What a report relies on."""
    for table in findings.tables:
        assert table.rows and all(len(row) == len(table.header) for row in table.rows), table.title
    for chart in findings.charts:
        for series in chart.series:
            assert len(series.x) == len(series.y) > 0, chart.name
            assert chart.kind != "bar" or len(series.x) == len(chart.x_ticks), chart.name
    assert findings.claims and findings.figures and findings.summary
    assert all(claim.measured and claim.expected for claim in findings.claims)


def test_prefix(context: LabContext) -> None:
    findings = prefix.run(context)
    check(findings)
    figures = findings.figures
    assert figures["counts.engine_equals_lab"] is figures["branches.engine_equals_lab"] is True
    assert figures["equal.radix.computed_tokens"] == 1000 + 99
    assert figures["equal.model.same_answers"] is True
    assert figures["sweep.0.computed_tokens"] == 120 and figures["sweep.95.computed_tokens"] == 6
    assert figures["history.greedy.kept_ids_found"] == figures["history.greedy.tokens"]


def test_beam(context: LabContext) -> None:
    findings = beam.run(context)
    check(findings)
    figures = findings.figures
    assert (figures["fork.30_of_50.block16.apart"], figures["fork.30_of_50.block16.shared"]) == (4, 3)
    for width in (2, 4):
        shared, apart = (int(figures[f"search.{width}.{way}.peak_blocks"]) for way in ("shared", "apart"))
        assert shared < apart == width * 13  # 204 tokens are 13 blocks
    assert findings.claims[0].verdict is Verdict.DEPENDS
    assert "table B  0 4   31 tokens" in findings.text


def test_kernels(context: LabContext) -> None:
    findings = kernels.run(context)
    check(findings)
    for case in ("decode", "piece"):
        assert int(findings.figures[f"{case}.gathered.copied_bytes"]) > 0
        assert float(findings.figures[f"{case}.gathered.largest_difference"]) < kernels.TOLERANCE
    if "decode.native.moved_bytes" in findings.figures:
        assert int(findings.figures["decode.native.moved_bytes"]) < int(findings.figures["decode.gathered.moved_bytes"])


def test_block_sizes(context: LabContext) -> None:
    findings = block_sizes.run(context)
    check(findings)
    figures = findings.figures
    assert figures["counts.engine_equals_lab"] is figures["layout.same_answers"] is True
    assert figures["size.1.waste"] == figures["size.1.hits_lost"] == 0
    assert 0 < float(figures["size.16.waste"]) < float(figures["size.256.waste"])
    assert float(figures["size.1.metadata_bytes_per_token"]) > 4 * float(figures["size.16.metadata_bytes_per_token"])
