"""What sampling costs per step, and what constrained rows cost their neighbours.

    .venv/bin/python benchmarks/bench_sampling.py            everything (a minute and a half, the demo model)
    .venv/bin/python benchmarks/bench_sampling.py --no-engine    the first table only

First table: a step's sampling alone, over random logits as wide as the demo model's vocabulary, every row with the same
options. The rows of grammars are at different places of the same JSON; `ready` is the usual case, in which the masks
were computed beside the model, `at once` computes them in the step.

Second table: whole engine steps of the demo model with as many decoding rows, all of them free, or half of them
constrained. A free row gets one token per step either way, so the ratio of the step times is its slow-down.

Both say the best median of several rounds, in turns: other work on the machine only slows.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch

from cluster.config import CacheConfig, EngineConfig
from cluster.core.constraint import Constraint
from cluster.core.request import GenerationRequest
from cluster.core.sampling import SamplingParams
from cluster.garbage_collection import calm_garbage_collector
from cluster.model_source import resolve_model
from cluster.tokenizer import Tokenizer
from worker.batch import ScheduledSeq
from worker.engine import Engine
from worker.engine_factory import build_engine
from worker.frame import EngineCommand
from worker.grammar.compiler import GrammarCompiler
from worker.grammar.grammar_state import GrammarState
from worker.grammar.mask_worker import MaskWorker
from worker.grammar.vocabulary import Vocabulary
from worker.sampler import Sampler
from worker.sampling.answers import answer
from worker.sampling.row_extras import RowExtras
from worker.sampling.token_counts import TokenCounts

ROWS = (1, 8, 32)
CONTEXT = 500  # tokens of prompt and answer that penalties look at
VOCAB, EOS = 49_152, 2
ITEM: dict[str, Any] = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 30},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "kind": {"enum": ["person", "place", "thing"]},
        "tags": {"type": "array", "items": {"type": "string", "pattern": "^[a-z]{1,12}$"}, "maxItems": 3},
    },
    "required": ["name", "age", "kind", "tags"],
    "additionalProperties": False,
}
SCHEMA = Constraint.json_schema({"type": "array", "items": ITEM, "minItems": 100})
TEXT = json.dumps([{"name": "Ada Lovelace", "age": 36, "kind": "person", "tags": ["maths", "engines"]}] * 8)
PLAIN: dict[str, Any] = {"temperature": 0.8, "seed": 5}
OPTIONS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "plain (temperature)": PLAIN,
    "filtered (top-k 50, top-p 0.9)": {**PLAIN, "top_k": 50, "top_p": 0.9},
    "penalties": {**PLAIN, "repetition_penalty": 1.2, "presence_penalty": 0.5, "frequency_penalty": 0.5},
    "greedy, 5 logprobs": {"temperature": 0.0, "logprobs": 5},
    "greedy, grammar, ready": {"temperature": 0.0},
    "greedy, grammar, at once": {"temperature": 0.0},
    "plain, grammar, ready": PLAIN,
}


class SamplingBench:
    def __init__(self) -> None:
        self.tokenizer = Tokenizer.from_dir(resolve_model("demo"))
        self._compiler = GrammarCompiler(
            lambda: Vocabulary(self.tokenizer.backend, vocab_size=VOCAB, eos_token_ids=(EOS,))
        )
        self._masks = MaskWorker()
        self._sampler = Sampler()
        self._logits = torch.randn(max(ROWS), VOCAB, generator=torch.Generator().manual_seed(1)) * 3
        self._places = list(self._states())

    def _states(self) -> Iterator[GrammarState]:
        state = self._compiler.compile(SCHEMA).start()
        for token in self.tokenizer.encode(TEXT)[:200]:
            yield state.fork()
            state.accept(token)

    def microseconds(self, name: str, rows: int, steps: int) -> float:
        """Median of a step."""
        params = SamplingParams(**OPTIONS[name])
        batch = [self._row(str(row), params) for row in range(rows)]
        logits = self._logits[:rows]
        seconds = [self._step(name, batch, logits, number) for number in range(steps)]
        return statistics.median(seconds) * 1e6

    def _step(self, name: str, batch: list[ScheduledSeq], logits: torch.Tensor, number: int) -> float:
        states = []
        if "grammar" in name:
            first = number * len(batch)
            states = [self._places[(first + 7 * row) % len(self._places)].fork() for row in range(len(batch))]
        if "ready" in name:
            self._masks.prepare(states)
            coming = self._masks._coming
            assert coming is not None
            coming.result()
        started = time.perf_counter()
        if states:
            masks, failed = self._masks.masks(states, VOCAB, logits.device)
            assert not failed
            answer(self._sampler, logits, batch, masks)
        else:
            answer(self._sampler, logits, batch)
        return time.perf_counter() - started

    def _row(self, seq_id: str, params: SamplingParams) -> ScheduledSeq:
        extras: RowExtras | None = None
        if params.penalised:
            counts = TokenCounts()
            counts.update(self.tokenizer.encode("the cat sat on the mat and " * 200)[:CONTEXT], CONTEXT // 2)
            extras = RowExtras(counts=counts)
        if params.logprobs is not None:
            extras = RowExtras(logprobs=params.logprobs)
        return ScheduledSeq(seq_id, (1,), CONTEXT, (0,), True, params, extras)

    def close(self) -> None:
        self._compiler.close()
        self._masks.close()


class EngineBench:
    """The demo model; a round adds requests, waits until all decode, and times steps."""

    def __init__(self, threads: int) -> None:
        cache = CacheConfig.model_validate({"kv_memory": "1GiB"})
        config = EngineConfig(threads=threads, cache=cache, device="cpu")
        engine, _ = build_engine(config, str(resolve_model("demo")))
        self.engine: Engine = engine
        self._numbers = iter(range(10**9))

    def milliseconds(self, free: int, constrained: int, steps: int) -> float:
        """Median of a step with so many rows."""
        ids = [self._add(None) for _ in range(free)] + [self._add(SCHEMA) for _ in range(constrained)]
        while self.engine.load().running < len(ids) or self.engine.load().uncached_tokens:
            self.engine.step()
        self.engine.step()
        seconds = []
        for _ in range(steps):
            started = time.perf_counter()
            frame = self.engine.step()
            seconds.append(time.perf_counter() - started)
            assert len(frame.deltas) == len(ids) and not any(delta.last for delta in frame.deltas)
        self.engine.execute([EngineCommand(cancel=request_id) for request_id in ids])
        self.engine.step()
        return statistics.median(seconds) * 1e3

    def _add(self, constraint: Constraint | None) -> str:
        number = next(self._numbers)
        sampling = SamplingParams(temperature=0.8, seed=number, max_tokens=500, ignore_eos=constraint is None)
        prompt = tuple(100 + (37 * number + 11 * place) % 40_000 for place in range(24))
        request = GenerationRequest(
            request_id=str(number), prompt_token_ids=prompt, sampling=sampling, constraint=constraint
        )
        self.engine.execute([EngineCommand(add=request)])
        return request.request_id


def best(rounds: int, measures: Sequence[Callable[[], float]]) -> list[float]:
    """Of each measure, all of them in turns."""
    found = [float("inf")] * len(measures)
    for _ in range(rounds):
        for place, measure in enumerate(measures):
            found[place] = min(found[place], measure())
    return found


def sampling_table(rounds: int) -> None:
    bench = SamplingBench()
    cells = [(name, rows) for name in OPTIONS for rows in ROWS]
    found = best(rounds, [partial(bench.microseconds, name, rows, 15) for name, rows in cells])
    print(f"| sampling of a step, {VOCAB:,} tokens | " + " | ".join(f"{rows} rows" for rows in ROWS) + " |")
    print("|---|" + "---:|" * len(ROWS))
    figures = dict(zip(cells, found, strict=True))
    for name in OPTIONS:
        print(f"| {name} | " + " | ".join(f"{figures[name, rows] / 1e3:.2f} ms" for rows in ROWS) + " |")
    bench.close()


def engine_table(rounds: int, threads: int, steps: int) -> None:
    bench = EngineBench(threads)
    calm_garbage_collector()
    print(f"\n| step of the demo model, {threads} threads | all free | half constrained | slow-down |")
    print("|---|---:|---:|---:|")
    for rows in (8, 32):
        measures = [partial(bench.milliseconds, n, rows - n, steps) for n in (rows, rows // 2)]
        free, mixed = best(4 * rounds, measures)  # short ones, so that some are quiet
        print(f"| {rows} rows | {free:.2f} ms | {mixed:.2f} ms | {mixed / free - 1:+.1%} |")
    bench.engine.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=2, help="rounds over all measurements")
    parser.add_argument("--steps", type=int, default=9, help="engine steps per measurement")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--no-engine", action="store_true", help="sampling alone")
    options = parser.parse_args()
    torch.set_num_threads(1)  # as beside the native decoder
    with torch.inference_mode():
        sampling_table(options.rounds)
    if not options.no_engine:
        engine_table(options.rounds, options.threads, options.steps)


if __name__ == "__main__":
    main()
