"""Misses for people: why prompts were not reused, as a table by reason and as a line about one request.

Owns: the table of `kvray status --misses`, and the words for one explanation.
Does not: ask a cluster (cluster.status_command, cluster.demo) or explain (router.reuse_explanation).
Invariants: knows nothing but what the RPC says, so positions and numbers, never text.
"""

from __future__ import annotations

from rich.table import Table

from cluster.rpc import inference_pb2 as pb

_MEANINGS = {
    "never_seen": "no earlier prompt began so",
    "diverged": "an earlier prompt began so, and went on differently",
    "evicted": "a replica had it, and gave it up",
    "routed_elsewhere": "another replica holds it, and was busier",
    "index_late": "index and replica did not agree at that moment",
    "namespace": "it was seen, with another salt",
}
_SHOWN_EXAMPLES = 3


def reason_name(reason: int) -> str:
    """As in headers and metrics."""
    return pb.LossReason.Name(pb.LossReason.ValueType(reason)).removeprefix("LOSS_REASON_").lower()


def misses_table(totals: pb.ReuseTotals) -> Table:
    """One row per reason, those that cost most first."""
    table = Table(title=_title(totals), box=None, padding=(0, 2, 0, 0), pad_edge=False, title_justify="left")
    for heading in ("not reused because", "tokens", "share", "requests", "latest (tokens @ position)"):
        table.add_column(heading, justify="right" if heading in ("tokens", "share", "requests") else "left")
    for loss in sorted(totals.losses, key=lambda total: -total.tokens):
        name = reason_name(loss.reason)
        share = f"{100 * loss.tokens / totals.prompt_tokens:.1f} %" if totals.prompt_tokens else "-"
        examples = ", ".join(_place(example.loss) for example in reversed(loss.examples[-_SHOWN_EXAMPLES:]))
        table.add_row(f"{name}: {_MEANINGS[name]}", str(loss.tokens), share, str(loss.requests), examples)
    return table


def reuse_line(reuse: pb.ReuseExplanation) -> str:
    """What was not reused of one prompt, and why."""
    if not reuse.losses:
        return "everything seen before was reused"
    return "not reused: " + ", ".join(f"{reason_name(loss.reason)} {_place(loss)}" for loss in reuse.losses)


def route_lines(told: pb.ExplainRouteResponse) -> list[str]:
    """The replicas one request could have gone to, best first."""
    return [
        f"{candidate.replica}: {candidate.overlap_tokens} tokens held, {candidate.ahead_tokens} to compute before, "
        f"{candidate.running} requests, cost {candidate.cost:.3g}" + (", unusable" if candidate.lost else "")
        for candidate in told.candidates
    ]


def _title(totals: pb.ReuseTotals) -> str:
    counts = (
        ("seen before", totals.seen_tokens),
        ("held somewhere", totals.held_tokens),
        ("held by the chosen replica", totals.chosen_tokens),
        ("reused", totals.reused_tokens),
    )
    said = ", ".join(f"{count} {name}" for name, count in counts)
    return f"{totals.requests} requests with {totals.prompt_tokens} prompt tokens: {said}"


def _place(loss: pb.ReuseLoss) -> str:
    message = f" in message {loss.message}" if loss.HasField("message") else ""
    return f"{loss.tokens} @ {loss.position}{message}"
