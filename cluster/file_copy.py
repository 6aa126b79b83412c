"""copy_files: files of an object store into a directory, several at a time, going on where it stopped.

Owns: the blocks, what is already there, and the check of sizes.
Does not: know models, or say what an error means (cluster.remote_model).
Invariants: a file under its own name is complete; one that is not yet ends in `.part`; errors of the local disk and of
the store can be told apart; after an error no more blocks are read.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

BLOCK_BYTES = 8 * 2**20
AT_A_TIME = 4  # one connection to an object store is slower than most disks


class LocalDiskError(Exception):
    """The local side failed: `cause`."""

    def __init__(self, cause: OSError) -> None:
        super().__init__(str(cause))
        self.cause = cause


def copy_files(
    store: Any, sources: Mapping[str, tuple[str, int]], target: Path, on_bytes: Callable[[int], None]
) -> None:
    """`sources`: name -> (path in the store, size). `store`: an fsspec file system. Raises the first error."""
    stop = threading.Event()

    def copy(name: str) -> None:
        if stop.is_set():
            return
        try:
            _copy(store, *sources[name], target / name, on_bytes, stop)
        except BaseException:
            stop.set()
            raise

    with ThreadPoolExecutor(AT_A_TIME, thread_name_prefix="kvray-copy") as pool:
        # Largest first: the last one to end should be a small one.
        copies = [pool.submit(copy, name) for name in sorted(sources, key=lambda name: -sources[name][1])]
    for one in copies:
        one.result()


def _copy(
    store: Any, source: str, size: int, target: Path, on_bytes: Callable[[int], None], stop: threading.Event
) -> None:
    if target.exists():
        return
    part = target.with_name(f"{target.name}.part")
    with _local(part, size) as file:
        done = file.tell()
        if done < size:
            with store.open(source, "rb") as remote:
                remote.seek(done)
                while not stop.is_set() and (block := remote.read(BLOCK_BYTES)):
                    _write(file, block)
                    done += len(block)
                    on_bytes(len(block))
    if stop.is_set():
        return
    if done != size:
        raise OSError(f"{source} has {size} bytes by its listing, but {done} came")
    with _as_local():
        part.rename(target)


@contextmanager
def _local(part: Path, size: int) -> Iterator[BinaryIO]:
    """Open for going on; a part that is longer than the whole is from something else."""
    with _as_local():
        if part.exists() and part.stat().st_size > size:
            part.unlink()
        file = part.open("ab", buffering=0)
    try:
        yield file
    finally:
        with _as_local():
            file.close()


def _write(file: BinaryIO, block: bytes) -> None:
    view = memoryview(block)
    with _as_local():
        while view:
            view = view[file.write(view) :]


@contextmanager
def _as_local() -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise LocalDiskError(error) from error
