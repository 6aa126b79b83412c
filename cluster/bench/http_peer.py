"""HttpPeer: an OpenAI-compatible server as a peer.

Owns: its address, the request body, which switch defeats its prefix cache, and turning every failure into one line.
Does not: start or stop servers (served_cluster), or read the stream's lines (completion_stream).
Invariants: one connection per request, closed at its end (llama.cpp's server drops kept ones); `connect` comes first.
"""

from __future__ import annotations

import ipaddress
import secrets
import time
from dataclasses import replace
from typing import Any
from urllib.parse import urlsplit

import aiohttp

from cluster.bench.completion_stream import CompletionStream
from cluster.bench.peer import PeerFacts, TimedAnswer
from cluster.core.errors import ConfigError, KvrayError

_LINE_BYTES = 2**20
_ERROR_CHARACTERS = 200
_SALTED = ("kvray", "vllm")
_UNCACHED = ("llamacpp",)


def open_http(timeout_s: float) -> aiohttp.ClientSession:
    """One session for all peers. `timeout_s` bounds a whole request."""
    return aiohttp.ClientSession(
        timeout=aiohttp.ClientTimeout(total=timeout_s, sock_connect=10),
        connector=aiohttp.TCPConnector(limit=0, force_close=True),
        read_bufsize=_LINE_BYTES,
    )


def is_loopback(url: str) -> bool:
    host = urlsplit(url).hostname or ""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


class HttpPeer:
    """`facts.kind` is what the server calls itself (owned_by of its model), such as kvray, vllm or llamacpp."""

    def __init__(self, http: aiohttp.ClientSession, name: str, url: str, pid: int | None) -> None:
        self.facts = PeerFacts(name=name, kind="", address=url.rstrip("/").removesuffix("/v1"), model="", pid=pid)
        self._http = http

    @property
    def is_local(self) -> bool:
        return is_loopback(self.facts.address)

    @property
    def can_defeat_cache(self) -> bool:
        return self.facts.kind in _SALTED + _UNCACHED

    async def connect(self) -> None:
        """Ask for the model. ConfigError when the server cannot be used."""
        name, url = self.facts.name, f"{self.facts.address}/v1/models"
        try:
            async with self._http.get(url, timeout=aiohttp.ClientTimeout(total=30)) as reply:
                if reply.status == 404:  # a server of one model need not list it; the warm-up shows whether it answers
                    self.facts = replace(self.facts, model=name)
                    return
                if reply.status != 200:
                    raise ConfigError(f"peer {name}: {url} answers HTTP {reply.status}: {await _reason(reply)}")
                listing = await reply.json(content_type=None)
                model = listing["data"][0]
                self.facts = replace(self.facts, model=str(model["id"]), kind=str(model.get("owned_by", "")))
        except (aiohttp.ClientError, OSError, ValueError) as error:
            raise ConfigError(f"peer {name}: no server answers at {url}: {_words(error)}") from None
        except (KeyError, IndexError, TypeError):
            raise ConfigError(f"peer {name}: {url} lists no model") from None

    async def complete(self, prompt: str, max_tokens: int, *, caching: bool) -> TimedAnswer:
        body = self._body(prompt, max_tokens, caching)
        stream = CompletionStream()
        started = time.perf_counter()
        try:
            async with self._http.post(f"{self.facts.address}/v1/completions", json=body) as reply:
                if reply.status != 200:
                    raise KvrayError(f"HTTP {reply.status}: {await _reason(reply)}")
                async for line in reply.content:
                    stream.feed(line, time.perf_counter() - started)
                    if stream.done:
                        break
        except (aiohttp.ClientError, OSError, ValueError) as error:
            raise KvrayError(f"the connection failed: {_words(error)}") from None
        return stream.answer(time.perf_counter() - started)

    def _body(self, prompt: str, max_tokens: int, caching: bool) -> dict[str, Any]:
        body: dict[str, Any] = {
            "model": self.facts.model,
            "prompt": prompt,
            "max_tokens": max_tokens,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        if not caching and self.facts.kind in _SALTED:
            body["cache_salt"] = secrets.token_hex(8)
        elif not caching and self.facts.kind in _UNCACHED:
            body["cache_prompt"] = False
        return body


async def _reason(reply: aiohttp.ClientResponse) -> str:
    return " ".join((await reply.text(errors="replace")).split())[:_ERROR_CHARACTERS]


def _words(error: Exception) -> str:
    if isinstance(error, TimeoutError):
        return "no answer in time"
    return " ".join(str(error).split())[:_ERROR_CHARACTERS] or type(error).__name__
