"""Checkpoint: the tensors of a model's directory under their Hugging Face names, memory-mapped.

Owns: mapping the files, the meaning of the stored types, and the order of rows in GGUF files.
Does not: know which tensors a model needs (worker.models.decoder_weights), convert types or move to a device.
Invariants: a tensor in a format that allows it is a view of the file, so memory that is only mapped can be reclaimed;
nothing is written to the files.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from cluster.core.errors import ConfigError
from worker.models.gguf_names import GgufNames
from worker.models.weight_directory import GGUF_SUFFIX, read_weight_files
from worker.models.weight_file import StoredTensor, WeightFile

_DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


@dataclass(frozen=True, slots=True)
class _Entry:
    stored: StoredTensor
    interleaved_heads: int | None


def open_checkpoint(model_dir: Path) -> Checkpoint:
    """Reads the headers only; ConfigError names the file that is missing, truncated or corrupt."""
    return Checkpoint(model_dir, read_weight_files(model_dir))


class Checkpoint:
    """Tensors by name. One that is not a view (quantised, or with rows to reorder) is made anew at every call."""

    def __init__(self, model_dir: Path, files: Sequence[WeightFile]) -> None:
        self.model_dir = model_dir
        self._entries: dict[str, _Entry] = {}
        self._maps: dict[Path, torch.Tensor] = {}
        for file in files:
            for name, entry in _entries(file):
                if name in self._entries:
                    raise ConfigError(f"tensor {name} is both in {self._entries[name].stored.path} and in {file.path}")
                self._entries[name] = entry

    def names(self) -> frozenset[str]:
        return frozenset(self._entries)

    def shape(self, name: str) -> tuple[int, ...]:
        """From the header; no weights are read."""
        return self._entry(name).stored.shape

    def path(self, name: str) -> Path:
        return self._entry(name).stored.path

    def tensor(self, name: str) -> torch.Tensor:
        """On the CPU, in the type of the file, or float32 if that is quantised; not to be written to."""
        entry = self._entry(name)
        stored = entry.stored
        raw = self._map(stored.path)[stored.offset : stored.offset + stored.num_bytes]
        dtype = _DTYPES.get(stored.kind)
        if dtype is None:
            tensor = _expand(raw, stored)
        else:
            aligned = stored.offset % dtype.itemsize == 0
            tensor = (raw if aligned else raw.clone()).view(dtype).view(stored.shape)
        return tensor if entry.interleaved_heads is None else _split_halves(tensor, entry)

    def _entry(self, name: str) -> _Entry:
        if name not in self._entries:
            raise ConfigError(f"{self.model_dir} has no tensor {name}")
        return self._entries[name]

    def _map(self, path: Path) -> torch.Tensor:
        """The file's bytes, [size] uint8."""
        if path not in self._maps:
            self._maps[path] = torch.from_file(str(path), shared=False, size=path.stat().st_size, dtype=torch.uint8)
        return self._maps[path]


def _entries(file: WeightFile) -> Iterator[tuple[str, _Entry]]:
    if file.path.suffix != GGUF_SUFFIX:
        yield from ((tensor.name, _Entry(tensor, None)) for tensor in file.tensors)
        return
    try:
        names = GgufNames(file.metadata)
        for tensor in file.tensors:
            name = names.hugging_face(tensor.name)
            if name is not None:
                yield name, _Entry(tensor, names.interleaved_heads(tensor.name))
    except ConfigError as error:
        raise ConfigError(f"cannot load {file.path}: {error.message}") from None


def _expand(raw: torch.Tensor, stored: StoredTensor) -> torch.Tensor:
    """A quantised GGUF tensor in float32."""
    if stored.path.suffix != GGUF_SUFFIX:
        raise ConfigError(f"{stored.path}: tensor {stored.name} has type {stored.kind}, which is not loaded")
    from gguf import GGMLQuantizationType
    from gguf.quants import dequantize

    rows = raw.numpy().reshape(*stored.shape[:-1], -1)
    try:
        return torch.from_numpy(dequantize(rows, GGMLQuantizationType[stored.kind])).view(stored.shape)
    except (NotImplementedError, ValueError, RuntimeError):
        raise ConfigError(f"{stored.path}: tensor {stored.name} of type {stored.kind} cannot be expanded") from None


def _split_halves(tensor: torch.Tensor, entry: _Entry) -> torch.Tensor:
    """Rows (or numbers of a bias) from adjacent pairs to first members, then second members of each head."""
    heads, rows = entry.interleaved_heads or 1, tensor.shape[0]
    if rows % (2 * heads):
        raise ConfigError(f"{entry.stored.path}: the {rows} rows of {entry.stored.name} are not {heads} heads")
    return tensor.view(heads, rows // heads // 2, 2, -1).transpose(1, 2).reshape(tensor.shape)
