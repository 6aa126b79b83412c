"""What a found prefix saves in time, on the real model: the agent's prompt, a sweep of the shared share, and the
cost where nothing is found.

Owns: these three measurements and the claims of 3.4, 4.4 and 6 about them.
Does not: count workloads (prefix_matrix).
Invariants: times are those of engine steps up to the first token; of repeated ones the shortest counts, because other
work on the machine only slows.
"""

from __future__ import annotations

import random

from cluster.lab.findings import Chart, Claim, Findings, LabContext, Series, Table, Verdict
from cluster.lab.joined_findings import joined
from cluster.lab.lab_engines import ModelEngines
from cluster.lab.prefix_keyings import KEYINGS, OFF, RADIX, Reuse, chunk_keying, run_set
from cluster.lab.prompt_sets import PromptSet, TokenSource
from cluster.lab.timed_cache import TimedCache, timed_manager

SHARES = (0, 10, 25, 50, 75, 80, 90, 95)
_CONTROL_IDS = 100  # the first ids of a vocabulary are control tokens and single bytes


def token_source(engines: ModelEngines, seed: int) -> TokenSource:
    size = engines.facts.vocab_size
    return TokenSource(seed, (min(_CONTROL_IDS, size // 10), size))


def run_times(context: LabContext, engines: ModelEngines) -> Findings:
    source = token_source(engines, context.seed)
    longest = min(engines.facts.max_model_len - 8, 120 if context.short else 3060)
    parts = [
        _agent(context, engines, source, longest),
        _sweep(context, engines, source, min(longest, 512), repeats=1 if context.short else 2),
        _cost(context, engines, source, min(longest, 256), requests=2 if context.short else 4),
    ]
    return joined("prefix", "What it saves", "", parts)


def _agent(context: LabContext, engines: ModelEngines, source: TokenSource, longest: int) -> Findings:
    question = max(longest // 75, 2)
    tools = source.take(longest - question)
    runs: dict[str, Reuse] = {}
    keyings = (chunk_keying(64), RADIX, OFF)
    for number, keying in enumerate(keyings):
        context.progress("prefix: the agent's prompt", number / len(keyings))
        requests = 1 if keying is OFF else 3
        prompts = PromptSet(
            name="agent",
            conversations=tuple((tools + source.take(question),) for _ in range(requests)),
            answer_tokens=1,
        )
        runs[keying.name] = run_set(prompts, keying, engines.engine(**keying.options))
        assert runs[keying.name].hits == runs[keying.name].counted_hits, keying.name
    cold = min(run.first_s[0] for run in runs.values())
    chunk, radix = (min(runs[keying.name].first_s[1:]) for keying in keyings[:2])
    off = runs["off"].first_s[0]
    figures: dict[str, float | int | str | bool] = {
        "times.agent.prompt_tokens": longest,
        "times.agent.cold_s": round(cold, 4),
        "times.agent.off.every_s": round(off, 4),
        "times.agent.chunk64.later_s": round(chunk, 4),
        "times.agent.radix.later_s": round(radix, 4),
        "times.agent.speedup": round(off / radix, 2),
    }
    rows = tuple(
        (
            keying.label,
            f"{runs[keying.name].first_s[0]:.3f}",
            f"{min(runs[keying.name].first_s[1:], default=off):.3f}",
            f"{runs[keying.name].computed:,} of {runs[keying.name].prompt_tokens:,}",
        )
        for keying in keyings
    )
    claim = Claim(
        "3.1, 4.4",
        "With a prefix cache the prefill of an agent's tool prompt is paid once",
        "the second request's first token comes much sooner",
        f"a prompt of {longest:,} tokens: {off:.2f} s without cache, {radix:.2f} s with (radix), "
        f"{off / radix:.1f} times faster from the second request on",
        Verdict.CONFIRMED if off > 2 * radix else Verdict.NOT_CONFIRMED,
    )
    table = Table(
        title=f"First token of an agent's request of {longest:,} tokens, on {engines.facts.model}",
        header=("keying", "first request, s", "later ones, s", "tokens computed"),
        rows=rows,
        note=f"{engines.threads} threads, attention {engines.facts.attention}, {engines.facts.dtype}.",
    )
    return Findings("prefix", "agent", "", (claim,), (table,), figures=figures)


def _sweep(context: LabContext, engines: ModelEngines, source: TokenSource, length: int, repeats: int) -> Findings:
    engine = engines.engine()
    base = source.take(length)
    engine.ask(base)
    seconds = {share: float("inf") for share in SHARES}
    computed: dict[int, int] = {}
    order = [share for _ in range(repeats) for share in SHARES]
    random.Random(context.seed).shuffle(order)
    for number, share in enumerate(order):
        context.progress("prefix: the shared share", number / len(order))
        kept = length * share // 100
        answer = engine.ask(base[:kept] + _other(source, base, kept) + source.take(length - kept - 1))
        assert answer.cached_tokens >= kept, "a shared beginning was not found"
        computed[share] = answer.computed_tokens
        seconds[share] = min(seconds[share], answer.first_s)
    saved = {share: 1 - seconds[share] / seconds[0] for share in SHARES}
    figures: dict[str, float | int | str | bool] = {"sweep.prompt_tokens": length}
    for share in SHARES:
        figures[f"sweep.{share}.seconds"] = round(seconds[share], 5)
        figures[f"sweep.{share}.computed_tokens"] = computed[share]
    claim = Claim(
        "3.4",
        "The gain grows with the shared share; at 80 % it is large",
        "prefill time falls with what is shared",
        f"prompts of {length} tokens: {saved[50]:.0%} of the time saved with half of it shared, {saved[80]:.0%} with "
        f"80 %, {saved[95]:.0%} with 95 %",
        Verdict.CONFIRMED if saved[80] > 0.5 and saved[95] > saved[50] else Verdict.DEPENDS,
    )
    x = tuple(float(share) for share in SHARES)
    chart = Chart(
        name="prefix-sweep",
        title=f"First token of a prompt of {length} tokens",
        x_label="shared share, %",
        y_label="seconds",
        series=(
            Series("measured", x, tuple(seconds[share] for share in SHARES)),
            Series(
                "in proportion to the tokens computed",
                x,
                tuple(seconds[0] * computed[share] / computed[0] for share in SHARES),
            ),
        ),
        note="What lies above the proportional line is the fixed part of a step, which a hit does not save.",
    )
    table = Table(
        title="The shared share swept",
        header=("shared", "tokens computed", "first token, s", "time saved"),
        rows=tuple((f"{s} %", str(computed[s]), f"{seconds[s]:.3f}", f"{saved[s]:.0%}") for s in SHARES),
    )
    return Findings("prefix", "sweep", "", (claim,), (table,), (chart,), figures)


def _other(source: TokenSource, base: tuple[int, ...], place: int) -> tuple[int, ...]:
    """A token that differs from the one there."""
    while (token := source.take(1)) == base[place : place + 1]:
        pass
    return token


def _cost(context: LabContext, engines: ModelEngines, source: TokenSource, length: int, requests: int) -> Findings:
    prompts = [source.take(length) for _ in range(requests)]
    shares: dict[str, float] = {}
    figures: dict[str, float | int | str | bool] = {}
    for keying in KEYINGS:
        if keying.name not in ("chunk64", "radix"):
            continue
        caches: list[TimedCache] = []
        engine = engines.engine(timed_manager(caches), **keying.options)
        prefill_s = 0.0
        for number, prompt in enumerate(prompts):
            context.progress(f"prefix: the cost at 0 % hits, {keying.label}", number / requests)
            prefill_s += engine.ask(prompt).first_s
        shares[keying.name] = caches[0].seconds / prefill_s
        figures[f"cost.{keying.name}.share_of_prefill"] = round(shares[keying.name], 6)
        figures[f"cost.{keying.name}.us_per_prompt"] = round(1e6 * caches[0].seconds / requests, 1)
    claim = Claim(
        "6",
        "A prefix cache costs next to nothing where nothing is shared",
        "lookups and inserts are cheap beside a prefill",
        f"unrelated prompts of {length} tokens: lookup and insert take {shares['radix']:.3%} (radix) and "
        f"{shares['chunk64']:.3%} (chunk hash 64) of the prefill's time, {figures['cost.radix.us_per_prompt']} and "
        f"{figures['cost.chunk64.us_per_prompt']} µs a prompt",
        Verdict.CONFIRMED if max(shares.values()) < 0.01 else Verdict.DEPENDS,
    )
    return Findings("prefix", "cost", "", (claim,), figures=figures)
