"""The generated gRPC modules: in step with the proto file, and not in the way of proto-plus."""

from __future__ import annotations

import itertools
import subprocess
import sys
from pathlib import Path

import pytest

from cluster.rpc import inference_pb2

ROOT = Path(inference_pb2.__file__).parents[2]
GENERATED = ("inference_pb2.py", "inference_pb2.pyi", "inference_pb2_grpc.py")


def test_checked_in_modules_are_what_protoc_makes(tmp_path: Path) -> None:
    subprocess.run(
        [
            sys.executable,
            *("-m", "grpc_tools.protoc", "-I", "proto"),
            *(f"--{kind}_out={tmp_path}" for kind in ("python", "pyi", "grpc_python")),
            "proto/cluster/rpc/inference.proto",
        ],
        cwd=ROOT,
        check=True,
        timeout=60,
    )
    for name in GENERATED:
        fresh = (tmp_path / "cluster" / "rpc" / name).read_text()
        assert fresh == (ROOT / "cluster" / "rpc" / name).read_text(), f"{name} is stale: run protoc again"


def test_proto_stays_a_namespace_so_that_proto_plus_is_importable() -> None:
    assert not list((ROOT / "proto").rglob("__init__.py"))
    import proto

    assert hasattr(proto, "Message")


def test_every_public_field_is_documented() -> None:
    lines = (ROOT / "proto/cluster/rpc/inference.proto").read_text().splitlines()
    for before, line in itertools.pairwise(lines):
        is_field = line.startswith("  ") and line.rstrip().endswith(";") and " = " in line
        obvious = "GenerateRequest" in line or "SamplingOptions sampling" in line
        assert not is_field or obvious or before.strip().startswith("//"), f"no comment: {line.strip()}"


@pytest.mark.parametrize(
    "field",
    [
        "temperature",
        "top_k",
        "top_p",
        "seed",
        "max_tokens",
        "ignore_eos",
        "n",
        "best_of",
        "beam_width",
        "length_penalty",
        "min_p",
        "repetition_penalty",
        "presence_penalty",
        "frequency_penalty",
        "min_tokens",
        "logprobs",
        "prompt_logprobs",
        "include_stop_str_in_output",
    ],
)
def test_absent_and_zero_differ(field: str) -> None:
    options = inference_pb2.SamplingOptions()
    assert not options.HasField(field)
    setattr(options, field, 0)
    assert inference_pb2.SamplingOptions.FromString(options.SerializeToString()).HasField(field)
