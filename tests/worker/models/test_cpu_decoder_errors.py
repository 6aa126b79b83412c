"""What the native decoder refuses, at load and in a step, and that a refused step leaves the pool as it was."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from step_run import make_pool

from cluster.core.errors import ConfigError
from worker.kernels import native
from worker.models.cpu_decoder import CpuDecoder, why_not_native
from worker.models.decoder_spec import DecoderSpec
from worker.models.executor import RowSpan, StepRows

ModelDir = Callable[[str], Path]

pytestmark = pytest.mark.skipif(native.module() is None, reason="the native kernels are not built in")

GOOD: dict[str, Any] = {"token_ids": [5, 6, 7], "spans": [RowSpan(3, 14, [1, 0])], "logit_rows": [2]}


def load(path: Path, free_bytes: int = 2**30, block_size: int = 16, isa: str = "") -> CpuDecoder:
    return CpuDecoder.load(path, dtype="float32", threads=2, free_bytes=free_bytes, block_size=block_size, isa=isa)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"token_ids": [5, 96, 7]}, "token id is outside the vocabulary"),
        ({"token_ids": [5, -1, 7]}, "token id is outside the vocabulary"),
        ({"token_ids": [5, 6], "logit_rows": []}, "spans do not cover the rows"),
        ({"token_ids": [], "logit_rows": []}, "spans do not cover the rows"),
        ({"logit_rows": [3]}, "logit row is outside the batch"),
        ({"logit_rows": [-1]}, "logit row is outside the batch"),
        ({"spans": []}, "spans do not cover the rows"),
        ({"spans": [RowSpan(2, 14, [1])]}, "spans do not cover the rows"),
        ({"spans": [RowSpan(3, 14, [1])]}, "does not fit its block table"),
        ({"spans": [RowSpan(3, 30, [1, 0])]}, "does not fit its block table"),
        ({"spans": [RowSpan(3, -1, [1, 0])]}, "does not fit its block table"),
        ({"spans": [RowSpan(3, 2**31 - 2, [1, 0])]}, "does not fit its block table"),
        ({"spans": [RowSpan(0, 0, [1]), RowSpan(3, 0, [0])]}, "does not fit its block table"),
        ({"spans": [RowSpan(3, 0, [])]}, "does not fit its block table"),
        ({"spans": [RowSpan(3, 14, [1, 2])]}, "block id is outside the pool"),
        ({"spans": [RowSpan(3, 14, [-1, 0])]}, "block id is outside the pool"),
        ({"spans": [RowSpan(3, 0, [1, 9])]}, "block id is outside the pool"),
    ],
)
def test_a_step_that_does_not_fit(changes: dict[str, Any], message: str, tiny_model_dir: ModelDir) -> None:
    model = load(tiny_model_dir("llama-tied"))
    pool = make_pool(model, 2, 16)
    with pytest.raises(ValueError, match=message):
        model.compute(StepRows(**{**GOOD, **changes}), pool)
    assert pool.tensor.isnan().all()
    model.compute(StepRows(**GOOD), pool)
    assert int((~pool.layer(0).isnan()).sum()) == 3 * 2 * 2 * 8  # later layers attend to positions that are not there


def test_a_step_of_nothing(tiny_model_dir: ModelDir) -> None:
    model = load(tiny_model_dir("llama-tied"))
    assert model.compute(StepRows([], [], []), make_pool(model, 2, 16)).shape == (0, 96)


@pytest.mark.parametrize("block_size", [4, 24, 512])
def test_a_pool_whose_blocks_do_not_fit(block_size: int, tiny_model_dir: ModelDir) -> None:
    model = load(tiny_model_dir("llama-tied"))
    with pytest.raises(ValueError, match="block size must divide 256"):
        model.compute(StepRows([5], [RowSpan(1, 0, [0])], [0]), make_pool(model, 2, block_size))


def test_more_weights_than_memory(tiny_model_dir: ModelDir) -> None:
    with pytest.raises(ConfigError, match=r"llama-tied needs .* weights in float32, but cpu has 1.0 KiB free"):
        load(tiny_model_dir("llama-tied"), free_bytes=1024)


@pytest.mark.parametrize("block_size", [1, 4, 24, 512])
def test_a_block_size_that_does_not_fit(block_size: int, tiny_model_dir: ModelDir) -> None:
    with pytest.raises(ConfigError, match=f"cannot run llama-tied natively: .*block size {block_size}"):
        load(tiny_model_dir("llama-tied"), block_size=block_size)


@pytest.mark.parametrize(
    ("changes", "block_size", "reason"),
    [
        ({}, 16, None),
        ({}, 4, "block size 4"),
        ({"hidden_size": 36, "head_dim": 8}, 16, "hidden size 36"),
        ({"intermediate_size": 50}, 16, "inner size 50"),
        ({"head_dim": 12}, 16, "head dim"),
        ({"head_dim": 2048}, 16, "head dim"),
    ],
)
def test_which_models_can_run(changes: dict[str, Any], block_size: int, reason: str | None) -> None:
    config = {
        "model_type": "llama",
        "vocab_size": 96,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 1,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 64,
        **changes,
    }
    found = why_not_native(DecoderSpec.from_config(config), block_size)
    if reason is None:
        assert found is None
    else:
        assert found is not None and reason in found


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("hidden", 12),
        ("intermediate", 20),
        ("heads", 3),
        ("dim", 12),
        ("dim", 1032),
        ("windows", [0]),
        ("inv_freq", [1.0] * 5),
    ],
)
def test_sizes_that_the_native_decoder_itself_refuses(name: str, value: int | Sequence[float]) -> None:
    sizes: dict[str, Any] = {
        "vocab": 32,
        "hidden": 16,
        "intermediate": 24,
        "layers": 2,
        "heads": 4,
        "kv_heads": 2,
        "dim": 8,
        "eps": 1e-5,
        "inv_freq": [1.0] * 4,
        "rope_scaling": 1.0,
        "windows": [0, 0],
    }
    native.module().Decoder(native.thread_pool(1), "scalar", "float32", **sizes)
    with pytest.raises(ValueError, match="do not fit the native decoder"):
        native.module().Decoder(native.thread_pool(1), "scalar", "float32", **{**sizes, name: value})


def test_weights_of_the_wrong_size_are_refused(tiny_model_dir: ModelDir) -> None:
    model = load(tiny_model_dir("llama-tied"))
    good = {"embedding": torch.zeros(96, 32), "final_norm": torch.zeros(32), "head": torch.zeros(96, 32)}
    for name in good:
        with pytest.raises(ValueError, match="number of elements"):
            model._native.set_ends(**{**good, name: torch.zeros(95, 32)})
