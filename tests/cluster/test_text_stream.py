"""TextStream: whole characters, stop strings, and independence from how tokens are cut into feeds."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import decoders, models, normalizers, pre_tokenizers, trainers

from cluster.chat_template import ChatTemplate
from cluster.text_stream import TextPiece, TextStream
from cluster.tokenizer import Tokenizer


def byte_level() -> Tokenizer:
    backend = tokenizers.Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=300,
        special_tokens=["<|im_start|>", "<|im_end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator(["the quick brown fox jumps over the lazy dog"] * 4, trainer)
    return Tokenizer(backend, ChatTemplate(None, {}))


def byte_fallback() -> Tokenizer:
    """Llama's kind: words with a leading-space mark, unknown characters as byte tokens."""
    vocab = {"<unk>": 0, **{f"<0x{byte:02X}>": byte + 1 for byte in range(256)}}
    for piece in ["▁", *"abcdefgh", "▁a", "▁ab"]:
        vocab[piece] = len(vocab)
    merges = [("▁", "a"), ("▁a", "b")]
    backend = tokenizers.Tokenizer(models.BPE(vocab, merges, unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return Tokenizer(backend, ChatTemplate(None, {}))


BYTE_LEVEL = byte_level()
BYTE_FALLBACK = byte_fallback()

texts = st.text(alphabet=st.characters(exclude_categories=["Cs"]), max_size=40) | st.text(
    alphabet="abc é漢🎉\ufffd", max_size=40
)


def run(
    tokenizer: Tokenizer, ids: list[int], cuts: list[int], stop: tuple[str, ...] = (), **options: Any
) -> list[TextPiece]:
    """Feed `ids` cut at `cuts`, then finish."""
    stream = TextStream(tokenizer, stop, **options)
    bounds = [0, *sorted(min(cut, len(ids)) for cut in cuts), len(ids)]
    pieces = [stream.feed(ids[a:b]) for a, b in itertools.pairwise(bounds)]
    tail = stream.finish()
    return [*pieces, TextPiece(text=tail, token_ids=(), stopped=stream.stopped)]


def joined(pieces: list[TextPiece]) -> str:
    return "".join(piece.text for piece in pieces)


@pytest.mark.parametrize("tokenizer", [BYTE_LEVEL, BYTE_FALLBACK], ids=["byte_level", "byte_fallback"])
@given(text=texts, cuts=st.lists(st.integers(0, 60), max_size=8))
def test_pieces_add_up_to_the_whole_text(tokenizer: Tokenizer, text: str, cuts: list[int]) -> None:
    ids = tokenizer.encode(text)
    pieces = run(tokenizer, ids, cuts)
    assert joined(pieces) == tokenizer.decode(ids) == text
    assert [token for piece in pieces for token in piece.token_ids] == ids


@given(ids=st.lists(st.integers(0, 310), max_size=60), cuts=st.lists(st.integers(0, 60), max_size=8))
def test_any_ids_add_up_to_decode(ids: list[int], cuts: list[int]) -> None:
    """Broken UTF-8, control tokens and ids outside the vocabulary included."""
    assert joined(run(BYTE_LEVEL, ids, cuts)) == BYTE_LEVEL.decode(ids)


@given(ids=st.lists(st.integers(0, 270), max_size=40), cuts=st.lists(st.integers(0, 40), max_size=6))
def test_broken_byte_runs_do_not_depend_on_the_cuts(ids: list[int], cuts: list[int]) -> None:
    assert joined(run(BYTE_FALLBACK, ids, cuts)) == joined(run(BYTE_FALLBACK, ids, []))


@given(text=texts, cuts=st.lists(st.integers(0, 60), max_size=8))
def test_no_half_characters(text: str, cuts: list[int]) -> None:
    seen = ""
    for piece in run(BYTE_LEVEL, BYTE_LEVEL.encode(text), cuts):
        seen += piece.text
        assert text.startswith(seen)


def test_unfinished_character_is_held_and_then_replaced() -> None:
    ids = BYTE_LEVEL.encode("a漢")
    stream = TextStream(BYTE_LEVEL)
    assert stream.feed(ids[:-1]).text == "a"
    assert stream.finish() == "\ufffd"
    stream = TextStream(BYTE_LEVEL)
    assert stream.feed(ids[:-1]).text + stream.feed(ids[-1:]).text == "a漢"


def test_a_long_run_of_broken_bytes_is_not_held_back() -> None:
    broken = BYTE_LEVEL.encode("漢")[:1] * 100
    stream = TextStream(BYTE_LEVEL)
    assert len(stream.feed(broken).text) == 64
    assert len(stream.finish()) == 36


def test_good_character_stays_when_a_bad_byte_follows() -> None:
    good = [byte + 1 for byte in "漢".encode()]
    stream = TextStream(BYTE_FALLBACK)
    assert stream.feed(good).text == "漢"
    assert stream.feed([0xFF + 1]).text + stream.finish() == "\ufffd"


def oracle(text: str, stop: tuple[str, ...], *, include: bool = False, behind: int = 0) -> str:
    """Let the text grow by single characters until it ends with a stop string; cut the longest such.

    behind: characters at the beginning with which no stop string counts that is complete there.
    """
    for end in range(behind + 1, len(text) + 1):
        hits = [s for s in stop if text[:end].endswith(s)]
        if hits:
            return text[: end if include else end - max(map(len, hits))]
    return text


stops = st.lists(st.text(alphabet="ab é漢", min_size=1, max_size=4), max_size=3).map(tuple)


@settings(max_examples=3 * settings().max_examples)
@given(
    text=st.text(alphabet="aab é漢", max_size=30),
    stop=stops,
    cuts=st.lists(st.integers(0, 60), max_size=8),
)
def test_stops_against_the_oracle(text: str, stop: tuple[str, ...], cuts: list[int]) -> None:
    ids = BYTE_LEVEL.encode(text)
    pieces = run(BYTE_LEVEL, ids, cuts, stop)
    expected = oracle(text, stop)
    assert joined(pieces) == expected
    assert pieces[-1].stopped == (expected != text or any(s in text for s in stop))
    used = [token for piece in pieces for token in piece.token_ids]
    assert used == ids[: len(used)]
    if pieces[-1].stopped:
        # The last counted token is the one that completed the stop string.
        assert oracle(BYTE_LEVEL.decode(used), stop) == expected
        assert not any(s in BYTE_LEVEL.decode(used[:-1]) for s in stop)


@given(
    text=st.text(alphabet="aab é漢", max_size=30),
    stop=stops,
    cuts=st.lists(st.integers(0, 60), max_size=8),
    include=st.booleans(),
    min_tokens=st.integers(0, 12),
)
def test_included_and_late_stops_against_the_oracle(
    text: str, stop: tuple[str, ...], cuts: list[int], include: bool, min_tokens: int
) -> None:
    ids = BYTE_LEVEL.encode(text)
    pieces = run(BYTE_LEVEL, ids, cuts, stop, include_stop=include, min_tokens=min_tokens)
    whole = BYTE_LEVEL.decode(ids[:min_tokens])
    behind = len(whole.rstrip("\ufffd"))  # an unfinished character is complete with a later token
    expected = oracle(text, stop, include=include, behind=behind)
    assert joined(pieces) == expected
    assert pieces[-1].stopped == (oracle(text, stop, behind=behind) != text)


def test_two_stops_that_overlap_end_at_the_one_that_is_complete_first() -> None:
    for stop in (("bcd", "abcdef"), ("abcdef", "bcd")):
        pieces = run(BYTE_LEVEL, BYTE_LEVEL.encode("xabcdefg"), [1, 3, 5], stop)
        assert joined(pieces) == "xa"
        assert joined(run(BYTE_LEVEL, BYTE_LEVEL.encode("xabcdefg"), [1, 3, 5], stop, include_stop=True)) == "xabcd"


def test_a_stop_string_in_the_first_tokens_is_text_and_may_begin_a_later_one() -> None:
    ids = [token for char in "ENDEND!" for token in BYTE_LEVEL.encode(char)]
    assert joined(run(BYTE_LEVEL, ids, [], ("END",), min_tokens=3)) == "END"
    assert joined(run(BYTE_LEVEL, ids, [], ("END",), min_tokens=6)) == "ENDEND!"
    assert joined(run(BYTE_LEVEL, ids, [], ("ND", "DEN"), min_tokens=3)) == "EN"


def test_stop_across_tokens_is_never_given_out() -> None:
    stream = TextStream(BYTE_LEVEL, ("END",))
    ids = BYTE_LEVEL.encode("ab END zz")
    pieces = [stream.feed([token]) for token in ids]
    assert "".join(piece.text for piece in pieces) == "ab "
    assert stream.stopped
    counted = sum(len(piece.token_ids) for piece in pieces)
    assert BYTE_LEVEL.decode(ids[:counted]).endswith("END")
    assert stream.finish() == ""


def test_false_start_is_released() -> None:
    stream = TextStream(BYTE_LEVEL, ("END",))
    assert stream.feed(BYTE_LEVEL.encode("xEN")).text == "x"
    assert stream.feed(BYTE_LEVEL.encode("d")).text == "ENd"
    assert stream.feed(BYTE_LEVEL.encode("EN")).text == ""
    assert stream.finish() == "EN"


def test_control_tokens_have_no_text() -> None:
    start, end = sorted(BYTE_LEVEL.special_ids)
    stream = TextStream(BYTE_LEVEL)
    pieces = [stream.feed([token]) for token in (start, *BYTE_LEVEL.encode("hi"), end, 99_999)]
    assert "".join(piece.text for piece in pieces) == "hi"
    assert sum(len(piece.token_ids) for piece in pieces) == len(BYTE_LEVEL.encode("hi")) + 3
