"""Digests change with the content they stand for, and with nothing else."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

from worker.models.fingerprint import checkpoint_bytes, kv_fingerprint, model_revision


def test_revision_depends_on_content_only(tiny_model_dir: Callable[[str], Path], tmp_path: Path) -> None:
    source = tiny_model_dir("llama")
    copy = tmp_path / "elsewhere"
    shutil.copytree(source, copy)
    first = model_revision(source)
    assert len(first) == 32
    assert model_revision(copy) == first
    config = json.loads((copy / "config.json").read_text())
    (copy / "config.json").write_text(json.dumps(dict(reversed(config.items())), indent=7))
    assert model_revision(copy) == first
    (copy / "config.json").write_text(json.dumps({**config, "rms_norm_eps": 0.5}))
    assert model_revision(copy) != first
    (copy / "config.json").write_text(json.dumps(config))
    weights = bytearray((copy / "model.safetensors").read_bytes())
    weights[-3] ^= 1
    (copy / "model.safetensors").write_bytes(weights)
    assert model_revision(copy) != first
    assert model_revision(tiny_model_dir("qwen2")) != first


def test_kv_fingerprint_depends_on_every_fact() -> None:
    facts = {"dtype": "bfloat16", "num_layers": 2, "rope": {"rope_theta": 1e4}}
    first = kv_fingerprint("abc", **facts)
    assert first == kv_fingerprint("abc", **dict(reversed(facts.items())))
    changed = [kv_fingerprint("abd", **facts), kv_fingerprint("abc", **{**facts, "dtype": "float32"})]
    changed.append(kv_fingerprint("abc", **{**facts, "rope": {"rope_theta": 1e5}}))
    assert len({first, *changed}) == 4


def test_checkpoint_bytes_from_headers(tiny_model_dir: Callable[[str], Path]) -> None:
    path = tiny_model_dir("llama")
    payload = (path / "model.safetensors").stat().st_size
    assert payload - 8192 < checkpoint_bytes(path, 4) < payload
    assert checkpoint_bytes(path, 2) * 2 == checkpoint_bytes(path, 4)
