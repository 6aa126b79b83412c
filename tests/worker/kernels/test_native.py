"""Finding the native module, choosing an instruction set that fits the sizes, and the thread pools."""

from __future__ import annotations

import gc
import runpy
import subprocess
import sys
import threading
from array import array
from typing import Any

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
    before = threads_of_this_process()
    pool = native.module().ThreadPool(5)
    assert threads_of_this_process() == before + 4
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
    assert any(threads_of_this_process() == before for _ in range(10_000))  # the system forgets them a little later


def threads_of_this_process() -> int:
    with open("/proc/self/status", encoding="ascii") as file:
        return next(int(line.split()[1]) for line in file if line.startswith("Threads:"))


@needs_module
def test_the_interpreter_runs_while_kernels_compute() -> None:
    """With a switch interval this long, the main thread goes on only where the other one lets go of the GIL."""
    matrix = native.module().Matrix(native.thread_pool(1), "scalar", "float32", torch.zeros(1024, 1024))
    x, y = torch.zeros(64, 1024), torch.empty(64, 1024)
    started, stopped, most, calls = threading.Event(), threading.Event(), 1000, 0

    def multiply() -> None:
        nonlocal calls
        started.set()
        while calls < most and not stopped.is_set():
            matrix.multiply(x, y)
            calls += 1

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1000.0)
    try:
        thread = threading.Thread(target=multiply)
        thread.start()
        started.wait()
        stopped.set()
        thread.join()
    finally:
        sys.setswitchinterval(interval)
    assert calls < most


@needs_module
@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"qkv": torch.zeros(3, 23)}, "shapes of qkv and out"),
        ({"out": torch.zeros(2, 16)}, "shapes of qkv and out"),
        ({"out": torch.zeros(3, 8)}, "shapes of qkv and out"),
        ({"spans": array("i", [2, 0, 1])}, "spans do not cover the rows"),
        ({"spans": array("i", [3, 0, 1, 1, 3, 1])}, "does not fit its block table"),
        ({"spans": array("i", [3, 0, 1, 0, 3, 0])}, "does not fit its block table"),
        ({"spans": array("i", [3, -1, 1])}, "does not fit its block table"),
        ({"spans": array("i", [3, 14, 1])}, "does not fit its block table"),
        ({"spans": array("i", [3, 0, -1])}, "does not fit its block table"),
        ({"spans": array("i", [3, 0, 2])}, "does not fit its block table"),
        ({"tables": array("i", [0, 1])}, "spans do not cover the rows"),
        ({"tables": array("i", [2])}, "a block id is outside the pool"),
        ({"tables": array("i", [-1])}, "a block id is outside the pool"),
        ({"block_size": 24}, "block size must divide 256"),
        ({"block_size": 4}, "block size must divide 256"),
        ({"block_size": 512}, "block size must divide 256"),
        ({"dtype": "float64"}, "dtype must be"),
    ],
)
def test_attention_refuses_what_does_not_fit(changes: dict[str, Any], message: str) -> None:
    """2 heads, 1 KV head of 8; 3 rows of one sequence in block 0 of 2."""
    pool = torch.full((2, 2, 1, 16, 8), float("nan"))
    arguments: dict[str, Any] = {
        "qkv": torch.zeros(3, 32),
        "out": torch.zeros(3, 16),
        "spans": array("i", [3, 0, 1]),
        "tables": array("i", [0]),
        "kv": pool.data_ptr(),
        "num_blocks": 2,
        "dtype": "float32",
        "block_stride": pool.stride(0),
        "v_offset": pool.stride(1),
        "block_size": 16,
        "scale": 1.0,
        "window": 0,
        "softcap": 0.0,
    }
    attention = native.module().Attention(native.thread_pool(1), "scalar", 2, 1, 8)
    with pytest.raises(ValueError, match=message):
        attention.forward(**{**arguments, **changes})
    assert pool.isnan().all()
    attention.forward(**arguments)
    assert int((~pool.isnan()).sum()) == 3 * 2 * 8


@needs_module
@pytest.mark.parametrize(("heads", "kv_heads", "head_dim"), [(3, 2, 8), (2, 1, 12)])
def test_attention_of_impossible_heads(heads: int, kv_heads: int, head_dim: int) -> None:
    with pytest.raises(ValueError, match="heads and dim"):
        native.module().Attention(native.thread_pool(1), "scalar", heads, kv_heads, head_dim)


TWO_CALLERS = """
import threading, torch
from worker.kernels import native

def work(seed):
    generator = torch.Generator().manual_seed(seed)
    weight, x = torch.randn(256, 256, generator=generator), torch.randn(8, 256, generator=generator)
    matrix, y = native.module().Matrix(native.thread_pool(2), "", "float32", weight), torch.empty(8, 256)
    matrix.multiply(x, y)
    first = y.clone()
    for _ in range(2000):
        matrix.multiply(x, y)
        different[seed] += not torch.equal(first, y)

different = [0, 0]
threads = [threading.Thread(target=work, args=(seed,)) for seed in (0, 1)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
assert different == [0, 0], different
"""


@needs_module
def test_two_engines_of_one_process_do_not_disturb_each_other() -> None:
    """Their threads call the same pool, without the GIL. In a process of its own: a mistake here ends in a crash."""
    done = subprocess.run([sys.executable, "-c", TWO_CALLERS], timeout=60, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-500:]
