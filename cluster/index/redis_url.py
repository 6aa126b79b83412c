"""RedisTarget: which servers a URL names, and how to reach them.

    redis://[user:password@]host[:port][/db]                     one server
    unix://[user:password@]/path.sock[?db=0]                     one server on this machine
    redis+sentinel://[user:password@]host[:port],.../service[/db]   the master that these Sentinels name
    redis+cluster://[user:password@]host[:port][,...]            a cluster, through any of its nodes

`rediss`, `rediss+sentinel` and `rediss+cluster` are the same over TLS.

Owns: reading and checking the URL, and its printable form.
Does not: open connections (cluster.index.redis_client).
Invariants: no error, repr or printable form shows a password, not even one that makes the URL unreadable.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any
from urllib.parse import parse_qsl, unquote, urlsplit

from cluster.core.errors import ConfigError

_REDIS_PORT = 6379
_SENTINEL_PORT = 26379


class RedisMode(StrEnum):
    SINGLE = "single"
    SENTINEL = "sentinel"
    CLUSTER = "cluster"


_SCHEMES = {
    "redis": (RedisMode.SINGLE, False),
    "rediss": (RedisMode.SINGLE, True),
    "unix": (RedisMode.SINGLE, False),
    "redis+sentinel": (RedisMode.SENTINEL, False),
    "rediss+sentinel": (RedisMode.SENTINEL, True),
    "redis+cluster": (RedisMode.CLUSTER, False),
    "rediss+cluster": (RedisMode.CLUSTER, True),
}
_TLS_OPTIONS = frozenset({"ssl_ca_certs", "ssl_certfile", "ssl_keyfile", "ssl_cert_reqs", "ssl_check_hostname"})
_SENTINEL_OPTIONS = frozenset({"sentinel_username", "sentinel_password"})


@dataclass(frozen=True, slots=True, kw_only=True)
class RedisTarget:
    """`hosts` are the server, the Sentinels or the cluster's nodes; `tls` holds the TLS options, None for no TLS."""

    mode: RedisMode
    hosts: tuple[tuple[str, int], ...] = ()
    unix_path: str = ""
    service: str = ""
    db: int = 0
    username: str | None = None
    password: str | None = field(default=None, repr=False)
    sentinel_username: str | None = None
    sentinel_password: str | None = field(default=None, repr=False)
    tls: Mapping[str, Any] | None = None


def hide_secrets(url: str) -> str:
    """The URL for people and logs: without user, password and the values of its options."""
    shown = re.sub(r"//.*@", "//***@", url, count=1, flags=re.DOTALL)
    return re.sub(r"([?&][^=&]*)=[^&]*", r"\1=***", shown)


def parse_redis_url(url: str) -> RedisTarget:
    """ConfigError, which names what is wrong but repeats nothing secret, for anything but the forms above."""
    # urlsplit drops these silently, and its own errors quote the part that holds the password.
    if any(character.isspace() or not character.isprintable() for character in url):
        raise ConfigError("the Redis URL holds a space or a control character; percent-encode it")
    scheme, separator, _ = url.partition("://")
    if not separator or scheme not in _SCHEMES:
        raise ConfigError(f"the Redis URL must start with one of {', '.join(f'{name}://' for name in _SCHEMES)}")
    mode, secure = _SCHEMES[scheme]
    try:
        parts = urlsplit(url)
    except ValueError:
        raise ConfigError("the Redis URL has a malformed host") from None
    if parts.fragment:
        raise ConfigError("the Redis URL has a '#'; percent-encode it as %23")
    user_info, _, netloc = parts.netloc.rpartition("@")
    username, _, password = user_info.partition(":")
    if mode is RedisMode.SINGLE and "," in netloc:
        raise ConfigError("several hosts need redis+sentinel:// or redis+cluster://")
    options = _options(parts.query, mode, secure)
    unix = scheme == "unix"
    service, db_text = ("", "") if unix else _path(parts.path, mode)
    db_text = options.pop("db", db_text)
    if unix and (netloc or not parts.path.strip("/")):
        raise ConfigError("a unix:// Redis URL needs a path and no host: unix:///run/redis.sock")
    return RedisTarget(
        mode=mode,
        hosts=() if unix else _hosts(netloc, _SENTINEL_PORT if mode is RedisMode.SENTINEL else _REDIS_PORT),
        unix_path=unquote(parts.path) if unix else "",
        service=service,
        db=_db(db_text, mode),
        username=unquote(username) or None,
        password=unquote(password) or None,
        sentinel_username=options.pop("sentinel_username", None),
        sentinel_password=options.pop("sentinel_password", None),
        tls=_tls(options) if secure else None,
    )


def _hosts(netloc: str, default_port: int) -> tuple[tuple[str, int], ...]:
    hosts: list[tuple[str, int]] = []
    for part in netloc.split(","):
        found = re.fullmatch(r"(?:\[([0-9A-Fa-f:.]+)\]|([A-Za-z0-9._-]+))(?::([0-9]{1,5}))?", part)
        port = default_port if found is None or found[3] is None else int(found[3])
        if found is None or not 0 < port < 65536:
            # What stands there may be the rest of a password with a '/' or '@' in it.
            raise ConfigError("the Redis URL needs host or host:port; percent-encode '/', '@' and ':' in passwords")
        hosts.append((found[1] or found[2], port))
    return tuple(hosts)


def _path(path: str, mode: RedisMode) -> tuple[str, str]:
    """(service, db as text)."""
    parts = [unquote(part) for part in path.strip("/").split("/")] if path.strip("/") else []
    if mode is RedisMode.SENTINEL:
        if not 1 <= len(parts) <= 2:
            raise ConfigError("a Sentinel URL names its service, and maybe a db: redis+sentinel://host:26379/service/0")
        return parts[0], parts[1] if len(parts) == 2 else ""
    if len(parts) > 1:
        raise ConfigError("the path of the Redis URL is the number of its db: redis://host:6379/0")
    return "", parts[0] if parts else ""


def _db(text: str, mode: RedisMode) -> int:
    if text and not re.fullmatch(r"[0-9]{1,5}", text):
        raise ConfigError("the db in the Redis URL is not a number")
    db = int(text or 0)
    if db and mode is RedisMode.CLUSTER:
        raise ConfigError("a Redis cluster has only db 0")
    return db


def _options(query: str, mode: RedisMode, secure: bool) -> dict[str, str]:
    known = _TLS_OPTIONS if secure else frozenset()
    known |= {RedisMode.SINGLE: {"db"}, RedisMode.SENTINEL: _SENTINEL_OPTIONS, RedisMode.CLUSTER: frozenset()}[mode]
    options = dict(parse_qsl(query, keep_blank_values=True))
    if set(options) - known:
        raise ConfigError(f"unknown options in the Redis URL; known here: {', '.join(sorted(known)) or 'none'}")
    return options


def _tls(options: Mapping[str, str]) -> dict[str, Any]:
    tls: dict[str, Any] = {name: value for name, value in options.items() if name in _TLS_OPTIONS}
    if "ssl_cert_reqs" in tls and tls["ssl_cert_reqs"] not in ("none", "optional", "required"):
        raise ConfigError("ssl_cert_reqs in the Redis URL must be none, optional or required")
    if "ssl_check_hostname" in tls:
        checked = {"true": True, "1": True, "false": False, "0": False}.get(tls["ssl_check_hostname"].lower())
        if checked is None:
            raise ConfigError("ssl_check_hostname in the Redis URL must be true or false")
        tls["ssl_check_hostname"] = checked
    return tls
