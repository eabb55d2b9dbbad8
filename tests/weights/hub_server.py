"""A Hugging Face hub of one repository on this machine: its listing, its files, ranges of them, and stalls."""

from __future__ import annotations

import hashlib
import json
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

__all__ = ["REVISION", "Hub", "hub_server"]

REVISION = "0123456789abcdef0123456789abcdef01234567"


class Hub:
    """The repository `org/name`.

    Attributes:
        url: where it is.
        files: path -> contents, those of `large` in LFS.
        pause_after: bytes of a file after which the connection stalls until `go_on` is set; 0 for never.
        sent: (path, first byte) of each request for a file.
    """

    def __init__(self, files: dict[str, bytes], large: tuple[str, ...]) -> None:
        self.url = ""
        self.files = files
        self.large = large
        self.pause_after = 0
        self.paused = threading.Event()
        self.go_on = threading.Event()
        self.sent: list[tuple[str, int]] = []

    def tree(self) -> list[dict]:
        listed = []
        for path, data in self.files.items():
            entry = {"type": "file", "path": path, "size": len(data), "oid": git_name(data)}
            if path in self.large:
                entry["lfs"] = {"oid": hashlib.sha256(data).hexdigest(), "size": len(data), "pointerSize": 130}
            listed.append(entry)
        return listed


def git_name(data: bytes) -> str:
    return hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()


@contextmanager
def hub_server(files: dict[str, bytes], large: tuple[str, ...] = ()) -> Iterator[Hub]:
    hub = Hub(files, large)

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            path = self.path.partition("?")[0]
            if path == "/api/models/org/name":
                self._json({"id": "org/name", "sha": REVISION, "siblings": []})
            elif path == f"/api/models/org/name/tree/{REVISION}":
                self._json(hub.tree())
            else:
                self._file(path.removeprefix(f"/org/name/resolve/{REVISION}/"))

        def _json(self, value: object) -> None:
            self._head(200, len(body := json.dumps(value).encode()), "application/json")
            self.wfile.write(body)

        def _file(self, name: str) -> None:
            data = hub.files[name]
            asked = re.fullmatch(r"bytes=(\d+)-", self.headers.get("Range", ""))
            first = int(asked[1]) if asked else 0
            hub.sent.append((name, first))
            ranged = {"Content-Range": f"bytes {first}-{len(data) - 1}/{len(data)}"} if asked else {}
            self._head(206 if asked else 200, len(data) - first, "application/octet-stream", **ranged)
            rest, stop = data[first:], hub.pause_after - first
            if 0 < stop < len(rest):
                self.wfile.write(rest[:stop])
                self.wfile.flush()
                hub.paused.set()
                hub.go_on.wait(120)
                rest = rest[stop:]
            self.wfile.write(rest)

        def _head(self, status: int, length: int, kind: str, **more: str) -> None:
            self.send_response(status)
            for header, value in {"Content-Type": kind, "Content-Length": str(length), **more}.items():
                self.send_header(header, value)
            self.end_headers()

        def log_message(self, *_: object) -> None:
            """Nothing is logged."""

        def handle(self) -> None:
            try:
                super().handle()
            except ConnectionError:  # the client was interrupted
                return

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    hub.url = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield hub
    finally:
        hub.go_on.set()
        server.shutdown()
        thread.join()
        server.server_close()
