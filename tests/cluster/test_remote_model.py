"""Models in object stores, through fsspec's memory file system: whole or not at all, once, every failure in a line."""

from __future__ import annotations

import errno
import logging
import shutil
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import fsspec
import pytest
from fsspec.implementations.memory import MemoryFile, MemoryFileSystem

from cluster import file_copy, remote_model
from cluster.config import ClusterConfig, EngineConfig
from cluster.core.errors import ConfigError
from cluster.model_source import resolve_model

URL = "memory://bucket/team/llama"
WEIGHTS = bytes(range(256)) * 400
NEEDED = ["config.json", "model-1.safetensors", "model-2.safetensors", "tokenizer.json"]


class Store:
    """The files behind URL, and what is read of them."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.files = MemoryFileSystem()
        self.opened: list[str] = []
        self.reads = 0
        self.before_read: Any = lambda: None
        store, read = self, MemoryFile.read

        def open_file(files: MemoryFileSystem, path: str, mode: str = "rb", **options: Any) -> Any:
            if mode == "rb":
                store.opened.append(path.rsplit("/", 1)[-1])
            return original(files, path, mode, **options)

        def counted_read(file: MemoryFile, size: int = -1) -> bytes:
            store.before_read()
            store.reads += 1
            data: bytes = read(file, size)
            return data

        original = MemoryFileSystem.open
        monkeypatch.setattr(MemoryFileSystem, "open", open_file)
        monkeypatch.setattr(MemoryFile, "read", counted_read)

    def put(self, name: str, content: bytes) -> None:
        self.files.pipe_file(f"/bucket/team/llama/{name}", content)


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch) -> Iterator[Store]:
    monkeypatch.setitem(remote_model.EXTRAS, "memory", "test")
    monkeypatch.setattr(file_copy, "BLOCK_BYTES", 10_000)
    monkeypatch.setattr(MemoryFileSystem, "store", {})
    monkeypatch.setattr(MemoryFileSystem, "pseudo_dirs", [""])
    store = Store(monkeypatch)
    for name in ["config.json", "tokenizer.json", "README.md", "pytorch_model.bin", "consolidated.safetensors"]:
        store.put(name, b"{}")
    for name in ("model-1.safetensors", "model-2.safetensors"):
        store.put(name, WEIGHTS)
    store.put("original/params.json", b"{}")
    yield store


def refusal(cache: Path, url: str = URL, *, weights: bool = True) -> str:
    with pytest.raises(ConfigError) as caught:
        resolve_model(url, cache_dir=cache, weights=weights)
    assert "\n" not in caught.value.message
    assert caught.value.__cause__ is None, "Serve would print it, and it may hold secrets"
    return caught.value.message


def visible(cache: Path) -> list[Path]:
    return [path for path in (cache / "models").glob("*") if not path.name.startswith(".")]


def test_a_model_is_copied_once(store: Store, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "cluster")
    heard: list[tuple[str, float]] = []
    path = resolve_model(URL, lambda phase, share: heard.append((phase, share)), tmp_path)
    assert sorted(entry.name for entry in path.iterdir()) == NEEDED == sorted(store.opened)
    assert all((path / name).read_bytes() == WEIGHTS for name in NEEDED if name.endswith(".safetensors"))
    assert path.parent == tmp_path / "models" and path.name.startswith("memory--bucket--team--llama-")
    assert heard[-1] == ("download", 1.0)
    lines = [line for line in caplog.messages if line.startswith(f"downloading {URL}: ")]
    assert 5 <= len(lines) <= 10 and "of 200.0 KiB" in lines[0]
    assert resolve_model(URL + "/", cache_dir=tmp_path) == path
    assert resolve_model(URL, cache_dir=tmp_path, weights=False) == path
    assert sorted(store.opened) == NEEDED


def test_config_and_tokenizer_without_weights(store: Store, tmp_path: Path) -> None:
    small = resolve_model(URL, cache_dir=tmp_path, weights=False)
    assert sorted(entry.name for entry in small.iterdir()) == ["config.json", "tokenizer.json"]
    assert resolve_model(URL, cache_dir=tmp_path, weights=False) == small
    whole = resolve_model(URL, cache_dir=tmp_path)
    assert whole != small and (whole / "model-1.safetensors").is_file()


def test_other_content_is_another_directory(store: Store, tmp_path: Path) -> None:
    first = resolve_model(URL, cache_dir=tmp_path)
    store.put("model-2.safetensors", WEIGHTS[::-1])
    second = resolve_model(URL, cache_dir=tmp_path)
    assert first != second and (first / "model-2.safetensors").read_bytes() == WEIGHTS
    assert (second / "model-2.safetensors").read_bytes() == WEIGHTS[::-1]


def test_only_one_copies_at_a_time(store: Store, tmp_path: Path) -> None:
    found: list[Path] = []
    threads = [threading.Thread(target=lambda: found.append(resolve_model(URL, cache_dir=tmp_path))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 4 and len(set(found)) == 1 and sorted(store.opened) == NEEDED


def test_a_copy_that_broke_off_is_invisible_and_goes_on(store: Store, tmp_path: Path) -> None:
    def break_off() -> None:
        if store.reads == 12:
            raise ConnectionError("reset by peer")

    store.before_read = break_off
    assert "cannot read memory://bucket/team/llama: reset by peer" in refusal(tmp_path)
    assert visible(tmp_path) == []
    before, store.before_read = store.reads, lambda: None
    path = resolve_model(URL, cache_dir=tmp_path)
    assert all((path / name).read_bytes() == WEIGHTS for name in NEEDED if name.endswith(".safetensors"))
    blocks = 2 * (-(-len(WEIGHTS) // 10_000) + 1) + 2 * 2  # each file's, and the empty read at its end
    assert store.reads - before < blocks - 5
    assert visible(tmp_path) == [path]


def test_a_store_that_is_away_does_not_matter_for_what_is_here(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    resolve_model(URL, cache_dir=tmp_path, weights=False)
    path = resolve_model(URL, cache_dir=tmp_path)
    failure: Exception = ConnectionError("no route to host")

    def ls(*args: Any, **options: Any) -> None:
        raise failure

    monkeypatch.setattr(MemoryFileSystem, "ls", ls)
    assert resolve_model(URL, cache_dir=tmp_path) == path
    assert any("no route to host; the copy of before is used" in line for line in caplog.messages)
    assert "no route to host" in refusal(tmp_path, "memory://bucket/team/lla")
    failure = PermissionError("Forbidden")
    assert "access to memory://bucket/team/llama is denied; check the credentials" in refusal(tmp_path)


def test_wrong_addresses(store: Store, tmp_path: Path) -> None:
    assert "there is nothing at memory://bucket/none; check the bucket and the path" in refusal(
        tmp_path, "memory://bucket/none"
    )
    assert "models are read from s3:// and gs:// addresses, not from https://" in refusal(tmp_path, "https://a/b")
    for url in ("s3://key:secret@bucket/path", "s3://bucket/path?token=secret"):
        message = refusal(tmp_path, url)
        assert "credentials come from the environment" in message and "secret" not in message
    for url in ("s3://", "s3://bucket//path", "gs://bucket/../path"):
        assert "the address is" in refusal(tmp_path, url)


def test_what_is_no_model(store: Store, tmp_path: Path) -> None:
    for name in ("model-1.safetensors", "model-2.safetensors"):
        store.files.rm_file(f"/bucket/team/llama/{name}")
    assert "has no *.safetensors weights" in refusal(tmp_path)
    store.files.rm_file("/bucket/team/llama/config.json")
    assert "is not a model: it has no config.json" in refusal(tmp_path, weights=False)
    assert store.opened == []


@pytest.mark.parametrize("protocol", ["s3", "gs"])
def test_a_missing_package_is_named(protocol: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def filesystem(name: str, **options: Any) -> None:
        raise ImportError("Install s3fs to access S3")

    monkeypatch.setattr(fsspec, "filesystem", filesystem)
    assert f"pip install 'kvray[{protocol}]'" in refusal(tmp_path, f"{protocol}://bucket/path")


@pytest.mark.parametrize("name,said", [("NoCredentialsError", "no credentials"), ("RefreshError", "expired")])
def test_credentials_of_the_stores_own_tools(
    name: str, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """These errors are of packages that need not be here: they are known by name."""

    def filesystem(protocol: str, **options: Any) -> None:
        raise type(name, (Exception,), {})("Unable to locate credentials")

    monkeypatch.setattr(fsspec, "filesystem", filesystem)
    message = refusal(tmp_path, "s3://bucket/path")
    assert said in message and "set AWS_ACCESS_KEY_ID" in message
    assert "set GOOGLE_APPLICATION_CREDENTIALS" in refusal(tmp_path, "gs://bucket/path")


def test_a_disk_without_room_is_found_before_the_copy(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(total=0, used=0, free=64 * 2**20))
    message = refusal(tmp_path)
    assert "needs 200.0 KiB more" in message and "KVRAY_CACHE" in message and store.opened == []


def test_a_disk_that_fills_up(store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def write(file: Any, block: bytes) -> None:
        raise file_copy.LocalDiskError(OSError(errno.ENOSPC, "No space left on device"))

    monkeypatch.setattr(file_copy, "_write", write)
    assert "cannot write memory://bucket/team/llama to" in (message := refusal(tmp_path))
    assert "the disk is full; make room" in message and visible(tmp_path) == []
    monkeypatch.undo()


def test_a_cache_below_a_file(store: Store, tmp_path: Path) -> None:
    (tmp_path / "models").write_text("")
    assert "cannot write memory://bucket/team/llama to" in refusal(tmp_path)


def test_the_public_name_is_the_last_part() -> None:
    config = ClusterConfig(engine=EngineConfig(model="s3://bucket/team/llama-8b"))
    assert config.public_name == "llama-8b"
