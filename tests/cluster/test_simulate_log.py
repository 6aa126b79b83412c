"""`kvray simulate --log` as a user runs it: figures from a log, without heavy libraries, and no text anywhere."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from small_tokenizer import small_tokenizer
from typer.testing import CliRunner

from cluster.cli import app

ROOT = Path(__file__).parents[2]
TEMPLATE = "{% for m in messages %}<|turn|>{{ m['role'] }} {{ m['content'] }}{% endfor %}<|start|>"
WITHOUT = (
    "import sys\n"
    "absent = ('ray', 'torch', 'transformers', 'redis', 'grpc', 'triton', 'fastapi', 'msgpack')\n"
    "sys.modules.update(dict.fromkeys(absent))\n"  # importing one fails
    "from cluster.cli import main\n"
    "main()\n"
)


@pytest.fixture
def tokenizer_dir(tmp_path: Path) -> Path:
    path = tmp_path / "model"
    path.mkdir()
    small_tokenizer().save(str(path / "tokenizer.json"))
    (path / "tokenizer_config.json").write_text(json.dumps({"chat_template": TEMPLATE}))
    return path


def simulate(*options: str | Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", WITHOUT, "simulate", *map(str, options)]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)


def log_file(path: Path, lines: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def chats() -> list[dict[str, Any]]:
    system = {"role": "system", "content": "the quick brown fox jumps over the lazy dog. " * 20}
    questions = [{"role": "user", "content": f"xyzzy question {n % 7} " * 5} for n in range(30)]
    return [
        {"timestamp": n * 0.4 + 0.01, "body": {"messages": [system, question], "max_tokens": 9}}
        for n, question in enumerate(questions)
    ]


def test_a_log_gives_figures_per_policy_and_no_text(tmp_path: Path, tokenizer_dir: Path) -> None:
    log = log_file(tmp_path / "log.jsonl", chats())
    done = simulate(
        *("--log", log, "--tokenizer", tokenizer_dir, "--replicas", "2"), *("--ttft-target", "0.05", "--json")
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert [one["policy"] for one in found["policies"]] == ["estimated_ttft", "least_uncached", "round_robin"]
    assert all(one["finished"] == 30 and one["hit_rate"] > 0.5 for one in found["policies"])
    assert all(one["gpu_hours"] == pytest.approx(2 * one["virtual_s"] / 3600) for one in found["policies"])
    assert [size["replicas"] for size in found["sizes"]] == [1, 1, 1]
    assert found["output_lengths"] == {"max_tokens": 30}
    table = simulate("--log", log, "--tokenizer", tokenizer_dir, "--replicas", "2", "--ttft-target", "0.05")
    assert table.returncode == 0 and "GPU-hours" in table.stdout and "from max_tokens" in table.stdout
    for text in (done.stdout, done.stderr, table.stdout, table.stderr):
        assert "xyzzy" not in text and "fox" not in text


def test_a_bad_line_is_one_line_with_its_number_and_no_text(tmp_path: Path, tokenizer_dir: Path) -> None:
    log = tmp_path / "log.jsonl"
    log.write_text(json.dumps(chats()[0]) + '\n{"timestamp": 1, "prompt": "xyzzy\n')
    done = simulate("--log", log, "--tokenizer", tokenizer_dir)
    assert done.returncode == 2
    assert done.stderr.strip().splitlines()[-1] == "kvray: log.jsonl, line 2: not valid JSON"
    assert "xyzzy" not in done.stdout + done.stderr


def test_a_log_without_times_needs_a_rate(tmp_path: Path, tokenizer_dir: Path) -> None:
    lines = [{name: value for name, value in line.items() if name != "timestamp"} for line in chats()]
    log = log_file(tmp_path / "log.jsonl", lines)
    refused = simulate("--log", log, "--tokenizer", tokenizer_dir)
    assert refused.returncode == 2 and "has no timestamps: say with --rate" in refused.stderr
    done = simulate("--log", log, "--tokenizer", tokenizer_dir, "--rate", "20", "--policy", "round_robin", "--json")
    assert done.returncode == 0 and json.loads(done.stdout)["policies"][0]["virtual_s"] < 4


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ((), "give --trace or --log"),
        (("--log", "a", "--trace", "b"), "give --trace or --log"),
        (("--log", "a"), "--log needs --tokenizer"),
        (("--log", "a", "--tokenizer", "b", "--ttft-target", "0"), "--ttft-target must be"),
        (("--log", "a", "--tokenizer", "b", "--ttft-target", "1", "--kill", "1@2"), "leave out --kill"),
        (("--log", "a", "--tokenizer", "b", "--output-tokens", "0"), "--output-tokens must be"),
        (("--engine-only", "--log", "a"), "--engine-only needs --trace"),
    ],
)
def test_wrong_options_are_named_before_anything_is_read(options: tuple[str, ...], problem: str) -> None:
    done = CliRunner().invoke(app, ["simulate", *options])
    assert done.exit_code == 2 and problem in done.stderr
