"""`kvray status --misses`, and the line about one request: counts, reasons and positions as the RPC says them."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent import futures
from typing import Any

import grpc
import pytest
from rich.console import Console
from typer.testing import CliRunner

from cluster.cli import app
from cluster.misses_table import misses_table, reason_name, reuse_line, route_lines
from cluster.rpc import inference_pb2 as pb
from cluster.rpc import inference_pb2_grpc as pb_grpc

DIVERGED = pb.ReuseLoss(reason=pb.LOSS_REASON_DIVERGED, tokens=68, position=837, message=2)
EVICTED = pb.ReuseLoss(reason=pb.LOSS_REASON_EVICTED, tokens=5, position=64)
TOTALS = pb.ReuseTotals(
    requests=3,
    prompt_tokens=1000,
    seen_tokens=900,
    held_tokens=800,
    chosen_tokens=700,
    reused_tokens=600,
    losses=[
        pb.LossTotal(reason=name) for name, reason in pb.LossReason.items() if reason > pb.LOSS_REASON_EVICTED
    ]
    + [
        pb.LossTotal(reason=pb.LOSS_REASON_NEVER_SEEN),
        pb.LossTotal(reason=pb.LOSS_REASON_EVICTED, tokens=5, requests=1, examples=[pb.LossExample(loss=EVICTED)]),
        pb.LossTotal(
            reason=pb.LOSS_REASON_DIVERGED,
            tokens=136,
            requests=2,
            examples=[pb.LossExample(loss=EVICTED), *[pb.LossExample(loss=DIVERGED)] * 3],
        ),
    ],
)  # fmt: skip


class Cache(pb_grpc.CacheServicer):
    def Status(self, request: pb.StatusRequest, context: Any) -> pb.StatusResponse:
        return pb.StatusResponse(models=["demo"], ready=True, reuse=TOTALS if request.misses else None)


@pytest.fixture
def address() -> Iterator[str]:
    server = grpc.server(futures.ThreadPoolExecutor(2))
    pb_grpc.add_CacheServicer_to_server(Cache(), server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    yield f"127.0.0.1:{port}"
    server.stop(None)


def test_reasons_that_cost_most_come_first() -> None:
    console = Console(width=200)
    with console.capture() as capture:
        console.print(misses_table(TOTALS))
    lines = capture.get().splitlines()
    assert lines[0].strip() == (
        "3 requests with 1000 prompt tokens: 900 seen before, 800 held somewhere, 700 held by the chosen replica, "
        "600 reused"
    )
    first = [cell.strip() for cell in lines[2].split("  ") if cell.strip()]
    assert first == [
        "diverged: an earlier prompt began so, and went on differently",
        *("136", "13.6 %", "2"),
        ", ".join(["68 @ 837 in message 2"] * 3),
    ]
    assert lines[3].startswith("evicted: ") and lines[3].rstrip().endswith("5 @ 64")
    assert len(lines) == 2 + len(pb.LossReason.values()) - 1


def test_nothing_counted_yet() -> None:
    totals = pb.ReuseTotals(losses=[pb.LossTotal(reason=pb.LOSS_REASON_EVICTED)])
    assert misses_table(totals).row_count == 1


def test_every_reason_has_a_meaning() -> None:
    for name in set(pb.LossReason.keys()) - {"LOSS_REASON_UNSPECIFIED"}:
        assert misses_table(pb.ReuseTotals(losses=[pb.LossTotal(reason=name)])).row_count == 1
    assert reason_name(pb.LOSS_REASON_ROUTED_ELSEWHERE) == "routed_elsewhere"


def test_the_line_about_one_request() -> None:
    assert reuse_line(pb.ReuseExplanation()) == "everything seen before was reused"
    told = reuse_line(pb.ReuseExplanation(losses=[EVICTED, DIVERGED]))
    assert told == "not reused: evicted 5 @ 64, diverged 68 @ 837 in message 2"


def test_the_candidates_of_one_request() -> None:
    candidates = [
        pb.RouteCandidate(replica="a", overlap_tokens=64, ahead_tokens=10, running=2, cost=0.12345),
        pb.RouteCandidate(replica="b", lost=True),
    ]
    assert route_lines(pb.ExplainRouteResponse(candidates=candidates)) == [
        "a: 64 tokens held, 10 to compute before, 2 requests, cost 0.123",
        "b: 0 tokens held, 0 to compute before, 0 requests, cost 0, unusable",
    ]


def test_status_shows_the_misses_only_when_asked(address: str) -> None:
    plain = CliRunner().invoke(app, ("status", "--address", address))
    asked = CliRunner().invoke(app, ("status", "--address", address, "--misses"), env={"COLUMNS": "200"})
    assert (plain.exit_code, asked.exit_code) == (0, 0)
    assert "diverged" not in plain.stdout
    assert "136" in asked.stdout and "837 in message 2" in asked.stdout
