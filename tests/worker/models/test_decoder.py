"""The lean decoder gives the logits and the greedy tokens of transformers' models, for every family and switch."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tiny_models
import torch
import transformers
from paged_run import PagedRun

from cluster.core.errors import ConfigError
from worker.models.attention_hook import ProbeStep
from worker.models.decoder import Decoder
from worker.models.transformers_backend import TransformersModel

CPU = torch.device("cpu")
PLENTY = 2**33
NEW_TOKENS = 64
PIECE = 6
PROMPT = [5, 77, 31, 9, 54, 54, 12, 88, 3, 41, 60, 17, 29, 95, 8, 70, 33]

ModelDir = Callable[[str], Path]


def lean(path: Path, dtype: str = "float32") -> Decoder:
    torch.set_num_threads(1)
    return Decoder.load(path, dtype=dtype, device=CPU, free_bytes=PLENTY)


@torch.inference_mode()
def reference_logits(path: Path, tokens: list[int], dtype: torch.dtype = torch.float32) -> torch.Tensor:
    model = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=dtype, attn_implementation="eager").eval()
    logits: torch.Tensor = model(torch.tensor([tokens]), use_cache=False).logits[0]
    return logits


@pytest.mark.parametrize("family", tiny_models.LEAN_FAMILIES)
def test_logits_and_greedy_tokens_equal_transformers(family: str, tiny_model_dir: ModelDir) -> None:
    path = tiny_model_dir(family)
    model, text = lean(path), list(PROMPT)
    run = PagedRun(model)
    logits = [run.feed(PROMPT[begin : begin + PIECE]) for begin in range(0, len(PROMPT), PIECE)]
    for _ in range(NEW_TOKENS):
        text.append(int(logits[-1][-1].argmax()))
        logits.append(run.feed(text[-1:]))
    in_pieces = torch.cat(logits)

    wanted = reference_logits(path, text)
    assert wanted[len(PROMPT) - 1 : -1].argmax(-1).tolist() == text[len(PROMPT) :]
    assert (in_pieces - wanted).abs().max() < 1e-4
    at_once = PagedRun(model).feed(text)
    assert (at_once - wanted).abs().max() < 1e-4
    assert wanted.std() > 0.5, "the tiny model must have something to say"


@pytest.mark.parametrize("family", ["llama-tied", "qwen3-norms", "phi3-partial"])
def test_bfloat16_rounds_as_transformers_does(family: str, tiny_model_dir: ModelDir) -> None:
    path = tiny_model_dir(family)
    exact, rounded = reference_logits(path, PROMPT), reference_logits(path, PROMPT, torch.bfloat16).float()
    ours = PagedRun(lean(path, "bfloat16")).feed(PROMPT)
    assert ours.dtype == torch.bfloat16
    assert (ours.float() - exact).square().mean() < 2 * (rounded - exact).square().mean()


@pytest.mark.parametrize("family", tiny_models.LEAN_FAMILIES)
def test_says_of_itself_what_the_transformers_backend_says(family: str, tiny_model_dir: ModelDir) -> None:
    path = tiny_model_dir(family)
    ours, theirs = lean(path), TransformersModel(path, dtype="float32", device=CPU, free_bytes=PLENTY)
    for name in ("dtype", "device", "weight_bytes", "geometry", "vocab_size", "model_limit", "eos_token_ids"):
        assert getattr(ours, name) == getattr(theirs, name), name
    assert ours.rope_parameters == theirs.rope_parameters


def test_end_ids_from_the_generation_config(tiny_model_dir: ModelDir, tmp_path: Path) -> None:
    path = Path(shutil.copytree(tiny_model_dir("llama-tied"), tmp_path / "m"))
    for content, wanted in (({"eos_token_id": [2, 5]}, (2, 5)), ({"eos_token_id": 7}, (7,)), ({}, (2,))):
        (path / "generation_config.json").write_text(json.dumps(content))
        assert lean(path).eos_token_ids == wanted
    (path / "generation_config.json").unlink()
    assert lean(path).eos_token_ids == (2,)


def test_only_the_asked_rows_get_logits(tiny_model_dir: ModelDir) -> None:
    model, ids = lean(tiny_model_dir("qwen2-bias")), torch.tensor(PROMPT[:4])
    for rows in ([], [2], [3, 0]):
        wanted = torch.tensor(rows, dtype=torch.int64)
        assert model.forward(ids, torch.arange(4), wanted, ProbeStep()).shape == (len(rows), 96)


def test_weights_in_the_wanted_type_stay_in_the_mapped_file(tiny_model_dir: ModelDir) -> None:
    model = lean(tiny_model_dir("phi3-plain"))
    storages = {model._embedding.untyped_storage().data_ptr()}
    for layer in model._layers:
        storages |= {getattr(layer.weights, name).untyped_storage().data_ptr() for name in ("qkv", "out", "gate_up")}
    assert len(storages) == 1


def test_refuses_a_model_larger_than_the_device(tiny_model_dir: ModelDir) -> None:
    with pytest.raises(ConfigError, match=r"llama-tied needs .* weights in float16, but cpu has 1.0 KiB free"):
        Decoder.load(tiny_model_dir("llama-tied"), dtype="float16", device=CPU, free_bytes=1024)


@pytest.mark.parametrize(
    ("stored", "asked", "wanted"),
    [("float32", "auto", torch.float32), (None, "auto", torch.float32), ("float32", "float16", torch.float16)],
)
def test_choice_of_dtype(
    stored: Any, asked: str, wanted: torch.dtype, tiny_model_dir: ModelDir, tmp_path: Path
) -> None:
    path = Path(shutil.copytree(tiny_model_dir("llama-tied"), tmp_path / "m"))
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps({**config, "dtype": stored}))
    assert lean(path, asked).dtype == wanted


def test_no_transformers_is_imported() -> None:
    code = (
        "import sys\n"
        "import worker.models.decoder, worker.models.fingerprint\n"
        "assert not {'transformers', 'gguf', 'safetensors'} & set(sys.modules)\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
