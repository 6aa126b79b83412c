"""Use the engine in your own process, without a cluster: two prompts that share a beginning.

python examples/offline_engine.py
"""

from __future__ import annotations

import sys

from cluster.config import EngineConfig
from cluster.core.sampling import SamplingParams
from cluster.model_source import resolve_model
from cluster.offline import OfflineEngine

SYSTEM = "You are a patient teacher. Answer in one short sentence, in plain words, and never use jargon. " * 4


def main() -> int:
    config = EngineConfig(model=sys.argv[1] if len(sys.argv) > 1 else "demo")
    sampling = SamplingParams(temperature=0.0, max_tokens=32)
    with OfflineEngine(config, resolve_model(config.model)) as engine:
        for question in ("Why is the sky blue?", "Why is the sea salty?"):
            messages = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": question}]
            text, cached = "", 0
            for piece in engine.chat(messages, sampling):
                text += piece.text
                cached = piece.cached_tokens if piece.cached_tokens is not None else cached
            print(f"{question} {text.strip()}\n  ({cached} prompt tokens came from the cache)")
    return 0


if __name__ == "__main__":
    sys.exit(main())
