"""A model of the Hugging Face hub: into huggingface_hub's own cache, which other programs share.

    HF_TOKEN     the token for private and gated models      HF_HOME        where the cache lives (a volume, say)
    HF_ENDPOINT  another hub                                 HF_HUB_OFFLINE use the cache only

Owns: which files are fetched, the checks before, progress, and one clear line per failure.
Does not: keep files itself: huggingface_hub resumes, verifies and stores them, and uses them again.
Invariants: one process at a time fetches a model into a cache; nothing is fetched that cannot fit or cannot be served;
a model that is whole in the cache is found without the hub; the token is never shown.
"""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

from cluster.core.errors import ConfigError
from cluster.download_failure import check_free_space, disk_reason, first_line
from cluster.download_lock import one_at_a_time
from cluster.download_progress import DownloadProgress, Report
from cluster.model_files import CONFIG_FILE, IGNORED_FILES, is_weights, patterns, wanted_files

logger = logging.getLogger(__name__)

_LISTING_TIMEOUT_S = 20.0


def fetch_from_hub(model: str, report: Report, *, weights: bool) -> Path:
    """The model's directory in the hub's cache. `weights` False: only config and tokenizer are needed."""
    import huggingface_hub  # slow to import, and only this branch needs it
    from huggingface_hub import constants
    from huggingface_hub.errors import HFValidationError
    from huggingface_hub.utils._validators import validate_repo_id

    try:
        validate_repo_id(model)
    except HFValidationError:
        raise ConfigError(f"model {model!r} is neither a directory nor a Hugging Face id (owner/name)") from None
    cache = Path(constants.HF_HUB_CACHE)
    try:
        with one_at_a_time(cache / ".locks" / f"kvray--{model.replace('/', '--')}.lock", model):
            missing = _missing_bytes(model, weights)
            check_free_space(model, missing, cache)
            progress = DownloadProgress(model, missing, report)
            found = huggingface_hub.snapshot_download(
                model,
                allow_patterns=patterns(weights=weights),
                ignore_patterns=list(IGNORED_FILES),
                tqdm_class=_bars(progress),
            )
            progress.finish()
    except ConfigError:
        raise
    except Exception as error:  # the hub's HTTP errors share no base class across its versions
        raise ConfigError(_reason(model, error)) from None
    path = Path(found)
    _check_names(model, [entry.name for entry in path.iterdir()], weights)
    return path


def _missing_bytes(model: str, weights: bool) -> int:
    """What has still to be fetched; 0 where that cannot be told, because then the download itself says why."""
    import huggingface_hub

    try:
        info = huggingface_hub.HfApi().model_info(model, files_metadata=True, timeout=_LISTING_TIMEOUT_S)
        sizes = {file.rfilename: file.size or 0 for file in info.siblings or []}
    except Exception as error:
        logger.debug("no list of files of %s: %s", model, first_line(error))
        return 0
    wanted = wanted_files(sizes, weights=weights)
    _check_names(model, wanted, weights)

    def is_here(name: str) -> bool:
        return isinstance(huggingface_hub.try_to_load_from_cache(model, name, revision=info.sha), str)

    return sum(sizes[name] for name in wanted if not is_here(name))


def _check_names(model: str, names: list[str], weights: bool) -> None:
    if CONFIG_FILE not in names:
        raise ConfigError(f"{model!r} on the Hugging Face hub is not a model: it has no {CONFIG_FILE}")
    if weights and not any(is_weights(name) for name in names):
        raise ConfigError(f"{model!r} on the Hugging Face hub has no *.safetensors weights; use a model that has them")


def _bars(progress: DownloadProgress) -> Any:
    """A bar class that draws nothing and passes on the bytes that are written."""
    from tqdm import tqdm

    class Bar(tqdm):  # type: ignore[misc]
        def __init__(self, *args: Any, **options: Any) -> None:
            # Of two bars in bytes one counts what came over the network, packed, and one what is on the disk.
            self._counts = options.get("unit") == "B" and not str(options.get("desc")).startswith("Downloading bytes")
            super().__init__(*args, **{**options, "disable": True})

        def update(self, n: float | None = 1) -> None:
            if self._counts and n:
                progress.add(int(n))

    return Bar


def _reason(model: str, error: Exception) -> str:
    from huggingface_hub.errors import (
        GatedRepoError,
        HfHubHTTPError,
        LocalEntryNotFoundError,
        RepositoryNotFoundError,
    )

    if isinstance(error, LocalEntryNotFoundError) and isinstance(error.__cause__, HfHubHTTPError):
        error = error.__cause__  # the hub was reached; that nothing is cached either is no news
    status = getattr(getattr(error, "response", None), "status_code", None)
    refused = f"the Hugging Face hub does not give out {model!r}"
    if isinstance(error, GatedRepoError):
        return f"{refused}: ask for access on its page and set HF_TOKEN to a token of that account"
    if isinstance(error, RepositoryNotFoundError):
        if status == 404:
            return f"the Hugging Face hub has no model {model!r}; check the id (owner/name)"
        return f"{refused}: the id is wrong, or the model is private and HF_TOKEN is missing or wrong"
    if status == 401:
        return f"{refused}: HF_TOKEN is wrong or has expired"
    if status == 403:
        return f"{refused}: HF_TOKEN has no permission to read it"
    if status == 429:
        return f"{refused} now: too many requests; set HF_TOKEN, or try again later"
    if isinstance(error, LocalEntryNotFoundError | ConnectionError | TimeoutError):
        return f"cannot reach the Hugging Face hub for {model!r}, and it is not in the cache: {first_line(error)}"
    if isinstance(error, OSError) and error.errno is not None:
        return f"cannot download {model!r}: {disk_reason(error)}"
    return f"cannot download {model!r}: {first_line(error)}"
