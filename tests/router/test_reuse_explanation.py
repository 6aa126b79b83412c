"""ReuseExplanation: whatever the facts are, the counts are in order and the losses cover the prompt without overlap."""

from __future__ import annotations

import random

import pytest

from router.reuse_explanation import Loss, LossReason, ReuseExplanation, ReuseFacts, explain

CHUNK = 16


def some_facts(rng: random.Random) -> ReuseFacts:
    """Not always plausible ones: sources disagree, and events come in any order."""
    prompt = rng.choice([1, 15, 16, 17, rng.randrange(1, 200), 16 * rng.randrange(1, 12)])

    def chunks() -> int:
        return min(rng.randrange(prompt // CHUNK + 1) * CHUNK, prompt - 1)

    return ReuseFacts(
        prompt=prompt,
        chunk=CHUNK,
        seen=rng.choice([0, prompt, rng.randrange(prompt + 1)]),
        forked=rng.random() < 0.5,
        seen_elsewhere=rng.choice([0, prompt, rng.randrange(prompt + 1)]),
        held=chunks(),
        chosen=chunks(),
        ghosts=rng.choice([0, prompt // CHUNK * CHUNK]),
        late=rng.choice([0, prompt // CHUNK * CHUNK]),
        feed_late=rng.random() < 0.5,
        reused=rng.choice([None, 0, rng.randrange(prompt)]),
        lost_underway=rng.random() < 0.5,
    )


@pytest.mark.parametrize("seed", range(20))
def test_losses_and_reuse_make_up_the_prompt(seed: int) -> None:
    rng = random.Random(seed)
    for _ in range(500):
        facts = some_facts(rng)
        told = explain(facts)
        reused = facts.chosen if told.reused_tokens is None else told.reused_tokens
        assert 0 <= reused <= told.chosen_tokens <= told.held_tokens <= told.seen_tokens <= told.prompt_tokens, facts
        assert all(loss.tokens > 0 for loss in told.losses)
        unnamed = told.prompt_tokens - reused - sum(loss.tokens for loss in told.losses)
        assert 0 <= unnamed <= CHUNK, facts
        if unnamed:
            assert told.seen_tokens == told.prompt_tokens or told.held_tokens >= told.prompt_tokens - 1
        starts = [loss.position for loss in told.losses if loss.reason is not LossReason.DIVERGED]
        assert starts == sorted(starts)


def test_the_compact_form() -> None:
    told = ReuseExplanation(
        prompt_tokens=900,
        seen_tokens=837,
        held_tokens=832,
        chosen_tokens=640,
        reused_tokens=640,
        losses=(
            Loss(reason=LossReason.ROUTED_ELSEWHERE, tokens=192, position=640),
            Loss(reason=LossReason.DIVERGED, tokens=68, position=837, message=2),
        ),
    )
    assert told.compact() == (
        "prompt=900,seen=837,held=832,chosen=640,reused=640;routed_elsewhere=192@640;diverged=68@837/m2"
    )
