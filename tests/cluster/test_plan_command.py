"""`kvray plan`: the page, the JSON object, where the weights' size comes from, one line and code 2 for the rest."""

from __future__ import annotations

import json
import struct
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from cluster.cli import app
from cluster.config import CacheConfig

SMOLLM2 = {
    "model_type": "llama",
    "dtype": "bfloat16",
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "vocab_size": 49152,
    "max_position_embeddings": 8192,
    "tie_word_embeddings": True,
}


def plan(*arguments: str) -> Result:
    result = CliRunner().invoke(app, ("plan", *arguments))
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return result


def refusal(*arguments: str) -> str:
    result = plan(*arguments)
    assert result.exit_code == 2, result.output
    assert result.stdout == ""
    (line,) = result.stderr.splitlines()
    assert line.startswith("kvray: ")
    return line


@pytest.fixture
def model_dir(tmp_path: Path) -> Path:
    path = tmp_path / "my-model"
    path.mkdir()
    (path / "config.json").write_text(json.dumps(SMOLLM2))
    return path


def save_checkpoint(path: Path, **counts: int) -> None:
    """A safetensors file of bf16 vectors; its data is a hole."""
    header, end = {}, 0
    for name, count in counts.items():
        header[name] = {"dtype": "BF16", "shape": [count], "data_offsets": [end, end + 2 * count]}
        end += 2 * count
    raw = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(raw)) + raw + bytes(end))


def plan_json(model_dir: Path, *arguments: str) -> dict[str, Any]:
    result = plan("--model", str(model_dir), "--memory", "4GB", "--json", *arguments)
    assert result.exit_code == 0, result.output
    found: dict[str, Any] = json.loads(result.stdout)
    return found


def test_json(model_dir: Path) -> None:
    free = 4 * 10**9 - 269_030_016
    blocks = free // 4 // (16 * 23_040)
    assert plan_json(model_dir) == {
        "model": "my-model",
        "model_type": "llama",
        "memory_bytes": 4 * 10**9,
        "weights": {"parameters": 134_515_008, "dtype": "bfloat16", "bytes": 269_030_016, "source": "formula"},
        "kv": {
            "layers": 30,
            "heads": 9,
            "kv_heads": 3,
            "head_dim": 64,
            "item_size": 2,
            "bytes_per_token": 23_040,
            "mha_bytes_per_token": 69_120,
        },
        "pool": {
            "budget_bytes": free // 4,
            "bytes": blocks * 16 * 23_040,
            "block_size": 16,
            "blocks": blocks,
            "tokens": blocks * 16,
        },
        "left_bytes": free - blocks * 16 * 23_040,
        "model_limit": 8192,
        "max_model_len": 8192,
        "full_length_requests": blocks // 512,
        "missing_bytes": 0,
        "warning": None,
        "concurrency": [
            {"tokens": tokens, "paged": blocks * 16 // tokens, "contiguous": 4, "reserved_use": tokens / 8192}
            for tokens in (1024, 4096, 8192)
        ],
    }


def test_the_page(model_dir: Path) -> None:
    result = plan("--model", str(model_dir), "--memory", "4GB")
    assert result.exit_code == 0
    assert result.stderr == ""
    for words in (
        "my-model in 3.7 GiB",
        "weights          256.6 MiB (bfloat16)",
        "134,515,008 (from config.json by formula)",
        "2 (K, V) x 30 layers x 3 KV heads x 64 dims x 2 bytes",
        "9 KV heads, 3 x as much: 69,120 bytes",
        "25% of 3.5 GiB free memory",
        "each reserving 8,192",
        "dtype auto: bfloat16, as stored",
    ):
        assert words in result.stdout
    assert "Does not fit" not in result.stdout
    assert max(map(len, result.stdout.splitlines())) <= 80


def test_the_page_when_the_models_own_length_does_not_fit(model_dir: Path) -> None:
    result = plan("--model", str(model_dir), "--memory", "1GB", "--kv-memory", "23040000")
    assert result.exit_code == 0
    for words in ("992 tokens", "Does not fit: one request of 8192 tokens", "lowered to 992; 158.0 MiB missing"):
        assert words in result.stdout


def test_a_model_whose_heads_all_keep_kv(model_dir: Path) -> None:
    (model_dir / "config.json").write_text(json.dumps({**SMOLLM2, "num_key_value_heads": 9}))
    assert "the same: every head has its own KV" in plan("--model", str(model_dir), "--memory", "4GB").stdout


def test_every_option_counts(model_dir: Path) -> None:
    options = ("--dtype", "float32", "--block-size", "24", "--max-model-len", "100", "--memory-share", "0.5")
    found = plan_json(model_dir, *options)
    assert (found["weights"]["dtype"], found["pool"]["block_size"], found["max_model_len"]) == ("float32", 24, 100)
    assert found["pool"]["budget_bytes"] == (4 * 10**9 - 2 * 269_030_016) // 2
    assert plan_json(model_dir, "--kv-memory", "1GiB")["pool"]["budget_bytes"] == 2**30


def test_the_default_share_is_that_of_serve(model_dir: Path) -> None:
    share = str(CacheConfig().memory_share)
    assert plan_json(model_dir) == plan_json(model_dir, "--memory-share", share)


def test_headers_win_over_the_formula(model_dir: Path) -> None:
    save_checkpoint(model_dir / "model.safetensors", a=10_000, b=7)
    weights = plan_json(model_dir)["weights"]
    assert weights == {"parameters": 10_007, "dtype": "bfloat16", "bytes": 20_014, "source": "headers"}
    result = plan("--model", str(model_dir), "--memory", "4GB")
    assert "10,007 (from safetensors headers)" in result.stdout


def test_shards_count_when_all_are_there(model_dir: Path) -> None:
    index = {"weight_map": {"a": "1.safetensors", "b": "2.safetensors"}}
    (model_dir / "model.safetensors.index.json").write_text(json.dumps(index))
    save_checkpoint(model_dir / "1.safetensors", a=100)
    assert plan_json(model_dir)["weights"]["source"] == "formula"
    save_checkpoint(model_dir / "2.safetensors", b=200)
    assert plan_json(model_dir)["weights"]["parameters"] == 300


def test_an_unknown_family_needs_headers(model_dir: Path) -> None:
    (model_dir / "config.json").write_text(json.dumps({**SMOLLM2, "model_type": "other"}))
    assert "no formula for the family 'other'" in refusal("--model", str(model_dir), "--memory", "4GB")
    save_checkpoint(model_dir / "model.safetensors", a=1000)
    assert plan_json(model_dir)["weights"]["parameters"] == 1000


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--memory", "lots"), "--memory: 'lots' is not a size"),
        (("--memory", "0"), "--memory: "),
        (("--memory", "-1"), "--memory: "),
        (("--memory", "9" * 400), "--memory: "),
        (("--memory", "200MB"), "the weights need 256.6 MiB in bfloat16"),
        (("--memory", "300MiB", "--max-model-len", "4096"), "needs 90.0 MiB of KV memory"),
        (("--memory", "269030017"), "less than one block"),
        (("--memory", "4GB", "--kv-memory", "5GB"), "kv_memory is 4.7 GiB, but only 3.5 GiB are free"),
        (("--memory", "4GB", "--max-model-len", "8193"), "own limit of 8192"),
        (("--memory", "4GB", "--max-model-len", "0"), "--max-model-len: "),
        (("--memory", "4GB", "--memory-share", "1.5"), "--memory-share: "),
        (("--memory", "4GB", "--block-size", "0"), "--block-size: "),
        (("--memory", "4GB", "--block-size", "99999"), "--block-size: "),
        (("--memory", "4GB", "--dtype", "int3"), "--dtype: "),
        (("--memory", "4GB", "--kv-memory", "x"), "--kv-memory: "),
    ],
)
@pytest.mark.parametrize("form", [(), ("--json",)], ids=["page", "json"])
def test_impossible_input_is_one_line(
    model_dir: Path, arguments: tuple[str, ...], words: str, form: tuple[str, ...]
) -> None:
    assert words in refusal("--model", str(model_dir), *arguments, *form)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"{", "cannot read "),
        (b"\xff\xfe", "cannot read "),
        (b"[" * 100_000, "cannot read "),
        (b"[]", "cannot plan my-model: config.json is not a JSON object"),
        (b'{"model_type": "llama"}', "cannot plan my-model: config.json has no num_attention_heads"),
    ],
)
def test_a_broken_config_is_one_line(model_dir: Path, content: bytes, words: str) -> None:
    (model_dir / "config.json").write_bytes(content)
    assert words in refusal("--model", str(model_dir), "--memory", "4GB")


@pytest.mark.parametrize("content", [b"", b"\x02\0\0\0\0\0\0\0[]", b"\x07\0\0\0\0\0\0\0" + b'{"a":1}'])
def test_a_broken_checkpoint_is_one_line(model_dir: Path, content: bytes) -> None:
    (model_dir / "model.safetensors").write_bytes(content)
    assert "safetensors" in refusal("--model", str(model_dir), "--memory", "4GB")


@pytest.mark.parametrize("content", ["{", "[]", "{}", '{"weight_map": 3}', '{"weight_map": {"a": []}}'])
def test_a_broken_index_is_one_line(model_dir: Path, content: str) -> None:
    (model_dir / "model.safetensors.index.json").write_text(content)
    assert "index.json" in refusal("--model", str(model_dir), "--memory", "4GB")


def test_no_model_is_one_line(tmp_path: Path) -> None:
    assert "no config.json" in refusal("--model", str(tmp_path), "--memory", "4GB")
    assert "no such directory" in refusal("--model", str(tmp_path / "none"), "--memory", "4GB")
    assert "name too long" in refusal("--model", "a" * 5000, "--memory", "4GB")


def test_memory_must_be_given(model_dir: Path) -> None:
    result = plan("--model", str(model_dir))
    assert result.exit_code == 2
    assert "--memory" in result.stderr


def test_it_needs_neither_torch_nor_transformers_nor_ray(model_dir: Path) -> None:
    save_checkpoint(model_dir / "model.safetensors", a=1000)
    code = (
        "import sys\n"
        "from cluster.cli import app\n"
        "try:\n"
        f"    app(['plan', '--memory', '4GB', '--model', {str(model_dir)!r}])\n"
        "except SystemExit as end:\n"
        "    assert not end.code, end.code\n"
        "heavy = {'ray', 'torch', 'transformers', 'redis', 'grpc', 'numpy'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
    )
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert "1,000 (from safetensors headers)" in done.stdout


@pytest.mark.model
def test_the_demo_model(demo_model_dir: Path) -> None:
    result = plan("--memory", "4GB", "--json")
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    assert found["model"] == demo_model_dir.name
    assert found["weights"]["parameters"] == 134_515_008
    assert found["weights"]["source"] == "headers"
