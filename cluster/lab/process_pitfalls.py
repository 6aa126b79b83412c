"""Pitfalls of the running process: beams that write into each other, gathering kernels, and misread memory counters.

Owns: the four experiments.
Does not: attend (gathered_attention, worker.kernels) or search (the engine does).
Invariants: times are the quickest of several rounds, in turn; memory is what the system says of this process.
"""

from __future__ import annotations

import mmap
from pathlib import Path
from typing import Any

import torch

from cluster.config import CacheConfig
from cluster.core.hashing import RouteScheme
from cluster.core.request import GenerationRequest
from cluster.core.sampling import SamplingParams
from cluster.lab.attention_case import AttentionCase, CaseShape, quickest
from cluster.lab.driven_engine import RunRecord
from cluster.lab.faulty_managers import UncopiedManager
from cluster.lab.findings import Findings, LabContext, Verdict
from cluster.lab.gathered_attention import GatheredAttention
from cluster.lab.kernels import head_shape
from cluster.lab.lab_engines import ModelEngines
from cluster.lab.pitfall import Pitfall, caught_error, pitfall_findings, quoted, yes
from cluster.lab.secret_prompts import secret_prompts
from worker.kernels import native
from worker.kernels.base import AttentionBackend
from worker.kernels.cpu import CpuAttention
from worker.kernels.reference import ReferenceAttention
from worker.kvcache.block_manager import BlockManager
from worker.kvcache.block_pool import BlockPool
from worker.runner import ModelFacts

BEAMS = 4
_STATM = Path("/proc/self/statm")
_LEAK_BYTES = 2**20  # a step
_MIB = 2**20


def process_pitfalls(context: LabContext, engines: ModelEngines) -> Findings:
    context.progress("beams", 0.75)
    pitfalls = [_beams(context, engines)]
    context.progress("kernels", 0.8)
    pitfalls.append(_gather(context))
    context.progress("memory counters", 0.85)
    pitfalls += [_counter(engines), _growing(context, engines)]
    return pitfall_findings(pitfalls)


def _beams(context: LabContext, engines: ModelEngines) -> Pitfall:
    def make(kind: type[BlockManager]) -> Any:
        def manager(_config: CacheConfig, facts: ModelFacts, scheme: RouteScheme) -> BlockManager:
            return kind(BlockPool(facts.num_blocks), None, facts.block_size, scheme)

        return manager

    prompt = tuple(secret_prompts(context.model_dir, 2, context.seed)[0][:-3])  # ends inside a block
    sampling = SamplingParams(temperature=0.0, beam_width=BEAMS, max_tokens=6 if context.short else 12, ignore_eos=True)

    def search(kind: type[BlockManager], *, strict: bool) -> RunRecord:
        request = GenerationRequest(request_id="beams", prompt_token_ids=prompt, sampling=sampling)
        return engines.engine(make(kind), prefix_cache="off", strict_blocks=strict).run([request])

    right = search(BlockManager, strict=True).choices["beams"]
    wrong = search(UncopiedManager, strict=False).choices["beams"]
    said = caught_error(lambda: search(UncopiedManager, strict=True))
    spoilt = sum(right[beam] != wrong[beam] for beam in right)
    return Pitfall(
        section="5.5",
        name="Beams that write into a shared block",
        symptom="beams contaminate each other",
        happened=f"without copy-on-write {spoilt} of {len(right)} beams had other tokens",
        caught=quoted(said, "`--strict-blocks`, before the write"),
        remedy="copy-on-write; run new code with `--strict-blocks` first",
        verdict=yes(spoilt > 0 and said is not None),
    )


def _gather(context: LabContext) -> Pitfall:
    length = 128 if context.short else 1024
    case = AttentionCase(head_shape(context), CaseShape(sequences=4, length=length, rows=1), context.seed)
    paged: AttentionBackend = ReferenceAttention()
    if native.instruction_set(case.shape.block_size, case.geometry.head_dim) is not None:
        paged = CpuAttention(threads=1)
    gathered = GatheredAttention()
    before = torch.get_num_threads()
    torch.set_num_threads(1)  # as in the kernels experiment: threads that wait for each other measure the machine
    try:
        works = {name: case.prepared(one, case.pool().layer) for name, one in (("gather", gathered), ("paged", paged))}
        seconds = quickest(works, 2 if context.short else 8)
    finally:
        torch.set_num_threads(before)
    slower = seconds["gather"] / seconds["paged"]
    return Pitfall(
        section="5.3",
        name="Gather the blocks first, then attend",
        symptom="slower, although memory fell",
        happened=f"{gathered.copied_bytes / _MIB:.1f} MiB copied per layer and step, {slower:.1f} times the time of "
        "the "
        f"{paged.name} kernel for 4 sequences of {length:,} tokens",
        caught="tokens per second in the log line; `kvray lab kernels` counts the bytes",
        remedy="a kernel that reads through the block table",
        verdict=Verdict.CONFIRMED if slower > 1 else Verdict.DEPENDS,
    )


def _counter(engines: ModelEngines) -> Pitfall:
    empty = engines.pool_bytes
    engine = engines.engine(prefix_cache="off")
    most = max(engine.run(_requests(2, 48)).in_use)
    full = engines.pool_bytes
    used = most * engines.facts.block_size * engines.facts.kv_bytes_per_token
    return Pitfall(
        section="5.1",
        name="The memory counter of a paged engine is no lower than before",
        symptom="a leak, or holes",
        happened=f"or neither: the pool is allocated once, {empty / _MIB:.1f} MiB with 0 blocks in use and "
        f"{full / _MIB:.1f} MiB with {most} ({used / _MIB:.1f} MiB)",
        caught="blocks in use, in the log line and in /metrics",
        remedy="read blocks, not the device's memory; `--kv-memory` sizes the pool",
        verdict=Verdict.DEPENDS if empty == full else Verdict.NOT_CONFIRMED,
    )


def _growing(context: LabContext, engines: ModelEngines) -> Pitfall:
    rounds = 3 if context.short else 6
    text, verdict = "this system does not say how much memory a process has", Verdict.DEPENDS
    if _STATM.exists():
        sound, leaking = (_growth(engines, rounds, leak=leak) for leak in (False, True))
        text = f"{sound / _MIB:+.2f} MiB a round in a sound engine, {leaking / _MIB:+.2f} MiB when a step keeps 1 MiB"
        verdict = Verdict.CONFIRMED if leaking > 4 * max(sound, _LEAK_BYTES) else Verdict.DEPENDS
    return Pitfall(
        section="5.6",
        name="Memory beside the pool that keeps growing (reserved minus allocated)",
        symptom="a leak outside the blocks",
        happened=f"the process less its pool over {rounds} equal rounds: {text}",
        caught="the difference of rounds, once the first has touched everything; on CUDA read reserved minus allocated",
        remedy="compare rounds, not a start with an end",
        verdict=verdict,
    )


def _growth(engines: ModelEngines, rounds: int, *, leak: bool) -> float:
    """Bytes a round, over all but the first, which touches the pool's blocks and fills caches."""
    engine = engines.engine(prefix_cache="off")
    kept: list[mmap.mmap] = []

    def step(_stats: object) -> None:
        if leak:
            kept.append(mmap.mmap(-1, _LEAK_BYTES))  # not from the heap, where freed memory would hide it
            kept[-1].write(bytes(_LEAK_BYTES))

    resident = []
    for _ in range(rounds):
        engine.run(_requests(4, 20), step)
        resident.append(_resident())
    return (resident[-1] - resident[0]) / (rounds - 1)


def _resident() -> int:
    return int(_STATM.read_text().split()[1]) * mmap.PAGESIZE


def _requests(count: int, prompt: int) -> list[GenerationRequest]:
    sampling = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
    return [
        GenerationRequest(
            request_id=f"r{number}", prompt_token_ids=tuple(range(5 + number, 5 + number + prompt)), sampling=sampling
        )
        for number in range(count)
    ]
