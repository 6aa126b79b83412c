"""one_at_a_time: a lock between the processes of one machine, or of one shared volume, that fetch the same model.

Owns: taking the lock and saying that it is waited for.
Does not: know what is fetched or where it goes.
Invariants: the kernel frees the lock when its holder dies; where nobody may write, nobody can fetch and no lock is
needed.
"""

from __future__ import annotations

import errno
import fcntl
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

logger = logging.getLogger(__name__)

_READ_ONLY = (errno.EROFS, errno.EACCES, errno.EPERM)


@contextmanager
def one_at_a_time(path: Path, what: str) -> Iterator[None]:
    """Hold the lock file `path` inside the block. `what` names, in the log, what somebody else is fetching."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        file = path.open("w")
    except OSError as error:
        if error.errno not in _READ_ONLY:
            raise
        yield  # a volume that is mounted read-only: what is there is used, and what is not fails by itself
        return
    with file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            logger.info("waiting: another process is fetching %s", what)
            fcntl.flock(file, fcntl.LOCK_EX)
        yield
