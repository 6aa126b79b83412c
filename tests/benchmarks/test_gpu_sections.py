"""Every section of the GPU check with tiny sizes on a CPU, so that it is known to run before it meets a device."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from cpu_device import Clock, cpu_environment

from benchmarks.gpu import conformance as conformance_module
from benchmarks.gpu.conformance import backend_of, conformance, run_pytest
from benchmarks.gpu.decode_bandwidth import Sizes, bandwidth
from benchmarks.gpu.environment import Failed, Setup, Skip
from benchmarks.gpu.parity import Difference, Plan, differences_in, judge, parity
from benchmarks.gpu.random_models import DEMO_SIZED, FAMILIES
from benchmarks.gpu.report import Row
from benchmarks.gpu.throughput import STEPS, Step, throughput
from benchmarks.gpu.versions import versions
from cluster.core.errors import ConfigError

REFERENCE, GRAPHS, TRITON = Setup("reference"), Setup("reference", cuda_graphs=True), Setup("triton")
SMALL = Plan(lengths=(1, 17, 20), new_tokens=3, piece=10, kv_memory=1 << 22)
SIZES = Sizes(heads=4, kv_heads=2, head_dim=32, contexts=(40, 64), copy_bytes=1 << 16)


def verdicts(rows: Sequence[Row]) -> dict[str, str]:
    return {row.what: row.verdict for row in rows}


@pytest.mark.parametrize(
    ("problem", "row"),
    [
        (Skip("too small"), Row("a", "skipped", "too small")),
        (ConfigError("not here"), Row("a", "skipped", "not here")),
        (Failed("wrong"), Row("a", "failed", "wrong")),
        (RuntimeError("broken\nin two lines"), Row("a", "failed", "RuntimeError: broken")),
    ],
)
def test_what_went_wrong_becomes_a_row(problem: Exception, row: Row) -> None:
    def work() -> str:
        raise problem

    assert cpu_environment().attempt("a", work) == row


def test_without_time_nothing_is_begun() -> None:
    row = cpu_environment(clock=Clock(left=0.0)).attempt("a", lambda: pytest.fail("begun"))
    assert row == Row("a", "skipped", "no time left")


def test_the_median_is_that_of_warm_calls() -> None:
    clock = Clock(times=[9.0, 1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0, 0.0])
    called: list[int] = []
    assert cpu_environment(clock=clock).median_seconds(lambda: called.append(1)) == 4.5
    assert len(called) == 13


def test_versions() -> None:
    rows = list(versions(cpu_environment(REFERENCE, TRITON)))
    found = {row.what: row for row in rows}
    assert torch.__version__ in found["torch"].found
    assert "transformers" in found["packages"].found
    assert found["backend reference"].verdict == "ok"
    assert found["backend triton"] == Row("backend triton", "skipped", "attention backend triton does not run on cpu")
    assert found["device"].verdict in ("ok", "warning")


def test_parity_of_random_models() -> None:
    rows = list(parity(cpu_environment(REFERENCE, GRAPHS, TRITON), SMALL))
    assert len(rows) == len(FAMILIES) * 2 * 3
    found = {row.what: row for row in rows}
    for family in FAMILIES:
        assert found[f"{family} float32, reference"] == Row(f"{family} float32, reference", "ok", "all 9 tokens equal")
        assert found[f"{family} bfloat16, reference"].verdict == "ok"
        assert found[f"{family} float32, triton"].verdict == "skipped"
        assert "CUDA graphs need a CUDA device" in found[f"{family} float32, reference with CUDA graphs"].found


def test_parity_of_a_model_on_disk(tiny_llama_dir: Path) -> None:
    rows = list(parity(cpu_environment(model=tiny_llama_dir), SMALL))
    assert verdicts(rows) == {"llama bfloat16, reference": "ok", "llama float32, reference": "ok"}


def test_a_difference_beyond_a_near_tie_fails() -> None:
    logits = torch.tensor([[1.0, 3.0, 2.0], [0.0, 4.0, 3.99], [8.0, 0.0, 0.0]])
    found = differences_in(logits, [1, 2, 0], 5, near_tie=0.01)
    assert [(d.prompt, d.token) for d in found] == [(5, 1)]
    assert judge(found, 3).startswith("2 of 3 tokens equal; first other: prompt of 5, token 1, margin 0.01; largest")
    with pytest.raises(Failed, match=r"margin 2; largest margin 2, allowed 0\.08"):
        judge(differences_in(logits, [0, 1, 0], 5, near_tie=0.01), 3)
    with pytest.raises(Failed):
        judge([Difference(1, 0, float("nan"), 0.1)], 1)
    assert judge([], 3) == "all 3 tokens equal"


def test_throughput(tiny_llama_dir: Path) -> None:
    steps = [Step(2, 16, 16), Step(3, 1, 40), Step(1, 1, 2000)]
    rows = list(throughput(cpu_environment(REFERENCE, TRITON, model=tiny_llama_dir), steps, 1 << 20))
    assert verdicts(rows) == {"llama bfloat16, triton": "skipped"}  # the reference is slow by intention

    rows = list(throughput(cpu_environment(model=tiny_llama_dir), steps, 1 << 20))
    found = {row.what: row for row in rows}
    assert found["llama bfloat16, reference"].found.startswith("loaded, ")
    assert found["prefill 2 x 16, reference"] == Row("prefill 2 x 16, reference", "ok", "64 tokens/s (500.00 ms)")
    assert found["decode 3 x 40, reference"].found == "6 tokens/s (500.00 ms)"
    assert found["decode 1 x 2,000, reference"] == Row(
        "decode 1 x 2,000, reference", "skipped", "the model ends at 512 tokens"
    )


def test_the_steps_fit_the_random_model() -> None:
    assert max(step.context for step in STEPS) <= DEMO_SIZED["max_position_embeddings"]


def test_bandwidth() -> None:
    rows = list(bandwidth(cpu_environment(clock=Clock(seconds=1e-3)), SIZES))
    assert rows[0].what == "copy"
    # A copy of 64 KiB in a millisecond reads and writes 131,072 bytes; the KV of a token is 256 bytes.
    assert rows[1] == Row("reference, contexts of 40", "ok", "0 GB/s of KV, 94% of the copy (12 sequences, 1.00 ms)")
    assert rows[2].found == "0 GB/s of KV, 100% of the copy (8 sequences, 1.00 ms)"


def test_bandwidth_of_what_is_not_possible() -> None:
    rows = list(bandwidth(cpu_environment(REFERENCE, TRITON), SIZES))
    assert [row.verdict for row in rows] == ["ok", "skipped", "skipped"]


PYTEST = """
tests/worker/kernels/test_cuda_conformance.py::test_equals[flash-torch.float32-9-None] SKIPPED (no flash) [  3%]
tests/worker/kernels/test_cuda_conformance.py::test_equals[reference-torch.bfloat16-9] PASSED            [  6%]
tests/worker/kernels/test_triton_attention.py::test_equals_the_reference[torch.float32-3] PASSED         [  9%]
tests/worker/kernels/test_triton_attention.py::test_random_mixes FAILED                                  [ 12%]
tests/worker/kernels/test_cuda_conformance.py::test_equals[triton-torch.bfloat16-9] PASSED               [ 15%]
FAILED tests/worker/kernels/test_triton_attention.py::test_random_mixes - AssertionError
1 failed, 3 passed, 1 skipped in 3.21s
"""


def test_conformance_counts_per_backend() -> None:
    rows = list(conformance(cpu_environment(), lambda command, limit_s: (PYTEST, 1)))
    assert rows == [
        Row("flash kernels", "skipped", "1 skipped"),
        Row("reference kernels", "ok", "1 passed"),
        Row("triton kernels", "failed", "1 failed, 2 passed: test_random_mixes"),
        Row("kernel tests", "failed", "pytest ended with code 1: 1 failed, 3 passed, 1 skipped in 3.21s"),
    ]


def test_conformance_that_is_stopped_keeps_what_was_counted() -> None:
    rows = list(conformance(cpu_environment(), lambda command, limit_s: (PYTEST.partition("FAILED")[0], None)))
    assert rows[-1] == Row("kernel tests", "failed", "stopped after 55 s")
    assert verdicts(rows)["triton kernels"] == "ok"


def test_conformance_that_tests_nothing_fails() -> None:
    (row,) = conformance(cpu_environment(), lambda command, limit_s: ("40 deselected in 1.02s", 5))
    assert row.verdict == "failed"


def test_the_child_of_conformance(tmp_path: Path) -> None:
    (tmp_path / "test_flash_a.py").write_text("def test_one(): pass\n")
    command = [part for part in conformance_module.COMMAND if part not in ("-m", "gpu")]
    command.insert(1, "-m")
    (tmp_path / "pytest.ini").write_text("[pytest]\n")
    output, code = run_pytest((*command, "-c", str(tmp_path / "pytest.ini"), str(tmp_path)), 60)
    assert code == 0
    assert [row.found for row in conformance_module.counts(output.splitlines())] == ["1 passed"]
    assert run_pytest(("sleep", "30"), 0.1) == ("", None)


@pytest.mark.parametrize(
    ("file", "parameters", "backend"),
    [
        ("test_triton_attention", "[torch.float32-3]", "triton"),
        ("test_cuda_conformance", "[flash-torch.float32]", "flash"),
        ("test_cuda_conformance", "[reference]", "reference"),
        ("test_triton_attention", "", "triton"),
        ("test_cuda_conformance", "", "other"),
    ],
)
def test_the_backend_of_a_test(file: str, parameters: str, backend: str) -> None:
    assert backend_of(file, parameters) == backend
