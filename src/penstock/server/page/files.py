"""The page at `/`: its files, read once from the package, and the headers they are served with.

With these headers a browser loads scripts, styles and data from this server alone, runs no inline script, builds no
markup from text (Trusted Types), and lets nobody frame the page. The files contain no secret and need no key: users
enter their key on the page; see `is_page_path`.
Invariant: only the files that were in `static/` when the application was made are served; a path from a request never
reaches the file system.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from fastapi import Request
from starlette.exceptions import HTTPException
from starlette.responses import Response

from penstock.server.http.route import Route

__all__ = ["PageFile", "is_page_path", "read_page", "routes"]

FOLDER = Path(__file__).with_name("static")
INDEX = "index.html"
PREFIX = "/page/"

MEDIA_TYPES = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}

SECURITY = "; ".join(
    (
        "default-src 'none'",
        "script-src 'self'",
        "style-src 'self'",
        "img-src 'self'",
        "connect-src 'self'",
        "form-action 'none'",
        "base-uri 'none'",
        "frame-ancestors 'none'",
        "require-trusted-types-for 'script'",
        "trusted-types 'none'",
    )
)
HEADERS = {
    "cache-control": "no-cache",  # cached, but revalidated each time: the ETag answers in one round trip
    "content-security-policy": SECURITY,
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "referrer-policy": "no-referrer",
    "x-content-type-options": "nosniff",
    "x-frame-options": "DENY",
}


@dataclass(frozen=True, slots=True)
class PageFile:
    """One file of the page. `etag` is quoted, as the header requires (RFC 9110, section 8.8.3)."""

    content: bytes
    media_type: str
    etag: str


def read_page(folder: Path = FOLDER) -> Mapping[str, PageFile]:
    """The page's files by name; files of other kinds in the folder are not served."""
    return {path.name: _read(path) for path in sorted(folder.iterdir()) if path.suffix in MEDIA_TYPES}


def _read(path: Path) -> PageFile:
    content = path.read_bytes()
    return PageFile(content, MEDIA_TYPES[path.suffix], f'"{hashlib.sha256(content).hexdigest()[:32]}"')


def is_page_path(path: str) -> bool:
    """Whether a raw path belongs to the page, which is public even if the server has keys."""
    return path == "/" or path.startswith(PREFIX)


def routes() -> tuple[Route, ...]:
    """The page on `/` and its files below `/page/`. Not in the OpenAPI document: the page is not part of the API."""
    files = read_page()

    async def index(http_request: Request) -> Response:
        """The page."""
        return _answer(files[INDEX], http_request)

    async def page_file(name: str, http_request: Request) -> Response:
        """One of the page's files."""
        if name not in files:
            raise HTTPException(404)
        return _answer(files[name], http_request)

    return (
        Route("GET", "/", index, documented=False),
        Route("GET", PREFIX + "{name}", page_file, documented=False),
    )


def _answer(file: PageFile, http_request: Request) -> Response:
    headers = HEADERS | {"etag": file.etag}
    if _has_already(http_request.headers.get("if-none-match", ""), file.etag):
        return Response(status_code=304, headers=headers)
    return Response(file.content, 200, headers, media_type=file.media_type)


def _has_already(if_none_match: str, etag: str) -> bool:
    """Whether If-None-Match matches: weak comparison with any of a list, or `*` (RFC 9110, section 13.1.2)."""
    known = {each.strip().removeprefix("W/") for each in if_none_match.split(",")}
    return etag in known or "*" in known
