"""`GET /docs`: the OpenAPI document for people, as one page that loads nothing else and runs no script."""

from __future__ import annotations

from collections.abc import Iterator
from html import escape
from typing import Any

from fastapi import Request, Response

from penstock.api_fields.strict_json import JsonObject
from penstock.server.http.route import Route

__all__ = ["ROUTES", "reference_page"]

STYLE = (
    ":root{color-scheme:light dark}"
    "body{font:16px/1.5 system-ui,sans-serif;max-width:60rem;margin:2rem auto;padding:0 1rem}"
    "code{font-family:ui-monospace,monospace}table{border-collapse:collapse;width:100%;margin:.5rem 0}"
    "td,th{text-align:left;vertical-align:top;padding:.25rem .5rem;border-bottom:1px solid #8884}"
    "summary{cursor:pointer;padding:.25rem 0}b{display:inline-block;min-width:4.5rem}"
)
HEADERS = {"content-security-policy": "default-src 'none'; style-src 'unsafe-inline'; frame-ancestors 'none'"}


async def reference(http_request: Request) -> Response:
    """Every endpoint with its fields and answers."""
    page = reference_page(http_request.app.openapi())
    return Response(page, media_type="text/html; charset=utf-8", headers=HEADERS)


ROUTES = (Route("GET", "/docs", reference, documented=False),)


def reference_page(document: JsonObject) -> str:
    """Render the page of an OpenAPI document."""
    title = escape(document["info"]["title"])
    operations = "".join(
        _operation(method.upper(), path, operation)
        for path, operations in document["paths"].items()
        for method, operation in operations.items()
    )
    head = f'<!doctype html><html lang="en"><meta charset="utf-8"><title>{title}</title><style>{STYLE}</style>'
    return f'{head}<h1>{title}</h1><p>For programs: <a href="openapi.json">openapi.json</a>.</p>{operations}</html>\n'


def _operation(method: str, path: str, operation: JsonObject) -> str:
    title = f"<summary><b>{method}</b> <code>{escape(path)}</code></summary>"
    said = f"<p>{escape(operation.get('description', ''))}</p>"
    body = operation.get("requestBody", {}).get("content", {}).get("application/json", {}).get("schema")
    fields = _table(("field", "type", "what it does"), _fields(body)) if body is not None else ""
    answers = ((status, answer["description"]) for status, answer in operation["responses"].items())
    return f"<details>{title}{said}{fields}{_table(('status', 'when'), answers)}</details>"


def _fields(schema: JsonObject) -> Iterator[tuple[str, str, str]]:
    required = schema.get("required", ())
    for name, field in sorted(schema["properties"].items(), key=lambda each: (each[0] not in required, each[0])):
        yield f"{name} (required)" if name in required else name, _type(field), field.get("description", "")


def _type(schema: Any) -> str:
    """The values that a schema allows, in a few words."""
    if "enum" in schema:
        return ", ".join("null" if value is None else str(value) for value in schema["enum"])
    if "anyOf" in schema:
        return " or ".join(dict.fromkeys(_type(each) for each in schema["anyOf"]))
    kind = schema.get("type", "anything")
    return " or ".join(kind) if isinstance(kind, list) else str(kind)


def _table(heads: tuple[str, ...], rows: Iterator[tuple[str, ...]]) -> str:
    first = "".join(f"<th>{head}</th>" for head in heads)
    rest = "".join(f"<tr>{''.join(f'<td>{escape(cell)}</td>' for cell in row)}</tr>" for row in rows)
    return f"<table><tr>{first}</tr>{rest}</table>"
