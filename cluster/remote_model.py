"""A model in an object store, `s3://bucket/path` or `gs://bucket/path`, copied once to a local directory.

    <cache>/models/s3--bucket--path-<version>            complete; the version is a digest of names, sizes and tags
    <cache>/models/.s3--bucket--path-<version>.partial   what is being fetched, and goes on after a crash

Credentials come from where the store's own tools find them (environment, files, the machine's role).

Owns: listing, copying, the version in the name, and one clear line per failure.
Does not: speak to a store (fsspec and its s3fs or gcsfs do), or choose the cache's place (cluster.model_source).
Invariants: a directory without a dot is whole and never changes; one process at a time fetches a version; another
version of the files becomes another directory; when the store cannot be reached the newest copy is used, with a
warning.
"""

from __future__ import annotations

import logging
import re
import shutil
from pathlib import Path
from typing import Any, NamedTuple

from cluster.core.errors import ConfigError
from cluster.core.hashing import digest_of
from cluster.download_failure import check_free_space, disk_reason, first_line
from cluster.download_lock import one_at_a_time
from cluster.download_progress import DownloadProgress, Report
from cluster.file_copy import LocalDiskError, copy_files
from cluster.model_files import CONFIG_FILE, is_weights, wanted_files

logger = logging.getLogger(__name__)

EXTRAS = {"s3": "s3", "gs": "gs"}  # the protocols that are read, and the extra that each needs
_VERSION_TAGS = ("ETag", "etag", "generation", "md5Hash", "mtime", "LastModified", "updated", "created")
_REFUSED = {
    "NoCredentialsError": "no credentials were found",
    "DefaultCredentialsError": "no credentials were found",
    "PartialCredentialsError": "the credentials are incomplete",
    "RefreshError": "the credentials have expired",
    "TokenRetrievalError": "the credentials have expired",
}
_CREDENTIALS = {
    "s3": "set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or give the machine a role that may read it",
    "gs": "set GOOGLE_APPLICATION_CREDENTIALS, or give the machine a service account that may read it",
}


class RemoteFile(NamedTuple):
    """path: in the store.  tag: whatever the store says that changes with the content."""

    path: str
    size: int
    tag: str


def fetch_from_store(url: str, models_dir: Path, report: Report, *, weights: bool) -> Path:
    """The local directory with a copy of what is at `url`. `weights` False: only config and tokenizer are needed."""
    protocol, url = _check_url(url), url.rstrip("/")
    try:
        store, root = _open_store(url, protocol)
        files = _list(store, root, url, weights)
    except ConfigError:
        raise
    except Exception as error:
        problem = ConfigError(_reason(url, error))
        copy = None if _is_refusal(error) else _newest_copy(models_dir, url, weights)
        if copy is None:
            raise problem from None
        logger.warning("%s; the copy of before is used: %s", problem.message, copy)
        return copy
    return _copy_of(store, files, url, models_dir, report, weights=weights)


def _copy_of(
    store: Any, files: dict[str, RemoteFile], url: str, models_dir: Path, report: Report, *, weights: bool
) -> Path:
    """The directory with these files, fetched unless it is there."""
    whole, config = models_dir / _name(url, files), models_dir / _name(url, files, weights=False)
    for copy in (whole,) if weights else (whole, config):
        if _is_whole(copy):
            return copy
    target = whole if weights else config
    try:
        with one_at_a_time(models_dir / f".{target.name}.lock", url):
            if not _is_whole(target):
                _fetch(store, _needed(files, weights), target, url, report)
    except ConfigError:
        raise
    except LocalDiskError as error:
        raise ConfigError(f"cannot write {url} to {models_dir}: {disk_reason(error.cause)}") from None
    except Exception as error:
        if isinstance(error, OSError) and error.filename is not None:  # a path of ours: stores do not set it
            raise ConfigError(f"cannot write {url} to {models_dir}: {disk_reason(error)}") from None
        raise ConfigError(_reason(url, error)) from None
    return target


def _check_url(url: str) -> str:
    """Its protocol. The text of an address that may hold a password is not repeated."""
    protocol, _, rest = url.partition("://")
    if protocol not in EXTRAS:
        raise ConfigError(f"models are read from s3:// and gs:// addresses, not from {protocol}://")
    if "@" in rest.split("/")[0] or "?" in rest or "#" in rest:
        raise ConfigError(f"a model's address is {protocol}://bucket/path; credentials come from the environment")
    if any(part in ("", ".", "..") for part in rest.rstrip("/").split("/")):
        raise ConfigError(f"model {url!r}: the address is {protocol}://bucket/path")
    return protocol


def _open_store(url: str, protocol: str) -> tuple[Any, str]:
    import fsspec  # slow to import, and only this branch needs it

    try:
        store = fsspec.filesystem(protocol, use_listings_cache=False)
    except ImportError:
        extra = EXTRAS[protocol]
        raise ConfigError(f"{protocol}:// needs another package: pip install 'kvray[{extra}]'") from None
    return store, str(store._strip_protocol(url)).rstrip("/")


def _list(store: Any, root: str, url: str, weights: bool) -> dict[str, RemoteFile]:
    """Everything a served model needs, by name, weights included; nothing is fetched yet."""
    entries = {}
    for entry in store.ls(root, detail=True):
        if entry["type"] == "file":
            tag = next((str(entry[key]) for key in _VERSION_TAGS if entry.get(key)), "")
            entries[entry["name"].rsplit("/", 1)[-1]] = RemoteFile(entry["name"], int(entry["size"] or 0), tag)
    files = {name: entries[name] for name in wanted_files(entries, weights=True)}
    if CONFIG_FILE not in files:
        raise ConfigError(f"{url} is not a model: it has no {CONFIG_FILE}")
    if weights and not any(map(is_weights, files)):
        raise ConfigError(f"{url} has no *.safetensors weights")
    return files


def _needed(files: dict[str, RemoteFile], weights: bool) -> dict[str, RemoteFile]:
    return {name: file for name, file in files.items() if weights or not is_weights(name)}


def _slug(url: str) -> str:
    """A readable name of the address; the digest tells apart what reads alike."""
    return f"{re.sub(r'[^A-Za-z0-9_.]+', '--', url)}-{digest_of(url.encode())[:6]}"


def _name(url: str, files: dict[str, RemoteFile], *, weights: bool = True) -> str:
    rows = [(name, file.size, file.tag) for name, file in sorted(_needed(files, weights).items())]
    return f"{_slug(url)}-{digest_of(repr(rows).encode())[:12]}{'' if weights else '-config'}"


def _is_whole(path: Path) -> bool:
    return (path / CONFIG_FILE).is_file()


def _fetch(store: Any, files: dict[str, RemoteFile], target: Path, url: str, report: Report) -> None:
    partial = target.with_name(f".{target.name}.partial")
    partial.mkdir(exist_ok=True)
    total = sum(file.size for file in files.values())
    already = sum(entry.stat().st_size for entry in partial.iterdir())
    check_free_space(url, max(total - already, 0), partial)
    progress = DownloadProgress(url, total, report, already=already)
    sources = {name: (file.path, file.size) for name, file in files.items()}
    copy_files(store, sources, partial, progress.add)
    if target.exists():  # debris without a config.json; ours alone, because we hold the lock
        shutil.rmtree(target)
    partial.rename(target)
    progress.finish()


def _newest_copy(models_dir: Path, url: str, weights: bool) -> Path | None:
    """What was fetched from the same address before."""
    name = re.compile(re.escape(_slug(url)) + "-[0-9a-f]{12}" + ("" if weights else "(-config)?"))
    copies = [path for path in models_dir.glob("*") if name.fullmatch(path.name) and _is_whole(path)]
    return max(copies, key=lambda path: path.stat().st_mtime, default=None)


def _is_refusal(error: Exception) -> bool:
    return isinstance(error, FileNotFoundError | PermissionError) or type(error).__name__ in _REFUSED


def _reason(url: str, error: Exception) -> str:
    advice = _CREDENTIALS.get(url.partition("://")[0], "check the credentials")
    if isinstance(error, FileNotFoundError):
        return f"there is nothing at {url}; check the bucket and the path"
    if isinstance(error, PermissionError):
        return f"access to {url} is denied; {advice}"
    if (refused := _REFUSED.get(type(error).__name__)) is not None:
        return f"cannot read {url}: {refused}; {advice}"
    return f"cannot read {url}: {first_line(error)}"
