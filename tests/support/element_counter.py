"""ElementCounter: how many numbers the torch operations of a block of code produce."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode


class ElementCounter(TorchDispatchMode):
    """Counts the floating point elements of every result that is no view of an argument."""

    def __init__(self) -> None:
        super().__init__()
        self.floats = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, list | tuple) else (result,):
            if isinstance(tensor, torch.Tensor) and tensor.is_floating_point() and not tensor._is_view():
                self.floats += tensor.numel()
        return result
