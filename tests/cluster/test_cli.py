"""The kvray command: which configuration its options make, its exit codes, and one line per mistake."""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from cluster.cli import app
from cluster.config import ClusterConfig, EngineConfig
from cluster.core.constraint import Constraint
from cluster.core.errors import ConfigError, KvrayError
from cluster.core.sampling import SamplingParams


def run(*arguments: str, text: str | None = None) -> Result:
    return CliRunner().invoke(app, arguments, input=text)


def lines(result: Result) -> list[str]:
    assert "Traceback" not in result.output
    return result.stderr.splitlines()


class Command:
    """Stands in for a command's module, which would load an engine or start a cluster."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, module: str, name: str) -> None:
        self.calls: list[tuple[tuple[Any, ...], dict[str, Any]]] = []
        self.answer: int | BaseException | None = 0
        stand_in = ModuleType(module)
        setattr(stand_in, name, self)
        monkeypatch.setitem(sys.modules, module, stand_in)

    def __call__(self, *args: Any, **options: Any) -> int | None:
        self.calls.append((args, options))
        if isinstance(self.answer, BaseException):
            raise self.answer
        return self.answer


@pytest.fixture
def serve(monkeypatch: pytest.MonkeyPatch) -> Command:
    return Command(monkeypatch, "cluster.serve_command", "run_serve")


@pytest.fixture
def generate(monkeypatch: pytest.MonkeyPatch) -> Command:
    return Command(monkeypatch, "cluster.generate_command", "run_generate")


def test_defaults_are_those_of_the_configuration(serve: Command, generate: Command) -> None:
    assert run("serve").exit_code == 0
    assert run("generate", "Hello").exit_code == 0
    assert serve.calls == [((ClusterConfig(),), {})]
    sampling = SamplingParams(temperature=0.0, max_tokens=256)
    options = {"chat": True, "as_json": False, "constraint": None}
    assert generate.calls == [((EngineConfig(), "Hello", sampling), options)]


def test_every_option_of_serve_arrives(serve: Command) -> None:
    options = {
        "--model": "a/b",
        "--served-model-name": "name",
        "--replicas": "3",
        "--host": "0.0.0.0",
        "--port": "1",
        "--grpc-port": "2",
        "--redis-url": "redis://r",
        "--policy": "round_robin",
        "--dtype": "bfloat16",
        "--device": "cpu",
        "--attention-backend": "reference",
        "--kv-memory": "1GiB",
        "--max-model-len": "99",
        "--max-num-seqs": "5",
        "--token-budget": "77",
        "--block-size": "8",
        "--chunk-tokens": "32",
        "--threads": "4",
        "--prefix-cache": "off",
    }
    result = run("serve", *(part for option in options.items() for part in option))
    assert result.exit_code == 0, result.output
    cache = {"kv_memory": 2**30, "block_size": 8, "chunk_tokens": 32, "prefix_cache": "off"}
    engine = {"model": "a/b", "dtype": "bfloat16", "device": "cpu", "max_model_len": 99, "max_num_seqs": 5}
    engine["attention_backend"] = "reference"
    wanted = ClusterConfig.model_validate(
        {
            "engine": {**engine, "token_budget": 77, "threads": 4, "cache": cache},
            "index": {"redis_url": "redis://r"},
            "router": {"policy": "round_robin"},
            "serve": {"host": "0.0.0.0", "port": 1, "grpc_port": 2, "replicas": 3},
            "served_model_name": "name",
        }
    )
    assert serve.calls == [((wanted,), {})]


@pytest.mark.parametrize(("option", "field"), [("--strict-blocks", "strict_blocks"), ("--log-blocks", "log_blocks")])
def test_the_switches_for_looking_at_blocks_arrive(serve: Command, generate: Command, option: str, field: str) -> None:
    assert run("serve", option).exit_code == run("generate", "x", option).exit_code == 0
    ((served,), _), ((generated, *_), _) = serve.calls[0], generate.calls[0]
    wanted = EngineConfig.model_validate({field: True})
    assert (served.engine, generated) == (wanted, wanted)


def test_every_option_of_generate_arrives(generate: Command) -> None:
    sampling = ("--max-tokens", "5", "--temperature", "0.5", "--top-k", "6", "--top-p", "0.9", "--seed", "-7")
    result = run("generate", "-", "--no-chat", "--json", *sampling, "--stop", "a", "--stop", "b", text="from stdin\n")
    assert result.exit_code == 0, result.output
    ((_, prompt, params), options) = generate.calls[0]
    assert prompt == "from stdin\n"
    assert params == SamplingParams(max_tokens=5, temperature=0.5, top_k=6, top_p=0.9, seed=-7, stop=("a", "b"))
    assert options == {"chat": False, "as_json": True, "constraint": None}


def test_every_sampling_option_of_generate_arrives(generate: Command) -> None:
    penalties = ("--repetition-penalty", "1.5", "--presence-penalty", "-0.5", "--frequency-penalty", "0.25")
    ends = ("--min-tokens", "2", "--ignore-eos", "--stop", "a", "--include-stop")
    told = ("--logprobs", "3", "--prompt-logprobs", "0")
    result = run("generate", "x", "--json", "--min-p", "0.1", *penalties, *ends, *told)
    assert result.exit_code == 0, result.output
    ((_, _, params), _) = generate.calls[0]
    assert params == SamplingParams(
        temperature=0.0,
        max_tokens=256,
        min_p=0.1,
        repetition_penalty=1.5,
        presence_penalty=-0.5,
        frequency_penalty=0.25,
        min_tokens=2,
        ignore_eos=True,
        stop=("a",),
        include_stop_str_in_output=True,
        logprobs=3,
        prompt_logprobs=0,
    )


def test_every_kind_of_constraint_arrives(generate: Command, tmp_path: Path) -> None:
    schema, grammar = tmp_path / "schema.json", tmp_path / "grammar.lark"
    schema.write_text('{"type": "object"}')
    grammar.write_text('start: "é"', encoding="utf-8")
    for arguments, constraint in (
        (("--json-object",), Constraint.json_object()),
        (("--json-schema", str(schema)), Constraint.json_schema('{"type": "object"}')),
        (("--regex", "a+"), Constraint.regex("a+")),
        (("--choice", "yes", "--choice", "no"), Constraint.choice(["yes", "no"])),
        (("--grammar", str(grammar)), Constraint.grammar('start: "é"')),
    ):
        result = run("generate", "x", *arguments)
        assert result.exit_code == 0, result.output
        assert generate.calls.pop()[1]["constraint"] == constraint


def test_wrong_constraints_are_one_line_that_names_the_option(generate: Command, tmp_path: Path) -> None:
    broken, latin = tmp_path / "broken.json", tmp_path / "latin.lark"
    broken.write_text('{"type":\n "object",}')
    latin.write_bytes(b"start: \xff")
    for arguments, says in (
        (("--json-schema", str(broken)), "--json-schema: json_schema is not valid JSON: "),
        (("--json-schema", str(tmp_path / "none")), "--json-schema: cannot be read: "),
        (("--grammar", str(latin)), "--grammar: cannot be read: "),
        (("--regex", ""), "--regex: "),
        (("--choice", ""), "--choice: "),
        (("--regex", "a", "--json-object"), "--regex: an answer has one constraint"),
        (("--regex", "a", "--ignore-eos"), "--ignore-eos: "),
        (("--regex", "a", "--beam-width", "2"), "--beam-width: "),
    ):
        result = run("generate", "x", *arguments)
        assert result.exit_code == 2, arguments
        (line,) = lines(result)
        assert line.startswith(f"kvray: {says}"), line
        if "not valid JSON" in says:
            assert "line 2" in line
    assert not generate.calls


@pytest.mark.parametrize("option", ["--logprobs", "--prompt-logprobs"])
def test_log_probabilities_are_for_json(generate: Command, option: str) -> None:
    result = run("generate", "x", option, "1")
    assert result.exit_code == 2 and not generate.calls
    assert result.stderr == f"kvray: {option}: log probabilities need --json\n"


WRONG = [
    ("generate", "--repetition-penalty", "0"),
    ("generate", "--presence-penalty", "2.5"),
    ("generate", "--min-tokens", "300"),
    ("generate", "--length-penalty", "0.5"),
    ("serve", "--kv-memory", "lots"),
    ("serve", "--kv-memory", "0"),
    ("serve", "--chunk-tokens", "65"),
    ("serve", "--block-size", "0"),
    ("serve", "--replicas", "0"),
    ("serve", "--port", "99999"),
    ("serve", "--policy", "best"),
    ("serve", "--dtype", "int3"),
    ("serve", "--served-model-name", ""),
    ("serve", "--threads", "0"),
    ("serve", "--prefix-cache", "maybe"),
    ("generate", "--device", "tpu"),
    ("generate", "--attention-backend", "flashy"),
    ("generate", "--max-model-len", "0"),
    ("generate", "--token-budget", "0"),
    ("generate", "--max-num-seqs", "0"),
    ("generate", "--max-tokens", "0"),
    ("generate", "--temperature", "-1"),
    ("generate", "--temperature", "nan"),
    ("generate", "--top-k", "-1"),
    ("generate", "--top-p", "0"),
    ("generate", "--seed", "9223372036854775808"),
    ("generate", "--stop", ""),
]


@pytest.mark.parametrize(("command", "option", "value"), WRONG)
def test_a_wrong_value_is_one_line_that_names_the_option(
    serve: Command, generate: Command, command: str, option: str, value: str
) -> None:
    prompt = ("Hello",) if command == "generate" else ()
    result = run(command, *prompt, option, value)
    assert result.exit_code == 2
    (line,) = lines(result)
    assert line.startswith(f"kvray: {option}: ")
    assert result.stdout == ""
    assert serve.calls == generate.calls == []


def test_two_wrong_values_are_two_lines(serve: Command) -> None:
    result = run("serve", "--replicas", "0", "--port", "-1")
    assert result.exit_code == 2
    assert sorted(line.split(": ")[1] for line in lines(result)) == ["--port", "--replicas"]


@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        (("serve", "--replicas", "two"), "--replicas"),
        (("serve", "--no-such", "1"), "--no-such"),
        (("generate",), "prompt"),
        (("dance",), "dance"),
    ],
)
def test_wrong_usage_ends_with_2_and_names_it(serve: Command, arguments: tuple[str, ...], word: str) -> None:
    result = run(*arguments)
    assert result.exit_code == 2
    assert word in result.stderr
    assert serve.calls == []


@pytest.mark.parametrize(
    ("error", "code"), [(ConfigError("no such model"), 2), (KvrayError("no such model", detail=1), 1)]
)
def test_an_error_of_kvray_is_one_line(serve: Command, error: KvrayError, code: int) -> None:
    serve.answer = error
    result = run("serve")
    assert result.exit_code == code
    assert lines(result) == ["kvray: no such model"]


@pytest.mark.parametrize(("answer", "code"), [(0, 0), (None, 0), (3, 3)])
def test_the_command_decides_the_exit_code(serve: Command, answer: int | None, code: int) -> None:
    serve.answer = answer
    assert run("serve").exit_code == code


def test_other_errors_are_not_hidden(serve: Command) -> None:
    serve.answer = ZeroDivisionError("a bug")
    assert isinstance(run("serve").exception, ZeroDivisionError)


def test_status_of_a_dead_address_is_one_line(unused_tcp_port: int) -> None:
    address = f"127.0.0.1:{unused_tcp_port}"
    result = run("status", "--address", address)
    assert result.exit_code == 1
    (line,) = lines(result)
    assert line.startswith(f"kvray: no cluster answers at {address}: ")


@pytest.mark.torch
def test_generate_with_a_model_that_is_not_there_is_one_line() -> None:
    result = run("generate", "x", "--model", "/nonexistent")
    assert result.exit_code == 2
    (line,) = lines(result)
    assert "/nonexistent" in line
    assert result.stdout == ""


def test_help_lists_the_commands() -> None:
    result = run("--help")
    assert result.exit_code == 0
    assert all(name in result.stdout for name in ("serve", "generate", "status"))
    assert run().exit_code == 2


def test_a_config_file_goes_with_places_only(monkeypatch: pytest.MonkeyPatch) -> None:
    command = Command(monkeypatch, "cluster.serve_command", "run_serve_file")
    assert run("serve", "--config", "a.yaml").exit_code == 0
    places = ("--host", "h", "--port", "1", "--grpc-port", "2", "--redis-url", "redis://r")
    assert run("serve", "--config", "a.yaml", *places).exit_code == 0
    nothing = {"host": None, "port": None, "grpc_port": None, "redis_url": None}
    given = {"host": "h", "port": 1, "grpc_port": 2, "redis_url": "redis://r"}
    assert command.calls == [((Path("a.yaml"),), nothing), ((Path("a.yaml"),), given)]

    result = run("serve", "--config", "a.yaml", "--port", "1", "--model", "demo", "--no-hold-back")
    assert result.exit_code == 2 and len(command.calls) == 2
    assert lines(result) == [
        f"kvray: --{name}: the file of --config says it, in the args of each application"
        for name in ("hold-back", "model")
    ]


def test_a_wrong_config_file_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "my.yaml").write_text("applications: []\nhttp_option: {}\n")
    result = run("serve", "--config", str(tmp_path / "my.yaml"))
    assert result.exit_code == 2
    (line,) = lines(result)
    assert line.startswith(f"kvray: {tmp_path / 'my.yaml'}: http_option: unknown key")
