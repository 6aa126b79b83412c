"""format_bytes: a number of bytes for people.

Owns: the one way in which sizes are written.  Does not: parse sizes (cluster.config).
Invariants: binary units, one decimal, plain bytes below 1 KiB.
"""

from __future__ import annotations


def format_bytes(count: float) -> str:
    size = float(count)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if size < 1024:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.1f} TiB"
