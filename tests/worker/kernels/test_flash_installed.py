"""Which flash attention is found on which machine, and what is said when there is none."""

from __future__ import annotations

import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from worker.kernels.flash.installed import FoundFlash, find_flash

AMPERE, HOPPER, BLACKWELL, TURING = (8, 0), (9, 0), (10, 0), (7, 5)


def wheel_function(
    q: Any, k: Any, v: Any, cu_seqlens_q: Any, cu_seqlens_k: Any, max_seqlen_q: int, max_seqlen_k: int,
    softmax_scale: Any = None, causal: Any = False, window_size: Any = (-1, -1), softcap: float = 0.0,
    block_table: Any = None,
) -> Any: ...  # fmt: skip


def vllm_function(
    q: Any, k: Any, v: Any, max_seqlen_q: int, cu_seqlens_q: Any, max_seqlen_k: int, cu_seqlens_k: Any = None,
    seqused_k: Any = None, softmax_scale: Any = None, causal: Any = False, window_size: Any = None,
    softcap: float = 0.0, block_table: Any = None, fa_version: int = 2,
) -> Any: ...  # fmt: skip


WHEEL = SimpleNamespace(__version__="2.6.2", flash_attn_varlen_func=wheel_function)


def vllm(*versions: int) -> dict[str, Any]:
    """vLLM on a device with these FlashAttention versions."""
    flash = SimpleNamespace(
        flash_attn_varlen_func=vllm_function,
        is_fa_version_supported=versions.__contains__,
        fa_version_unsupported_reason=lambda version: f"FA{version} is not for this device",
    )
    return {"vllm": SimpleNamespace(__version__="0.32.0"), "vllm.vllm_flash_attn": flash}


class Packages:
    """Stands in for importlib.import_module; an exception in the place of a module is raised."""

    def __init__(self, found: dict[str, Any]) -> None:
        self.found, self.asked = found, list[str]()

    def __call__(self, name: str) -> Any:
        self.asked.append(name)
        module = self.found.get(name) or ModuleNotFoundError(f"No module named {name!r}")
        if isinstance(module, BaseException):
            raise module
        return module


def find(capability: tuple[int, int], **found: Any) -> FoundFlash:
    return find_flash(Packages({name.replace("__", "."): module for name, module in found.items()}), capability)


@pytest.mark.parametrize("capability", [AMPERE, HOPPER, (8, 9)])
def test_the_wheel_comes_first(capability: tuple[int, int]) -> None:
    packages = Packages({"vllm_flash_attn": WHEEL} | vllm(2, 3))
    found = find_flash(packages, capability)
    assert found.call is not None and found.call.origin == "vllm-flash-attn 2.6.2" and found.call.supports_softcap
    assert packages.asked == ["vllm_flash_attn"]  # importing vLLM takes seconds


@pytest.mark.parametrize(("versions", "chosen"), [((2,), 2), ((2, 3), 3), ((2, 4), 2)])
def test_the_copy_inside_vllm(versions: tuple[int, ...], chosen: int) -> None:
    found = find_flash(Packages(vllm(*versions)), HOPPER)
    assert found.call is not None and found.call.origin == f"vLLM 0.32.0, FlashAttention {chosen}"


def test_a_device_for_which_the_wheel_has_no_kernels() -> None:
    found = find_flash(Packages({"vllm_flash_attn": WHEEL} | vllm(2)), BLACKWELL)
    assert found.call is not None and found.call.origin == "vLLM 0.32.0, FlashAttention 2"
    assert find(TURING, vllm_flash_attn=WHEEL).reason == (
        "vllm-flash-attn 2.6.2 has no kernels for compute capability 7.5; "
        "vLLM has no flash kernels for compute capability 7.5"
    )


@pytest.mark.parametrize(
    "error", [ImportError("undefined symbol: _ZN3c10\nmore"), OSError("undefined symbol: _ZN3c10")]
)
def test_a_package_built_for_another_torch(error: Exception) -> None:
    found = find(HOPPER, vllm_flash_attn=error)
    assert found.call is None
    first, second = found.reason.split("; ")
    assert first == f"vllm-flash-attn does not import with torch {torch.__version__}: undefined symbol: _ZN3c10"
    assert second == "vLLM is not installed (No module named 'vllm.vllm_flash_attn')"


def test_neither_can_run_here() -> None:
    assert find_flash(Packages(vllm()), HOPPER).reason.endswith("; vLLM 0.32.0: FA2 is not for this device")
    changed = SimpleNamespace(__version__="3.0", flash_attn_varlen_func=lambda q, k, v: None)
    assert "vllm-flash-attn 3.0 has no parameter block_table" in find(HOPPER, vllm_flash_attn=changed).reason


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a CUDA device")
def test_without_a_device_no_package_is_imported() -> None:
    packages = Packages({})
    assert find_flash(packages).reason == "torch finds no CUDA device"
    assert packages.asked == []


def test_sizes_are_a_reason_too() -> None:
    found = find(HOPPER, vllm_flash_attn=WHEEL)
    assert found.why_not(16, 64, torch.bfloat16) is None
    assert found.why_not(8, 64, torch.bfloat16) == "block size 8 is not a multiple of 16"
    assert find(HOPPER).why_not(8, 64, torch.bfloat16) == find(HOPPER).reason


def test_importing_the_kernels_imports_no_flash_package() -> None:
    code = (
        "import sys, worker.kernels, worker.kernels.flash.backend, worker.kernels.flash.installed\n"
        "found = {'vllm', 'vllm_flash_attn', 'flash_attn'} & set(sys.modules)\n"
        "assert not found, found\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
