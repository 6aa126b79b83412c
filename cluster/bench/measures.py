"""Measures: the figures of one run, from its answers.

Owns: the arithmetic and the names of the figures.
Does not: compare runs (summary) or know which figures a table shows (columns).
Invariants: pure; a figure that cannot be known is None (cached tokens that one answer does not report); rates are
tokens per second, times are seconds.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import TypeAlias

from cluster.bench.driver import Drive
from cluster.bench.peer import TimedAnswer

Figure: TypeAlias = float | int | tuple[float, ...] | None


def measure(drive: Drive) -> dict[str, Figure]:
    answers = [answer for conversation in drive.answers for answer in conversation]
    firsts = [answer.first_s for answer in answers]
    prompt_tokens = sum(answer.prompt_tokens for answer in answers)
    answer_tokens = sum(answer.answer_tokens for answer in answers)
    figures: dict[str, Figure] = {
        "wall_s": drive.wall_s,
        "requests": len(answers),
        "prompt_tokens": prompt_tokens,
        "answer_tokens": answer_tokens,
        "cached_tokens": _cached(answers),
        "out_tps": answer_tokens / drive.wall_s,
        "total_tps": (answer_tokens + prompt_tokens) / drive.wall_s,
        "ttft_mean_s": statistics.fmean(firsts),
        "ttft_median_s": statistics.median(firsts),
        "ttft_max_s": max(firsts),
        "ttft_per_turn_s": _per_turn(drive.answers),
    }
    return figures | (_single(answers[0]) if len(answers) == 1 else {})


def _single(answer: TimedAnswer) -> dict[str, Figure]:
    """What only a lone request shows: others share the machine with it otherwise."""
    decoding = answer.last_s - answer.first_s
    return {
        "ttft_s": answer.first_s,
        "e2e_tps": answer.answer_tokens / answer.end_s,
        "prefill_tps": answer.prompt_tokens / answer.first_s,
        "decode_tps": (answer.answer_tokens - 1) / decoding if decoding > 0 else None,
    }


def _cached(answers: Sequence[TimedAnswer]) -> int | None:
    counts = [answer.cached_tokens for answer in answers]
    return None if None in counts else sum(count or 0 for count in counts)


def _per_turn(conversations: Sequence[Sequence[TimedAnswer]]) -> tuple[float, ...]:
    """Median first-token time of all first turns, of all second turns, and so on."""
    return tuple(statistics.median(a.first_s for a in turn) for turn in zip(*conversations, strict=True))
