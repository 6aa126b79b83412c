"""Explanations as protobuf messages.

Owns: what ExplainRoute and the misses of Status answer.
Does not: explain anything itself (router.reuse_explanation).
Invariants: every reason has its enum value.
"""

from __future__ import annotations

from cluster.rpc import inference_pb2 as pb
from router.reuse_counters import ReuseCounters
from router.reuse_explanation import Loss, LossReason, ReuseExplanation
from router.route_explanation import RouteExplanation

_REASONS: dict[LossReason, pb.LossReason] = {
    LossReason.NEVER_SEEN: pb.LOSS_REASON_NEVER_SEEN,
    LossReason.DIVERGED: pb.LOSS_REASON_DIVERGED,
    LossReason.EVICTED: pb.LOSS_REASON_EVICTED,
    LossReason.ROUTED_ELSEWHERE: pb.LOSS_REASON_ROUTED_ELSEWHERE,
    LossReason.INDEX_LATE: pb.LOSS_REASON_INDEX_LATE,
    LossReason.NAMESPACE: pb.LOSS_REASON_NAMESPACE,
}


def explanation_from(explanation: RouteExplanation) -> pb.ExplainRouteResponse:
    return pb.ExplainRouteResponse(
        request_id=explanation.request_id,
        replica=explanation.worker_id,
        dry_run=explanation.dry_run,
        candidates=[
            pb.RouteCandidate(
                replica=score.candidate.worker_id,
                overlap_tokens=score.candidate.overlap_tokens,
                ahead_tokens=score.candidate.ahead_tokens,
                running=score.candidate.running,
                cost=score.cost,
                lost=score.candidate.lost,
            )
            for score in explanation.candidates
        ],
        reuse=None if explanation.reuse is None else _reuse(explanation.reuse),
    )


def totals_from(counters: ReuseCounters) -> pb.ReuseTotals:
    return pb.ReuseTotals(
        requests=counters.requests,
        prompt_tokens=counters.prompt,
        seen_tokens=counters.seen,
        held_tokens=counters.held,
        chosen_tokens=counters.chosen,
        reused_tokens=counters.reused,
        losses=[
            pb.LossTotal(
                reason=_REASONS[reason],
                tokens=total.tokens,
                requests=total.requests,
                examples=[
                    pb.LossExample(
                        request_id=example.request_id,
                        replica=example.worker_id,
                        prompt_tokens=example.prompt_tokens,
                        loss=_loss(example.loss),
                    )
                    for example in total.examples
                ],
            )
            for reason, total in counters.by_reason.items()
        ],
    )


def _reuse(reuse: ReuseExplanation) -> pb.ReuseExplanation:
    return pb.ReuseExplanation(
        prompt_tokens=reuse.prompt_tokens,
        seen_tokens=reuse.seen_tokens,
        held_tokens=reuse.held_tokens,
        chosen_tokens=reuse.chosen_tokens,
        reused_tokens=reuse.reused_tokens,
        losses=[_loss(loss) for loss in reuse.losses],
    )


def _loss(loss: Loss) -> pb.ReuseLoss:
    return pb.ReuseLoss(reason=_REASONS[loss.reason], tokens=loss.tokens, position=loss.position, message=loss.message)
