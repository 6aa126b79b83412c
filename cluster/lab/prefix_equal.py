"""100 equal requests: how often is their prompt computed (article 3.4)?

Owns: the counts, one after the other and all at once, with and without holding back, and the time of both on the model.
Does not: count other traffic (prefix_matrix).
Invariants: the engine's computed tokens are those of its own steps.
"""

from __future__ import annotations

from typing import Any

from cluster.core.request import GenerationRequest
from cluster.core.sampling import SamplingParams
from cluster.lab.driven_engine import RunRecord
from cluster.lab.findings import Claim, Findings, LabContext, Table, Verdict
from cluster.lab.lab_engines import ModelEngines, counting_engine
from cluster.lab.prefix_times import token_source
from cluster.lab.prompt_sets import Tokens, TokenSource

REQUESTS = 100
PROMPT_TOKENS = 1000
NUM_BLOCKS = 8192
SEATS = 128
MODEL_TOKENS = 32
_WORDS = {
    "off": "off",
    "chunk64": "chunk hash 64",
    "radix": "radix",
    "radix_no_hold": "radix, nobody held back",
}


def equal_requests(prompt: Tokens, count: int = REQUESTS) -> list[GenerationRequest]:
    sampling = SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True)
    return [
        GenerationRequest(request_id=f"r{number}", prompt_token_ids=prompt, sampling=sampling)
        for number in range(count)
    ]


def computed_tokens(record: RunRecord) -> int:
    return record.prompt_tokens - sum(record.cached_tokens.values())


def run_equal(context: LabContext, engines: ModelEngines) -> Findings:
    requests = equal_requests(TokenSource(context.seed, (100, 32_000)).take(PROMPT_TOKENS))
    ways: dict[str, dict[str, Any]] = {
        "off": {"prefix_cache": "off"},
        "chunk64": {"prefix_cache": "chunk"},
        "radix": {},
        "radix_no_hold": {"hold_back": False},
    }
    counts: dict[str, int] = {}
    steps: dict[str, int] = {}
    for name, options in ways.items():
        record = counting_engine(NUM_BLOCKS, max_num_seqs=SEATS, **options).run(requests)
        counts[name], steps[name] = computed_tokens(record), record.steps
    prompt = token_source(engines, context.seed + 1).take(MODEL_TOKENS)
    seconds: dict[str, float] = {}
    answers: dict[str, dict[str, dict[int, list[int]]]] = {}
    for name in ("off", "radix"):
        context.progress("prefix: equal requests", 0.5 * len(seconds))
        record = engines.engine(max_num_seqs=SEATS, **ways[name]).run(
            equal_requests(prompt, 8 if context.short else REQUESTS)
        )
        seconds[name], answers[name] = record.seconds, record.choices
    assert answers["off"] == answers["radix"], "a hit changed an answer"
    figures: dict[str, float | int | str | bool] = {f"equal.{name}.computed_tokens": n for name, n in counts.items()}
    figures |= {f"equal.{name}.steps": n for name, n in steps.items()}
    figures |= {f"equal.model.{name}.seconds": round(value, 4) for name, value in seconds.items()}
    figures |= {"equal.requests": REQUESTS, "equal.prompt_tokens": PROMPT_TOKENS, "equal.model.same_answers": True}
    once = PROMPT_TOKENS + REQUESTS - 1
    claim = Claim(
        "3.4",
        "Of 100 equal requests the prompt is prefilled once instead of 100 times",
        f"{PROMPT_TOKENS:,} of {REQUESTS * PROMPT_TOKENS:,} tokens",
        f"all at once: {counts['off']:,} tokens computed without cache, {counts['radix']:,} with it: the prompt once "
        f"and then one token a request, whose logits are wanted. It needs the scheduler to hold the others back while "
        f"the first one computes: without that {counts['radix_no_hold']:,}",
        Verdict.CONFIRMED if counts["radix"] == once else Verdict.DEPENDS,
    )
    table = Table(
        title=f"{REQUESTS} equal requests of {PROMPT_TOKENS:,} tokens, sent at once",
        header=("prefix cache", "prompt tokens computed", "in prompts", "engine steps"),
        rows=tuple(
            (_WORDS[name], f"{n:,}", f"{n / PROMPT_TOKENS:.2f}", str(steps[name])) for name, n in counts.items()
        ),
        note=f"On the model, with {MODEL_TOKENS} tokens a prompt: {seconds['off']:.2f} s without cache, "
        f"{seconds['radix']:.2f} s with it, equal answers.",
    )
    return Findings("prefix", "equal", "", (claim,), (table,), figures=figures)
