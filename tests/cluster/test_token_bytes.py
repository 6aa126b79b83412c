"""What single tokens write, in the kinds of vocabulary that models have."""

from __future__ import annotations

import tokenizers
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import decoders, models, normalizers, pre_tokenizers

from cluster.token_bytes import TokenBytes

SPECIALS = ["<s>", "<|im_end|>"]


def byte_level() -> tokenizers.Tokenizer:
    vocab = {char: number for number, char in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    for piece in ("Ġt", "he", "Ġthe"):
        vocab[piece] = len(vocab)
    backend = tokenizers.Tokenizer(models.BPE(vocab, [("Ġ", "t"), ("h", "e"), ("Ġt", "he")]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(SPECIALS)
    return backend


def byte_fallback() -> tokenizers.Tokenizer:
    vocab = {"<unk>": 0, **{f"<0x{byte:02X}>": byte + 1 for byte in range(256)}}
    for piece in ["▁", *"abcdefgh", "▁a", "▁ab"]:
        vocab[piece] = len(vocab)
    backend = tokenizers.Tokenizer(
        models.BPE(vocab, [("▁", "a"), ("▁a", "b")], unk_token="<unk>", byte_fallback=True, fuse_unk=True)
    )
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    backend.add_special_tokens(SPECIALS)
    return backend


def metaspace() -> tokenizers.Tokenizer:
    backend = tokenizers.Tokenizer(models.WordLevel({"▁a": 0, "▁b": 1, "c": 2}, unk_token="c"))
    backend.pre_tokenizer = pre_tokenizers.Metaspace()
    backend.decoder = decoders.Metaspace()
    return backend


def id_of(backend: tokenizers.Tokenizer, piece: str) -> int:
    found = backend.token_to_id(piece)
    assert isinstance(found, int)
    return found


BYTE_LEVEL, BYTE_FALLBACK = byte_level(), byte_fallback()
texts = st.text(alphabet=st.characters(exclude_categories=["Cs"]), max_size=30)


@given(texts)
def test_the_bytes_of_a_texts_tokens_are_the_text(text: str) -> None:
    table = TokenBytes(BYTE_LEVEL)
    assert b"".join(table.of(token) for token in BYTE_LEVEL.encode(text).ids) == text.encode()
    table = TokenBytes(BYTE_FALLBACK)
    ids = BYTE_FALLBACK.encode(text, add_special_tokens=False).ids
    assert b"".join(table.of(token) for token in ids) == (f" {text}" if text else "").encode()


def test_halves_of_characters_control_tokens_and_unknown_ids() -> None:
    for backend in (BYTE_LEVEL, BYTE_FALLBACK):
        table = TokenBytes(backend)
        assert table.of(id_of(backend, "<|im_end|>")) == b"<|im_end|>"
        assert table.of(99_999) == b""
    table = TokenBytes(BYTE_LEVEL)
    assert [table.of(token) for token in BYTE_LEVEL.encode("漢").ids] == [b"\xe6", b"\xbc", b"\xa2"]
    assert table.of(id_of(BYTE_LEVEL, "Ġthe")) == b" the"
    table = TokenBytes(BYTE_FALLBACK)
    assert table.of(0xE6 + 1) == b"\xe6"
    assert table.of(id_of(BYTE_FALLBACK, "▁ab")) == b" ab"


def test_a_space_is_not_lost_where_decoders_strip_the_first() -> None:
    backend = metaspace()
    table = TokenBytes(backend)
    assert [table.of(token) for token in (0, 1, 2)] == [b" a", b" b", b"c"]


def test_a_tokenizer_without_a_decoder() -> None:
    backend = tokenizers.Tokenizer(models.WordLevel({"a": 0, "b": 1}, unk_token="a"))
    assert TokenBytes(backend).of(1) in (b"b", b" b")
