"""attention_check: the attention backend that a replica would take here, and why none faster.

Owns: asking the same functions that load a model, and catching the reason that they log.
Does not: choose by itself or load weights.
Invariants: the logs of the choice are shown as the check's detail and nowhere else.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from cluster.config import EngineConfig
from cluster.core.errors import ConfigError
from cluster.doctor.check import Check

if TYPE_CHECKING:
    import torch

_NAME = "attention"
_HEAD_DIM = 64  # of the demo model and many others


def attention_check(engine: EngineConfig, device: str, model: Mapping[str, Any] | None = None) -> Check:
    """`model`: its config.json, when there is one."""
    try:
        with _warnings() as reasons:
            chosen = _choose(engine, device, model)
    except ConfigError as error:
        return Check(_NAME, "failed", error.message, "choose another --attention-backend, --block-size or --model")
    except (ImportError, OSError) as error:
        return Check(_NAME, "failed", f"does not import: {error}", "make the torch check pass")
    if reasons:
        return Check(_NAME, "warning", f"{chosen}. {'; '.join(reasons)}", _advice(device))
    return Check(_NAME, "ok", chosen)


def _choose(engine: EngineConfig, device: str, model: Mapping[str, Any] | None) -> str:
    """As worker.models.loading.load_executor does."""
    from worker.kernels import select_backend
    from worker.models.cpu_decoder import why_not_native
    from worker.models.decoder_spec import DecoderSpec, why_not_lean

    block_size, wanted, head_dim, path = engine.cache.block_size, engine.attention_backend, _HEAD_DIM, ""
    if model is not None and (reason := why_not_lean(model)) is not None:
        head_dim, path = _head_dim(model), f", the model through transformers ({reason})"
    elif model is not None:
        spec = DecoderSpec.from_config(model)
        head_dim = spec.head_dim
        if device == "cpu" and wanted in ("auto", "cpu"):
            reason = why_not_native(spec, block_size)
            if reason is None:
                path = ", whole layers in one native call"
            elif wanted == "cpu":
                raise ConfigError(f"attention backend cpu cannot run this model: {reason}")
            else:
                logging.getLogger("worker.kernels").warning("running in torch, several times slower: %s", reason)
                wanted = "reference"
    name = select_backend(device, wanted, 1, block_size, head_dim, _dtype(engine, model)).name
    assumed = " (assumed)" if model is None else ""
    return f"{name} for block size {block_size}, head dim {head_dim}{assumed}{path}"


def _dtype(engine: EngineConfig, model: Mapping[str, Any] | None) -> torch.dtype:
    """As the model would be loaded: what was asked for, else what its files hold, else what most hold."""
    import torch

    stored = (model or {}).get("dtype", (model or {}).get("torch_dtype"))
    named = getattr(torch, str(engine.dtype if engine.dtype != "auto" else stored), None)
    return named if isinstance(named, torch.dtype) else torch.bfloat16


def _head_dim(model: Mapping[str, Any]) -> int:
    """Good enough for a look: what the model says, or what most of its kind have."""
    given, hidden, heads = (model.get(name) for name in ("head_dim", "hidden_size", "num_attention_heads"))
    if isinstance(given, int):
        return given
    return hidden // heads if isinstance(hidden, int) and isinstance(heads, int) and heads else _HEAD_DIM


def _advice(device: str) -> str:
    from worker.kernels import native

    if device == "cuda":
        return "install Triton (the extra `gpu`) or flash attention (`flash`), or use --device cpu"
    if native.module() is None:
        return "install a C++ compiler and run `make install` again"
    return "take a --block-size that divides 256, such as 16"


@contextmanager
def _warnings() -> Iterator[list[str]]:
    """The warnings that the kernels log meanwhile; they go nowhere else."""
    found: list[str] = []

    class Collect(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            if record.levelno >= logging.WARNING:
                found.append(record.getMessage())

    logger, handler = logging.getLogger("worker.kernels"), Collect()
    propagated, logger.propagate = logger.propagate, False
    logger.addHandler(handler)
    try:
        yield found
    finally:
        logger.removeHandler(handler)
        logger.propagate = propagated
