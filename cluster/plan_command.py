"""`kvray plan`: the memory account of a model on a device that need not be there.

Owns: finding what the directory says (config.json, and safetensors headers when the whole checkpoint is there), and
the page or JSON object that shows the plan.
Does not: calculate (cluster.memory_plan), or load anything: no torch, no transformers, no weights.
Invariants: a plan that is impossible, or made from invalid input, is one line on stderr and exit code 2.
"""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from cluster.config import ClusterConfig, parse_bytes
from cluster.core.byte_size import format_bytes
from cluster.core.errors import ConfigError
from cluster.memory_plan import MemoryPlan, Weights, plan_memory, weights_dtype
from cluster.model_shape import FAMILIES, ModelShape, read_shape
from cluster.model_source import DEMO, resolve_model
from cluster.progress import resolve_with_progress
from worker.kv_sizing import account_text
from worker.models.fingerprint import checkpoint_bytes

_SOURCES = {"headers": "safetensors headers", "formula": "config.json by formula"}
_MALFORMED = (ValueError, LookupError, TypeError, AttributeError, RecursionError)  # JSON that is not what we expect


def run_plan(config: ClusterConfig, memory: str, *, as_json: bool) -> int:
    """`memory` is the whole device's, as the user wrote it."""
    engine = config.engine
    try:
        memory_bytes = _memory(memory)
        model_dir = _resolve(engine.model)
        shape = _shape(model_dir)
        plan = plan_memory(
            shape,
            _weights(model_dir, shape, weights_dtype(engine.dtype, shape)),
            engine.cache,
            memory_bytes=memory_bytes,
            max_model_len=engine.max_model_len,
        )
    except ConfigError as error:
        print(f"kvray: {error.message}", file=sys.stderr)
        return 2
    if as_json:
        print(json.dumps(plan_dict(plan, config.public_name)))
    else:
        _show(plan, config, Console())
    return 0


def plan_dict(plan: MemoryPlan, name: str) -> dict[str, Any]:
    """The plan for machines: plain values, sizes in bytes."""
    shape, weights, kv = plan.shape, plan.weights, plan.kv
    return {
        "model": name,
        "model_type": shape.model_type,
        "memory_bytes": plan.memory_bytes,
        "weights": {
            "parameters": weights.parameters,
            "dtype": weights.dtype,
            "bytes": weights.num_bytes,
            "source": weights.source,
        },
        "kv": {
            "layers": shape.num_layers,
            "heads": shape.num_heads,
            "kv_heads": shape.num_kv_heads,
            "head_dim": shape.head_dim,
            "item_size": weights.item_size,
            "bytes_per_token": kv.bytes_per_token,
            "mha_bytes_per_token": plan.mha_bytes_per_token,
        },
        "pool": {
            "budget_bytes": plan.request.budget_bytes,
            "bytes": kv.num_bytes,
            "block_size": kv.block_size,
            "blocks": kv.num_blocks,
            "tokens": kv.num_tokens,
        },
        "left_bytes": plan.left_bytes,
        "model_limit": shape.model_limit,
        "max_model_len": kv.max_model_len,
        "full_length_requests": kv.full_length_requests,
        "missing_bytes": plan.missing_bytes,
        "warning": kv.warning,
        "concurrency": [asdict(row) for row in plan.concurrency],
    }


def _memory(text: str) -> int:
    try:
        size = parse_bytes(text)
    except (ValueError, OverflowError) as error:
        raise ConfigError(f"--memory: {error}") from None
    if size < 1:
        raise ConfigError(f"--memory: {text!r} is no memory")
    return size


def _resolve(model: str) -> Path:
    try:
        if model == DEMO:  # its weights come with it, and building it takes a while
            return resolve_with_progress(model, Console(stderr=True))
        return resolve_model(model, weights=False)
    except OSError as error:
        raise ConfigError(f"model {model!r:.80}: {error.strerror or error}") from None


def _shape(model_dir: Path) -> ModelShape:
    path = model_dir / "config.json"
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, *_MALFORMED) as error:
        raise ConfigError(f"cannot read {path}: {error}") from None
    try:
        return read_shape(config)
    except ConfigError as error:
        raise ConfigError(f"cannot plan {model_dir.name}: {error.message}") from None


def _weights(model_dir: Path, shape: ModelShape, dtype: str) -> Weights:
    """Headers know every tensor, so they win over the formula, but only when no file is absent."""
    if _checkpoint_is_here(model_dir):
        return Weights(parameters=_header_parameters(model_dir), dtype=dtype, source="headers")
    if shape.parameters is None:
        raise ConfigError(
            f"cannot plan {model_dir.name}: no formula for the family {shape.model_type!r:.40} "
            f"(there is one for {', '.join(FAMILIES)}), and its weight files are not all here"
        )
    return Weights(parameters=shape.parameters, dtype=dtype, source="formula")


def _checkpoint_is_here(model_dir: Path) -> bool:
    """An index comes with the small files of a hub model, its shards perhaps not."""
    index = model_dir / "model.safetensors.index.json"
    if (model_dir / "model.safetensors").is_file() or not index.is_file():
        return any(model_dir.glob("*.safetensors"))
    try:
        names = set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
        return all((model_dir / name).is_file() for name in names)
    except (OSError, *_MALFORMED) as error:
        raise ConfigError(f"cannot read {index}: {error}") from None


def _header_parameters(model_dir: Path) -> int:
    try:
        parameters = checkpoint_bytes(model_dir, 1)  # one byte a number makes the bytes a count
    except (OSError, *_MALFORMED) as error:
        raise ConfigError(f"cannot read the safetensors headers in {model_dir}: {error}") from None
    if parameters < 1:
        raise ConfigError(f"the safetensors files in {model_dir} hold no weights")
    return parameters


def _show(plan: MemoryPlan, config: ClusterConfig, console: Console) -> None:
    weights, kv = plan.weights, plan.kv
    account = account_text(kv, weight_bytes=weights.num_bytes, weights_dtype=weights.dtype)
    lines = ["KV account of one replica", account, "How it adds up"]
    lines += [f"  {name:<16} {text}" for name, text in _explanations(plan)]
    console.rule(f"{config.public_name} in {format_bytes(plan.memory_bytes)}")
    console.print("\n".join(lines), highlight=False, markup=False, soft_wrap=True)
    console.print(_concurrency_table(plan))
    for note in _notes(plan, config.engine.dtype):
        console.print(note, highlight=False, markup=False, soft_wrap=True)


def _explanations(plan: MemoryPlan) -> list[tuple[str, str]]:
    shape, kv, per_token = plan.shape, plan.kv, plan.mha_bytes_per_token
    mha = "the same: every head has its own KV"
    if per_token > kv.bytes_per_token:
        times = per_token // kv.bytes_per_token
        mha = (
            f"{shape.num_heads} KV heads, {times} x as much: {per_token:,} bytes, {kv.num_bytes // per_token:,} tokens"
        )
    terms = f"{shape.num_kv_heads} KV heads x {shape.head_dim} dims x {plan.weights.item_size} bytes"
    return [
        ("parameters", f"{plan.weights.parameters:,} (from {_SOURCES[plan.weights.source]})"),
        ("KV per token", f"2 (K, V) x {shape.num_layers} layers x {terms}"),
        ("if it were MHA", mha),
        ("KV budget", plan.request.budget_text),
        ("left", f"{format_bytes(plan.left_bytes)} for activations and everything else"),
    ]


def _concurrency_table(plan: MemoryPlan) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, header_style="")
    for heading in ("Requests at once", "paged", f"each reserving {plan.kv.max_model_len:,}", "of it used"):
        table.add_column(heading, justify="left" if heading == "Requests at once" else "right", no_wrap=True)
    for row in plan.concurrency:
        used = f"{row.reserved_use:.1%}"
        table.add_row(f"  {row.tokens:,} tokens", f"{row.paged:,}", f"{row.contiguous:,}", used)
    return table


def _notes(plan: MemoryPlan, dtype: str) -> list[str]:
    notes = []
    if plan.kv.warning is not None:
        notes.append(f"Does not fit: {plan.kv.warning}; {plan.shortfall}")
    if dtype == "auto" and plan.weights.item_size < 4:
        notes.append(f"dtype auto: {plan.weights.dtype}, as stored")
    return notes
