"""What `kvray serve` makes of its options before anything starts."""

from __future__ import annotations

from pathlib import Path

import pytest

from cluster.config import ClusterConfig, EngineConfig, ServeConfig
from cluster.serve_command import hide_password, with_absolute_model, with_threads


def test_a_relative_model_directory_becomes_absolute_and_keeps_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "mine").mkdir()
    monkeypatch.chdir(tmp_path)
    config = ClusterConfig(engine=EngineConfig(model="./mine"))
    absolute = with_absolute_model(config, tmp_path / "mine")
    assert absolute.engine.model == str(tmp_path / "mine")
    assert absolute.public_name == config.public_name == "mine"
    demo = ClusterConfig()
    assert with_absolute_model(demo, tmp_path) == demo


def test_cores_are_shared_between_the_replicas_unless_threads_are_given(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda _pid: set(range(8)), raising=False)
    assert with_threads(ClusterConfig(serve=ServeConfig(replicas=3))).engine.threads == 2
    assert with_threads(ClusterConfig(serve=ServeConfig(replicas=99))).engine.threads == 1
    assert with_threads(ClusterConfig(engine=EngineConfig(threads=5))).engine.threads == 5


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("redis://127.0.0.1:6379/0", "redis://127.0.0.1:6379/0"),
        ("rediss://user:se@cret@host:1/2", "rediss://***@host:1/2"),
        ("redis://:secret@host", "redis://***@host"),
    ],
)
def test_a_password_is_never_shown(url: str, shown: str) -> None:
    assert hide_password(url) == shown


def test_cores_are_shared_between_the_replicas_of_all_models(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda _pid: set(range(8)), raising=False)
    assert with_threads(ClusterConfig(serve=ServeConfig(replicas=1)), 4).engine.threads == 2
