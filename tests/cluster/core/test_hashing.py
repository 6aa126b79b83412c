"""Chunk hashes: fixed for ever, chained, and never shared between schemes."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cluster.core.hashing import HASH_BYTES, RouteScheme, hash_chunk, hash_prompt, root_hash

SCHEME = RouteScheme(tokenizer_revision="tok-1", model_revision="model-1")
TOKENS = st.lists(st.integers(0, 2**32 - 1), max_size=40)


def test_golden_root_hash() -> None:
    assert SCHEME.digest == "e27ddffce7db44a985307595c93b1cd7"


def test_golden_chunk_hashes() -> None:
    hashes = hash_prompt(root_hash(SCHEME), range(3 * 64 + 10), 64)
    assert [chunk.hex() for chunk in hashes] == [
        "12ac4744b8fd618d3a5387555b2b285a",
        "bce031bb31f7c395533628ae1467a28b",
        "be572811fcd405062e7b7d5e5a6141c8",
    ]


@given(tokens=TOKENS, chunk_tokens=st.integers(1, 7))
def test_a_prompt_is_hashed_chunk_by_chunk(tokens: list[int], chunk_tokens: int) -> None:
    parent = root_hash(SCHEME)
    for number, chunk in enumerate(hash_prompt(parent, tokens, chunk_tokens)):
        parent = hash_chunk(parent, tokens[number * chunk_tokens : (number + 1) * chunk_tokens])
        assert chunk == parent


def test_golden_salted_and_large_token_ids() -> None:
    root = root_hash(SCHEME.with_salt("tenant"))
    assert hash_chunk(root, [2**32 - 1, 0]).hex() == "3fe5c689c7ca15f654621fe0d67f3586"


@given(tokens=TOKENS, cut=st.integers(0, 40), chunk_tokens=st.integers(1, 7))
def test_prefix_of_tokens_gives_prefix_of_hashes(tokens: list[int], cut: int, chunk_tokens: int) -> None:
    root = root_hash(SCHEME)
    whole = hash_prompt(root, tokens, chunk_tokens)
    part = hash_prompt(root, tokens[:cut], chunk_tokens)
    assert part == whole[: len(part)]
    assert len(part) == min(cut, len(tokens)) // chunk_tokens


@given(tokens=st.lists(st.integers(0, 99), min_size=4, max_size=20), at=st.integers(0, 19))
def test_a_changed_token_changes_its_chunk_and_all_later_ones(tokens: list[int], at: int) -> None:
    at %= len(tokens)
    changed = [*tokens[:at], tokens[at] + 1, *tokens[at + 1 :]]
    root = root_hash(SCHEME)
    before, after = hash_prompt(root, tokens, 2), hash_prompt(root, changed, 2)
    same = [a == b for a, b in zip(before, after, strict=True)]
    assert same == [index < at // 2 for index in range(len(before))]


def test_same_tokens_at_another_place_have_another_hash() -> None:
    first, second = hash_prompt(root_hash(SCHEME), [7, 7], 1)
    assert first != second


_TEXT = st.text(alphabet="ab1:", max_size=4)


@settings(max_examples=2 * settings().max_examples)
@given(fields=st.lists(st.tuples(_TEXT, _TEXT, st.integers(1, 3), _TEXT, _TEXT), min_size=2, max_size=2, unique=True))
def test_schemes_that_differ_anywhere_never_share_a_root(fields: list[tuple[str, str, int, str, str]]) -> None:
    roots = {
        root_hash(
            RouteScheme(tokenizer_revision=tok, model_revision=model, chunk_tokens=size, adapter=adapter, salt=salt)
        )
        for tok, model, size, adapter, salt in fields
    }
    assert len(roots) == 2


def test_salt_and_adapter_of_one_name_do_not_collide() -> None:
    salted = RouteScheme(tokenizer_revision="t", model_revision="m", salt="x")
    adapted = RouteScheme(tokenizer_revision="t", model_revision="m", adapter="x")
    assert salted.digest != adapted.digest


def test_with_salt_changes_only_the_salt() -> None:
    scheme = RouteScheme(tokenizer_revision="t", model_revision="m", chunk_tokens=32, adapter="a", version=3)
    assert scheme.with_salt("s").with_salt("") == scheme
    assert scheme.with_salt("s").digest != scheme.digest


@pytest.mark.parametrize("token", [-1, 2**32])
def test_token_out_of_range_is_an_error_not_a_collision(token: int) -> None:
    with pytest.raises(Exception, match=r"format|argument"):
        hash_prompt(root_hash(SCHEME), [token], 1)


def test_hashes_do_not_depend_on_the_process() -> None:
    program = (
        "from cluster.core.hashing import *\n"
        "scheme = RouteScheme(tokenizer_revision='tok-1', model_revision='model-1', salt='s')\n"
        "print(b''.join(hash_prompt(root_hash(scheme), range(256), 64)).hex())"
    )
    outputs = {
        subprocess.run(
            [sys.executable, "-c", program],
            env={**os.environ, "PYTHONHASHSEED": seed},
            capture_output=True,
            check=True,
            text=True,
            timeout=60,
        ).stdout.strip()
        for seed in ("1", "2")
    }
    assert len(outputs) == 1
    assert len(bytes.fromhex(outputs.pop())) == 4 * HASH_BYTES
