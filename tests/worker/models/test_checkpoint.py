"""Checkpoints: every format gives the same tensors under the same names, and a broken file is named."""

from __future__ import annotations

import json
import shutil
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch
from gguf import GGMLQuantizationType as Kind
from gguf_models import write_gguf
from paged_run import PagedRun
from safetensors.torch import load_file, save_file

from cluster.core.errors import ConfigError
from worker.models.checkpoint import open_checkpoint
from worker.models.decoder import Decoder
from worker.models.fingerprint import checkpoint_bytes, model_revision

ModelDir = Callable[[str], Path]
GGUF_FAMILIES = {
    "llama-untied": "llama",
    "llama-biased": "llama",
    "mistral-window": "llama",
    "qwen2-bias": "qwen2",
    "qwen3-norms": "qwen3",
    "phi3-plain": "phi3",
}


def sharded(source: Path, target: Path) -> Path:
    target.mkdir()
    shutil.copy(source / "config.json", target)
    tensors = load_file(source / "model.safetensors")
    weight_map: dict[str, str] = {}
    for number in range(3):
        name = f"model-{number}.safetensors"
        part = {key: tensors[key] for key in sorted(tensors)[number::3]}
        save_file(part, target / name)
        weight_map |= dict.fromkeys(part, name)
    (target / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return target


def test_safetensors_are_views_of_the_file(tiny_model_dir: ModelDir) -> None:
    path = tiny_model_dir("llama-untied")
    wanted, checkpoint = load_file(path / "model.safetensors"), open_checkpoint(path)
    assert checkpoint.names() == wanted.keys()
    for name, tensor in wanted.items():
        ours = checkpoint.tensor(name)
        assert torch.equal(ours, tensor) and checkpoint.shape(name) == tensor.shape
        assert ours.untyped_storage().data_ptr() == checkpoint.tensor("model.norm.weight").untyped_storage().data_ptr()


def test_shards(tiny_model_dir: ModelDir, tmp_path: Path) -> None:
    source = tiny_model_dir("qwen2-bias")
    path = sharded(source, tmp_path / "m")
    save_file({"other": torch.zeros(3)}, path / "consolidated.safetensors")  # not in the index: not the model's
    wanted, checkpoint = load_file(source / "model.safetensors"), open_checkpoint(path)
    assert checkpoint.names() == wanted.keys()
    assert all(torch.equal(checkpoint.tensor(name), tensor) for name, tensor in wanted.items())
    assert checkpoint_bytes(path, 2) == checkpoint_bytes(source, 2)


def test_types_of_safetensors(tmp_path: Path) -> None:
    values = torch.tensor([1.5, -2.0, 0.25])
    stored = {kind: values.to(getattr(torch, kind)) for kind in ("float64", "float32", "float16", "bfloat16")}
    save_file(stored, tmp_path / "model.safetensors")
    checkpoint = open_checkpoint(tmp_path)
    for kind, tensor in stored.items():
        assert checkpoint.tensor(kind).dtype == tensor.dtype
        assert torch.equal(checkpoint.tensor(kind), tensor)
    save_file({"w": torch.zeros(3, dtype=torch.int8)}, tmp_path / "model.safetensors")
    with pytest.raises(ConfigError, match=r"model.safetensors: tensor w has type I8, which is not loaded"):
        open_checkpoint(tmp_path).tensor("w")


def test_unaligned_tensors(tmp_path: Path) -> None:
    header = json.dumps({"w": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}}).encode()
    header += b" " * (1 + -len(header) % 8)
    content = struct.pack("<Q", len(header)) + header + struct.pack("<ff", 1.5, -3.0)
    (tmp_path / "model.safetensors").write_bytes(content)
    assert open_checkpoint(tmp_path).tensor("w").tolist() == [1.5, -3.0]


@pytest.mark.parametrize("kind", [Kind.F32, Kind.F16])
@pytest.mark.parametrize("family", GGUF_FAMILIES)
def test_gguf_equals_safetensors(family: str, kind: Kind, tiny_model_dir: ModelDir, tmp_path: Path) -> None:
    source = tiny_model_dir(family)
    path = write_gguf(source, tmp_path / "m", kind, GGUF_FAMILIES[family])
    wanted, checkpoint = load_file(source / "model.safetensors"), open_checkpoint(path)
    assert checkpoint.names() == wanted.keys()
    for name, tensor in wanted.items():
        expected = tensor.half() if kind == Kind.F16 and tensor.dim() == 2 else tensor
        assert checkpoint.shape(name) == tensor.shape
        assert checkpoint.tensor(name).dtype == expected.dtype
        assert torch.equal(checkpoint.tensor(name), expected), name


def test_model_from_gguf_gives_the_same_logits(tiny_model_dir: ModelDir, tmp_path: Path) -> None:
    source = tiny_model_dir("llama-biased")
    path = write_gguf(source, tmp_path / "m", Kind.F32, "llama")
    options: dict[str, Any] = {"dtype": "float32", "device": torch.device("cpu"), "free_bytes": 2**30}
    logits = [PagedRun(Decoder.load(place, **options)).feed([5, 77, 31, 9]) for place in (source, path)]
    assert torch.equal(*logits)


@pytest.mark.parametrize("kind", [Kind.BF16, Kind.Q8_0, Kind.Q4_0])
def test_other_gguf_types(kind: Kind, tiny_model_dir: ModelDir, tmp_path: Path) -> None:
    source = tiny_model_dir("qwen3-norms")
    path = write_gguf(source, tmp_path / "m", kind, "qwen3")
    name = "model.layers.1.self_attn.v_proj.weight"  # 32 columns: one quantised block
    stored, ours = load_file(source / "model.safetensors")[name], open_checkpoint(path).tensor(name)
    assert ours.dtype == (torch.bfloat16 if kind == Kind.BF16 else torch.float32)
    expected = gguf.dequantize(gguf.quantize(stored.numpy(), kind), kind)
    assert torch.equal(ours.float(), torch.from_numpy(expected))


def test_digests_of_gguf(tiny_model_dir: ModelDir, tmp_path: Path) -> None:
    source = tiny_model_dir("qwen3-norms")
    path = write_gguf(source, tmp_path / "m", Kind.Q8_0, "qwen3")
    assert checkpoint_bytes(path, 4) == checkpoint_bytes(source, 4) + 4 * 4  # and rope_freqs
    first = model_revision(path)
    assert first == model_revision(Path(shutil.copytree(path, tmp_path / "copy"))) != model_revision(source)
    content = bytearray((path / "model.gguf").read_bytes())
    content[-40] ^= 1
    (path / "model.gguf").write_bytes(content)
    assert model_revision(path) != first


def test_safetensors_win_over_gguf(tiny_model_dir: ModelDir, tmp_path: Path) -> None:
    path = write_gguf(tiny_model_dir("qwen3-norms"), tmp_path / "m", Kind.F16, "qwen3")
    save_file({"w": torch.zeros(3)}, path / "model.safetensors")
    assert open_checkpoint(path).names() == {"w"}


def edited_header(path: Path, edit: Callable[[dict[str, Any]], Any]) -> None:
    content = path.read_bytes()
    length = struct.unpack("<Q", content[:8])[0]
    header = json.dumps(edit(json.loads(content[8 : 8 + length]))).encode()
    path.write_bytes(struct.pack("<Q", len(header)) + header + content[8 + length :])


def changed(**entry: Any) -> Callable[[dict[str, Any]], Any]:
    return lambda header: {**header, "model.norm.weight": {**header["model.norm.weight"], **entry}}


BROKEN: dict[str, tuple[Callable[[Path], Any], str]] = {
    "empty": (lambda p: p.write_bytes(b""), "model.safetensors is not a complete safetensors file"),
    "only a length": (lambda p: p.write_bytes(p.read_bytes()[:8]), "not a complete safetensors file"),
    "cut header": (lambda p: p.write_bytes(p.read_bytes()[:90]), "not a complete safetensors file"),
    "cut data": (lambda p: p.write_bytes(p.read_bytes()[:-9]), "truncated or corrupt: tensor model.norm.weight"),
    "no JSON": (lambda p: p.write_bytes(struct.pack("<Q", 4) + b"abcd"), "corrupt safetensors header"),
    "a list": (lambda p: edited_header(p, list), "corrupt safetensors header"),
    "no shape": (lambda p: edited_header(p, lambda h: {k: {"dtype": "F32"} for k in h}), "corrupt safetensors header"),
    "short": (lambda p: edited_header(p, changed(shape=[33])), "model.norm.weight has 128 bytes, F32 .33,. needs 132"),
    "negative": (lambda p: edited_header(p, changed(data_offsets=[-128, 0])), "tensor model.norm.weight"),
    "missing": (lambda p: p.unlink(), "has no ..safetensors or ..gguf weights"),
}


@pytest.mark.parametrize("case", BROKEN)
def test_broken_safetensors(case: str, tiny_model_dir: ModelDir, tmp_path: Path) -> None:
    path = Path(shutil.copytree(tiny_model_dir("llama-untied"), tmp_path / "m"))
    spoil, message = BROKEN[case]
    spoil(path / "model.safetensors")
    with pytest.raises(ConfigError, match=message):
        open_checkpoint(path)


def test_broken_shards(tiny_model_dir: ModelDir, tmp_path: Path) -> None:
    path = sharded(tiny_model_dir("llama-untied"), tmp_path / "m")
    shutil.copy(path / "model-0.safetensors", path / "model-1.safetensors")
    with pytest.raises(ConfigError, match=r"is both in .*model-0.safetensors and in .*model-1.safetensors"):
        open_checkpoint(path)
    (path / "model-1.safetensors").unlink()
    with pytest.raises(ConfigError, match=r"index.json names model-1.safetensors, which is missing"):
        open_checkpoint(path)
    (path / "model.safetensors.index.json").write_text("{}")
    with pytest.raises(ConfigError, match=r"index.json has no weight_map"):
        open_checkpoint(path)


def without_heads(content: bytes) -> bytes:
    return content.replace(b"llama.attention.head_count", b"llama.attention.head_c0unt")


BROKEN_GGUF: dict[str, tuple[Callable[[bytes], bytes], str]] = {
    "empty": (lambda c: b"", "truncated or has a corrupt GGUF header"),
    "other magic": (lambda c: b"GGML" + c[4:], "is not a GGUF file of version 2 or 3"),
    "version 1": (lambda c: c[:4] + struct.pack("<I", 1) + c[8:], "is not a GGUF file of version 2 or 3"),
    "cut header": (lambda c: c[:200], "truncated or has a corrupt GGUF header"),
    "cut data": (lambda c: c[:-300], "model.gguf is truncated or corrupt: tensor"),
    "other architecture": (lambda c: c.replace(b"llama", b"gemma"), "its architecture is 'gemma'"),
    "unknown tensor": (lambda c: c.replace(b"blk.0.ffn_up.", b"blk.0.ffn_xx."), "purpose of tensor blk.0.ffn_xx"),
    "no head count": (without_heads, "model.gguf: its metadata has no llama.attention.head_count"),
}


@pytest.mark.parametrize("case", BROKEN_GGUF)
def test_broken_gguf(case: str, tiny_model_dir: ModelDir, tmp_path: Path) -> None:
    path = write_gguf(tiny_model_dir("llama-untied"), tmp_path / "m", Kind.F32, "llama")
    spoil, message = BROKEN_GGUF[case]
    (path / "model.gguf").write_bytes(spoil((path / "model.gguf").read_bytes()))
    with pytest.raises(ConfigError, match=message):
        open_checkpoint(path)


def test_two_gguf_files_leave_a_choice(tiny_model_dir: ModelDir, tmp_path: Path) -> None:
    path = write_gguf(tiny_model_dir("llama-untied"), tmp_path / "m", Kind.F32, "llama")
    shutil.copy(path / "model.gguf", path / "other.gguf")
    with pytest.raises(ConfigError, match=r"has 2 \*.gguf files"):
        open_checkpoint(path)


def test_unknown_name(tiny_model_dir: ModelDir) -> None:
    with pytest.raises(ConfigError, match=r"llama-untied has no tensor nowhere"):
        open_checkpoint(tiny_model_dir("llama-untied")).tensor("nowhere")
