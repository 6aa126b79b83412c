"""Fixtures that more than one part of the tests needs."""

from __future__ import annotations

from pathlib import Path

import pytest

from cluster.model_source import resolve_model


@pytest.fixture(scope="session")
def demo_model_dir() -> Path:
    """The demo model, fetched and converted on first use (tests that ask for it carry the `model` marker)."""
    return resolve_model("demo")
