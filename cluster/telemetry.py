"""Logging set-up, called once per process.

Owns: the log format and level.
Does not: create loggers (modules use logging.getLogger(__name__)) or log prompt text.
Invariants: calling it twice changes nothing.
"""

from __future__ import annotations

import logging
import sys


def configure_logging(role: str, level: int = logging.INFO) -> None:
    """Send kvray's loggers to stderr, each line marked with the process's role."""
    for name in ("cluster", "router", "worker"):
        logger = logging.getLogger(name)
        logger.setLevel(level)
        if not logger.handlers:
            # Not sys.stderr: in a replica that is Serve's own logger, which shows nothing and buffers a thousand lines.
            handler = logging.StreamHandler(sys.__stderr__)
            handler.setFormatter(logging.Formatter(f"%(asctime)s %(levelname)s kvray {role}: %(message)s"))
            logger.addHandler(handler)
            logger.propagate = False
