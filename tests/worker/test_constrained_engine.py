"""Structured output through a whole engine over a random model: valid texts, whatever happens around a request."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from sampling_engine import Answer, SamplingEngine
from small_tokenizer import EOS, PADDING, save_small_model
from tokenizers import Tokenizer

from cluster.core.constraint import Constraint
from cluster.core.errors import InvalidRequest, KvrayError
from cluster.core.request import FinishReason
from worker.grammar.vocabulary import Vocabulary

PROMPT = [3 + (29 * i + 7) % 380 for i in range(21)]
OTHER = [3 + (31 * i + 11) % 380 for i in range(17)]
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "kind": {"enum": ["one", "two"]},
        "ok": {"type": "boolean"},
        "name": {"type": "string", "pattern": "^[a-z]{1,6}$"},
    },
    "required": ["kind", "ok", "name"],
    "additionalProperties": False,
}
CONSTRAINTS = {
    "schema": Constraint.json_schema(SCHEMA),
    "regex": Constraint.regex("[0-9]{3}-[a-f]{2,4}"),
    "choice": Constraint.choice(["yes", "no", "perhaps"]),
    "grammar": Constraint.grammar('start: "(" (start | /[a-c]{1,3}/) ")"'),
}
OPTIONS: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {"temperature": 1.5, "seed": 3},
    {"temperature": 2.0, "seed": 4, "top_k": 20, "top_p": 0.9},
    {"temperature": 1.0, "seed": 5, "repetition_penalty": 1.3, "min_p": 0.01, "logprobs": 1},
]
LENGTH = 100


class World:
    def __init__(self, path: Path) -> None:
        self.path = path
        self.tokenizer = Tokenizer.from_file(str(path / "tokenizer.json"))
        size = self.tokenizer.get_vocab_size() + PADDING
        self.vocabulary = Vocabulary(self.tokenizer, vocab_size=size, eos_token_ids=EOS)
        self.engines: list[SamplingEngine] = []

    def engine(self, **changes: Any) -> SamplingEngine:
        """With all constraints compiled, so that its steps can be counted."""
        made = SamplingEngine(self.path, vocabulary=lambda: self.vocabulary, **changes)
        for constraint in CONSTRAINTS.values():
            made.compile(constraint)
        self.engines.append(made)
        return made

    def text(self, answer: Answer) -> str:
        return str(self.tokenizer.decode(answer.tokens))

    def check(self, kind: str, answer: Answer) -> None:
        """A whole text of its constraint, or the beginning of one that was cut off."""
        text = self.text(answer)
        assert answer.end is not None
        if answer.end.finish_reason is FinishReason.LENGTH:
            state = self.engines[0].grammars.submit(CONSTRAINTS[kind]).result().start()  # type: ignore[union-attr]
            state.replay(answer.tokens)
            return
        assert answer.end.finish_reason is FinishReason.STOP
        if kind == "schema":
            jsonschema.validate(json.loads(text), SCHEMA)
        elif kind == "regex":
            assert re.fullmatch(CONSTRAINTS[kind].text, text)
        elif kind == "choice":
            assert text in ("yes", "no", "perhaps")
        else:
            assert re.fullmatch(r"\(+[a-c]{1,3}\)+", text) and text.count("(") == text.count(")")


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    path = tmp_path_factory.mktemp("small")
    save_small_model(path)
    made = World(path)
    yield made
    for engine in made.engines:
        engine.engine.close()


@pytest.fixture(scope="module")
def engine(world: World) -> SamplingEngine:
    return world.engine()


def error_of(engine: SamplingEngine, **request: Any) -> KvrayError:
    with pytest.raises(KvrayError) as caught:
        engine.run("refused", PROMPT, **request)
    return caught.value


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("kind", CONSTRAINTS)
def test_answers_are_texts_of_their_constraint(
    kind: str, options: dict[str, Any], world: World, engine: SamplingEngine
) -> None:
    ended = 0
    for seed in range(4):
        request = {**options, "seed": seed, "max_tokens": LENGTH, "constraint": CONSTRAINTS[kind]}
        answer = engine.run(f"{kind}{seed}", PROMPT, **request)
        world.check(kind, answer)
        ended += answer.end is not None and answer.end.finish_reason is FinishReason.STOP
    assert ended or kind == "grammar"


def requests() -> dict[str, dict[str, Any]]:
    found: dict[str, dict[str, Any]] = {}
    for number, options in enumerate(OPTIONS):
        found[f"free{number}"] = {"prompt": PROMPT[number:], "max_tokens": 14, **options}
        for kind, constraint in CONSTRAINTS.items():
            found[f"{kind}{number}"] = {
                "prompt": (PROMPT if number % 2 else OTHER)[number:],
                "constraint": constraint,
                "max_tokens": 24,
                **options,
            }
    return found


@pytest.fixture(scope="module")
def alone(world: World) -> dict[str, list[int]]:
    """What each request answers with the engine to itself, free ones without any grammar."""
    plain, constrained = SamplingEngine(world.path), world.engine()
    return {
        name: (plain if name.startswith("free") else constrained).run(name, **request).tokens
        for name, request in requests().items()
    }


@pytest.mark.parametrize("changes", [{}, {"token_budget": 13}, {"prefix_cache": "off", "max_num_seqs": 5}], ids=str)
def test_company_changes_no_answer(changes: dict[str, Any], world: World, alone: dict[str, list[int]]) -> None:
    """Free rows have the tokens that they have without any constrained neighbour, and the other way round."""
    engine = world.engine(**changes)
    for number, (name, request) in enumerate(requests().items()):
        engine.add(name, **request)
        if number % 3 == 2:
            engine.step()
    engine.finish()
    assert {name: answers[0].tokens for name, answers in engine.answers.items()} == alone


@pytest.mark.parametrize("preempt_at", [1, 2, 4, 7, 11])
def test_preemption_in_the_middle_changes_no_answer(
    preempt_at: int, world: World, engine: SamplingEngine, alone: dict[str, list[int]]
) -> None:
    for name, request in requests().items():
        answer = engine.run(f"{name}-{preempt_at}", preempt_at=preempt_at, **request)
        assert answer.tokens == alone[name]


@pytest.mark.parametrize("preempt_at", [None, 2, 5, 9])
@pytest.mark.parametrize("kind", CONSTRAINTS)
def test_samples_are_those_of_their_seeds_alone(
    kind: str, preempt_at: int | None, world: World, engine: SamplingEngine
) -> None:
    options: dict[str, Any] = {"temperature": 1.5, "max_tokens": LENGTH, "constraint": CONSTRAINTS[kind]}
    wanted = [engine.run(f"one{seed}", PROMPT, seed=seed, **options).tokens for seed in (7, 8, 9)]
    found = engine.run_all("three", PROMPT, n=3, seed=7, preempt_at=preempt_at, **options)
    assert [found[index].tokens for index in range(3)] == wanted
    for answer in found.values():
        world.check(kind, answer)
    best = engine.run_all("best", PROMPT, n=1, best_of=3, seed=7, **options)
    assert best[0].tokens in wanted


def test_the_end_may_come_before_min_tokens_where_nothing_else_can(world: World, engine: SamplingEngine) -> None:
    for name, constraint in (("choice", CONSTRAINTS["choice"]), ("late end", Constraint.regex("a|ab|abc"))):
        answer = engine.run(name, PROMPT, constraint=constraint, min_tokens=9, max_tokens=9, temperature=0.0)
        assert answer.end is not None and answer.end.finish_reason is FinishReason.STOP
        assert len(answer.tokens) < 9
    assert world.text(answer) == "abc", "as long as it can be"
    short = engine.run("free to end", PROMPT, constraint=Constraint.regex("[a-z]+"), min_tokens=9, max_tokens=30)
    assert len(short.tokens) >= 9


def test_a_stop_token_that_is_all_that_can_come_does_not_wait_for_min_tokens(
    world: World, engine: SamplingEngine
) -> None:
    stops = tuple(number for word, number in world.tokenizer.get_vocab().items() if set(word) == {"a"})
    answer = engine.run("stop", PROMPT, constraint=Constraint.regex("a{40}"), stop_token_ids=stops, min_tokens=5)
    assert answer.end is not None and answer.end.finish_reason is FinishReason.STOP
    assert set(world.text(answer)) == {"a"}


def test_log_probabilities_are_those_of_the_model_without_the_mask(world: World, engine: SamplingEngine) -> None:
    answer = engine.run("masked", PROMPT, constraint=CONSTRAINTS["regex"], temperature=0.0, logprobs=2)
    scored = engine.run("scored", PROMPT + answer.tokens, temperature=0.0, prompt_logprobs=2, max_tokens=1)
    assert scored.prompt_logprobs is not None
    raw = scored.prompt_logprobs[len(PROMPT) :]
    for mine, wanted in zip(answer.logprobs, raw, strict=True):
        assert wanted is not None
        assert mine.logprob == pytest.approx(wanted.logprob, abs=1e-3)
        assert [value for _, value in mine.top] == pytest.approx([value for _, value in wanted.top], abs=1e-3)
    assert any(one.top[0][0] != token for one, token in zip(answer.logprobs, answer.tokens, strict=True))


def test_a_bias_cannot_let_in_what_the_mask_keeps_out(world: World, engine: SamplingEngine) -> None:
    token = world.tokenizer.token_to_id("z")
    answer = engine.run("bias", PROMPT, constraint=CONSTRAINTS["choice"], logit_bias=((token, 100.0),))
    world.check("choice", answer)
    liked = world.tokenizer.token_to_id("p")
    answer = engine.run("liked", PROMPT, constraint=CONSTRAINTS["choice"], logit_bias=((liked, 100.0),), max_tokens=20)
    assert world.text(answer) == "perhaps"


def test_a_scored_prompt_of_a_constrained_request(world: World) -> None:
    engine = world.engine(token_budget=6)
    plain = engine.run("plain", PROMPT, constraint=CONSTRAINTS["regex"], temperature=0.0)
    scored = engine.run("scored", PROMPT, constraint=CONSTRAINTS["regex"], temperature=0.0, prompt_logprobs=1)
    assert scored.tokens == plain.tokens
    assert scored.prompt_logprobs is not None and len(scored.prompt_logprobs) == len(PROMPT)


def test_a_dead_end_ends_its_request_only(world: World) -> None:
    engine = world.engine()
    wanted = engine.run("alone", OTHER, temperature=0.0).tokens
    dead = Constraint.grammar('start: "aaaaa" <|end|> "b"')
    engine.compile(dead)
    engine.add("free", OTHER, temperature=0.0)
    engine.add("dead", PROMPT, constraint=dead, temperature=0.0)
    with pytest.raises(InvalidRequest) as caught:
        engine.finish()
    assert caught.value.field == "grammar"
    engine.finish()
    assert engine.engine.load().in_use_blocks == 0
    assert engine.run("after", OTHER, temperature=0.0).tokens == wanted


REFUSED: list[tuple[Callable[[], Constraint], str, str]] = [
    (lambda: Constraint.json_schema({"properties": {"a": {"not": {}}}}), "json_schema", "#/properties/a"),
    (lambda: Constraint.regex("(a"), "regex", "character 1"),
    (lambda: Constraint.grammar("start: other"), "grammar", "line 1"),
]


@pytest.mark.parametrize(("make", "field", "at"), REFUSED, ids=[field for _, field, _ in REFUSED])
def test_a_constraint_that_does_not_compile_says_where(
    make: Callable[[], Constraint], field: str, at: str, world: World
) -> None:
    engine = world.engine()
    engine.compile(make())
    error = error_of(engine, constraint=make())
    assert isinstance(error, InvalidRequest) and error.field == field
    assert at in error.message
    assert not engine.engine.has_work
