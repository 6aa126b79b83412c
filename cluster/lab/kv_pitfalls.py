"""Pitfalls that change answers: KV of other text, other positions or another model, on the real one.

Owns: each wrong reuse, made by hand in a ModelSandbox, beside what the production cache finds.
Does not: write prompts (secret_prompts).
Invariants: a wrong answer is one that differs from the same prompt computed from nothing; so is a right hit judged.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from cluster.core.sampling import SamplingParams
from cluster.lab.findings import Findings, LabContext, Verdict
from cluster.lab.lab_engines import ModelEngines
from cluster.lab.model_sandbox import ModelSandbox
from cluster.lab.pitfall import Pitfall, pitfall_findings, yes
from cluster.lab.secret_prompts import secret_prompts, typed, words_of

CHUNK = 64
_POOL_TOKENS = 4096


class _Prompts:
    """Prompts of equal length, their right answers, and how many a wrong reuse changes."""

    def __init__(self, context: LabContext, sandbox: ModelSandbox) -> None:
        self.tokens = secret_prompts(context.model_dir, 2 if context.short else 4, context.seed)
        self.answer_tokens = 12
        self.sandbox = sandbox
        self.right = [self.alone(prompt) for prompt in self.tokens]

    def __len__(self) -> int:
        return len(self.tokens)

    def alone(self, prompt: Sequence[int]) -> tuple[int, ...]:
        self.sandbox.reset()
        return self.sandbox.alone(prompt, self.answer_tokens)

    def other(self, index: int) -> int:
        return (index + 1) % len(self.tokens)

    def over(self, source: Sequence[int], prompt: Sequence[int], kept: int) -> tuple[int, ...]:
        """The answer when the KV of the first `kept` tokens is that of `source`."""
        self.sandbox.reset()
        table = self.sandbox.table(len(prompt) + self.answer_tokens)
        self.sandbox.feed(source[:kept], table)
        return self.sandbox.answer(prompt[kept:], self.answer_tokens, table, kept)


def kv_pitfalls(context: LabContext, engines: ModelEngines) -> Findings:
    prompts = _Prompts(context, ModelSandbox(engines.runner))
    figures: dict[str, float | int | str | bool] = {}
    makers: tuple[Callable[[], Pitfall], ...] = (
        lambda: _lenient(context.model_dir, prompts, engines, figures),
        lambda: _text(context.model_dir, prompts, engines),
        lambda: _shifted(prompts),
        lambda: _changed_model(context, prompts),
    )
    pitfalls = []
    for number, make in enumerate(makers):
        context.progress("wrong KV on the model", 0.3 + 0.1 * number)
        pitfalls.append(make())
    return pitfall_findings(pitfalls, figures=figures)


def _lenient(
    model_dir: Path, prompts: _Prompts, engines: ModelEngines, figures: dict[str, float | int | str | bool]
) -> Pitfall:
    """`figures` receives the counts."""
    changed = stolen = 0
    example = ""
    for index, prompt in enumerate(prompts.tokens):
        other = prompts.other(index)
        got = prompts.over(prompts.tokens[other], prompt, CHUNK)
        changed += got != prompts.right[index]
        if got == prompts.right[other] != prompts.right[index]:
            stolen += 1
            right = words_of(model_dir, prompts.right[index])
            example = example or f": `{words_of(model_dir, got)}` instead of `{right}`"
    exact = _asked(engines, prompts, prompts.tokens)
    figures |= {
        "pitfalls.lenient_prompts": len(prompts),
        "pitfalls.lenient_changed": changed,
        "pitfalls.lenient_stolen": stolen,
        "pitfalls.exact_changed": exact,
    }
    return Pitfall(
        section="5.4c",
        name="Remedy: match the first chunk leniently, when only a little of it changed",
        symptom="more hits, the same answers",
        happened=f"prompts that differ in one token of their first {CHUNK}: {changed} of {len(prompts)} answers "
        "changed, "
        f"{stolen} were the other prompt's answer{example}",
        caught=f"exact comparison: the production cache changed {exact} of {len(prompts)} answers",
        remedy="do not; put what changes last",
        verdict=Verdict.NOT_CONFIRMED if changed else Verdict.DEPENDS,
    )


def _text(model_dir: Path, prompts: _Prompts, engines: ModelEngines) -> Pitfall:
    changed = wrong = found = total = 0
    for prompt, right in zip(prompts.tokens, prompts.right, strict=True):
        as_typed = typed(model_dir, prompt)
        total += len(as_typed)
        own = prompts.alone(as_typed)
        changed += right != own  # all KV is found under the equal text, so the answer is that prompt's
        engine = engines.engine()
        sampling = _greedy(prompts.answer_tokens)
        engine.ask(prompt, sampling)
        answered = engine.ask(as_typed, sampling)
        found += answered.cached_tokens
        wrong += answered.tokens != own
    return Pitfall(
        section="5.2a",
        name="A hash over text",
        symptom="a hit, and wrong text",
        happened=f"the same text in other tokens (control tokens typed by a user, other word borders): with KV found "
        "by "
        f"text {changed} of {len(prompts)} answers were another prompt's",
        caught=f"the tree compares token ids: it found {found} of {total} tokens and changed {wrong} answers",
        remedy="hash and compare token ids",
        verdict=yes(changed > 0 and wrong == 0),
    )


def _shifted(prompts: _Prompts) -> Pitfall:
    """The second chunk's blocks stand one block too late in the table."""
    changed = 0
    sandbox, kept = prompts.sandbox, CHUNK // prompts.sandbox.block_size
    for index, prompt in enumerate(prompts.tokens):
        sandbox.reset()
        table = sandbox.table(len(prompt) + prompts.answer_tokens)
        sandbox.feed(prompt, table)
        last = sandbox.table(sandbox.block_size)[0]
        sandbox.copy(table[kept - 1], last)  # a copy, so that writing the answer does not touch what is read twice
        wrong = [*table[:kept], last, *table[kept:]]
        got = sandbox.answer(prompt[-1:], prompts.answer_tokens, wrong, len(prompt) - 1)
        changed += got != prompts.right[index]
    return Pitfall(
        section="5.2b",
        name="A wrong interval changes answers",
        symptom="a hit, and wrong text",
        happened=f"with the second chunk one block late {changed} of {len(prompts)} answers changed",
        caught="as above, and by `KvFingerprint` when it is the block size that changed",
        remedy="as above; a new block size is a new namespace",
        verdict=yes(changed > 0),
    )


def _changed_model(context: LabContext, prompts: _Prompts) -> Pitfall:
    with tempfile.TemporaryDirectory() as folder:
        other_dir = _other_model(context.model_dir, Path(folder))
        engines = ModelEngines(replace(context, model_dir=other_dir), tokens=_POOL_TOKENS)
        old, new = prompts.sandbox.runner, engines.runner
        sandbox = ModelSandbox(new)
        changed = 0
        for prompt in prompts.tokens:
            own = sandbox.alone(prompt, prompts.answer_tokens)
            sandbox.reset()
            prompts.sandbox.reset()
            table = sandbox.table(len(prompt) + prompts.answer_tokens)
            prompts.sandbox.feed(prompt, prompts.sandbox.table(len(prompt)))
            new.pool.tensor[table] = old.pool.tensor[table]
            changed += sandbox.answer(prompt[-1:], prompts.answer_tokens, table, len(prompt) - 1) != own
            sandbox.reset()
        differ = old.facts.kv_fingerprint != new.facts.kv_fingerprint
        differ &= old.facts.model_revision != new.facts.model_revision
    return Pitfall(
        section="5.2c",
        name="A cache that outlives a change of the model",
        symptom="a hit, and wrong text",
        happened=f"the same weights with another rotary base, over KV of before: {changed} of {len(prompts)} answers "
        "changed",
        caught="the fingerprint in the tree's namespace and the revision in every chunk hash "
        + ("are others, so nothing of before is found" if differ else "are NOT others"),
        remedy="what decides the numbers (weights, layers, heads, dtype, rope, block size, layout) is in the namespace",
        verdict=yes(changed > 0 and differ),
    )


def _other_model(model_dir: Path, folder: Path) -> Path:
    for file in model_dir.iterdir():
        if file.name != "config.json":
            (folder / file.name).symlink_to(file.resolve())
    config = json.loads((model_dir / "config.json").read_text(encoding="utf-8"))
    nested = config.get("rope_parameters")
    base = 3 * float(config.get("rope_theta") or (nested or {}).get("rope_theta") or 10_000.0)
    config["rope_theta"] = base
    if isinstance(nested, dict):
        nested["rope_theta"] = base
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    return folder


def _asked(engines: ModelEngines, prompts: _Prompts, asked: Sequence[Sequence[int]]) -> int:
    """How many answers the production engine changes when all prompts go through one prefix cache."""
    engine = engines.engine()
    sampling = _greedy(prompts.answer_tokens)
    got = [engine.ask(prompt, sampling).tokens for prompt in asked]
    return sum(one != right for one, right in zip(got, prompts.right, strict=True))


def _greedy(tokens: int) -> SamplingParams:
    return SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True)
