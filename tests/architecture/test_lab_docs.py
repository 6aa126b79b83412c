"""The documents that show the lab's figures: every one is of the run that docs/lab_figures.json keeps."""

from __future__ import annotations

import json
import re

import pytest

from benchmarks.refresh_lab_docs import DOCUMENTS, FIGURES, MARK, PICTURE, ROOT, filled, unknown

WRITTEN = [name for name in DOCUMENTS if (ROOT / name).exists()]


@pytest.mark.parametrize("name", WRITTEN)
def test_every_figure_is_of_the_kept_run(name: str) -> None:
    text = (ROOT / name).read_text("utf-8")
    stored = json.loads((ROOT / FIGURES).read_text("utf-8"))
    assert len(MARK.findall(text)) > 20
    assert unknown(text, stored["figures"]) == set()
    assert filled(text, stored["figures"]) == text
    assert not stored["short"]


@pytest.mark.parametrize("name", WRITTEN)
def test_every_picture_and_link_is_there(name: str) -> None:
    text = (ROOT / name).read_text("utf-8")
    pictures = PICTURE.findall(text)
    assert len(pictures) >= 4
    for picture in pictures:
        path = ROOT / "docs" / "pictures" / picture
        assert path.read_bytes().startswith(b"\x89PNG") and path.stat().st_size < 60_000
    links = re.findall(r"\]\((?!https?:|#|pictures/)([^)#]+)(?:#[^)]*)?\)", text)
    assert links and not [link for link in links if not ((ROOT / name).parent / link).exists()]


def test_a_figure_is_filled_in_by_name_and_format() -> None:
    text = "a <!--=x.y:.1f-->?<!--/--> b <!--=x.z:.0%-->?<!--/--> c <!--=other-->7<!--/-->"
    assert filled(text, {"x.y": 1.26, "x.z": 0.5}) == (
        "a <!--=x.y:.1f-->1.3<!--/--> b <!--=x.z:.0%-->50%<!--/--> c <!--=other-->7<!--/-->"
    )
    assert unknown(text, {"x.y": 1.0}) == {"x.z", "other"}
