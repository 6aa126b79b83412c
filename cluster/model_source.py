"""From what the user wrote after --model to a local Hugging Face directory.

    demo               the demo model, built once in kvray's cache
    a local directory  itself, when it holds a config.json
    anything else      a Hugging Face id, through huggingface_hub and its own shared cache

Owns: the cache's place, the lock and rename that make building the demo model atomic, one clear line per failure.
Does not: load models (worker.models) or know how the demo model is converted (cluster.demo_model).
Invariants: a returned directory is complete, but for weights that nobody asked for; two processes may resolve the
same model at once; a second call neither downloads nor converts.
"""

from __future__ import annotations

import errno
import fcntl
import logging
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from cluster.core.errors import ConfigError

logger = logging.getLogger(__name__)

DEMO = "demo"
DEMO_NAME = "SmolLM2-135M-Instruct"
_SMALL_FILES = ["*.json", "*.jinja", "*.model", "*.txt"]
_WEIGHT_FILES = ["*.safetensors"]


def default_cache_dir() -> Path:
    """$KVRAY_CACHE, else ~/.cache/kvray."""
    chosen = os.environ.get("KVRAY_CACHE")
    return Path(chosen).expanduser() if chosen else Path.home() / ".cache" / "kvray"


def resolve_model(
    model: str,
    on_progress: Callable[[str, float], None] | None = None,
    cache_dir: Path | None = None,
    *,
    weights: bool = True,
) -> Path:
    """The local directory of `model`. `on_progress(phase, share)` hears of "download" and "convert".

    `weights` False: config and tokenizer are enough, so a hub model's weights are not downloaded.
    """
    report = on_progress or (lambda _phase, _share: None)
    if model == DEMO:
        return _demo(cache_dir or default_cache_dir(), report)
    path = Path(model).expanduser()
    if path.is_dir():
        if not (path / "config.json").is_file():
            raise ConfigError(f"{path} is not a model directory: it has no config.json")
        return path.resolve()
    if path.is_file():
        raise ConfigError(f"{path} is a file; --model takes its directory, with config.json and tokenizer.json in it")
    if path.exists() or model.startswith((".", "/", "~")) or model.count("/") > 1:
        raise ConfigError(f"model {model!r}: there is no such directory")
    return _from_hub(model, report, _SMALL_FILES + (_WEIGHT_FILES if weights else []))


def _demo(cache_dir: Path, report: Callable[[str, float], None]) -> Path:
    target = cache_dir / "models" / DEMO_NAME
    if (target / "config.json").is_file():
        return target
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with _locked(target.parent / f".{DEMO_NAME}.lock"):
            if not (target / "config.json").is_file():
                _build_demo(target, report)
    except OSError as error:
        raise ConfigError(f"cannot write the demo model to {target}: {_disk_reason(error)}") from error
    return target


def _build_demo(target: Path, report: Callable[[str, float], None]) -> None:
    """Build beside the target, then rename: readers see the whole model or none."""
    from cluster.demo_model import build_demo_model  # needs gguf and numpy, which a ready cache does not

    with tempfile.TemporaryDirectory(prefix=".build-", dir=target.parent) as scratch:
        built = Path(scratch) / "model"
        built.mkdir()
        build_demo_model(built, Path(scratch), report)
        if target.exists():  # debris without a config.json; ours alone, because we hold the lock
            shutil.rmtree(target)
        built.rename(target)
    logger.info("demo model ready in %s", target)


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """One process at a time; the kernel frees the lock when its holder dies."""
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _from_hub(model: str, report: Callable[[str, float], None], patterns: list[str]) -> Path:
    from huggingface_hub import snapshot_download  # slow to import, and only this branch needs it
    from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError

    report("download", 0.0)
    try:
        path = Path(snapshot_download(model, allow_patterns=patterns))
    except HFValidationError:
        raise ConfigError(f"model {model!r} is neither a directory nor a Hugging Face id (owner/name)") from None
    except (LocalEntryNotFoundError, ConnectionError, TimeoutError) as error:
        raise ConfigError(f"cannot reach the Hugging Face hub for {model!r}: {_first_line(error)}") from error
    except Exception as error:  # the hub's HTTP errors share no base class across its versions
        raise ConfigError(_hub_reason(model, error)) from error
    if not (path / "config.json").is_file():
        raise ConfigError(f"{model!r} on the Hugging Face hub is not a model: it has no config.json")
    report("download", 1.0)
    return path


def _hub_reason(model: str, error: Exception) -> str:
    from huggingface_hub.errors import GatedRepoError, RepositoryNotFoundError

    status = getattr(getattr(error, "response", None), "status_code", None)
    if isinstance(error, GatedRepoError) or status in (401, 403):
        advice = "ask for access on its page and set HF_TOKEN to a token that has it"
        if isinstance(error, RepositoryNotFoundError) and not isinstance(error, GatedRepoError):
            advice = "the id is wrong, or the model is private and HF_TOKEN is missing or wrong"
        return f"the Hugging Face hub does not give out {model!r}: {advice}"
    if isinstance(error, RepositoryNotFoundError):
        return f"the Hugging Face hub has no model {model!r}"
    if isinstance(error, OSError):
        return f"cannot download {model!r}: {_disk_reason(error)}"
    return f"cannot download {model!r}: {_first_line(error)}"


def _disk_reason(error: OSError) -> str:
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return "the disk is full"
    return _first_line(error)


def _first_line(error: Exception) -> str:
    text = str(error).strip()
    return text.splitlines()[0] if text else type(error).__name__
