"""build_engine: load a model directory and assemble its engine.

Owns: the order: tokenizer and route scheme first (cheap, and wrong directories fail early), then the weights.
Does not: choose processes or threads (engine_port implementations) or wire the parts (engine_assembly).
Invariants: the route scheme is that of the same directory; the vocabulary for structured output is built later.
"""

from __future__ import annotations

from pathlib import Path

from cluster.config import EngineConfig
from cluster.route_scheme import route_scheme
from cluster.tokenizer import Tokenizer
from worker.engine import Engine
from worker.engine_assembly import assemble_engine
from worker.grammar.grammar_service import GrammarService
from worker.grammar.vocabulary import Vocabulary
from worker.model_runner import ModelRunner
from worker.runner import ModelFacts
from worker.warm_up import warm_up


def build_engine(config: EngineConfig, model_dir: str, *, warm: bool = False) -> tuple[Engine, ModelFacts]:
    """ConfigError when the model cannot run here. `warm`: with its first, slow steps behind it."""
    path = Path(model_dir)
    tokenizer = Tokenizer.from_dir(path)
    scheme = route_scheme(path, tokenizer, config.cache.chunk_tokens)
    grammars = GrammarService(lambda: _vocabulary(tokenizer, runner.facts))
    runner = ModelRunner(config, path, grammars.masks)
    if warm:
        warm_up(config, runner, scheme)
    return assemble_engine(config, runner, scheme, tokenizer.decode, grammars), runner.facts


def _vocabulary(tokenizer: Tokenizer, facts: ModelFacts) -> Vocabulary:
    return Vocabulary(tokenizer.backend, vocab_size=facts.vocab_size, eos_token_ids=facts.eos_token_ids)
