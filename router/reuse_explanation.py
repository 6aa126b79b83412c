"""ReuseExplanation: how much of a prompt was reused, and for each part that was not, why.

    0 ------ reused ------ chosen ------ held ------ seen ------ prompt        tokens, all from the beginning
                    |             |            |           '- never_seen, diverged, namespace
                    |             |            '- evicted, index_late
                    |             '- routed_elsewhere
                    '- evicted, index_late (what the engine no longer had when the request came to it)

never_seen: no earlier prompt of this router began so.  diverged: one did, and went on differently.  evicted: a replica
had it, and gave it up.  routed_elsewhere: another replica holds it, and was busier.  index_late: index and replica did
not agree at that moment.  namespace: it was seen, with another salt.

Owns: the five counts, the reasons, how facts become losses, and the compact form for headers.
Does not: gather the facts (router.reuse_watch), or carry text or tokens.
Invariants: reused <= chosen <= held <= seen <= prompt; losses do not overlap, and together with what was reused they
make up the prompt, but for at most a chunk at the end of a prompt that was seen whole: its last token at least is
computed always. Losses begin and end where chunks do, because replicas are looked up by chunks; `position` is exact.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import StrEnum


class LossReason(StrEnum):
    NEVER_SEEN = "never_seen"
    DIVERGED = "diverged"
    EVICTED = "evicted"
    ROUTED_ELSEWHERE = "routed_elsewhere"
    INDEX_LATE = "index_late"
    NAMESPACE = "namespace"


@dataclass(frozen=True, slots=True, kw_only=True)
class Loss:
    """position: the first token it is about; for `diverged` the first that differs.  message: of a chat, which message
    that token belongs to, from 0."""

    reason: LossReason
    tokens: int
    position: int
    message: int | None = None

    def __str__(self) -> str:
        where = "" if self.message is None else f"/m{self.message}"
        return f"{self.reason}={self.tokens}@{self.position}{where}"


@dataclass(frozen=True, slots=True, kw_only=True)
class ReuseExplanation:
    """reused_tokens: None while the engine has not said it; then the losses are those that are expected."""

    prompt_tokens: int
    seen_tokens: int
    held_tokens: int
    chosen_tokens: int
    reused_tokens: int | None
    losses: tuple[Loss, ...]

    def compact(self) -> str:
        """For the client. That a prompt was seen with another salt is not for it to know: salts keep clients apart."""
        reused = "" if self.reused_tokens is None else f",reused={self.reused_tokens}"
        counts = (
            f"prompt={self.prompt_tokens},seen={self.seen_tokens},held={self.held_tokens},chosen={self.chosen_tokens}"
        )
        return ";".join([counts + reused, *map(str, self._public_losses())])

    def _public_losses(self) -> list[Loss]:
        shown: list[Loss] = []
        for loss in self.losses:
            if loss.reason is LossReason.NAMESPACE:
                loss = replace(loss, reason=LossReason.NEVER_SEEN)
            if shown and shown[-1].reason is loss.reason is LossReason.NEVER_SEEN:
                shown[-1] = replace(shown[-1], tokens=shown[-1].tokens + loss.tokens)
            else:
                shown.append(loss)
        return shown


@dataclass(slots=True, kw_only=True)
class ReuseFacts:
    """What is known of one request, in tokens from the beginning of its prompt.

    seen: that this router saw with this salt.  forked: an earlier prompt went on differently there, in this message.
    seen_elsewhere: with another salt.  held: by the replica that holds most.  chosen: by the chosen one.  ghosts: up to
    where what nobody holds is known to have been evicted.  late: up to where it turned out to be held elsewhere.
    feed_late: the index's feed is behind.  reused: by the engine.  lost_underway: the chosen replica evicted some of it
    between the choice and the answer.
    """

    prompt: int
    chunk: int
    seen: int = 0
    forked: bool = False
    message: int | None = None
    seen_elsewhere: int = 0
    held: int = 0
    chosen: int = 0
    ghosts: int = 0
    late: int = 0
    feed_late: bool = False
    reused: int | None = None
    lost_underway: bool = False


def explain(facts: ReuseFacts) -> ReuseExplanation:
    reused = facts.chosen if facts.reused is None else facts.reused
    chosen = max(facts.chosen, reused)  # an engine reuses what the index did not know of, too
    held = max(facts.held, chosen)
    seen = min(max(facts.seen, facts.ghosts, facts.late, held), facts.prompt)
    return ReuseExplanation(
        prompt_tokens=facts.prompt,
        seen_tokens=seen,
        held_tokens=held,
        chosen_tokens=chosen,
        reused_tokens=facts.reused,
        losses=_losses(facts, reused, seen),
    )


def _losses(facts: ReuseFacts, reused: int, seen: int) -> tuple[Loss, ...]:
    # One token is always computed, and of the last chunk an engine may take the part that its blocks allow.
    whole = (facts.prompt - 1) // facts.chunk * facts.chunk
    bound = facts.prompt - 1 if reused < whole else whole
    losses: list[Loss] = []
    begin = reused

    def cut(reason: LossReason, end: int, position: int | None = None, message: int | None = None) -> None:
        nonlocal begin
        if end > begin:
            at = begin if position is None else position
            losses.append(Loss(reason=reason, tokens=end - begin, position=at, message=message))
            begin = end

    cut(LossReason.EVICTED if facts.lost_underway else LossReason.INDEX_LATE, min(facts.chosen, bound))
    cut(LossReason.ROUTED_ELSEWHERE, min(facts.held, bound))
    cut(LossReason.INDEX_LATE, min(facts.late, bound))
    cut(LossReason.EVICTED, min(facts.ghosts, bound))
    cut(LossReason.INDEX_LATE if facts.feed_late else LossReason.EVICTED, min(seen - seen % facts.chunk, bound))
    if seen == facts.prompt or max(facts.held, facts.chosen, reused) >= facts.prompt - 1:
        return tuple(losses)
    if facts.seen_elsewhere > seen:
        cut(LossReason.NAMESPACE, facts.seen_elsewhere)
        cut(LossReason.NEVER_SEEN, facts.prompt)
    elif facts.forked and facts.seen == seen:
        cut(LossReason.DIVERGED, facts.prompt, facts.seen, facts.message)
    else:
        cut(LossReason.NEVER_SEEN, facts.prompt)
    return tuple(losses)
