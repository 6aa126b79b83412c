"""`kvray doctor`: which checks it makes, the table, the JSON object and the exit codes."""

from __future__ import annotations

import errno
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from cluster.config import ClusterConfig
from cluster.doctor.ray_flags import RayProcess
from cluster.doctor.torch_build import TorchBuild
from cluster.doctor_command import Probes, examine, run_doctor
from cluster.index.base import IndexUnavailable

NAMES = ["driver", "torch", "device", "attention", "redis", "ports", "ray"]


def answers(url: str, timeout_s: float) -> Mapping[str, Any]:
    return {"redis_version": "7.2.4"}


def refuses(url: str, timeout_s: float) -> Mapping[str, Any]:
    raise IndexUnavailable("Redis cannot answer: refused")


def probes(**changes: Any) -> Probes:
    """A machine with only a CPU, on which everything is well."""
    well: dict[str, Any] = {
        "driver": lambda: None,
        "torch": lambda: TorchBuild(version="2.13.0+cpu"),
        "cores": lambda: 2,
        "redis": answers,
        "bind": lambda host, port: 0,
        "ray": list,
    }
    return Probes(**well | changes)


def config(**parts: Any) -> ClusterConfig:
    return ClusterConfig.model_validate({"engine": {"attention_backend": "reference"}} | parts)


def test_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_doctor(config(index={"redis_url": "redis://me:secret@host/0"}), as_json=True, probes=probes()) == 0
    output = capsys.readouterr().out
    found = json.loads(output)
    assert found["ok"] is True
    assert [check["name"] for check in found["checks"]] == NAMES
    assert {check["verdict"] for check in found["checks"]} == {"ok"}
    assert found["checks"][4] == {
        "name": "redis",
        "verdict": "ok",
        "detail": "redis://***@host/0: redis 7.2.4",
        "advice": "",
    }
    assert "secret" not in output


def test_a_failed_check_is_exit_code_1(capsys: pytest.CaptureFixture[str]) -> None:
    broken = config(index={"redis_url": "redis://host/0"})
    assert run_doctor(broken, as_json=True, probes=probes(redis=refuses)) == 1
    assert json.loads(capsys.readouterr().out)["ok"] is False
    assert run_doctor(broken, as_json=False, probes=probes(redis=refuses)) == 1
    page = capsys.readouterr().out
    assert "failed" in page
    assert "-> start the server or correct --redis-url" in page
    assert [line.split()[0] for line in page.splitlines()[1:] if not line.startswith(" ")] == NAMES


def test_a_warning_is_exit_code_0(capsys: pytest.CaptureFixture[str]) -> None:
    """A running cluster has the ports."""
    running = probes(
        bind=lambda host, port: errno.EADDRINUSE, ray=lambda: [RayProcess(5, "ray::RuntimeEnvAgent", frozenset())]
    )
    assert run_doctor(config(), as_json=False, probes=running) == 0
    page = capsys.readouterr().out
    assert "warning" in page and "failed" not in page


def test_words_from_outside_are_no_markup(capsys: pytest.CaptureFixture[str]) -> None:
    torch = TorchBuild(error="[bold]undefined[/nonsense] symbol")
    assert run_doctor(config(), as_json=False, probes=probes(torch=lambda: torch)) == 1
    assert "[bold]undefined[/nonsense] symbol" in capsys.readouterr().out


def test_the_ports_and_the_host_that_are_asked_for() -> None:
    tried: list[tuple[str, int]] = []

    def bind(host: str, port: int) -> int:
        tried.append((host, port))
        return 0

    examine(config(serve={"host": "0.0.0.0", "port": 81, "grpc_port": 91}), probes(bind=bind))
    assert tried == [("0.0.0.0", 81), ("0.0.0.0", 91)]


def test_the_sizes_of_a_local_model(tmp_path: Path) -> None:
    raw = {"model_type": "gpt_neox", "hidden_size": 96, "num_attention_heads": 4}
    (tmp_path / "config.json").write_text(json.dumps(raw))

    def attention(model: str) -> str:
        asked = config(engine={"model": model, "attention_backend": "reference"})
        return next(check.detail for check in examine(asked, probes()) if check.name == "attention")

    assert "head dim 24" in attention(str(tmp_path))
    assert "head dim 64 (assumed)" in attention("some/id")
    (tmp_path / "config.json").write_text("[")
    assert "(assumed)" in attention(str(tmp_path))


def test_this_machine() -> None:
    """The real probes, but for the ports, which others may use."""
    found = examine(ClusterConfig(), Probes(bind=lambda host, port: 0, ray=list))
    assert [check.name for check in found] == NAMES
    assert all(check.advice for check in found if check.verdict != "ok")
