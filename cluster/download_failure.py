"""Why a model could not be fetched, in one line without secrets; and the check that it fits on the disk.

Owns: these texts, what of foreign errors may be shown, and the free space that is asked for before a download.
Does not: decide what failed where (cluster.hub_model, cluster.remote_model, cluster.model_source).
Invariants: one line; no token, key or signature that a foreign message may hold (for which reason the errors made of
these lines have no cause: Serve prints causes).
"""

from __future__ import annotations

import errno
import re
import shutil
from pathlib import Path

from cluster.core.byte_size import format_bytes
from cluster.core.errors import ConfigError

_ROOM = "make room, or set HF_HOME (hub models) or KVRAY_CACHE (all others) to a larger disk"
_SPARE_BYTES = 64 * 2**20  # so that logs and the like can still be written
_LONGEST = 300
_NAMED_SECRET = re.compile(r"(?i)((?:token|secret|password|signature|credential|authorization|key)\w*\s*[=:]\s*)\S+")
_BARE_SECRET = re.compile(r"\b(hf_|Bearer |AKIA|ASIA|ya29\.)[\w.~+/-]+")


def first_line(error: BaseException) -> str:
    """The beginning of what a library says, with whatever looks like a secret left out."""
    text = str(error).strip()
    line = text.splitlines()[0] if text else type(error).__name__
    return _BARE_SECRET.sub(r"\1***", _NAMED_SECRET.sub(r"\1***", line))[:_LONGEST]


def is_disk_full(error: BaseException) -> bool:
    return isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT)


def disk_reason(error: OSError) -> str:
    return f"the disk is full; {_ROOM}" if is_disk_full(error) else first_line(error)


def check_free_space(model: str, needed_bytes: int, place: Path) -> None:
    """ConfigError unless the disk of `place` has room for that much."""
    existing = next(path for path in (place, *place.parents) if path.exists())
    free = shutil.disk_usage(existing).free
    if needed_bytes and free < needed_bytes + _SPARE_BYTES:
        raise ConfigError(
            f"{model!r} needs {format_bytes(needed_bytes)} more on the disk of {existing}, "
            f"which has {format_bytes(free)} free; {_ROOM}"
        )
