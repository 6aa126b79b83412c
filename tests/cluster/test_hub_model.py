"""Models of the hub, from a small hub on this machine: what is fetched, what is used again, every refusal in a line."""

from __future__ import annotations

import errno
import logging
import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import hub_server
import huggingface_hub
import pytest
from hub_server import GOOD_TOKEN, Hub
from huggingface_hub import constants

from cluster.core.errors import ConfigError
from cluster.model_source import resolve_model

WEIGHTS = bytes(range(256)) * 200
NEEDED = ["config.json", "model.safetensors", "tokenizer.json"]
NOT_NEEDED = ["README.md", "pytorch_model.bin", "consolidated.safetensors", "onnx/config.json", ".gitattributes"]


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    """The hub of this process, with an empty cache of its own."""
    with hub_server.running_hub() as hub:
        hub.files = {name: b'{"%s": 1}' % name.encode() for name in NEEDED + NOT_NEEDED} | {
            "model.safetensors": WEIGHTS
        }
        monkeypatch.setattr(constants, "ENDPOINT", hub.url)
        template = hub.url + "/{repo_id}/resolve/{revision}/{filename}"
        monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
        monkeypatch.setattr("huggingface_hub.file_download.HUGGINGFACE_CO_URL_TEMPLATE", template, raising=False)
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
        monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(tmp_path / "no-token"))
        monkeypatch.delenv("HF_TOKEN", raising=False)
        yield hub
        huggingface_hub.close_session()


def refusal(model: str = "owner/name") -> str:
    with pytest.raises(ConfigError) as caught:
        resolve_model(model)
    assert "\n" not in caught.value.message
    assert caught.value.__cause__ is None, "Serve would print it, and it may hold secrets"
    return caught.value.message


def test_only_needed_files_come_and_a_second_call_fetches_nothing(hub: Hub, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "cluster")
    heard: list[tuple[str, float]] = []
    path = resolve_model("owner/name", lambda phase, share: heard.append((phase, share)))
    assert sorted(entry.name for entry in path.iterdir()) == NEEDED == sorted(hub.sent)
    assert (path / "model.safetensors").read_bytes() == WEIGHTS
    assert heard[-1] == ("download", 1.0) and {phase for phase, _ in heard} == {"download"}
    assert any(line.startswith("downloading owner/name: ") and "/s)" in line for line in caplog.messages)
    caplog.clear()
    heard.clear()
    assert resolve_model("owner/name", lambda phase, share: heard.append((phase, share))) == path
    assert len(hub.sent) == len(NEEDED) and not caplog.messages and not heard


def test_config_and_tokenizer_without_weights(hub: Hub) -> None:
    path = resolve_model("owner/name", weights=False)
    assert sorted(entry.name for entry in path.iterdir()) == ["config.json", "tokenizer.json"]
    assert resolve_model("owner/name") == path
    assert sorted(hub.sent) == NEEDED


def test_what_is_in_the_cache_needs_no_hub(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    path = resolve_model("owner/name")
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    assert resolve_model("owner/name") == path


def test_processes_wait_for_each_other(hub: Hub, caplog: pytest.LogCaptureFixture) -> None:
    found: list[Path] = []
    threads = [threading.Thread(target=lambda: found.append(resolve_model("owner/name"))) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(set(found)) == 1 and len(found) == 3
    assert sorted(hub.sent) == NEEDED


def test_a_download_that_broke_off_goes_on(hub: Hub) -> None:
    hub.break_at = 20_000
    path = resolve_model("owner/name")
    assert (path / "model.safetensors").read_bytes() == WEIGHTS
    assert hub.sent.count("model.safetensors") == 2


def test_wrong_ids_and_tokens(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    assert "the id is wrong, or the model is private and HF_TOKEN is missing" in refusal("owner/other")
    hub.private = True
    assert "HF_TOKEN is missing or wrong" in refusal()
    monkeypatch.setenv("HF_TOKEN", "hf_wrong")
    message = refusal()
    assert "HF_TOKEN is wrong or has expired" in message and "hf_wrong" not in message
    monkeypatch.setenv("HF_TOKEN", GOOD_TOKEN)
    assert "has no model 'owner/other'" in refusal("owner/other")
    assert resolve_model("owner/name").is_dir()
    assert hub.tokens == {"hf_wrong", GOOD_TOKEN}


@pytest.mark.parametrize("token", [None, GOOD_TOKEN])
def test_gated_models(token: str | None, hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    hub.gated = True
    if token is not None:
        monkeypatch.setenv("HF_TOKEN", token)
    message = refusal()
    assert "ask for access on its page and set HF_TOKEN" in message and GOOD_TOKEN not in message


def test_what_is_no_model_is_not_fetched(hub: Hub) -> None:
    del hub.files["model.safetensors"]
    assert "has no *.safetensors weights" in refusal()
    del hub.files["config.json"]
    assert "is not a model: it has no config.json" in refusal()
    assert hub.sent == []


def test_no_hub_and_nothing_cached(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    assert "cannot reach the Hugging Face hub for 'owner/name', and it is not in the cache" in refusal()


def test_a_disk_without_room_is_found_before_the_download(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    free = 64 * 2**20
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(total=0, used=0, free=free))
    message = refusal()
    assert "needs 50.0 KiB more on the disk of" in message and "HF_HOME" in message and hub.sent == []
    free += len(WEIGHTS) + 100
    assert resolve_model("owner/name").is_dir()


def test_a_disk_that_fills_up(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*args: object, **options: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("huggingface_hub.file_download.http_get", full)
    assert "cannot download 'owner/name': the disk is full; make room, or set HF_HOME" in refusal()


def test_the_command_says_it_in_one_line(hub: Hub, tmp_path: Path) -> None:
    """Through the environment, as a user sets it, and in a process where nothing hides what libraries print."""
    environment = {**os.environ, "HF_ENDPOINT": hub.url, "HF_HOME": str(tmp_path / "home"), "HF_TOKEN": "hf_wrong"}
    command = [sys.executable, "-m", "cluster.cli", "generate", "hello", "--model", "owner/name"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, check=False)
    assert len(done.stderr.strip().splitlines()) == 1, done.stderr
    line = done.stderr
    assert "HF_TOKEN is wrong or has expired" in line and "hf_wrong" not in line
    assert (done.returncode, done.stdout) == (2, "")
