"""How messages lie in a byte stream between kvray processes: msgpack values, one after the other.

Owns: the packing options and the reader that cuts a stream back into messages.
Does not: read or write sockets, or know what the messages mean.
Invariants: messages come out whole and in order, however the bytes were cut; a message over the limit is an error,
never a growing buffer.
"""

from __future__ import annotations

from typing import Any

import msgpack


class MessageReader:
    """Feed bytes, take the messages that are complete. `max_bytes` bounds what waits to be completed."""

    def __init__(self, max_bytes: int) -> None:
        self._unpacker = msgpack.Unpacker(raw=False, strict_map_key=False, max_buffer_size=max_bytes)

    def feed(self, data: bytes) -> None:
        """ValueError (msgpack's) when a message is too large."""
        self._unpacker.feed(data)

    def take(self) -> list[Any]:
        """All complete messages. Any exception means that the bytes are no messages."""
        return list(self._unpacker)


class MessagePacker:
    """Not for use from several threads at once."""

    def __init__(self) -> None:
        self._packer = msgpack.Packer()

    def pack(self, message: Any) -> bytes:
        packed: bytes = self._packer.pack(message)
        return packed
