"""steps: from no KV cache to the native step, the same requests at every stage: rows computed, seconds, answers.

Owns: the scale, the timing, and what it says about sections 1.1, 2.4, 3.1 and 6.
Does not: compute (stages).
Invariants: all stages answer the same prompts with the same weights; a stage this machine lacks is left out by name.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch

from cluster.lab.findings import Chart, Claim, Findings, LabContext, Series, Table, Verdict
from cluster.lab.stages import BLOCK_SIZE, Contiguous, Paged, Recompute, Stage
from worker.kernels.cpu import CpuAttention
from worker.kernels.reference import ReferenceAttention
from worker.kvcache.kv_pool import KvGeometry
from worker.model_runner import free_bytes
from worker.models.cpu_decoder import CpuDecoder, why_not_native
from worker.models.decoder import Decoder
from worker.models.torch_executor import TorchExecutor

NO_CACHE, CONTIGUOUS, BLOCKS, PREFIX = "no KV cache", "contiguous cache", "blocks", "prefix cache"
KERNEL, NATIVE = "kernel", "native step"
MAX_MODEL_LEN = 512
_CPU = torch.device("cpu")


@dataclass(frozen=True, slots=True)
class _Scale:
    """Requests share `prefix` tokens and have `own` more; `growth`: tokens of the one that grows alone."""

    prefix: int
    own: int
    answer: int
    growth: int
    requests: int = 3


_FULL = _Scale(prefix=64, own=8, answer=10, growth=40)
_SHORT = _Scale(prefix=32, own=4, answer=4, growth=8)


@dataclass(slots=True)
class StageRun:
    """first_s: up to the first token of each request.  token_s: of every later one.  after: rows after each token."""

    first_s: list[float] = field(default_factory=list)
    token_s: list[float] = field(default_factory=list)
    after: list[int] = field(default_factory=list)
    answers: list[list[int]] = field(default_factory=list)
    computed: int = 0
    kv_bytes: int = 0

    @property
    def seconds(self) -> float:
        return sum(self.first_s) + sum(self.token_s)


def run(context: LabContext) -> Findings:
    scale = _SHORT if context.short else _FULL
    context.progress("loading the model", 0.0)
    threads = context.threads or 1  # more would wait for each other where others work, and measure that
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        with torch.inference_mode():
            makers, missing = _stages(context.model_dir, threads)
            alone = _growth(makers, scale, context)
            runs = _compare(makers, scale, context)
    finally:
        torch.set_num_threads(before)
    return Findings(
        experiment="steps",
        title="one stage after the other",
        summary=_summary(scale, missing, threads),
        claims=(_quadratic(alone, scale), *_claims(runs)),
        tables=(_table(runs),),
        charts=(_computed_chart(alone), _time_chart(alone), _stage_chart(runs)),
        figures=_figures(alone, runs),
    )


def _stages(model_dir: Path, threads: int) -> tuple[dict[str, Callable[[], Stage]], str]:
    """How to make each stage, and why the native ones are missing."""
    free = free_bytes(_CPU)
    decoder = Decoder.load(model_dir, dtype="float32", device=_CPU, free_bytes=free)
    spec = decoder.spec
    geometry = KvGeometry(
        num_layers=spec.num_layers,
        num_kv_heads=spec.num_kv_heads,
        head_dim=spec.head_dim,
        block_size=BLOCK_SIZE,
        dtype=torch.float32,
    )
    blocks = 2 * MAX_MODEL_LEN // BLOCK_SIZE
    plain = TorchExecutor(decoder, ReferenceAttention())
    makers: dict[str, Callable[[], Stage]] = {
        NO_CACHE: lambda: Recompute(decoder),
        CONTIGUOUS: lambda: Contiguous(decoder, geometry, MAX_MODEL_LEN),
        BLOCKS: lambda: Paged(plain, geometry, blocks, prefix_cache=False),
        PREFIX: lambda: Paged(plain, geometry, blocks, prefix_cache=True),
    }
    missing = why_not_native(spec, BLOCK_SIZE)
    if missing is None:
        kernel = TorchExecutor(decoder, CpuAttention(threads))
        native = CpuDecoder.load(model_dir, dtype="float32", threads=threads, free_bytes=free, block_size=BLOCK_SIZE)
        makers[KERNEL] = lambda: Paged(kernel, geometry, blocks, prefix_cache=True)
        makers[NATIVE] = lambda: Paged(native, geometry, blocks, prefix_cache=True)
    return makers, missing or ""


def _growth(makers: dict[str, Callable[[], Stage]], scale: _Scale, context: LabContext) -> dict[str, StageRun]:
    prompt = _prompts(scale, context.seed)[0][: scale.own]
    found = {}
    for number, name in enumerate((NO_CACHE, CONTIGUOUS)):
        context.progress(f"growing: {name}", 0.2 + 0.2 * number)
        found[name] = _timed(makers[name](), [prompt], scale.growth)
    return found


def _compare(makers: dict[str, Callable[[], Stage]], scale: _Scale, context: LabContext) -> dict[str, StageRun]:
    prompts = _prompts(scale, context.seed)
    found = {}
    for number, name in enumerate(makers):
        context.progress(name, 0.5 + 0.5 * number / len(makers))
        _timed(makers[name](), [prompts[0][: scale.own]], 2)  # what happens once in a process is nobody's time
        found[name] = _timed(makers[name](), prompts, scale.answer)
    return found


def _prompts(scale: _Scale, seed: int) -> list[list[int]]:
    rng = random.Random(seed)

    def tokens(count: int) -> list[int]:
        return [rng.randrange(4, 90) for _ in range(count)]  # ids that every vocabulary has

    shared = tokens(scale.prefix)
    return [shared + tokens(scale.own) for _ in range(scale.requests)]


def _timed(stage: Stage, prompts: Sequence[Sequence[int]], answer: int) -> StageRun:
    run = StageRun()
    for prompt in prompts:
        started = time.perf_counter()
        tokens = [stage.start(prompt)]
        run.first_s.append(time.perf_counter() - started)
        run.after.append(stage.computed)
        for _ in range(answer - 1):
            started = time.perf_counter()
            tokens.append(stage.next())
            run.token_s.append(time.perf_counter() - started)
            run.after.append(stage.computed)
        stage.end()
        run.answers.append(tokens)
    run.computed, run.kv_bytes = stage.computed, stage.kv_bytes
    return run


def _summary(scale: _Scale, missing: str, threads: int) -> str:
    text = (
        f"{scale.requests} requests, one after the other, with {scale.prefix} tokens in common, {scale.own} of "
        f"their own and {scale.answer} to generate, at each stage of the article's learning order; all in fp32 with "
        "the same "
        f"weights. Threads: {threads}."
    )
    return f"{text} The native stages are left out: {missing}." if missing else text


def _quadratic(alone: dict[str, StageRun], scale: _Scale) -> Claim:
    half = scale.growth // 2
    counts = [run.after[-1] / run.after[half - 1] for run in (alone[NO_CACHE], alone[CONTIGUOUS])]
    times = [run.seconds / (run.first_s[0] + sum(run.token_s[: half - 1])) for run in alone.values()]
    squared = alone[NO_CACHE].computed == sum(scale.own + i for i in range(scale.growth))
    linear = alone[CONTIGUOUS].computed == scale.own + scale.growth - 1
    slower = alone[NO_CACHE].seconds > alone[CONTIGUOUS].seconds
    return Claim(
        section="1.1",
        claim="Without a KV cache every token recomputes its whole history: quadratic",
        expected="twice the answer costs about four times as much; with a cache, twice",
        measured=f"{scale.growth} instead of {half} tokens: {counts[0]:.1f} times the rows and {times[0]:.1f} times "
        "the "
        f"seconds without, {counts[1]:.1f} and {times[1]:.1f} times with a cache; in all "
        f"{alone[NO_CACHE].computed:,} and "
        f"{alone[CONTIGUOUS].computed:,} rows, {alone[NO_CACHE].seconds:.1f} and {alone[CONTIGUOUS].seconds:.1f} s",
        verdict=_verdict(squared and linear, slower),
    )


def _claims(runs: dict[str, StageRun]) -> list[Claim]:
    first = next(iter(runs.values()))
    same = sum(run.answers == first.answers for run in runs.values())
    contiguous, blocks, prefix = runs[CONTIGUOUS], runs[BLOCKS], runs[PREFIX]
    claims = [
        Claim(
            section="3.3, 6",
            claim="Decode, blocks, prefix cache, kernel: every stage can be verified alone",
            expected="the same answers at every stage",
            measured=f"{same} of {len(runs)} stages gave the same answers",
            verdict=Verdict.CONFIRMED if same == len(runs) else Verdict.NOT_CONFIRMED,
        ),
        Claim(
            section="3.1",
            claim="Paging is how to store, a prefix cache is what not to compute",
            expected="blocks compute as many rows as contiguous memory, in less of it; a prefix cache computes fewer",
            measured=f"rows: {contiguous.computed} contiguous, {blocks.computed} in blocks, {prefix.computed} with a "
            "prefix "
            f"cache; KV memory of a request: {_mib(contiguous.kv_bytes)} and {_mib(blocks.kv_bytes)} MiB",
            verdict=_verdict(
                contiguous.computed == blocks.computed and blocks.kv_bytes < contiguous.kv_bytes,
                prefix.computed < blocks.computed,
            ),
        ),
    ]
    if KERNEL in runs:
        slow, fast = sum(prefix.token_s), sum(runs[KERNEL].token_s)
        claims.append(
            Claim(
                section="2.4",
                claim="First a readable kernel for correctness, then a fast one",
                expected="the same answers, faster",
                measured=f"decoding took {slow:.2f} s with the readable kernel and {fast:.2f} s with the native one, "
                f"{sum(runs[NATIVE].token_s):.2f} s with the whole step native; "
                f"answers {'equal' if runs[KERNEL].answers == prefix.answers else 'differ'}",
                verdict=_verdict(runs[KERNEL].answers == prefix.answers, fast < slow),
            )
        )
    return claims


def _verdict(certain: bool, measured: bool) -> Verdict:
    """`certain` must hold on every machine, `measured` may depend on it."""
    if not certain:
        return Verdict.NOT_CONFIRMED
    return Verdict.CONFIRMED if measured else Verdict.DEPENDS


def _table(runs: dict[str, StageRun]) -> Table:
    first = next(iter(runs.values()))
    rows = [
        (
            name,
            f"{run.computed:,}",
            f"{run.seconds:.2f}",
            " / ".join(f"{seconds:.3f}" for seconds in run.first_s),
            f"{1000 * sum(run.token_s) / len(run.token_s):.0f}",
            _mib(run.kv_bytes) if run.kv_bytes else "0",
            "yes" if run.answers == first.answers else "NO",
        )
        for name, run in runs.items()
    ]
    header = (
        "stage",
        "rows computed",
        "seconds",
        "first token s, each",
        "ms a token",
        "KV MiB a request",
        "same answers",
    )
    return Table("The same requests at every stage", header, tuple(rows))


def _computed_chart(alone: dict[str, StageRun]) -> Chart:
    series = tuple(
        Series(name, tuple(float(i + 1) for i in range(len(run.after))), tuple(map(float, run.after)))
        for name, run in alone.items()
    )
    return Chart("rows", "Rows computed for one answer", "tokens generated", "rows, in all", series)


def _time_chart(alone: dict[str, StageRun]) -> Chart:
    series = []
    for name, run in alone.items():
        total, points = 0.0, []
        for seconds in (*run.first_s, *run.token_s):
            total += seconds
            points.append(total)
        series.append(Series(name, tuple(float(i + 1) for i in range(len(points))), tuple(points)))
    return Chart("seconds", "Seconds for one answer", "tokens generated", "seconds, in all", tuple(series))


def _stage_chart(runs: dict[str, StageRun]) -> Chart:
    places = tuple(float(place) for place in range(len(runs)))
    series = (Series("seconds", places, tuple(run.seconds for run in runs.values())),)
    ticks = tuple(name.replace(" ", "\n") for name in runs)
    return Chart("stages", "Seconds for the same requests", "", "seconds", series, kind="bar", x_ticks=ticks)


def _figures(alone: dict[str, StageRun], runs: dict[str, StageRun]) -> dict[str, float | int | str | bool]:
    figures: dict[str, float | int | str | bool] = {
        "steps.growth.rows_without": alone[NO_CACHE].computed,
        "steps.growth.rows_with": alone[CONTIGUOUS].computed,
        "steps.growth.seconds_without": round(alone[NO_CACHE].seconds, 3),
        "steps.growth.seconds_with": round(alone[CONTIGUOUS].seconds, 3),
        "steps.growth.tokens": len(alone[NO_CACHE].after),
    }
    first = next(iter(runs.values()))
    for name, run in runs.items():
        key = name.replace(" ", "_")
        figures[f"steps.{key}.rows"] = run.computed
        figures[f"steps.{key}.seconds"] = round(run.seconds, 3)
        figures[f"steps.{key}.ms_a_token"] = round(1000 * sum(run.token_s) / len(run.token_s), 1)
        figures[f"steps.{key}.kv_bytes"] = run.kv_bytes
        figures[f"steps.{key}.same"] = run.answers == first.answers
    return figures


def _mib(size: int) -> str:
    return f"{size / 2**20:.2f}"
