"""select_on_cuda: flash, then triton, then reference, and a named one or its reason."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from cluster.core.errors import ConfigError
from worker.kernels import select_backend
from worker.kernels import triton as triton_kernels
from worker.kernels.cuda import select_on_cuda
from worker.kernels.flash.calls import adapt
from worker.kernels.flash.installed import FoundFlash


def varlen(
    q: Any, k: Any, v: Any, cu_seqlens_q: Any, cu_seqlens_k: Any, max_seqlen_q: int, max_seqlen_k: int,
    softmax_scale: Any = None, causal: Any = False, window_size: Any = (-1, -1), softcap: float = 0.0,
    block_table: Any = None,
) -> Any: ...  # fmt: skip


FOUND = FoundFlash(call=adapt(varlen, "flash of the test"), reason="")
NONE = FoundFlash(call=None, reason="no flash today")


def select(wanted: str, found: FoundFlash, dtype: torch.dtype = torch.bfloat16) -> str:
    return select_on_cuda(wanted, 16, 64, dtype, find=lambda: found).name


def test_flash_is_first_where_it_fits() -> None:
    assert select("auto", FOUND) == "flash"
    assert select("flash", FOUND) == "flash"
    assert select("triton", FOUND) == "triton"


def test_a_type_that_flash_lacks_goes_to_triton() -> None:
    assert select("auto", FOUND, torch.float32) == "triton"
    with pytest.raises(ConfigError, match=r"attention backend flash is not possible: .*float32"):
        select("flash", FOUND, torch.float32)


def test_without_flash_it_is_triton() -> None:
    assert select("auto", NONE) == "triton"
    with pytest.raises(ConfigError, match="attention backend flash is not possible: no flash today"):
        select("flash", NONE)


def test_without_both_the_reference_says_why(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(triton_kernels, "why_missing", lambda: "no triton today")
    with caplog.at_level("WARNING"):
        assert select("auto", NONE) == "reference"
    assert "no flash: no flash today; no triton: no triton today" in caplog.text
    with pytest.raises(ConfigError, match="attention backend triton is not possible: no triton today"):
        select("triton", NONE)


@pytest.mark.parametrize(("device", "wanted"), [("cpu", "flash"), ("cpu", "triton"), ("cuda", "cpu")])
def test_a_backend_of_another_device_is_refused(device: str, wanted: str) -> None:
    with pytest.raises(ConfigError, match=f"attention backend {wanted} does not run on {device}"):
        select_backend(device, wanted)
