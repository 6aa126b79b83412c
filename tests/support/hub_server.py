"""A hub on 127.0.0.1 with as much of the Hugging Face protocol as huggingface_hub needs to fetch a model.

GET  /api/models/<id>[/revision/main]     GET /api/models/<id>/tree/<sha>     HEAD, GET /<id>/resolve/<sha>/<file>
"""

from __future__ import annotations

import hashlib
import json
import re
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

SHA = "a" * 40
GOOD_TOKEN = "hf_" + "good" * 5


class Hub(ThreadingHTTPServer):
    """files: of the repository `owner/name`. `gated`, `private`: as on the hub. `break_at`: bytes after which the first
    download of a weight file breaks off."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.files: dict[str, bytes] = {}
        self.gated = self.private = False
        self.break_at: int | None = None
        self.sent: list[str] = []  # files whose content went out, in order
        self.tokens: set[str] = set()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"


class _Handler(BaseHTTPRequestHandler):
    server: Hub
    protocol_version = "HTTP/1.1"

    def log_message(self, format: str, *args: Any) -> None:
        pass

    def do_HEAD(self) -> None:
        self._file(content=False)

    def do_GET(self) -> None:
        if self.path.startswith("/api/models/"):
            self._api()
        else:
            self._file(content=True)

    def _api(self) -> None:
        path = self.path.partition("?")[0].removeprefix("/api/models/")
        if self._refused(path.startswith("owner/name"), listing=True):
            return
        files = self.server.files
        if "/tree/" in path:
            self._json([_tree_row(name, content) for name, content in files.items()])
        else:
            siblings = [{"rfilename": name, "size": len(content)} for name, content in files.items()]
            self._json({"id": "owner/name", "sha": SHA, "siblings": siblings, "tags": [], "private": False})

    def _file(self, *, content: bool) -> None:
        match = re.fullmatch(r"/owner/name/resolve/\w+/(.+)", self.path)
        if self._refused(match is not None, listing=False):
            return None
        assert match is not None
        name = match[1]
        if name not in self.server.files:
            return self._status(404, {"X-Error-Code": "EntryNotFound"})
        body, start = self.server.files[name], 0
        if (asked := self.headers.get("Range")) is not None and content:
            start = int(re.fullmatch(r"bytes=(\d+)-", asked)[1])  # type: ignore[index]
        self.send_response(206 if start else 200)
        self.send_header("ETag", f'"{hashlib.sha1(body).hexdigest()}"')
        self.send_header("X-Repo-Commit", SHA)
        self.send_header("Accept-Ranges", "bytes")
        if start:
            self.send_header("Content-Range", f"bytes {start}-{len(body) - 1}/{len(body)}")
        self.send_header("Content-Length", str(len(body) - start))
        self.end_headers()
        if not content:
            return None
        self.server.sent.append(name)
        if self.server.break_at is not None and name.endswith(".safetensors"):
            self.wfile.write(body[: self.server.break_at])
            self.wfile.flush()
            self.server.break_at = None
            self.close_connection = True
            self.connection.shutdown(socket.SHUT_RDWR)
            return None
        self.wfile.write(body[start:])
        return None

    def _refused(self, known: bool, *, listing: bool) -> bool:
        """As the hub does it: it hides what one may not see, and tells wrong tokens from missing ones."""
        token = (self.headers.get("Authorization") or "").removeprefix("Bearer ")
        self.server.tokens |= {token} - {""}
        if token not in ("", GOOD_TOKEN):
            self._status(401, {"X-Error-Message": "Invalid credentials in Authorization header"})
        elif not known or (self.server.private and not token):
            self._status(404 if token else 401, {"X-Error-Code": "RepoNotFound"})
        elif self.server.gated and not listing:
            self._status(403 if token else 401, {"X-Error-Code": "GatedRepo"})
        else:
            return False
        return True

    def _json(self, value: Any) -> None:
        body = json.dumps(value).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def _status(self, status: int, headers: dict[str, str]) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("Content-Length", "0")
        self.end_headers()


def _tree_row(name: str, content: bytes) -> dict[str, Any]:
    return {"type": "file", "path": name, "size": len(content), "oid": hashlib.sha1(content).hexdigest()}


@contextmanager
def running_hub() -> Iterator[Hub]:
    with Hub() as hub:
        thread = threading.Thread(target=hub.serve_forever, args=(0.05,))
        thread.start()
        try:
            yield hub
        finally:
            hub.shutdown()
            thread.join()
