"""OfflineEngine on a tiny model, then `kvray generate` and the example on the demo model."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import jsonschema
import pytest
import tiny_models

from cluster.config import CacheConfig, EngineConfig
from cluster.core.errors import ConfigError, InvalidRequest, ReplicaLost, RequestTooLong
from cluster.core.request import FinishReason
from cluster.core.sampling import SamplingParams
from cluster.offline import OfflineEngine, OfflinePiece

ROOT = Path(__file__).parents[2]
CONFIG = EngineConfig(
    dtype="float32", device="cpu", threads=1, cache=CacheConfig(kv_memory=2**20, block_size=8, chunk_tokens=16)
)
PROMPT = " ".join(f"w{number}" for number in range(5, 25))


def greedy(max_tokens: int, **options: object) -> SamplingParams:
    return SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True, **options)  # type: ignore[arg-type]


def tokens_of(pieces: list[OfflinePiece]) -> list[int]:
    return [token for piece in pieces for token in piece.token_ids]


def text_of(pieces: list[OfflinePiece]) -> str:
    return "".join(piece.text for piece in pieces)


@pytest.fixture(scope="module")
def engine(tiny_llama_dir: Path) -> Iterator[OfflineEngine]:
    with OfflineEngine(CONFIG, tiny_llama_dir) as engine:
        yield engine


def test_a_stream_is_text_and_tokens_that_belong_together(engine: OfflineEngine) -> None:
    pieces = list(engine.generate(PROMPT, greedy(9)))
    assert len(tokens_of(pieces)) == 9
    assert text_of(pieces) == engine.tokenizer.decode(tokens_of(pieces))
    assert [p.finish_reason for p in pieces] == [None] * 8 + [FinishReason.LENGTH]
    assert [p.cached_tokens is None for p in pieces] == [False] + [True] * 8


def test_text_ids_and_chat_are_the_same_prompt(engine: OfflineEngine) -> None:
    ids = [*range(5, 25), 4]
    answers = [
        tokens_of(list(pieces))
        for pieces in (
            engine.generate(f"{PROMPT} w4", greedy(5)),
            engine.generate(ids, greedy(5)),
            engine.chat([{"role": "user", "content": PROMPT}], greedy(5)),
        )
    ]
    assert answers[0] == answers[1] == answers[2]
    assert engine.tokenizer.encode(f"{PROMPT} w4") == ids


def test_a_second_prompt_reuses_the_first_ones_cache(engine: OfflineEngine) -> None:
    prompt = list(range(40, 60))
    cached = [next(iter(engine.generate(prompt + tail, greedy(3)))).cached_tokens for tail in ([30], [31])]
    assert cached == [0, 20]


def test_a_stop_string_ends_the_answer_and_is_not_in_it(engine: OfflineEngine) -> None:
    ids = tokens_of(list(engine.generate(PROMPT, greedy(12))))
    word = tiny_models.WORDS[ids[5]]
    first = next(n for n, token in enumerate(ids) if word in tiny_models.WORDS[token])
    pieces = list(engine.generate(PROMPT, greedy(12, stop=(word,))))
    assert pieces[-1].finish_reason is FinishReason.STOP
    assert tokens_of(pieces) == ids[: first + 1]
    assert text_of(pieces).split() == [tiny_models.WORDS[token] for token in ids[:first]]


def test_log_probabilities_come_with_their_tokens(engine: OfflineEngine) -> None:
    pieces = list(engine.generate(PROMPT, greedy(5, logprobs=2, prompt_logprobs=0)))
    assert [len(piece.logprobs or ()) for piece in pieces] == [len(piece.token_ids) for piece in pieces]
    assert pieces[0].logprobs is not None and pieces[0].logprobs[0].top[0][0] == pieces[0].token_ids[0]
    assert [len(piece.prompt_logprobs or ()) for piece in pieces] == [len(engine.tokenizer.encode(PROMPT)), 0, 0, 0, 0]


def test_leaving_a_stream_frees_its_blocks(engine: OfflineEngine) -> None:
    before = engine.load.generated_tokens
    stream = engine.generate(PROMPT, greedy(480))
    assert next(stream).token_ids
    stream.close()  # type: ignore[attr-defined]
    deadline = time.monotonic() + 60
    while engine.load.in_use_blocks or engine.load.running:
        assert time.monotonic() < deadline, engine.load
        time.sleep(0.01)
    assert engine.load.generated_tokens - before < 480, "it did not just run to its end"
    assert engine._streams == {}


def test_refusals_raise_their_typed_error_and_the_engine_goes_on(engine: OfflineEngine) -> None:
    with pytest.raises(RequestTooLong) as caught:
        list(engine.generate(PROMPT, greedy(1000)))
    assert (caught.value.field, caught.value.limit) == ("max_tokens", 512)
    with pytest.raises(InvalidRequest, match="vocabulary"):
        list(engine.generate([96], greedy(1)))
    with pytest.raises(InvalidRequest, match="empty"):
        list(engine.generate("", greedy(1)))
    assert len(tokens_of(list(engine.generate(PROMPT, greedy(2))))) == 2


def test_threads_generate_at_the_same_time(engine: OfflineEngine) -> None:
    prompts = [[5, 6, 7, number] for number in range(30, 38)]
    alone = [tokens_of(list(engine.generate(prompt, greedy(10)))) for prompt in prompts]
    with ThreadPoolExecutor(len(prompts)) as pool:
        together = list(pool.map(lambda prompt: tokens_of(list(engine.generate(prompt, greedy(10)))), prompts))
    assert together == alone


def test_after_closing_streams_and_new_requests_say_that_it_is_gone(tiny_llama_dir: Path) -> None:
    engine = OfflineEngine(CONFIG, tiny_llama_dir)
    stream = engine.generate(PROMPT, greedy(480))
    next(stream)
    engine.close()
    with pytest.raises(ReplicaLost):
        list(stream)
    with pytest.raises(ReplicaLost):
        list(engine.generate(PROMPT, greedy(1)))
    engine.close()


def test_a_directory_that_is_no_model_is_a_configuration_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError):
        OfflineEngine(CONFIG, tmp_path)


def run(*command: str, text: str | None = None) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *command], cwd=ROOT, capture_output=True, text=True, input=text, timeout=250, check=False
    )


@pytest.mark.model
def test_generate_answers_as_json(demo_model_dir: Path) -> None:
    question = "What is the capital of France?"
    done = run("-m", "cluster.cli", "generate", "-", "--max-tokens", "8", "--json", text=question)
    assert done.returncode == 0, done.stderr
    answer = json.loads(done.stdout)
    assert "Paris" in answer["text"]
    assert 1 <= len(answer["token_ids"]) <= 8
    assert answer["finish_reason"] in ("stop", "length")


@pytest.mark.model
def test_generate_tells_log_probabilities_as_json(demo_model_dir: Path) -> None:
    options = ("--max-tokens", "3", "--logprobs", "1", "--prompt-logprobs", "0", "--json")
    done = run("-m", "cluster.cli", "generate", "The capital of France is", "--no-chat", *options)
    assert done.returncode == 0, done.stderr
    answer = json.loads(done.stdout)
    assert [one["top"][0] for one in answer["logprobs"]] == [
        [token, one["logprob"]] for token, one in zip(answer["token_ids"], answer["logprobs"], strict=True)
    ]
    assert answer["prompt_logprobs"][0] is None and answer["prompt_logprobs"][-1]["logprob"] < 0


SCHEMA = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 30}, "country": {"type": "string", "maxLength": 30}},
    "required": ["city", "country"],
    "additionalProperties": False,
}


@pytest.mark.model
def test_generate_follows_a_json_schema(demo_model_dir: Path, tmp_path: Path) -> None:
    file = tmp_path / "schema.json"
    file.write_text(json.dumps(SCHEMA))
    question = "Name the capital of France and its country, as JSON."
    done = run("-m", "cluster.cli", "generate", question, "--json-schema", str(file), "--max-tokens", "100")
    assert done.returncode == 0, done.stderr
    jsonschema.validate(json.loads(done.stdout), SCHEMA)
    assert "(stop)" in done.stderr


@pytest.mark.model
def test_generate_says_where_a_schema_is_wrong(demo_model_dir: Path, tmp_path: Path) -> None:
    file = tmp_path / "schema.json"
    file.write_text(json.dumps({"properties": {"a": {"not": {}}}}))
    done = run("-m", "cluster.cli", "generate", "Hi", "--json-schema", str(file))
    assert done.returncode == 1
    assert done.stdout == ""
    assert re.fullmatch(r"kvray: json_schema is refused at #/properties/a: .*\n", done.stderr)


@pytest.mark.model
def test_generate_streams_the_answer_to_stdout_and_the_rest_to_stderr(demo_model_dir: Path) -> None:
    done = run("-m", "cluster.cli", "generate", "What is the capital of France?", "--max-tokens", "8")
    assert done.returncode == 0, done.stderr
    assert "Paris" in done.stdout
    assert len(done.stdout.splitlines()) == 1
    assert re.fullmatch(r"\d tokens in .* s, first after .* s \((stop|length)\)\n", done.stderr)


@pytest.mark.model
def test_the_example_reuses_the_shared_beginning(demo_model_dir: Path) -> None:
    done = run("examples/offline_engine.py")
    assert done.returncode == 0, done.stderr
    counts = [int(line.split()[0].strip("(")) for line in done.stdout.splitlines() if "from the cache" in line]
    assert len(counts) == 2
    assert counts[0] == 0 < counts[1]
