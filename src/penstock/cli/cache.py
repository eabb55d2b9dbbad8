"""`penstock cache`: the KV blocks that are kept in files."""

from __future__ import annotations

import os
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import click

from penstock.cli.options import ADAPTER_OPTIONS, NOT_OFFLINE, build_configs, config_options
from penstock.cli.sections import SectionedCommand
from penstock.contract.config import EngineConfig
from penstock.contract.errors import ConfigError
from penstock.contract.memory import readable_bytes

__all__ = ["command"]

NOT_RIGHT = 1

_STORE = click.option(
    "--kv-store", default="auto", show_default=True, help="Folder of kept blocks, as for `penstock serve`."
)

# Engine options that do not matter to a verification: names, queues and parsers of answers.
_LEFT_OUT = (
    NOT_OFFLINE
    | ADAPTER_OPTIONS
    | {
        *(
            "model",
            "kv_store",
            "kv_store_bytes",
            "kv_cache_memory",
            "max_num_seqs",
            "prefix_caching",
            "tool_call_parser",
        ),
        *("reasoning_parser", "tokenizer", "chat_template", "generation_config", "record", "state_checkpoint_interval"),
        "draft_model",
    }
)


@click.group("cache")
def command() -> None:
    """List, measure, clear and verify the KV blocks that `--kv-store` keeps in files."""


@command.command("list")
@_STORE
def list_folders(kv_store: str) -> None:
    """List what is kept, one folder per contract (everything that the bits of its blocks depend on)."""
    from penstock.store import folders

    for folder in folders(_root(kv_store)):
        blocks, size = folder.size()
        used = datetime.fromtimestamp(folder.used(), UTC).strftime("%Y-%m-%d %H:%M UTC") if blocks else "never"
        facts = folder.facts
        kinds = f"{facts.get('dtype')}, KV {facts.get('kv_cache_dtype')}, {facts.get('isa')}"
        said = f"{kinds}, weights {facts.get('weights')}"
        click.echo(f"{folder.path.name}  {facts.get('model')}")
        held = facts.get("holds") or f"blocks, {blocks * folder.form.block_size} tokens"
        click.echo(f"    {blocks} {held}, {readable_bytes(size)}; last used {used}")
        click.echo(f"    {said}; Penstock {facts.get('penstock')}")


@command.command("size")
@_STORE
def show_size(kv_store: str) -> None:
    """Print how much disk space the blocks take, all models together, and where."""
    from penstock.store import folders

    root = _root(kv_store)
    sizes = [folder.size() for folder in folders(root)]
    total = sum(size for _, size in sizes)
    click.echo(f"{readable_bytes(total)} in {sum(count for count, _ in sizes)} blocks, {root}")


@command.command("clear")
@click.argument("contract", required=False)
@click.option("--yes", "-y", is_flag=True, help="Do not ask for confirmation.")
@_STORE
def clear_folders(contract: str | None, yes: bool, kv_store: str) -> None:
    """Delete everything that is kept, or only what `penstock cache list` shows as CONTRACT (first digits suffice).

    Running servers continue: they compute what they do not find, and write it again.
    """
    from penstock.store import clear, folders

    root = _root(kv_store)
    chosen = [folder for folder in folders(root) if folder.path.name.startswith(contract or "")]
    if contract and len(chosen) != 1:
        raise ConfigError("CONTRACT", f"{contract!r} names {len(chosen)} folders in {root}; see: penstock cache list")
    size = sum(folder.size()[1] for folder in chosen)
    if not yes:
        if not sys.stdin.isatty():
            raise ConfigError("--yes", "is needed where nobody can be asked")
        if not click.confirm(f"Delete {readable_bytes(size)} in {root}?"):
            return
    count = sum(clear(root, folder) for folder in chosen)
    click.echo(f"{count} blocks deleted, {readable_bytes(size)} freed")


@command.command("verify", cls=SectionedCommand)
@click.option("--blocks", type=click.IntRange(1), default=32, show_default=True, help="Blocks to compute again.")
@click.option("--seed", type=int, default=0, show_default=True, help="Seed of the choice of blocks.")
@_STORE
@config_options(EngineConfig, leave_out=_LEFT_OUT)
@click.pass_context
def verify(context: click.Context, /, blocks: int, seed: int, kv_store: str, **_: Any) -> None:
    """Compute some blocks of MODEL again from their tokens, and compare them with their files, bit by bit.

    Give the options that the model is served with: other options have other blocks. Exit code 1 if a block differs.
    """
    from penstock.store_check import verify_store
    from penstock.weights.locate import default_cache_dir

    (config,) = build_configs(context, EngineConfig)
    verdict = verify_store(config, default_cache_dir(os.environ), _root(kv_store), blocks, seed, click.echo)
    if verdict.why_not:
        click.echo(f"kept KV          none: {verdict.why_not}")
        return
    for key in verdict.different:
        click.echo(f"block {key} is not what this model computes", err=True)
    click.echo(
        f"{verdict.same} blocks are what was computed again, {len(verdict.different)} are not; {verdict.damaged} were"
        f" damaged and are deleted; of {verdict.orphaned} the blocks before them are gone"
    )
    if verdict.different:
        context.exit(NOT_RIGHT)


def _root(option: str) -> Path:
    """The folder that the option names."""
    from penstock.store import store_root
    from penstock.weights.locate import default_cache_dir

    root = store_root(option, default_cache_dir(os.environ))
    if root is None:
        raise ConfigError("--kv-store", "off has nothing to show")
    return root
