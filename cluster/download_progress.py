"""DownloadProgress: how far a download is, as log lines and for whoever draws a bar.

    downloading owner/name: 30 % (4.2 GiB of 14.2 GiB, 95.3 MiB/s)

Owns: counting bytes, the rate, and when a line is due.
Does not: download, or draw (cluster.progress).
Invariants: a line at most per 10 % or per 10 s, whichever is first; nothing is said when nothing had to be fetched;
bytes may be added from several threads.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable

from cluster.core.byte_size import format_bytes

logger = logging.getLogger(__name__)

LINE_SHARE = 0.1
LINE_INTERVAL_S = 10.0

Report = Callable[[str, float], None]


class DownloadProgress:
    """`total` 0: not known. `report(phase, share)` hears of the phase "download"."""

    def __init__(
        self, model: str, total: int, report: Report, clock: Callable[[], float] = time.monotonic, already: int = 0
    ) -> None:
        self._model = model
        self._total = total
        self._report = report
        self._clock = clock
        self._lock = threading.Lock()
        self._done = self._already = already
        self._started = self._line_at = clock()
        self._line_share = self._share()

    def add(self, count: int) -> None:
        with self._lock:
            self._done += count
            now, share = self._clock(), self._share()
            if share >= self._line_share + LINE_SHARE - 1e-9 or now >= self._line_at + LINE_INTERVAL_S:
                self._line_at, self._line_share = now, share
                logger.info("downloading %s: %s", self._model, self._words(now))
            self._report("download", share)

    def finish(self) -> None:
        """All is here."""
        seconds = max(self._clock() - self._started, 1e-9)
        fetched = self._done - self._already
        if fetched:
            logger.info("downloaded %s: %s in %.1f s", self._model, format_bytes(fetched), seconds)
            self._report("download", 1.0)

    def _share(self) -> float:
        return min(self._done / self._total, 1.0) if self._total else 0.0

    def _words(self, now: float) -> str:
        rate = (self._done - self._already) / max(now - self._started, 1e-9)
        if not self._total:
            return f"{format_bytes(self._done)} ({format_bytes(rate)}/s)"
        sizes = f"{format_bytes(self._done)} of {format_bytes(self._total)}"
        return f"{100 * self._share():.0f} % ({sizes}, {format_bytes(rate)}/s)"
