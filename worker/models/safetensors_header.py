"""The header of a safetensors file: 8 bytes of length, then JSON.

Owns: read_safetensors.
Does not: read weights, or choose among files (worker.models.weight_directory).
Invariants: as worker.models.weight_file; a tensor's bytes are exactly what its type and shape need.
"""

from __future__ import annotations

import json
import struct
from math import prod
from pathlib import Path
from typing import Any

from cluster.core.errors import ConfigError
from worker.models.weight_file import StoredTensor, WeightFile

_LENGTH_BYTES = 8
_ITEM_BYTES = {
    **dict.fromkeys(("F64", "I64", "U64", "C64"), 8),
    **dict.fromkeys(("F32", "I32", "U32"), 4),
    **dict.fromkeys(("F16", "BF16", "I16", "U16"), 2),
    **dict.fromkeys(("I8", "U8", "BOOL", "F8_E4M3", "F8_E5M2", "F8_E8M0", "F8_E4M3FNUZ", "F8_E5M2FNUZ"), 1),
}


def read_safetensors(path: Path) -> WeightFile:
    """The header; ConfigError if the file is not a whole safetensors file."""
    size = path.stat().st_size
    with path.open("rb") as file:
        first = file.read(_LENGTH_BYTES)
        length = int(struct.unpack("<Q", first)[0]) if len(first) == _LENGTH_BYTES else 0
        if not 0 < length <= size - _LENGTH_BYTES:
            raise ConfigError(f"{path} is not a complete safetensors file")
        text = file.read(length)
    try:
        entries = dict(json.loads(text))
        metadata = entries.pop("__metadata__", None) or {}
        tensors = tuple(_tensor(path, name, entry, _LENGTH_BYTES + length) for name, entry in entries.items())
    except (ValueError, KeyError, TypeError, AttributeError):
        raise ConfigError(f"{path} has a corrupt safetensors header") from None
    return WeightFile(path=path, size=size, header_bytes=_LENGTH_BYTES + length, tensors=tensors, metadata=metadata)


def _tensor(path: Path, name: str, entry: dict[str, Any], data_start: int) -> StoredTensor:
    kind, shape = str(entry["dtype"]), tuple(int(size) for size in entry["shape"])
    begin, end = (int(offset) for offset in entry["data_offsets"])
    expected = prod(shape) * _ITEM_BYTES[kind] if kind in _ITEM_BYTES else end - begin
    if end - begin != expected or begin < 0 or min(shape, default=0) < 0:
        raise ConfigError(f"{path} is corrupt: tensor {name} has {end - begin} bytes, {kind} {shape} needs {expected}")
    return StoredTensor(name=name, path=path, kind=kind, shape=shape, offset=data_start + begin, num_bytes=end - begin)
