"""A chat's history comes back as text: is it cut into the tokens that were generated (article 3.1)?

    kept ids    prompt of turn 1, generated ids, new ids                              everything before is found
    as text     the answer decoded, put into the chat template, tokenised again       found up to the first difference

Owns: conversations on the real model, one greedy and some sampled, and how much of the history is found either way.
Does not: make long chats (prefix_matrix counts those).
Invariants: both ways ask the same engine; what is found is the engine's own count.
"""

from __future__ import annotations

from typing import NamedTuple

from cluster.core.sampling import SamplingParams
from cluster.lab.driven_engine import DrivenEngine
from cluster.lab.findings import Claim, Findings, LabContext, Table, Verdict
from cluster.lab.lab_engines import ModelEngines
from cluster.lab.prefix_counts import common_beginning
from cluster.tokenizer import Tokenizer

QUESTIONS = ("Name three rivers.", "Which one is the longest?")
WAYS = {
    "greedy": SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True),
    **{
        f"sampled{seed}": SamplingParams(temperature=1.5, max_tokens=40, ignore_eos=True, seed=seed)
        for seed in range(3)
    },
}


class History(NamedTuple):
    """history: tokens of turn 1 whose KV there is.  kept, text: how many of them turn 2 found."""

    history: int
    kept: int
    text: int


def run_history(context: LabContext, engines: ModelEngines) -> Findings:
    tokenizer = Tokenizer.from_dir(context.model_dir)
    found: dict[str, History] = {}
    for number, (name, sampling) in enumerate(WAYS.items()):
        context.progress("prefix: a chat's history", number / len(WAYS))
        found[name] = second_turn(engines.engine(), tokenizer, sampling)
    figures: dict[str, float | int | str | bool] = {}
    for name, one in found.items():
        figures[f"history.{name}.tokens"] = one.history
        figures[f"history.{name}.kept_ids_found"] = one.kept
        figures[f"history.{name}.text_found"] = one.text
    lost = max(one.history - one.text for one in found.values())
    words = "; ".join(
        f"{name} answer: {one.text} of {one.history} tokens as text, {one.kept} as ids" for name, one in found.items()
    )
    claim = Claim(
        "3.1",
        "In a chat all of the history is found again",
        "the whole earlier turn",
        words + (": text is not always cut into the tokens that were generated" if lost else ""),
        Verdict.DEPENDS if lost else Verdict.CONFIRMED,
    )
    table = Table(
        title="What the second turn of a chat finds of the first",
        header=("answer", "history, tokens", "found with the generated ids", "found with the text, tokenised again"),
        rows=tuple((name, str(one.history), str(one.kept), str(one.text)) for name, one in found.items()),
    )
    return Findings("prefix", "history", "", (claim,), (table,), figures=figures)


def second_turn(engine: DrivenEngine, tokenizer: Tokenizer, sampling: SamplingParams) -> History:
    opening = [{"role": "user", "content": QUESTIONS[0]}]
    first = tuple(tokenizer.apply_chat_template(opening))
    answer = engine.ask(first, sampling).tokens
    computed = first + answer[:-1]
    one_token = SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True)
    said = [*opening, {"role": "assistant", "content": tokenizer.decode(answer)}]
    again = tuple(tokenizer.apply_chat_template([*said, {"role": "user", "content": QUESTIONS[1]}]))
    text = engine.ask(again, one_token)
    assert text.cached_tokens == common_beginning(again[:-1], computed), "the engine found other tokens than are equal"
    kept = engine.ask(first + answer + tuple(tokenizer.encode(QUESTIONS[1])), one_token)
    return History(len(computed), min(kept.cached_tokens, len(computed)), text.cached_tokens)
