"""Finding the native module, choosing an instruction set that fits the sizes, and the thread pools."""

from __future__ import annotations

import gc
import runpy
import sys
import time
from pathlib import Path

import pytest
import torch

import worker.kernels
from worker.kernels import native

needs_module = pytest.mark.skipif(native.module() is None, reason="the native kernels are not built in")


@needs_module
def test_the_best_comes_first_and_scalar_is_always_there() -> None:
    names = native.module().available()
    order = ["avx512bf16", "avx512", "avx2", "scalar"]
    assert names[-1] == "scalar"
    assert names == sorted(names, key=order.index)
    assert native.why_missing() == ""


@needs_module
@pytest.mark.parametrize(
    ("block_size", "head_dim", "wanted", "fits"),
    [
        (16, 64, "", True),
        (8, 8, "", True),
        (256, 128, "", True),
        (16, 80, "scalar", True),
        (4, 64, "", False),
        (1, 64, "", False),
        (24, 64, "", False),
        (512, 64, "", False),
        (16, 12, "", False),
        (16, 4, "scalar", False),
    ],
)
def test_which_sizes_fit(block_size: int, head_dim: int, wanted: str, fits: bool) -> None:
    found = native.instruction_set(block_size, head_dim, wanted)
    assert (found in native.module().available()) if fits else found is None
    if wanted:
        assert found in (wanted, None)


@needs_module
def test_every_instruction_set_can_be_asked_for_and_narrow_sizes_get_narrow_vectors() -> None:
    for name in native.module().available():
        assert native.instruction_set(16, 64, name) == name
        assert native.instruction_set(8, 8, name) in (name, "avx2", "scalar")
    with pytest.raises(ValueError, match="no kernels of that name"):
        native.instruction_set(16, 64, "mmx")


def test_without_the_module_there_is_a_reason_and_nothing_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "worker.kernels._cpu", None)
    monkeypatch.delattr(worker.kernels, "_cpu", raising=False)
    found = runpy.run_path(str(native.__file__))
    assert found["module"]() is None
    assert found["why_missing"]().startswith("the native kernels are not built in (")
    assert found["instruction_set"](16, 64) is None


@needs_module
def test_one_pool_per_thread_count() -> None:
    assert native.thread_pool(2) is native.thread_pool(2)
    assert [native.thread_pool(threads).size for threads in (1, 2, 3)] == [1, 2, 3]


@needs_module
def test_a_pool_ends_its_threads() -> None:
    before = pool_threads()
    pool = native.module().ThreadPool(5)
    ours = pool_threads() - before
    assert len(ours) == 4
    matrix = native.module().Matrix(pool, "", "float32", torch.eye(64))
    y = torch.empty(100, 64)
    for _ in range(200):
        matrix.multiply(torch.ones(100, 64), y)
    assert torch.equal(y, torch.ones(100, 64))
    del pool
    matrix.multiply(torch.full((100, 64), 2.0), y)  # a matrix keeps its pool
    assert torch.equal(y, torch.full((100, 64), 2.0))
    del matrix
    gc.collect()
    for _ in range(5_000):  # the system forgets them a little later
        if not ours & pool_threads():
            return
        time.sleep(0.001)
    raise AssertionError(f"still there after 5 s: {ours & pool_threads()}")


def pool_threads() -> set[int]:
    """Ids of the threads of all pools in this process; other libraries start and end threads of their own."""
    return {int(task.name) for task in Path("/proc/self/task").iterdir() if name_of(task) == "kvray-pool"}


def name_of(task: Path) -> str:
    try:
        return (task / "comm").read_text().strip()
    except OSError:  # it has just ended
        return ""
