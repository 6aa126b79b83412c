"""Pitfalls of bookkeeping: a leaked reference, a double free, an unshared alias, a second allocate.

Owns: a small engine without a model for each, and the check that sees it.
Does not: hold the faulty code (faulty_managers, changed_managers).
Invariants: the checks are those of production: the audit of an idle engine, and the assertions on the way.
"""

from __future__ import annotations

from cluster.config import CacheConfig
from cluster.core.hashing import RouteScheme
from cluster.core.request import GenerationRequest
from cluster.core.sampling import SamplingParams
from cluster.lab.changed_managers import LeakyManager
from cluster.lab.driven_engine import DrivenEngine
from cluster.lab.faulty_managers import AliasingManager, TwiceFreeingManager
from cluster.lab.findings import Findings
from cluster.lab.lab_engines import counting_engine
from cluster.lab.pitfall import Pitfall, caught_error, pitfall_findings, quoted, yes
from worker.kvcache.block_manager import BlockManager
from worker.kvcache.block_pool import BlockPool
from worker.runner import ModelFacts

NUM_BLOCKS = 64
REQUESTS = 8
AUDIT = "the audit of the idle engine"


def book_pitfalls() -> Findings:
    leaked, leak_said = _leak()
    pitfalls = (
        Pitfall(
            section="5.1, 5.6",
            name="A reference that nobody gives back",
            symptom="ref counts do not return to where they started, memory does not fall",
            happened=f"{leaked} of {NUM_BLOCKS} blocks were still in use after all {REQUESTS} requests had ended",
            caught=quoted(leak_said, AUDIT),
            remedy="one place that gives references back (`BlockManager.free`), unknown ids ignored",
            verdict=yes(leaked > 0 and leak_said is not None),
        ),
        _double_free(),
        _alias(),
        _second_allocate(),
    )
    return pitfall_findings(pitfalls, figures={"pitfalls.leaked_blocks": leaked})


def _requests() -> list[GenerationRequest]:
    sampling = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
    return [
        GenerationRequest(
            request_id=f"p{n}", prompt_token_ids=tuple(range(100 * n + 1, 100 * n + 41)), sampling=sampling
        )
        for n in range(REQUESTS)
    ]


def _engine(kind: type[BlockManager]) -> DrivenEngine:
    def make(_config: CacheConfig, facts: ModelFacts, scheme: RouteScheme) -> BlockManager:
        return kind(BlockPool(facts.num_blocks), None, facts.block_size, scheme)

    return counting_engine(NUM_BLOCKS, make, prefix_cache="off")


def _audit(engine: DrivenEngine) -> None:
    for _ in engine.engine.audit():
        pass


def _leak() -> tuple[int, str | None]:
    sound = _engine(BlockManager)
    sound.run(_requests())
    assert sound.engine.last_step.blocks.in_use == 0 and caught_error(lambda: _audit(sound)) is None
    engine = _engine(LeakyManager)
    engine.run(_requests())
    return engine.engine.last_step.blocks.in_use, caught_error(lambda: _audit(engine))


def _double_free() -> Pitfall:
    engine = _engine(TwiceFreeingManager)
    said = caught_error(lambda: engine.run(_requests()))
    return Pitfall(
        section="4.5",
        name="A block given back twice",
        symptom="two sequences get the same block",
        happened=f"the step that did it failed ({engine.totals.finished_requests} requests had ended)",
        caught=quoted(said, "the pool, at the second release"),
        remedy="freeing a sequence twice is harmless, because its table leaves with the first call",
        verdict=yes(said is not None),
    )


def _alias() -> Pitfall:
    engine = _engine(AliasingManager)
    said = caught_error(lambda: engine.run(_requests(), lambda _stats: _audit(engine)))
    return Pitfall(
        section="5.6",
        name="A block in several tables without a record of sharing",
        symptom="freed by one, still read by the other",
        happened="a second request read the first one's block, whose count stayed 1",
        caught=quoted(said, AUDIT),
        remedy="tables change in one place, which counts (`BlockLedger`)",
        verdict=yes(said is not None),
    )


def _second_allocate() -> Pitfall:
    scheme = RouteScheme(tokenizer_revision="lab", model_revision="lab")
    pool = BlockPool(NUM_BLOCKS)
    manager = BlockManager(pool, None, 16, scheme)
    manager.allocate("a", range(40))
    before = pool.counts().in_use
    said = caught_error(lambda: manager.allocate("a", range(40)))
    kept = pool.counts().in_use == before
    return Pitfall(
        section="4.2",
        name="A second allocate of the same id (as the article's listing allows)",
        symptom="the first table is overwritten and its blocks are lost",
        happened=f"the blocks in use stayed {before}" if kept else "blocks were lost",
        caught=quoted(said, "the manager, before it changes anything"),
        remedy="an id is allocated once; request ids of live requests are refused at the door",
        verdict=yes(said is not None and kept),
    )
