"""find_flash: the flash_attn_varlen_func that works on this machine, or why there is none.

    vllm_flash_attn          the PyPI wheel; built for one torch version, so with another it does not import
    vllm.vllm_flash_attn     the copy inside vLLM, which knows more devices

Owns: the order of search, and the devices for which each package has kernels.
Does not: choose among backends (worker.kernels.select_backend), or import a package before it is asked.
Invariants: a package that is missing, broken or too old for the device is a reason, never an exception.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from cluster.core.errors import ConfigError
from worker.kernels.flash.calls import FlashCall, adapt
from worker.kernels.flash.limits import why_not_sizes

_BROKEN = (ImportError, OSError, RuntimeError, AttributeError)  # what a package built for another torch raises
Import = Callable[[str], Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class FoundFlash:
    call: FlashCall | None
    reason: str  # why `call` is None

    def why_not(self, block_size: int, head_dim: int, dtype: torch.dtype) -> str | None:
        """The reason against flash attention for these sizes, None when it is possible."""
        return self.reason or why_not_sizes(block_size, head_dim, dtype)


def find_flash(load: Import = importlib.import_module, capability: tuple[int, int] | None = None) -> FoundFlash:
    """`capability`: the device's compute capability; None asks torch."""
    if capability is None:
        if not torch.cuda.is_available():
            return FoundFlash(call=None, reason="torch finds no CUDA device")
        capability = torch.cuda.get_device_capability()
    reasons = []
    for package, open_package in (("vllm-flash-attn", _open_wheel), ("vLLM", _open_vllm)):
        try:
            return FoundFlash(call=open_package(load, capability), reason="")
        except ModuleNotFoundError as error:
            reasons.append(f"{package} is not installed ({error})")
        except ConfigError as error:
            reasons.append(error.message)
        except _BROKEN as error:
            reasons.append(f"{package} does not import with torch {torch.__version__}: {_first_line(error)}")
    return FoundFlash(call=None, reason="; ".join(reasons))


def _open_wheel(load: Import, capability: tuple[int, int]) -> FlashCall:
    module = load("vllm_flash_attn")
    origin = f"vllm-flash-attn {module.__version__}"
    if capability[0] != 8 and capability != (9, 0):
        raise ConfigError(f"{origin} has no kernels for compute capability {capability[0]}.{capability[1]}")
    return adapt(module.flash_attn_varlen_func, origin)


def _open_vllm(load: Import, capability: tuple[int, int]) -> FlashCall:
    """FlashAttention 3 on the devices made for it, else 2. 4 is left alone: it compiles at run time."""
    if capability[0] < 8:  # importing vLLM takes seconds
        raise ConfigError(f"vLLM has no flash kernels for compute capability {capability[0]}.{capability[1]}")
    module = load("vllm.vllm_flash_attn")
    origin = f"vLLM {load('vllm').__version__}"
    for fa_version in (3, 2):
        if module.is_fa_version_supported(fa_version):
            return adapt(module.flash_attn_varlen_func, f"{origin}, FlashAttention {fa_version}", fa_version)
    raise ConfigError(f"{origin}: {module.fa_version_unsupported_reason(2)}")


def _first_line(error: BaseException) -> str:
    return str(error).partition("\n")[0] or type(error).__name__
