"""From what the user wrote after --model to a local Hugging Face directory.

    demo                        the demo model, built once in kvray's cache
    a local directory           itself, when it holds a config.json
    s3://... or gs://...        a copy in kvray's cache (cluster.remote_model)
    anything else               a Hugging Face id, in the hub's own cache (cluster.hub_model)

kvray's cache is $KVRAY_CACHE, the hub's is below $HF_HOME; both may be on a volume that several machines share.

Owns: telling the sources apart, the cache's place, and building the demo model once.
Does not: download (hub_model, remote_model), load models (worker.models) or convert the demo model (demo_model).
Invariants: a returned directory is complete, but for weights that nobody asked for; two processes may resolve the
same model at once; a second call neither downloads nor converts; a failure is a ConfigError of one line.
"""

from __future__ import annotations

import logging
import os
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path

from cluster.core.errors import ConfigError
from cluster.download_failure import disk_reason
from cluster.download_lock import one_at_a_time
from cluster.hub_model import fetch_from_hub
from cluster.model_files import CONFIG_FILE
from cluster.remote_model import fetch_from_store

logger = logging.getLogger(__name__)

DEMO = "demo"
DEMO_NAME = "SmolLM2-135M-Instruct"


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

    `weights` False: config and tokenizer are enough, so weights are not downloaded.
    """
    report = on_progress or (lambda _phase, _share: None)
    if model == DEMO:
        return _demo(cache_dir or default_cache_dir(), report)
    if "://" in model:
        return fetch_from_store(model, (cache_dir or default_cache_dir()) / "models", report, weights=weights)
    path = Path(model).expanduser()
    if path.is_dir():
        if not (path / CONFIG_FILE).is_file():
            raise ConfigError(f"{path} is not a model directory: it has no config.json")
        return path.resolve()
    if path.is_file():
        raise ConfigError(f"{path} is a file; --model takes its directory, with config.json and tokenizer.json in it")
    if path.exists() or model.startswith((".", "/", "~")) or model.count("/") > 1:
        raise ConfigError(f"model {model!r}: there is no such directory")
    return fetch_from_hub(model, report, weights=weights)


def _demo(cache_dir: Path, report: Callable[[str, float], None]) -> Path:
    target = cache_dir / "models" / DEMO_NAME
    if (target / CONFIG_FILE).is_file():
        return target
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with one_at_a_time(target.parent / f".{DEMO_NAME}.lock", "the demo model"):
            if not (target / CONFIG_FILE).is_file():
                _build_demo(target, report)
    except OSError as error:
        raise ConfigError(f"cannot write the demo model to {target}: {disk_reason(error)}") from error
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
