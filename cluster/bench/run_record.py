"""RunRecord: one run of one workload against one peer, kept, dropped or failed.

Owns: the record and its JSON form.
Does not: decide which runs are compared beyond its own verdict (summary takes the kept ones).
Invariants: exactly one verdict; a failed run has a reason and no figures.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from cluster.bench.measures import Figure
from cluster.bench.run_meter import Usage


class Verdict(StrEnum):
    KEPT = "kept"
    NOISY = "noisy"
    FAILED = "failed"


@dataclass(frozen=True, slots=True, kw_only=True)
class RunRecord:
    """load_asked, load_taken: share of all cores' time for the background load (None without one)."""

    peer: str
    workload: str
    repetition: int
    attempt: int
    verdict: Verdict
    at: float
    figures: dict[str, Figure] = field(default_factory=dict)
    usage: Usage = field(default_factory=Usage)
    asked_tokens: int = 0
    load_asked: float | None = None
    load_taken: float | None = None
    reason: str = ""

    @property
    def is_short(self) -> bool:
        """Did the peer answer with fewer tokens than it was asked for?"""
        answered = self.figures.get("answer_tokens")
        return isinstance(answered, int) and answered < self.asked_tokens

    def to_wire(self) -> dict[str, Any]:
        usage = {
            "noise": self.usage.noise,
            "server_cpu_s": self.usage.server_cpu_s,
            "client_cpu_s": self.usage.client_cpu_s,
            "peak_rss": self.usage.peak_rss,
        }
        return {
            "peer": self.peer,
            "workload": self.workload,
            "repetition": self.repetition,
            "attempt": self.attempt,
            "verdict": str(self.verdict),
            "reason": self.reason,
            "at": self.at,
            "asked_tokens": self.asked_tokens,
            "load_asked": self.load_asked,
            "load_taken": self.load_taken,
            **usage,
            **self.figures,
        }
