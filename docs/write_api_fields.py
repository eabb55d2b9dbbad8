"""Writes docs/api-fields.md from the code: `.venv/bin/python docs/write_api_fields.py`."""

from __future__ import annotations

from pathlib import Path

from penstock.server.field_support import table as page

PAGE = Path(__file__).parent / "api-fields.md"

if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
