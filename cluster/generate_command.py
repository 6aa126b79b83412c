"""`kvray generate`: one prompt, one answer, one process.

Owns: printing the stream and the summary.  Does not: generate (cluster.offline).
Invariants: the answer goes to stdout and everything else to stderr.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from rich.console import Console

from cluster.config import EngineConfig
from cluster.core.constraint import Constraint
from cluster.core.logprobs import PromptLogprobs, TokenLogprob
from cluster.core.sampling import SamplingParams
from cluster.offline import OfflineEngine, OfflinePiece
from cluster.progress import resolve_with_progress
from cluster.telemetry import configure_logging


def run_generate(
    config: EngineConfig,
    prompt: str,
    sampling: SamplingParams,
    *,
    chat: bool,
    as_json: bool,
    constraint: Constraint | None = None,
) -> int:
    console = Console(stderr=True)
    if config.log_blocks:
        configure_logging("generate")
    model_dir = resolve_with_progress(config.model, console)
    with OfflineEngine(config, model_dir) as engine:
        started = time.monotonic()
        if chat:
            pieces = engine.chat([{"role": "user", "content": prompt}], sampling, constraint=constraint)
        else:
            pieces = engine.generate(prompt, sampling, constraint=constraint)
        answers = [_Answer() for _ in range(sampling.num_choices)]
        first = 0.0
        for piece in pieces:
            first = first or time.monotonic() - started
            answers[piece.index].add(piece)
            if not as_json and len(answers) == 1:
                sys.stdout.write(piece.text)
                sys.stdout.flush()
        elapsed = time.monotonic() - started
    if as_json:
        found = [answer.to_json() for answer in answers]
        print(json.dumps(found[0] if len(found) == 1 else {"choices": found}))
        return 0
    if len(answers) == 1:
        sys.stdout.write("\n")
    else:
        _print_choices(answers)
    count = sum(len(answer.token_ids) for answer in answers)
    reasons = ", ".join(str(answer.finish_reason) for answer in answers)
    console.print(f"{count} tokens in {elapsed:.1f} s, first after {first:.2f} s ({reasons})", style="dim")
    return 0


@dataclass(slots=True)
class _Answer:
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    finish_reason: str | None = None
    score: float | None = None
    logprobs: list[TokenLogprob] = field(default_factory=list)
    prompt_logprobs: PromptLogprobs | None = None

    def add(self, piece: OfflinePiece) -> None:
        self.text += piece.text
        self.token_ids += piece.token_ids
        self.finish_reason = piece.finish_reason or self.finish_reason
        self.score = piece.score
        self.logprobs += piece.logprobs or ()
        self.prompt_logprobs = piece.prompt_logprobs or self.prompt_logprobs

    def to_json(self) -> dict[str, Any]:
        found: dict[str, Any] = {"text": self.text, "token_ids": self.token_ids, "finish_reason": self.finish_reason}
        if self.score is not None:
            found["score"] = self.score
        for name, logprobs in (("logprobs", self.logprobs), ("prompt_logprobs", self.prompt_logprobs)):
            if logprobs:
                found[name] = [one and {"logprob": one.logprob, "top": one.top} for one in logprobs]
        return found


def _print_choices(answers: Sequence[_Answer]) -> None:
    for number, answer in enumerate(answers, start=1):
        score = "" if answer.score is None else f" score {answer.score:.4f}"
        print(f"[{number}]{score}\n{answer.text.strip()}\n")
