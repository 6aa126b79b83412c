"""TokenBytes: what a single token writes, as bytes. For replies that name tokens (log probabilities).

    byte-level vocabulary    each character of a piece stands for one byte, so half a character is told exactly
    byte tokens <0xE6>       that byte
    added tokens             their own text, control tokens too
    all others               what decoding adds behind another token

Owns: this table, filled as tokens are asked for.
Does not: decode texts (cluster.text_stream); the bytes of an answer's tokens need not add up to it where a decoder
joins or strips.
Invariants: the same id always gives the same bytes; an id without a piece has none. May be used from several threads.
"""

from __future__ import annotations

import re

import tokenizers

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


class TokenBytes:
    def __init__(self, backend: tokenizers.Tokenizer) -> None:
        self._backend = backend
        self._added = {token_id: token.content for token_id, token in backend.get_added_tokens_decoder().items()}
        decoder = b"" if backend.decoder is None else backend.decoder.__getstate__()
        self._byte_of = _byte_level() if b'"ByteLevel"' in decoder else {}
        self._has_byte_tokens = b'"ByteFallback"' in decoder
        self._known: dict[int, bytes] = {}

    def of(self, token_id: int) -> bytes:
        found = self._known.get(token_id)
        if found is None:
            found = self._known[token_id] = self._look_up(token_id)
        return found

    def _look_up(self, token_id: int) -> bytes:
        if token_id in self._added:
            return str(self._added[token_id]).encode("utf-8")
        piece = self._backend.id_to_token(token_id)
        if piece is None:
            return b""
        if self._byte_of and all(char in self._byte_of for char in piece):
            return bytes(self._byte_of[char] for char in piece)
        match = _BYTE_TOKEN.fullmatch(piece) if self._has_byte_tokens else None
        return bytes([int(match[1], 16)]) if match else self._behind_another(token_id).encode("utf-8")

    def _behind_another(self, token_id: int) -> str:
        """Decoders strip the space of a text's first token, so it must not be the first."""
        before, both = (str(self._backend.decode([token_id] * count)) for count in (1, 2))
        return both[len(before) :] if both.startswith(before) else before


def _byte_level() -> dict[str, int]:
    """The characters of byte-level vocabularies: printable bytes are themselves, the others follow from 256 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + place): byte for place, byte in enumerate(others)}
