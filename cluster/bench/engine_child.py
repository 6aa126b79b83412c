"""`python -m cluster.bench.engine_child MODEL_DIR CONFIG`: the engine alone, behind lines of JSON on its own pipes.

    in   {"id": 1, "prompt": " one two", "max_tokens": 8, "caching": true}, or {"cancel": 1}
    out  {"ready": true}, then for each request {"id": 1, "answer": {...}} or {"id": 1, "error": "..."}

Owns: one OfflineEngine, a thread per request, and the times of its answers.
Does not: share an interpreter with the client, whose work would show in the engine's times and memory.
Invariants: only these lines go to the pipe, whatever libraries print; it ends when its input is closed.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
import uuid
from contextlib import suppress
from pathlib import Path
from typing import Any, TextIO

from cluster.config import EngineConfig
from cluster.core.errors import KvrayError
from cluster.core.sampling import SamplingParams
from cluster.offline import OfflineEngine


class EngineChild:
    def __init__(self, engine: OfflineEngine, lines: TextIO) -> None:
        self._engine = engine
        self._lines = lines
        self._writing = threading.Lock()
        self._cancelled: set[int] = set()

    def serve(self, requests: TextIO) -> None:
        self.say({"ready": True})
        for line in requests:
            request = json.loads(line)
            if "cancel" in request:
                self._cancelled.add(request["cancel"])
                continue
            # Daemons: a request that is under way when the input closes must not keep the process.
            threading.Thread(target=self._answer, args=(request,), daemon=True).start()

    def say(self, message: dict[str, Any]) -> None:
        with self._writing, suppress(BrokenPipeError):  # nobody waits any more
            self._lines.write(json.dumps(message) + "\n")
            self._lines.flush()

    def _answer(self, request: dict[str, Any]) -> None:
        try:
            answer = self._generate(request)
            self.say({"id": request["id"], "answer": answer})
        except KvrayError as error:
            self.say({"id": request["id"], "error": error.message})

    def _generate(self, request: dict[str, Any]) -> dict[str, Any]:
        started = time.perf_counter()
        tokens = self._engine.tokenizer.encode(request["prompt"])
        sampling = SamplingParams(temperature=0.0, max_tokens=request["max_tokens"], ignore_eos=True)
        salt = "" if request["caching"] else uuid.uuid4().hex
        texts, count, cached, first, last = [], 0, None, 0.0, 0.0
        for piece in self._engine.generate(tokens, sampling, salt):
            if request["id"] in self._cancelled:
                break
            last = time.perf_counter() - started
            first = first or last
            texts.append(piece.text)
            count += len(piece.token_ids)
            cached = piece.cached_tokens if cached is None else cached
        return {
            "text": "".join(texts),
            "first_s": first,
            "last_s": last,
            "end_s": time.perf_counter() - started,
            "prompt_tokens": len(tokens),
            "answer_tokens": count,
            "cached_tokens": cached,
        }


def main() -> None:
    lines = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    try:
        with OfflineEngine(EngineConfig.model_validate_json(sys.argv[2]), Path(sys.argv[1])) as engine:
            EngineChild(engine, lines).serve(sys.stdin)
    except KvrayError as error:
        lines.write(json.dumps({"failed": error.message}) + "\n")
        lines.flush()


if __name__ == "__main__":
    main()
