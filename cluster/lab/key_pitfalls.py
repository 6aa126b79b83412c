"""Pitfalls of the cache key: a chunk's wrong interval, chunks too large, first bytes that change, and their remedy.

Owns: the prompts, and hit counts of engines without a model.
Does not: show what wrong KV does to answers (kv_pitfalls).
Invariants: hit counts are the engine's own.
"""

from __future__ import annotations

import random
from collections.abc import Sequence

from cluster.config import CacheConfig
from cluster.core.hashing import RouteScheme
from cluster.core.sampling import SamplingParams
from cluster.lab.driven_engine import DrivenEngine
from cluster.lab.findings import Chart, Findings, Series, Verdict
from cluster.lab.lab_engines import counting_engine
from cluster.lab.pitfall import Pitfall, caught_error, pitfall_findings, quoted, yes
from worker.engine_assembly import build_manager
from worker.kvcache.block_manager import BlockManager
from worker.kvcache.chunk_hash_cache import ChunkHashCache
from worker.runner import ModelFacts

CHUNKS = (16, 32, 64, 128, 256, 512, 1024)
SYSTEM, QUESTION, VOLATILE = 600, 24, 8  # tokens
BLOCK_SIZE = 16
REQUESTS = 12
_ANSWER = SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True)


def key_pitfalls(seed: int) -> Findings:
    rng = random.Random(seed)
    rates = {chunk: _hit_rate(_chunk_engine(chunk), _chat(random.Random(seed))) for chunk in CHUNKS}
    exact = _hit_rate(_radix_engine(), _chat(random.Random(seed)))
    first, last, kept, lost = _volatile(rng)
    pitfalls = (_interval(), _too_large(rates, exact), _first_bytes(first, last), _pinned(kept, lost))
    curve = Series("chunk hash", tuple(map(float, CHUNKS)), tuple(100 * rates[chunk] for chunk in CHUNKS))
    line = Series("radix tree", tuple(map(float, CHUNKS)), (100 * exact,) * len(CHUNKS))
    chart = Chart(
        "chunk-size",
        "Share of prompt tokens found, six chats of six turns",
        "tokens per chunk",
        "%",
        (curve, line),
        log_x=True,
    )
    return pitfall_findings(
        pitfalls,
        charts=(chart,),
        figures={
            "pitfalls.hit_rate_chunk_16": round(rates[16], 4),
            "pitfalls.hit_rate_chunk_64": round(rates[64], 4),
            "pitfalls.hit_rate_chunk_512": round(rates[512], 4),
            "pitfalls.hit_rate_radix": round(exact, 4),
            "pitfalls.hits_volatile_first": first,
            "pitfalls.hits_volatile_last": last,
            "pitfalls.hits_pinned": kept,
            "pitfalls.hits_not_pinned": lost,
        },
    )


def _chunk_engine(chunk_tokens: int) -> DrivenEngine:
    return counting_engine(1024, prefix_cache="chunk", chunk_tokens=chunk_tokens)


def _radix_engine() -> DrivenEngine:
    return counting_engine(1024, prefix_cache="radix")


def _tokens(rng: random.Random, count: int) -> list[int]:
    return [rng.randrange(5, 30_000) for _ in range(count)]


def _chat(rng: random.Random) -> list[list[int]]:
    """Six conversations of six turns, in turn; each prompt has all before it."""
    system = _tokens(rng, 40)
    histories = [list(system) for _ in range(6)]
    prompts = []
    for _ in range(6):
        for history in histories:
            history += _tokens(rng, 70)
            prompts.append(list(history))
            history += _tokens(rng, 30)  # the answer
    return prompts


def _hit_rate(engine: DrivenEngine, prompts: Sequence[Sequence[int]]) -> float:
    for prompt in prompts:
        engine.ask(prompt, _ANSWER)
    return engine.totals.hit_tokens / engine.totals.query_tokens


def _interval() -> Pitfall:
    caches: list[ChunkHashCache] = []

    def make(config: CacheConfig, facts: ModelFacts, scheme: RouteScheme) -> BlockManager:
        manager = build_manager(config, facts, scheme)
        assert isinstance(manager._cache, ChunkHashCache)
        caches.append(manager._cache)
        return manager

    engine = counting_engine(64, make, prefix_cache="chunk", chunk_tokens=64)
    engine.ask(list(range(5, 205)), _ANSWER)
    chunk = next(chunk for chunk in caches[0]._chunks() if chunk.end == 128)
    chunk.end += BLOCK_SIZE
    said = caught_error(lambda: [None for _ in engine.engine.audit()])
    return Pitfall(
        section="5.2b",
        name="An entry with the wrong token interval",
        symptom="a hit, and wrong text",
        happened="the second chunk's entry was made to end one block late",
        caught=quoted(said, "the audit of the idle engine"),
        remedy="an entry stores the position behind its last token and its parent, and both are checked",
        verdict=yes(said is not None),
    )


def _too_large(rates: dict[int, float], exact: float) -> Pitfall:
    falls = rates[64] > rates[512]
    curve = ", ".join(f"{rate:.0%} with {chunk}" for chunk, rate in rates.items())
    return Pitfall(
        section="5.4a",
        name="Chunks that are too large",
        symptom="a low hit rate: what is behind the last whole chunk is never found",
        happened=f"of the prompt tokens of short chats {curve}",
        caught=f"the hit rate in the 10-second log line; the radix tree, exact to the token, finds {exact:.0%}",
        remedy="chunks of 64, or the radix tree",
        verdict=yes(falls and exact >= max(rates.values())),
    )


def _volatile(rng: random.Random) -> tuple[int, int, int, int]:
    """Tokens found in the second request: date first, date last; and after pressure, pinned and not."""
    system = _tokens(rng, SYSTEM)

    def hits(order: str) -> int:
        engine = _radix_engine()
        found = 0
        for _ in range(2):
            date, question = _tokens(rng, VOLATILE), _tokens(rng, QUESTION)
            prompt = date + system + question if order == "first" else system + date + question
            found = engine.ask(prompt, _ANSWER).cached_tokens
        return found

    return hits("first"), hits("last"), _after_pressure(rng, system, pin=True), _after_pressure(rng, system, pin=False)


def _after_pressure(rng: random.Random, system: list[int], *, pin: bool) -> int:
    managers: list[BlockManager] = []

    def make(config: CacheConfig, facts: ModelFacts, scheme: RouteScheme) -> BlockManager:
        managers.append(build_manager(config, facts, scheme))
        return managers[0]

    engine = counting_engine(64, make, prefix_cache="radix")  # room for the system prompt and little more
    engine.ask(system + _tokens(rng, QUESTION), _ANSWER)
    if pin:
        managers[0].pin("system", system, until_s=float("inf"))
    for _ in range(REQUESTS):
        engine.ask(_tokens(rng, 200), _ANSWER)
    return engine.ask(system + _tokens(rng, QUESTION), _ANSWER).cached_tokens


def _first_bytes(first: int, last: int) -> Pitfall:
    return Pitfall(
        section="5.4b",
        name="A few bytes that change at the beginning of the prompt, such as the date",
        symptom="nothing behind them is found",
        happened=f"{first} of {SYSTEM + VOLATILE} tokens found with a new date in front of the system prompt",
        caught="`kvray status --misses`, which names the loss, and the hit rate in the log line",
        remedy=f"volatile text last: {last} tokens found",
        verdict=yes(first == 0 and last >= SYSTEM - BLOCK_SIZE),
    )


def _pinned(kept: int, lost: int) -> Pitfall:
    floor = SYSTEM // BLOCK_SIZE * BLOCK_SIZE
    return Pitfall(
        section="5.4d",
        name="Remedy: the system prompt as a segment of its own, cut at a border",
        symptom="it stays found whatever else comes",
        happened=f"{kept} of {SYSTEM} tokens found after {REQUESTS} other long prompts had gone through a small pool "
        f"when it was pinned, {lost} when it was not",
        caught=f"a pin covers whole blocks: {floor} tokens here",
        remedy="pin the system prompt; pins end by time, and never make a request wait",
        verdict=Verdict.CONFIRMED if kept >= floor > lost else Verdict.NOT_CONFIRMED,
    )
