"""Prints what a project needs, one requirement per line, so that an image can install it before the sources are there.

python requirements.py pyproject.toml [EXTRA ...]
"""

from __future__ import annotations

import sys
import tomllib
from pathlib import Path


def requirements(pyproject: Path, extras: list[str]) -> list[str]:
    """KeyError for an extra that the project does not have."""
    project = tomllib.loads(pyproject.read_text())["project"]
    more = [line for name in extras for line in project["optional-dependencies"][name]]
    return [*project["dependencies"], *more]


if __name__ == "__main__":
    print(*requirements(Path(sys.argv[1]), sys.argv[2:]), sep="\n")
