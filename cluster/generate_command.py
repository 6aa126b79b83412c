"""`kvray generate`: one prompt, one answer, one process.

Owns: printing the stream and the summary.  Does not: generate (cluster.offline).
Invariants: the answer goes to stdout and everything else to stderr.
"""

from __future__ import annotations

import json
import sys
import time

from rich.console import Console

from cluster.config import EngineConfig
from cluster.core.sampling import SamplingParams
from cluster.offline import OfflineEngine
from cluster.progress import resolve_with_progress


def run_generate(config: EngineConfig, prompt: str, sampling: SamplingParams, *, chat: bool, as_json: bool) -> int:
    console = Console(stderr=True)
    model_dir = resolve_with_progress(config.model, console)
    with OfflineEngine(config, model_dir) as engine:
        started = time.monotonic()
        messages = [{"role": "user", "content": prompt}]
        pieces = engine.chat(messages, sampling) if chat else engine.generate(prompt, sampling)
        text, reason, first = "", None, 0.0
        token_ids: list[int] = []
        for piece in pieces:
            first = first or time.monotonic() - started
            text += piece.text
            token_ids += piece.token_ids
            reason = piece.finish_reason
            if not as_json:
                sys.stdout.write(piece.text)
                sys.stdout.flush()
        elapsed = time.monotonic() - started
    if as_json:
        print(json.dumps({"text": text, "token_ids": token_ids, "finish_reason": reason}))
    else:
        sys.stdout.write("\n")
        console.print(f"{len(token_ids)} tokens in {elapsed:.1f} s, first after {first:.2f} s ({reason})", style="dim")
    return 0
