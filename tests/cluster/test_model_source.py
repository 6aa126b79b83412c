"""Resolving --model: local directories, hub failures as one clear line, and the atomic build of the demo model."""

from __future__ import annotations

import errno
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import huggingface_hub
import huggingface_hub.constants
import pytest
from huggingface_hub.errors import GatedRepoError, HfHubHTTPError, LocalEntryNotFoundError, RepositoryNotFoundError

import cluster.demo_model
from cluster.core.errors import ConfigError
from cluster.model_source import DEMO_NAME, default_cache_dir, resolve_model


def test_cache_dir(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVRAY_CACHE", "/somewhere/else")
    assert default_cache_dir() == Path("/somewhere/else")
    monkeypatch.delenv("KVRAY_CACHE")
    assert default_cache_dir() == Path.home() / ".cache" / "kvray"


def test_local_directories(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match=r"no config\.json"):
        resolve_model(str(tmp_path))
    (tmp_path / "config.json").write_text("{}")
    assert resolve_model(str(tmp_path)) == tmp_path
    monkeypatch.chdir(tmp_path.parent)
    assert resolve_model(tmp_path.name) == tmp_path
    with pytest.raises(ConfigError, match="no such directory"):
        resolve_model(str(tmp_path / "missing"))
    with pytest.raises(ConfigError, match="no such directory"):
        resolve_model("./missing")
    (tmp_path / "model.gguf").touch()
    with pytest.raises(ConfigError, match=r"model\.gguf is a file; --model takes its directory"):
        resolve_model(str(tmp_path / "model.gguf"))


def hub(monkeypatch: pytest.MonkeyPatch, outcome: Exception) -> None:
    """Replace the hub's download by `outcome`."""

    def snapshot_download(repo_id: str, **options: Any) -> str:
        raise outcome

    def model_info(api: Any, repo_id: str, **options: Any) -> Any:
        raise outcome

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    monkeypatch.setattr(huggingface_hub.HfApi, "model_info", model_info)


def response(status_code: int) -> Any:
    """As much of an HTTP reply as the hub's errors look at."""
    return SimpleNamespace(status_code=status_code, headers={}, request=None)


@pytest.mark.parametrize(
    "outcome,said",
    [
        (RepositoryNotFoundError("x", response=response(404)), "has no model 'owner/name'"),
        (RepositoryNotFoundError("x", response=response(401)), "HF_TOKEN is missing or wrong"),
        (HfHubHTTPError("x", response=response(401)), "HF_TOKEN is wrong or has expired"),
        (HfHubHTTPError("x", response=response(403)), "HF_TOKEN has no permission"),
        (HfHubHTTPError("x", response=response(429)), "too many requests"),
        (GatedRepoError("x", response=response(403)), "ask for access"),
        (LocalEntryNotFoundError("ConnectError: no route\nmore"), "cannot reach the Hugging Face hub"),
        (ConnectionError("refused"), "cannot reach the Hugging Face hub"),
        (OSError(errno.ENOSPC, "No space left on device"), "the disk is full"),
        (RuntimeError("odd\nlines"), "cannot download 'owner/name': odd"),
        (RuntimeError("no: token=abcdef"), "token=***"),
        (RuntimeError("no: hf_abcdef"), "hf_***"),
    ],
)
def test_hub_failures_are_one_line(
    outcome: Exception, said: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    hub(monkeypatch, outcome)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))
    with pytest.raises(ConfigError) as caught:
        resolve_model("owner/name")
    assert said in caught.value.message
    assert "\n" not in caught.value.message


def test_ids_that_are_none() -> None:
    with pytest.raises(ConfigError, match="neither a directory nor a Hugging Face id"):
        resolve_model("not an id!")


def test_two_resolvers_build_the_demo_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    builds: list[Path] = []

    def build(target: Path, work_dir: Path, on_progress: Any) -> None:
        builds.append(target)
        assert target.is_dir()
        assert work_dir.is_dir()
        threading.Event().wait(0.1)
        (target / "config.json").write_text("{}")

    monkeypatch.setattr(cluster.demo_model, "build_demo_model", build)
    found: list[Path] = []
    threads = [
        threading.Thread(target=lambda: found.append(resolve_model("demo", cache_dir=tmp_path))) for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [tmp_path / "models" / DEMO_NAME] * 4
    assert len(builds) == 1
    assert sorted(path.name for path in (tmp_path / "models").iterdir()) == [f".{DEMO_NAME}.lock", DEMO_NAME]


def test_a_failed_build_leaves_nothing_and_can_be_repeated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(target: Path, work_dir: Path, on_progress: Any) -> None:
        (target / "config.json").write_text("{")
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(cluster.demo_model, "build_demo_model", fail)
    with pytest.raises(ConfigError, match="the disk is full"):
        resolve_model("demo", cache_dir=tmp_path)
    assert [path.name for path in (tmp_path / "models").iterdir()] == [f".{DEMO_NAME}.lock"]

    debris = tmp_path / "models" / DEMO_NAME
    debris.mkdir()
    (debris / "half").write_text("")
    monkeypatch.setattr(
        cluster.demo_model, "build_demo_model", lambda target, *_: (target / "config.json").write_text("{}")
    )
    assert [path.name for path in resolve_model("demo", cache_dir=tmp_path).iterdir()] == ["config.json"]
