"""Check: what one look at the machine found.

Owns: the value, and the three verdicts: ok, warning (it works, but not well), failed (kvray would not start).
Does not: look or print.
Invariants: what is not ok says in `advice` what to do about it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Verdict = Literal["ok", "warning", "failed"]


@dataclass(frozen=True, slots=True)
class Check:
    name: str
    verdict: Verdict
    detail: str
    advice: str = ""

    def __post_init__(self) -> None:
        assert self.advice or self.verdict == "ok", f"no advice for {self.name}: {self.detail}"
