"""A model that cannot run: `kvray generate` ends with one line on stderr that names the cause, and no traceback."""

from __future__ import annotations

import json
import shutil
import struct
import subprocess
import sys
from collections.abc import Callable
from math import prod
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
from typer.testing import CliRunner

from cluster.cli import app

EXIT_CODE = 2
WEIGHTS = "model.safetensors"
HIDDEN, INNER, LAYERS, HEADS, KV_HEADS, HEAD_DIM = 16384, 65536, 64, 4, 2, 4096

Change = Callable[[Path], object]


@pytest.fixture
def model_dir(tiny_llama_dir: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(tiny_llama_dir, tmp_path / "my-model"))


def configure(**changes: Any) -> Change:
    def change(path: Path) -> None:
        config = json.loads((path / "config.json").read_text())
        (path / "config.json").write_text(json.dumps({**config, **changes}))

    return change


def weights(content: Callable[[bytes], bytes]) -> Change:
    return lambda path: (path / WEIGHTS).write_bytes(content((path / WEIGHTS).read_bytes()))


def header(text: bytes) -> Callable[[bytes], bytes]:
    return lambda whole: struct.pack("<Q", len(text)) + text + whole[-1000:]


def without_a_tensor(path: Path) -> None:
    tensors = safetensors.torch.load_file(path / WEIGHTS)
    del tensors["model.layers.1.mlp.up_proj.weight"]
    safetensors.torch.save_file(tensors, path / WEIGHTS)


def huge(tied: bool) -> Change:
    """A checkpoint of a terabyte: a true header, and a hole instead of the data."""

    def change(path: Path) -> None:
        sizes = {"hidden_size": HIDDEN, "intermediate_size": INNER, "num_hidden_layers": LAYERS, "head_dim": HEAD_DIM}
        configure(**sizes, tie_word_embeddings=tied)(path)
        shapes = {"model.embed_tokens.weight": [96, HIDDEN], "model.norm.weight": [HIDDEN]}
        if not tied:
            shapes["lm_head.weight"] = [96, HIDDEN]
        for layer in range(LAYERS):
            prefix = f"model.layers.{layer}."
            shapes |= {f"{prefix}{name}_layernorm.weight": [HIDDEN] for name in ("input", "post_attention")}
            shapes |= {f"{prefix}mlp.{name}_proj.weight": [INNER, HIDDEN] for name in ("gate", "up")}
            shapes |= {f"{prefix}mlp.down_proj.weight": [HIDDEN, INNER]}
            shapes |= {f"{prefix}self_attn.{name}_proj.weight": [KV_HEADS * HEAD_DIM, HIDDEN] for name in ("k", "v")}
            shapes |= {f"{prefix}self_attn.q_proj.weight": [HEADS * HEAD_DIM, HIDDEN]}
            shapes |= {f"{prefix}self_attn.o_proj.weight": [HIDDEN, HEADS * HEAD_DIM]}
        entries, end = {}, 0
        for name, shape in shapes.items():
            begin, end = end, end + 4 * prod(shape)
            entries[name] = {"dtype": "F32", "shape": shape, "data_offsets": [begin, end]}
        text = json.dumps(entries).encode()
        with (path / WEIGHTS).open("wb") as file:
            file.write(struct.pack("<Q", len(text)) + text)
            file.truncate(8 + len(text) + end)

    return change


CASES: dict[str, tuple[Change, str]] = {
    "another architecture": (configure(model_type="t5"), "my-model"),
    "an unknown architecture": (configure(model_type="martian"), "martian"),
    "a recurrent model": (configure(model_type="mamba", architectures=["MambaForCausalLM"]), "recurrent state"),
    "no configuration": (lambda path: (path / "config.json").unlink(), "no config.json"),
    "a broken configuration": (lambda path: (path / "config.json").write_text("{") and None, "config.json"),
    "no weights": (lambda path: (path / WEIGHTS).unlink(), "has no *.safetensors or *.gguf weights"),
    "empty weights": (weights(lambda _: b""), WEIGHTS),
    "no safetensors file": (weights(lambda _: b"<html>not found</html>" * 99), WEIGHTS),
    "a corrupt header": (weights(header(b'{"model.norm.weight": {"dtype"')), "corrupt safetensors header"),
    "a download that stopped": (weights(lambda whole: whole[: len(whole) // 2]), "truncated"),
    "a missing tensor": (without_a_tensor, "model.layers.1.mlp.up_proj.weight"),
    "another shape": (configure(intermediate_size=56), "has shape"),
    "a missing shard": (
        lambda path: (path / WEIGHTS).rename(path / "model.safetensors.index.json"),
        "model.safetensors.index.json",
    ),
    "too little memory": (huge(tied=True), "for its weights in float32, but cpu has"),
    "too little memory, two matrices": (huge(tied=False), "for its weights in float32, but cpu has"),
}


def generate(path: Path) -> list[str]:
    return ["generate", "w5 w6", "--max-tokens", "2", "--kv-memory", "1MiB", "--device", "cpu", "--model", str(path)]


def check(code: int, stdout: str, stderr: str, cause: str) -> None:
    assert "Traceback" not in stderr
    (line,) = stderr.splitlines()
    assert line.startswith("kvray: ")
    assert cause in line
    assert stdout == ""
    assert code == EXIT_CODE


@pytest.mark.parametrize("name", CASES)
def test_one_line_names_the_cause(name: str, model_dir: Path) -> None:
    change, cause = CASES[name]
    change(model_dir)
    result = CliRunner().invoke(app, generate(model_dir))
    assert isinstance(result.exception, SystemExit), repr(result.exception)
    check(result.exit_code, result.stdout, result.stderr, cause)


def test_the_model_itself_runs(model_dir: Path) -> None:
    """What makes the others fail is the change."""
    result = CliRunner().invoke(app, generate(model_dir))
    assert result.exit_code == 0, result.output


def test_more_kv_than_memory_for_the_wanted_length(model_dir: Path) -> None:
    result = CliRunner().invoke(app, [*generate(model_dir), "--kv-memory", "10KiB", "--max-model-len", "500"])
    check(result.exit_code, result.stdout, result.stderr, "--max-model-len")


def test_also_as_a_command(model_dir: Path) -> None:
    """In a process of its own nothing hides what libraries print."""
    (model_dir / WEIGHTS).unlink()
    command = [sys.executable, "-m", "cluster.cli", *generate(model_dir)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    check(done.returncode, done.stdout, done.stderr, "has no *.safetensors or *.gguf weights")
