"""route_scheme: equal files give an equal digest anywhere, and what changes the meaning of text changes it."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import tokenizers
from tokenizers import models

from cluster.route_scheme import route_scheme
from cluster.tokenizer import Tokenizer


@pytest.fixture
def model_dir(tmp_path: Path) -> Path:
    path = tmp_path / "model"
    path.mkdir()
    (path / "config.json").write_text(json.dumps({"hidden_size": 8}))
    (path / "chat_template.jinja").write_text("{{ messages[0].content }}")
    (path / "model.safetensors").write_bytes(b"weights")
    write_tokenizer(path, ["a", "b"])
    return path


def write_tokenizer(path: Path, words: list[str]) -> None:
    backend = tokenizers.Tokenizer(models.WordLevel({word: number for number, word in enumerate(words)}, words[0]))
    backend.save(str(path / "tokenizer.json"))


def digest(path: Path, chunk_tokens: int = 64) -> str:
    return route_scheme(path, Tokenizer.from_dir(path), chunk_tokens).digest


def test_equal_files_at_another_place_give_the_same_digest(model_dir: Path, tmp_path: Path) -> None:
    """Router and worker build it apart from each other, each from its own copy."""
    copy = Path(shutil.copytree(model_dir, tmp_path / "copy"))
    assert digest(copy) == digest(model_dir)


def test_weights_are_no_part_of_it(model_dir: Path) -> None:
    """A router on a node without weights comes to the same scheme."""
    before = digest(model_dir)
    (model_dir / "model.safetensors").unlink()
    assert digest(model_dir) == before


def test_the_parts_come_from_the_directory(model_dir: Path) -> None:
    tokenizer = Tokenizer.from_dir(model_dir)
    scheme = route_scheme(model_dir, tokenizer, 32)
    assert (scheme.tokenizer_revision, scheme.chunk_tokens) == (tokenizer.revision, 32)
    assert (scheme.salt, scheme.adapter) == ("", "")


def test_every_change_of_meaning_changes_the_digest(model_dir: Path) -> None:
    digests = [digest(model_dir), digest(model_dir, chunk_tokens=32)]
    (model_dir / "config.json").write_text(json.dumps({"hidden_size": 16}))
    digests.append(digest(model_dir))
    write_tokenizer(model_dir, ["b", "a"])
    digests.append(digest(model_dir))
    (model_dir / "chat_template.jinja").write_text("{{ messages[-1].content }}")
    digests.append(digest(model_dir))
    assert len(set(digests)) == 5
