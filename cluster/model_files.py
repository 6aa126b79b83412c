"""Which files of a model repository are needed to serve it.

Owns: the patterns, for the hub and for object stores alike.
Does not: list or fetch files (cluster.hub_model, cluster.remote_model).
Invariants: nothing below a folder is wanted (other formats live there), and no second copy of the weights.
"""

from __future__ import annotations

from collections.abc import Iterable
from fnmatch import fnmatch

CONFIG_FILE = "config.json"
SMALL_FILES = ("*.json", "*.jinja", "*.model", "*.txt")  # config, tokenizer, chat template
WEIGHT_FILES = ("*.safetensors",)
IGNORED_FILES = ("*/*", "consolidated*.safetensors", ".*")  # Mistral's own format repeats all weights


def patterns(*, weights: bool) -> list[str]:
    return [*SMALL_FILES, *(WEIGHT_FILES if weights else ())]


def wanted_files(names: Iterable[str], *, weights: bool) -> list[str]:
    """Those of `names` that are needed, in order."""
    chosen = patterns(weights=weights)
    return sorted(name for name in names if _matches(name, chosen) and not _matches(name, IGNORED_FILES))


def is_weights(name: str) -> bool:
    return _matches(name, WEIGHT_FILES)


def _matches(name: str, patterns: Iterable[str]) -> bool:
    return any(fnmatch(name, pattern) for pattern in patterns)
