"""Which executor a configuration gets, what is said when it is a slower one, and that all of them agree."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from step_run import StepRun

from cluster.config import CacheConfig, EngineConfig
from cluster.core.errors import ConfigError
from worker.kernels import native
from worker.model_runner import ModelRunner
from worker.models.cpu_decoder import CpuDecoder
from worker.models.executor import Executor
from worker.models.loading import load_executor
from worker.models.torch_executor import TorchExecutor

ModelDir = Callable[[str], Path]

PROMPT = [5, 77, 31, 9, 54, 54, 12, 88, 3, 41, 60, 17, 29, 95, 8, 70, 33]
PLENTY = 2**33

needs_module = pytest.mark.skipif(native.module() is None, reason="the native kernels are not built in")


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture
def no_module(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native, "_cpu", None)
    monkeypatch.setattr(native, "_reason", "the native kernels are not built in (test)")


def config_of(path: Path, block_size: int = 16, **changes: Any) -> EngineConfig:
    cache = CacheConfig(kv_memory=2**20, block_size=block_size, chunk_tokens=block_size)
    values: dict[str, Any] = {"model": str(path), "device": "cpu", "dtype": "float32", "threads": 1, "cache": cache}
    return EngineConfig(**{**values, **changes})


def load(path: Path, block_size: int = 16, free_bytes: int = PLENTY, **changes: Any) -> Executor:
    return load_executor(config_of(path, block_size, **changes), path, torch.device("cpu"), free_bytes)


def greedy(executor: Executor, block_size: int = 16, count: int = 24) -> tuple[list[int], torch.Tensor]:
    """The tokens, and the logits they were chosen from."""
    run, tokens = StepRun(executor, [64], block_size), list(PROMPT)
    logits = [run.feed(tokens)[-1:]]
    for _ in range(count):
        tokens.append(int(logits[-1].argmax()))
        logits.append(run.feed(tokens[-1:]))
    return tokens[len(PROMPT) :], torch.cat(logits)


def warnings_of(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]


def changed(path: Path, to: Path, **changes: Any) -> Path:
    """A copy of a model's directory with other values in config.json."""
    copy = Path(shutil.copytree(path, to / path.name))
    config = json.loads((copy / "config.json").read_text())
    (copy / "config.json").write_text(json.dumps({**config, **changes}))
    return copy


def retyped(path: Path, to: Path, dtype: torch.dtype, **changes: Any) -> Path:
    copy = changed(path, to, dtype=str(dtype).removeprefix("torch."), **changes)
    weights = safetensors.torch.load_file(copy / "model.safetensors")
    safetensors.torch.save_file({k: v.to(dtype) for k, v in weights.items()}, copy / "model.safetensors")
    return copy


@needs_module
@pytest.mark.parametrize(
    ("family", "block_size", "backend", "kind", "attention", "warning"),
    [
        ("llama-tied", 16, "auto", CpuDecoder, "cpu", ""),
        ("llama-tied", 16, "cpu", CpuDecoder, "cpu", ""),
        ("llama-tied", 16, "reference", TorchExecutor, "reference", ""),
        ("llama-tied", 4, "auto", TorchExecutor, "reference", "block size 4"),
        ("gemma2", 16, "auto", TorchExecutor, "cpu", ""),
        ("gemma2", 16, "reference", TorchExecutor, "reference", ""),
        ("gemma2", 4, "auto", TorchExecutor, "reference", "block size 4"),
    ],
)
def test_the_choice(
    family: str,
    block_size: int,
    backend: str,
    kind: type,
    attention: str,
    warning: str,
    tiny_model_dir: ModelDir,
    caplog: pytest.LogCaptureFixture,
) -> None:
    with caplog.at_level("INFO"):
        executor = load(tiny_model_dir(family), block_size, attention_backend=backend)
    assert type(executor) is kind
    assert executor.attention == attention
    said = warnings_of(caplog)
    assert len(said) == bool(warning)
    assert all(warning in line for line in said)


@pytest.mark.parametrize(("family", "attention"), [("llama-tied", "reference"), ("gemma2", "reference")])
def test_without_the_module_there_is_one_warning_that_says_why(
    family: str, attention: str, no_module: None, tiny_model_dir: ModelDir, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level("INFO"):
        executor = load(tiny_model_dir(family))
    assert (type(executor), executor.attention) == (TorchExecutor, attention)
    (line,) = warnings_of(caplog)
    assert "the native kernels are not built in (test)" in line


@needs_module
@pytest.mark.parametrize("family", ["llama", "qwen3", "mistral", "gemma2", "phi3"])
def test_all_backends_choose_the_same_tokens(family: str, tiny_model_dir: ModelDir) -> None:
    path = tiny_model_dir(family)
    wanted, wanted_logits = greedy(load(path, attention_backend="reference"))
    for block_size in (4, 8, 64):
        tokens, logits = greedy(load(path, block_size), block_size)
        assert tokens == wanted
        assert (logits - wanted_logits).abs().max() < 1e-4


@needs_module
def test_a_model_that_fits_no_kernel_runs_in_torch(
    tiny_model_dir: ModelDir, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Inner size 48 cut down to 44."""
    path = changed(tiny_model_dir("llama-tied"), tmp_path, intermediate_size=44)
    weights = safetensors.torch.load_file(path / "model.safetensors")
    for name in weights:
        if "gate_proj" in name or "up_proj" in name:
            weights[name] = weights[name][:44].clone()
        elif "down_proj" in name:
            weights[name] = weights[name][:, :44].contiguous()
    safetensors.torch.save_file(weights, path / "model.safetensors")
    executor = load(path)
    assert isinstance(executor, TorchExecutor)
    (line,) = warnings_of(caplog)
    assert "inner size 44" in line
    assert greedy(executor, count=3)[1].isfinite().all()


@needs_module
@pytest.mark.parametrize(
    ("stored", "asked", "wanted"),
    [
        (torch.float32, "auto", torch.float32),
        (torch.bfloat16, "auto", torch.bfloat16),
        (torch.float16, "auto", torch.float16),
        (torch.bfloat16, "float32", torch.float32),
        (torch.float32, "bfloat16", torch.bfloat16),
        (torch.float16, "bfloat16", torch.bfloat16),
        (torch.float64, "float32", torch.float32),
        (torch.float64, "auto", None),  # which one is the reader's choice
    ],
)
def test_stored_and_computed_types(
    stored: torch.dtype, asked: str, wanted: torch.dtype | None, tiny_model_dir: ModelDir, tmp_path: Path
) -> None:
    path = retyped(tiny_model_dir("llama-tied"), tmp_path, stored)
    executor = load(path, dtype=asked)
    assert executor.dtype == (wanted or executor.dtype)
    exact = StepRun(load(path, dtype="float32", attention_backend="reference"), [32]).feed(PROMPT)
    tolerance = 1e-4 if executor.dtype == stored == torch.float32 else 0.3
    assert (StepRun(executor, [32]).feed(PROMPT) - exact).abs().max() < tolerance


@needs_module
def test_a_dtype_in_the_config_that_is_none(tiny_model_dir: ModelDir, tmp_path: Path) -> None:
    for value in ("no_such_type", None):
        path = changed(tiny_model_dir("llama-tied"), tmp_path / str(value), dtype=value)
        assert load(path, dtype="auto").dtype == torch.float32


@pytest.mark.parametrize("backend", ["auto", "reference"])
def test_too_little_memory(backend: str, tiny_model_dir: ModelDir) -> None:
    with pytest.raises(ConfigError, match=r"llama-tied needs .* for its weights in float32, but cpu has 1.0 KiB free"):
        load(tiny_model_dir("llama-tied"), free_bytes=1024, attention_backend=backend)


@needs_module
def test_the_number_of_threads_is_the_configured_one_or_that_of_the_cores(
    tiny_model_dir: ModelDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes: list[int] = []
    original = native.thread_pool

    def recording(threads: int) -> Any:
        sizes.append(threads)
        return original(threads)

    monkeypatch.setattr(native, "thread_pool", recording)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _process: {0, 1})
    for threads in (3, None, None):  # loading must not change what the next one gets
        load(tiny_model_dir("llama-tied"), threads=threads)
    assert sizes == [3, 2, 2]


@pytest.mark.parametrize("family", ["llama-tied", "gemma2"])
def test_a_backend_that_was_asked_for_is_not_replaced(family: str, tiny_model_dir: ModelDir) -> None:
    with pytest.raises(ConfigError, match=r"attention backend cpu .*block size 4"):
        load(tiny_model_dir(family), 4, attention_backend="cpu")


@needs_module
def test_blocks_of_different_layouts_have_different_fingerprints(tiny_model_dir: ModelDir) -> None:
    path = tiny_model_dir("llama-tied")

    def fingerprints(backends: Sequence[str]) -> set[str]:
        return {ModelRunner(config_of(path, attention_backend=b), path).facts.kv_fingerprint for b in backends}

    assert len(fingerprints(["auto", "cpu"])) == 1
    assert len(fingerprints(["auto", "reference"])) == 2
