"""The page at `/`: its files, read once from the package, and the headers they are served with.

Decides what a browser may do with them: load scripts, styles and data from this server alone, run no inline script,
build no markup from text (Trusted Types), be framed by nobody. Knows nothing of what the page shows.

The files hold no secret and need no key, so that a page can be opened on which a key is entered; see `is_page_path`.
Invariant: what is served is what lay in `page/` when the application was made; a path never reaches the file system.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from fastapi import FastAPI, Request
from starlette.exceptions import HTTPException
from starlette.responses import Response

__all__ = ["PageFile", "add_page", "is_page_path", "read_page"]

FOLDER = Path(__file__).with_name("page")
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
    "cache-control": "no-cache",  # kept, but asked about each time: the ETag answers in one round trip
    "content-security-policy": SECURITY,
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "referrer-policy": "no-referrer",
    "x-content-type-options": "nosniff",
    "x-frame-options": "DENY",
}


@dataclass(frozen=True, slots=True)
class PageFile:
    """One file of the page. `etag` is quoted, as the header wants it (RFC 9110, section 8.8.3)."""

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
    """Whether a raw path is the page's own: public, and served whatever keys the server wants."""
    return path == "/" or path.startswith(PREFIX)


def add_page(app: FastAPI) -> None:
    """Put the page on `/` and its files below `/page/`. Not in the OpenAPI document: it is no part of the API."""
    files = read_page()

    @app.api_route("/", methods=["GET", "HEAD"], include_in_schema=False)
    async def index(request: Request) -> Response:
        """The page."""
        return _answer(files[INDEX], request)

    @app.api_route(PREFIX + "{name}", methods=["GET", "HEAD"], include_in_schema=False)
    async def page_file(name: str, request: Request) -> Response:
        """One of the page's files."""
        if name not in files:
            raise HTTPException(404)
        return _answer(files[name], request)


def _answer(file: PageFile, request: Request) -> Response:
    headers = HEADERS | {"etag": file.etag}
    if _has_already(request.headers.get("if-none-match", ""), file.etag):
        return Response(status_code=304, headers=headers)
    return Response(file.content, 200, headers, media_type=file.media_type)


def _has_already(if_none_match: str, etag: str) -> bool:
    """RFC 9110, section 13.1.2: weak comparison with any of a list, or `*`."""
    known = {each.strip().removeprefix("W/") for each in if_none_match.split(",")}
    return etag in known or "*" in known
