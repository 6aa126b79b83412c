"""The header of a GGUF file: counts, metadata, tensor records.

The gguf package's reader makes several arrays for each of some 300,000 vocabulary strings, which takes seconds; nothing
here needs them, so arrays are stepped over.

Owns: read_gguf.
Does not: read weights, or know what the tensors are for (worker.models.gguf_names).
Invariants: as worker.models.weight_file; metadata holds the scalars and strings, no arrays.
"""

from __future__ import annotations

import struct
from math import prod
from pathlib import Path
from typing import Any

from cluster.core.errors import ConfigError
from worker.models.weight_file import StoredTensor, WeightFile

_MAGIC = b"GGUF"
_VERSIONS = (2, 3)
_STRING, _ARRAY = 8, 9
# value type -> struct format
_SCALARS = {0: "<B", 1: "<b", 2: "<H", 3: "<h", 4: "<I", 5: "<i", 6: "<f", 7: "<?", 10: "<Q", 11: "<q", 12: "<d"}
_DEFAULT_ALIGNMENT = 32
_MAX_DIMENSIONS = 4


def read_gguf(path: Path) -> WeightFile:
    """The header; ConfigError if the file is not a whole little-endian GGUF file of version 2 or 3."""
    size = path.stat().st_size
    with path.open("rb") as file:
        cursor = _Cursor(file, size)
        try:
            if cursor.take(4) != _MAGIC or cursor.number("<I") not in _VERSIONS:
                raise ConfigError(f"{path} is not a GGUF file of version 2 or 3")
            return _read(path, size, cursor)
        except (EOFError, ValueError, KeyError, TypeError, ZeroDivisionError):
            raise ConfigError(f"{path} is truncated or has a corrupt GGUF header") from None


class _Cursor:
    """Reads forward through the file, never past its end."""

    def __init__(self, file: Any, size: int) -> None:
        self._file = file
        self._left = size
        self.position = 0

    def take(self, count: int) -> bytes:
        if count > self._left:
            raise EOFError
        self._left -= count
        self.position += count
        return bytes(self._file.read(count))

    def number(self, form: str) -> Any:
        return struct.unpack(form, self.take(struct.calcsize(form)))[0]

    def text(self) -> str:
        return self.take(self.number("<Q")).decode()

    def value(self, kind: int) -> Any:
        """A scalar or a string; None for an array."""
        if kind == _STRING:
            return self.text()
        if kind != _ARRAY:
            return self.number(_SCALARS[kind])
        items, count = self.number("<I"), self.number("<Q")
        if items in _SCALARS:
            self.take(count * struct.calcsize(_SCALARS[items]))
        else:
            for _ in range(count):
                self._skip(items)
        return None

    def _skip(self, kind: int) -> None:
        if kind == _STRING:
            self.take(self.number("<Q"))
        else:
            self.value(kind)


def _read(path: Path, size: int, cursor: _Cursor) -> WeightFile:
    num_tensors, num_values = cursor.number("<Q"), cursor.number("<Q")
    metadata = {cursor.text(): cursor.value(cursor.number("<I")) for _ in range(num_values)}
    records = [_record(cursor) for _ in range(num_tensors)]
    alignment = metadata.get("general.alignment", _DEFAULT_ALIGNMENT)
    start = -(-cursor.position // alignment) * alignment
    tensors = tuple(_tensor(path, start, *record) for record in records)
    return WeightFile(path=path, size=size, header_bytes=cursor.position, tensors=tensors, metadata=metadata)


def _record(cursor: _Cursor) -> tuple[str, tuple[int, ...], int, int]:
    name, dimensions = cursor.text(), cursor.number("<I")
    if dimensions > _MAX_DIMENSIONS:
        raise ValueError
    shape = tuple(cursor.number("<Q") for _ in range(dimensions))
    return name, shape[::-1], cursor.number("<I"), cursor.number("<Q")


def _tensor(path: Path, start: int, name: str, shape: tuple[int, ...], code: int, offset: int) -> StoredTensor:
    from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

    kind = GGMLQuantizationType(code)
    block, block_bytes = GGML_QUANT_SIZES[kind]
    num_bytes = prod(shape) // block * block_bytes
    return StoredTensor(
        name=name, path=path, kind=str(kind.name), shape=shape, offset=start + offset, num_bytes=num_bytes
    )
