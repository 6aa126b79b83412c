"""warm_up: the first steps of a model, run before anybody waits for them.

The first prefill and the first decode step of a process are slow: kernels are compiled, weights packed, memory touched.
They are run through an engine of their own around the same runner, with its own books, which is then dropped: so
nothing of it is in the cache, the counters, the step-time model or the events of the engine that serves.

Owns: the requests of the warm-up.
Does not: load the model, or measure.
Invariants: before the runner is used for anything else; every row it computes is a prefill piece or a decode row, as
later; what fails here would have failed the first request, and ends the start.
"""

from __future__ import annotations

import logging
import time

from cluster.config import CacheConfig, EngineConfig
from cluster.core.hashing import RouteScheme
from cluster.core.request import GenerationRequest
from cluster.core.sampling import SamplingParams
from worker.engine import Engine
from worker.engine_assembly import assemble_engine
from worker.frame import EngineCommand
from worker.runner import Runner

logger = logging.getLogger(__name__)

PREFILL_TOKENS = 256  # kernels of a GPU take another way from there on
CPU_PREFILL_TOKENS = 32  # ours do not, and every token is felt
_DECODE_STEPS = 2
_SAMPLINGS = (
    SamplingParams(temperature=0.0, max_tokens=1 + _DECODE_STEPS, ignore_eos=True),
    SamplingParams(temperature=0.8, top_p=0.9, seed=1, max_tokens=1 + _DECODE_STEPS, ignore_eos=True),
)


def warm_up(config: EngineConfig, runner: Runner, scheme: RouteScheme) -> None:
    """A prefill piece and decode steps, greedy and sampled, each alone and both in one batch."""
    started = time.monotonic()
    facts = runner.facts
    room = min(facts.max_model_len, facts.num_blocks * facts.block_size) - (1 + _DECODE_STEPS)
    if room < 1:
        logger.info("no warm-up: the longest request has only %d tokens", facts.max_model_len)
        return
    plain = CacheConfig(block_size=config.cache.block_size, chunk_tokens=config.cache.chunk_tokens, prefix_cache="off")
    engine = assemble_engine(config.model_copy(update={"cache": plain, "log_blocks": False}), runner, scheme)
    tokens = min(CPU_PREFILL_TOKENS if facts.device == "cpu" else PREFILL_TOKENS, config.token_budget, room)
    prompt = tuple(1 + position % (facts.vocab_size - 1) for position in range(tokens))
    for number, (sampling, length) in enumerate(zip(_SAMPLINGS, (tokens, max(1, tokens // 4)), strict=True)):
        request = GenerationRequest(request_id=f"warm-up-{number}", prompt_token_ids=prompt[:length], sampling=sampling)
        engine.execute([EngineCommand(add=request)])
        _step(engine)
    while engine.has_work:
        _step(engine)
    steps, seconds = engine.last_step.totals.steps, time.monotonic() - started
    logger.info("warm: %d steps, the first with %d tokens, in %.2f s", steps, tokens, seconds)


def _step(engine: Engine) -> None:
    for delta in engine.step().deltas:
        if delta.error is not None:
            raise delta.error
