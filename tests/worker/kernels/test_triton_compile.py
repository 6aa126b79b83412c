"""Every Triton kernel compiles for real CUDA devices, none needed, and takes what such a device has.

The interpreter accepts more than the compiler does. So a child process, in which nothing is interpreted, launches the
kernels as always, on a stand-in for the driver that names a device and lets each launch end after compiling.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.skipif(find_spec("triton") is None, reason="triton is not installed")

SUPPORT = Path(__file__).parents[2] / "support"
LEAST_SHARED = 99 << 10  # bytes a program may have on the smallest of the devices (8.6 and 8.9)
ON_TENSOR_CORES = {"prefill_kernel", "split_kernel"}

COMPILE = """
import json, sys
from unittest.mock import Mock
import torch
from attention_world import AttentionWorld
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction
from worker.kernels.triton.attention import TritonAttention
from worker.kernels.triton.block_copy import copy_blocks

arch, dtype, sizes = int(sys.argv[1]), getattr(torch, sys.argv[2]), json.loads(sys.argv[3])
driver.set_active(Mock(get_current_target=lambda: GPUTarget("cuda", arch, 32), get_current_device=lambda: 0))
found, run = {}, JITFunction.run

def compile_only(self, *args, warmup, **options):
    kernel = run(self, *args, warmup=True, **options)
    ptx = kernel.asm["ptx"]
    found[self.__name__] = {
        "shared": kernel.metadata.shared,
        "cubin": len(kernel.asm["cubin"]),
        "tensor cores": "mma" in ptx,
        "wide loads": "ld.global.v4" in ptx or "cp.async.cg.shared.global" in ptx,
    }

JITFunction.run = compile_only
world = AttentionWorld([40, 300], dtype=dtype, **sizes)
world.run(TritonAttention(), [(0, 0, 40), (1, 299, 300)], rows=dtype)
copy_blocks(world.pool, world.tables[0], world.tables[0])
print(json.dumps(found))
"""


def compiled(tmp_path: Path, *arguments: str) -> dict[str, dict[str, Any]]:
    paths = os.pathsep.join((str(SUPPORT), os.environ.get("PYTHONPATH", "")))
    env = {**os.environ, "PYTHONPATH": paths, "TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-c", COMPILE, *arguments], env=env, check=True, stdout=subprocess.PIPE, text=True
    )
    return dict(json.loads(done.stdout))


@pytest.mark.parametrize(
    ("arch", "dtype", "sizes"),
    [
        ("80", "float16", {"heads": 7, "kv_heads": 1, "head_dim": 80, "softcap": 20.0}),
        ("90", "bfloat16", {"heads": 32, "kv_heads": 8, "head_dim": 128, "window": 100}),
    ],
)
def test_kernels_compile_for_a_device(arch: str, dtype: str, sizes: dict[str, Any], tmp_path: Path) -> None:
    found = compiled(tmp_path, arch, dtype, json.dumps(sizes))
    assert set(found) == {"write_kernel", "prefill_kernel", "split_kernel", "merge_kernel", "copy_kernel"}
    for name, kernel in found.items():
        assert kernel["cubin"] > 0
        assert kernel["shared"] <= LEAST_SHARED
        assert kernel["wide loads"], name
        assert kernel["tensor cores"] == (name in ON_TENSOR_CORES)
