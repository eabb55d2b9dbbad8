"""`penstock explain`: where the time of one request went, from a running server or a record."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any
from urllib.parse import quote

import click

from penstock.contract.errors import ConfigError

__all__ = ["command"]

WORDS = {
    "intake": "read, rendered and tokenised",
    "queue": "waited in the queue",
    "prompt": "its own prompt",
    "other_prompts": "others' prompts in its steps",
    "decode": "got its tokens",
    "other_decodes": "others' tokens in steps of its prompt",
    "drafting": "the draft model in its steps",
    "grammar": "waited for its grammar",
    "left_out": "had no row in a step",
    "preempted": "lost its blocks, and computed them again",
    "recovery": "computed again after a failed step",
    "restored": "read its blocks from the store",
    "engine": "the engine between steps",
    "text": "its last text on the way to the server",
    "transport": "between the server and its engine",
    "reader": "waited for its reader",
}
"""What each part of a request's time was spent on, for the report."""

_SHOWN_MS = 0.0005
_BAR = 24
_MOST_NAMED = 8


@click.command("explain")
@click.argument("answer_id", metavar="ID")
@click.option(
    "--record",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="Read this file, which `penstock serve --record` wrote, instead of asking a running server.",
)
@click.option(
    "--perfetto",
    type=click.Path(dir_okay=False, writable=True, path_type=Path),
    help="Write the steps of the request's life to this file, for https://ui.perfetto.dev; needs --record.",
)
@click.option("--json", "as_json", is_flag=True, help="Print JSON, in milliseconds.")
@click.option(
    "--base-url",
    default="",
    help="URL of the server, such as http://127.0.0.1:8000; by default the only one that `penstock ps` lists.",
)
@click.option("--api-key", default="", help="API key for the server; by default the value of PENSTOCK_API_KEY.")
def command(
    answer_id: str, record: Path | None, perfetto: Path | None, as_json: bool, base_url: str, api_key: str
) -> None:
    """Show where the time of a request went, in parts that sum to its wall time.

    ID is the id of the answer (chatcmpl-...) or, at a running server, its x-request-id. A record holds what the engine
    saw: from when the request was ready for the engine to the request's last step.
    """
    if record is None:
        if perfetto is not None:
            raise ConfigError("perfetto", "needs --record: a server does not remember every step")
        found = _ask(answer_id, base_url, api_key)
    else:
        found = _read(answer_id, record, perfetto)
    click.echo(json.dumps(found, indent=2) if as_json else "\n".join(_lines(found)))


def _ask(answer_id: str, base_url: str, api_key: str) -> dict[str, Any]:
    """Ask a running server about the answer."""
    from penstock.cli.api_client import ApiClient, Refused
    from penstock.cli.running_servers import only_server

    client = ApiClient(base_url or only_server(), api_key or os.environ.get("PENSTOCK_API_KEY", ""))
    try:
        found: dict[str, Any] = client.ask("GET", f"/v1/requests/{quote(answer_id, safe='')}/latency")
    except Refused as error:
        raise ConfigError("ID", f"{answer_id}: {error.message}") from error
    return found


def _read(answer_id: str, record: Path, perfetto: Path | None) -> dict[str, Any]:
    """Compute the same from a record."""
    from penstock.api_fields.timings import parts_object
    from penstock.latency.perfetto import trace_events
    from penstock.latency.recorded import lives_of

    with record.open(encoding="utf-8") as lines:
        lives = lives_of(answer_id, lines)
    if perfetto is not None:
        try:
            perfetto.write_text(json.dumps(trace_events(lives)), encoding="utf-8")
        except OSError as error:
            raise ConfigError("perfetto", f"{perfetto} cannot be written: {error.strerror}") from error
    last = lives.last
    most = sorted(last.met.items(), key=lambda pair: -pair[1])[:_MOST_NAMED]
    return {
        "id": answer_id,
        "sequence": last.id,
        "over": last.ended is not None,
        "parts_ms": parts_object(lives.parts),
        "behind": list(lives.parts.behind),
        "other_prompts_of": {seq_id: round(1000 * seconds, 3) for seq_id, seconds in most},
    }


def _lines(found: dict[str, Any]) -> list[str]:
    """The report as lines of text: one for each part, the largest first."""
    parts: dict[str, Any] = dict(found["parts_ms"])
    total, reasons = float(parts.pop("total")), dict(parts.pop("queue_for"))
    still = "" if found.get("over", True) else ", and it goes on"
    lines = [f"{found['id']}: {total:,.1f} ms{still}"]
    for name, ms in sorted(parts.items(), key=lambda pair: -pair[1]):
        if ms < _SHOWN_MS:
            continue
        share = ms / total if total else 0.0
        line = f"{ms:12,.1f} ms {share:6.1%}  {name:13}  {WORDS.get(name, ''):41}  {'#' * round(_BAR * share)}"
        lines.append(line.rstrip())
        if name == "queue":
            lines += [f"{each:12,.1f} ms          for {reason}" for reason, each in reasons.items()]
    if found.get("behind"):
        lines.append(f"It waited in the queue behind {', '.join(found['behind'])}.")
    for seq_id, ms in found.get("other_prompts_of", {}).items():
        lines.append(f"The prompt of {seq_id} took {ms:,.1f} ms of its steps.")
    return lines
