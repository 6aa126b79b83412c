"""resolve_with_progress: bars for work that is done, and not a byte when there is none."""

from __future__ import annotations

import io
from collections.abc import Callable
from pathlib import Path

import pytest
from rich.console import Console

from cluster import progress
from cluster.core.errors import ConfigError


def test_nothing_is_drawn_when_nothing_has_to_be_done(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    output = io.StringIO()
    assert progress.resolve_with_progress(str(tmp_path), Console(file=output)) == tmp_path.resolve()
    with pytest.raises(ConfigError):
        progress.resolve_with_progress(str(tmp_path / "absent"), Console(file=output))
    assert output.getvalue() == ""


@pytest.mark.parametrize("fails", [False, True])
def test_a_bar_per_phase_with_its_share(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fails: bool) -> None:
    def resolve(model: str, report: Callable[[str, float], None]) -> Path:
        report("download", 0.0)
        report("download", 1.0)
        report("convert", 0.25)
        if fails:
            raise ConfigError("the disk is full")
        return tmp_path

    monkeypatch.setattr(progress, "resolve_model", resolve)
    output = io.StringIO()
    console = Console(file=output)
    if fails:
        with pytest.raises(ConfigError, match="disk"):
            progress.resolve_with_progress("demo", console)
    else:
        assert progress.resolve_with_progress("demo", console) == tmp_path
    lines = [line.split() for line in output.getvalue().splitlines() if line.strip()]
    assert [(line[0], line[-3]) for line in lines] == [("download", "100"), ("convert", "25")]
    console.print("after")
    assert output.getvalue().endswith("after\n"), "the display has let go of the console"
