"""Tokenizer: text and chat messages to token ids, and back.

Owns: loading a Hugging Face tokenizer directory on the `tokenizers` library alone (no torch), and the tokenizer's
revision.
Does not: decode streams (cluster.text_stream) or check a prompt's length.
Invariants: ids equal transformers' for the same directory; all methods may be called from several threads; text
that is not valid Unicode raises `InvalidRequest`.
"""

from __future__ import annotations

import json
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import tokenizers

from cluster.chat_template import ChatTemplate
from cluster.core.errors import ConfigError, InvalidRequest
from cluster.core.hashing import digest_of
from cluster.token_bytes import TokenBytes


class Tokenizer:
    """A loaded tokenizer. `revision` is what must be equal for two processes to cut text the same way."""

    def __init__(self, backend: tokenizers.Tokenizer, template: ChatTemplate, *, content: bytes | None = None) -> None:
        """content: the bytes that `backend` was read from; its own serialisation if there is no file."""
        content = backend.to_str().encode("utf-8") if content is None else content
        # A file may carry its training-time truncation and padding; a served prompt must have neither.
        backend.no_truncation()
        backend.no_padding()
        self._backend = backend
        self._template = template
        self._vocab_size = int(backend.get_vocab_size(with_added_tokens=True))
        added = backend.get_added_tokens_decoder()
        self._special_ids = frozenset(token_id for token_id, token in added.items() if token.special)
        self._token_bytes = TokenBytes(backend)
        self._id_limit = max((self._vocab_size, *(token_id + 1 for token_id in added)))
        self.revision = _revision(content, template)

    @classmethod
    def from_dir(cls, path: str | Path) -> Tokenizer:
        """Load `tokenizer.json` and the chat template from a model directory."""
        directory = Path(path)
        file = directory / "tokenizer.json"
        if not file.is_file():
            return cls(_convert_slow(directory), ChatTemplate.from_dir(directory))
        try:
            content = file.read_bytes()
            backend = tokenizers.Tokenizer.from_buffer(content)
        except Exception as error:  # the library raises plain Exception for a malformed file
            raise ConfigError(f"{file} cannot be read: {error}") from error
        return cls(backend, ChatTemplate.from_dir(directory), content=content)

    @property
    def backend(self) -> tokenizers.Tokenizer:
        """The library's own, for who needs the whole vocabulary; not to be changed."""
        return self._backend

    @property
    def vocab_size(self) -> int:
        """Number of tokens, added ones included. The model's embedding may be larger (padded)."""
        return self._vocab_size

    @property
    def special_ids(self) -> frozenset[int]:
        """Ids of control tokens, which never appear in decoded text."""
        return self._special_ids

    def is_silent(self, token_id: int) -> bool:
        """True for ids without text: control tokens, and the padding rows of a model's embedding."""
        return token_id in self._special_ids or not 0 <= token_id < self._id_limit

    def encode(self, text: str, *, field: str = "prompt") -> list[int]:
        """Ids of `text`, with the special tokens that the model wants around a prompt. `field` names errors."""
        return self._encode(text, field=field, add_special_tokens=True)

    def apply_chat_template(self, messages: Sequence[Mapping[str, Any]]) -> list[int]:
        """Ids of a conversation, ending where the assistant's answer begins."""
        return self._encode(self._template.render(messages), field="messages", add_special_tokens=False)

    def encode_chat(self, messages: Sequence[Mapping[str, Any]]) -> tuple[list[int], tuple[int, ...]]:
        """The same ids, and how many of them there are up to the end of each message; () if the template hides it."""
        text = self._template.render(messages)
        encoding = self._encoding(text, field="messages", add_special_tokens=False)
        ids: list[int] = encoding.ids
        ends = self._template.message_ends(messages, text)

        def begins_at(token: int) -> int:
            span = encoding.token_to_chars(token)
            return 0 if span is None else int(span[0])

        return ids, tuple(bisect_left(range(len(ids)), end, key=begins_at) for end in ends)

    def decode(self, token_ids: Sequence[int]) -> str:
        """Text of `token_ids` without control tokens. Bytes that are no valid UTF-8 become U+FFFD."""
        return str(self._backend.decode(list(token_ids), skip_special_tokens=True))

    def token_bytes(self, token_id: int) -> bytes:
        """What one token writes, also half a character; a control token its name."""
        return self._token_bytes.of(token_id)

    def _encode(self, text: str, *, field: str, add_special_tokens: bool) -> list[int]:
        return list(self._encoding(text, field=field, add_special_tokens=add_special_tokens).ids)

    def _encoding(self, text: str, *, field: str, add_special_tokens: bool) -> tokenizers.Encoding:
        try:
            text.encode("utf-8")
        except UnicodeEncodeError:
            raise InvalidRequest(field, f"{field} is not valid Unicode: it has an unpaired surrogate") from None
        return self._backend.encode(text, add_special_tokens=add_special_tokens)


def _convert_slow(directory: Path) -> tokenizers.Tokenizer:
    """A directory without tokenizer.json: let transformers convert what is there."""
    # Imported here because it takes seconds and few models need it.
    from transformers import AutoTokenizer

    try:
        slow = AutoTokenizer.from_pretrained(str(directory), use_fast=True, local_files_only=True)
        backend: tokenizers.Tokenizer = slow.backend_tokenizer
    except Exception as error:
        raise ConfigError(f"{directory} has no tokenizer.json, and transformers cannot make one: {error}") from error
    return backend


def _revision(content: bytes, template: ChatTemplate) -> str:
    """Hex digest of everything that decides which ids a prompt becomes."""
    specials = json.dumps(template.special_tokens, sort_keys=True)
    return digest_of(b"tokenizer", content, (template.source or "").encode("utf-8"), specials.encode("utf-8"))
