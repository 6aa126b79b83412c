"""load_executor: the fastest way to run a model directory on a device.

    a family that the lean decoder knows    on a CPU: CpuDecoder, one native call per step
                                            else, or without native kernels: Decoder, in torch
    any other causal LM                     TransformersModel, in torch

With `cuda_graphs`, decode steps of the lean decoder are captured and replayed; where that cannot be, it is refused.

Owns: the choice, and one log line that says why something slower was taken.
Does not: load (the classes do) or size the pool.
Invariants: the choice depends on the configuration, the sizes in config.json and the machine, never on load order.
"""

from __future__ import annotations

import logging
import os
from pathlib import Path

import torch

from cluster.config import EngineConfig
from cluster.core.errors import ConfigError
from worker.kernels import select_backend
from worker.models.cpu_decoder import CpuDecoder, why_not_native
from worker.models.decoder import Decoder
from worker.models.decoder_spec import DecoderSpec, why_not_lean
from worker.models.executor import Executor
from worker.models.graph_capture import CudaCapture
from worker.models.graphed_executor import GraphedExecutor, require_graphs
from worker.models.model_card import read_json
from worker.models.torch_executor import TorchExecutor

logger = logging.getLogger(__name__)


def _available_cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def load_executor(config: EngineConfig, model_dir: Path, device: torch.device, free_bytes: int) -> Executor:
    """ConfigError when the model cannot run here, or not with the attention backend that was asked for."""
    raw = read_json(model_dir / "config.json")
    threads, block_size, wanted = (
        config.threads or _available_cores(),
        config.cache.block_size,
        config.attention_backend,
    )
    torch.set_num_threads(threads)
    reason = why_not_lean(raw)
    if config.cuda_graphs:
        require_graphs(device.type, reason)
    if reason is not None:
        from worker.models.transformers_backend import TransformersModel  # imports transformers, which takes seconds

        logger.info("running through transformers: %s", reason)
        model = TransformersModel(model_dir, dtype=config.dtype, device=device, free_bytes=free_bytes)
        head_dim = model.geometry.head_dim
        return TorchExecutor(model, select_backend(device.type, wanted, threads, block_size, head_dim, model.dtype))
    spec = DecoderSpec.from_config(raw)
    if device.type == "cpu" and wanted in ("auto", "cpu"):
        reason = why_not_native(spec, block_size)
        if reason is None:
            torch.set_num_threads(1)  # its idle threads spin, and would take the cores from ours
            return CpuDecoder.load(
                model_dir, dtype=config.dtype, threads=threads, free_bytes=free_bytes, block_size=block_size
            )
        if wanted == "cpu":
            raise ConfigError(f"attention backend cpu cannot run {model_dir.name}: {reason}")
        logger.warning("running in torch, several times slower: %s", reason)
        wanted = "reference"
    lean = Decoder.load(model_dir, dtype=config.dtype, device=device, free_bytes=free_bytes)
    backend = select_backend(device.type, wanted, threads, block_size, spec.head_dim, lean.dtype)
    if config.cuda_graphs:
        return GraphedExecutor(lean, backend, CudaCapture(), most_rows=config.max_num_seqs)
    return TorchExecutor(lean, backend)
