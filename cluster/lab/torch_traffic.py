"""TorchTraffic: the bytes that torch operations read and write, counted from the tensors they are given and give back.

Owns: the count while the context is open.
Does not: see what the CPU's caches save, or native kernels.
Invariants: a view moves nothing; a gather reads as much as it returns, not all that it could choose from.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from types import TracebackType
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

_GATHERS = ("index_select", "index.Tensor", "embedding")
_SCATTERS = ("index_put", "masked_fill_", "fill_", "zero_", "copy_")
_MAKES = ("empty", "empty_like", "new_empty", "empty_strided")


class TorchTraffic(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.num_bytes = 0

    def __enter__(self) -> TorchTraffic:
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        super().__exit__(kind, error, trace)  # type: ignore[no-untyped-call]

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        name = str(func).removeprefix("aten.")
        if not _is_view(func) and not name.startswith(_MAKES):
            given, made = list(_tensors((args, kwargs or {}))), list(_tensors(result))
            if name.startswith(_SCATTERS):
                self.num_bytes += _scattered(name, given)
            elif name.startswith(_GATHERS):
                self.num_bytes += 2 * _size(made)
            else:
                self.num_bytes += _size(given) + _size(made)
        return result


def _is_view(func: Any) -> bool:
    return any(value.alias_info is not None and not value.alias_info.is_write for value in func._schema.returns)


def _scattered(name: str, given: Sequence[torch.Tensor]) -> int:
    """Written in place: what is put there is read and written; a fill only writes."""
    if name.startswith(("index_put", "copy_")):
        return 2 * given[-1].nbytes
    return _size(given)


def _size(tensors: Iterable[torch.Tensor]) -> int:
    return sum(tensor.nbytes for tensor in tensors)


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, Mapping):
        for one in value.values():
            yield from _tensors(one)
    elif isinstance(value, list | tuple):
        for one in value:
            yield from _tensors(one)
