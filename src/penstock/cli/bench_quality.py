"""`penstock bench quality`: what each variant of weights and KV cache costs in quality, against float32."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from tqdm import tqdm

from penstock.bench.machine import load_average, provenance
from penstock.bench.variants import VARIANTS
from penstock.cli.bench_report import json_option, report
from penstock.cli.fallback import tell_torch_computes
from penstock.cli.options import ADAPTER_OPTIONS, NOT_OFFLINE, build_configs, config_options
from penstock.cli.sections import SectionedCommand
from penstock.contract.config import EngineConfig
from penstock.contract.errors import ConfigError

if TYPE_CHECKING:
    from penstock.bench.quality import Chunks, Quality
    from penstock.weights.files import ModelFiles

__all__ = ["command", "cut_text", "progress", "quality_options", "quality_record"]

# Engine options without effect in a measurement of quality.
_LEFT_OUT = (
    NOT_OFFLINE
    | ADAPTER_OPTIONS
    | {
        "model",
        "quantization",
        "max_model_len",
        "kv_cache_memory",
        "max_num_seqs",
        "prefix_caching",
        "draft_model",
        "tool_call_parser",
        "reasoning_parser",
        "tokenizer",
        "chat_template",
        "generation_config",
        "record",
    }
)
_OPTIONS = (
    click.option(
        "--quantization",
        "names",
        multiple=True,
        type=click.Choice(VARIANTS),
        help="Value of --quantization to measure; :int8-kv after it adds an int8 KV cache. By default all that the"
        " model and this machine allow. May be given several times.",
    ),
    click.option("--tokens", type=click.IntRange(1), help="Use only this many tokens from the start of the text."),
    click.option(
        "--context",
        "context_tokens",
        type=click.IntRange(4),
        default=512,
        show_default=True,
        help="Tokens in a chunk; the second half of each is scored.",
    ),
    click.option(
        "--text",
        "text_file",
        type=click.Path(path_type=Path, dir_okay=False, exists=True),
        help="UTF-8 text to measure on instead of the built-in one, nine chapters of Jane Austen.",
    ),
)


def quality_options(function: Callable[..., None]) -> Callable[..., None]:
    """Add the options of a quality measurement, with or without other engines; the engine's own come last."""
    function = json_option(config_options(EngineConfig, leave_out=_LEFT_OUT)(function))
    for option in reversed(_OPTIONS):
        function = option(function)
    return function


@click.command("quality", cls=SectionedCommand)
@quality_options
@click.pass_context
def command(
    context: click.Context,
    /,
    names: tuple[str, ...],
    tokens: int | None,
    context_tokens: int,
    text_file: Path | None,
    target: Path | None,
    **_: object,
) -> None:
    """Measure what each variant of MODEL's weights costs: its predictions on a fixed text beside float32's.

    The mean Kullback-Leibler divergence says by how many nats a token a variant departs from float32 of the same
    weights. In a checkout of Penstock, bench/quality.py scores llama.cpp against the same float32.
    """
    (config,) = build_configs(context, EngineConfig)
    head = provenance()
    from penstock.bench import quality
    from penstock.loading import find_model  # imports torch: too slow for --help

    tell_torch_computes(config.device)
    files = find_model(config)
    variants = quality.possible_variants(config, files, names)
    chunks, text_name = cut_text(files, text_file, context_tokens, tokens)
    with progress(len(chunks.tokens) * (1 + len(variants))) as steps:
        rows = quality.measure(config, files, variants, chunks, steps)[1]
    record = head | quality_record(config, files, text_name, chunks, rows)
    report(quality.quality_table(rows), record, target)


def cut_text(files: ModelFiles, path: Path | None, context: int, tokens: int | None) -> tuple[Chunks, str]:
    """The chunks of a text and its name; without a `path`, of Penstock's own text.

    Raises:
        ConfigError: the text cannot be read, or does not fill a chunk.
    """
    from penstock.bench import quality
    from penstock.text import open_text

    source = path or quality.CORPUS
    try:
        written = source.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError("text", f"{source} cannot be read: {error}") from error
    return quality.cut(open_text(files.text), written, context, tokens or 0), source.name


def quality_record(
    config: EngineConfig, files: ModelFiles, text_name: str, chunks: Chunks, rows: list[Quality]
) -> dict[str, Any]:
    """The measurement as JSON, without the machine's part."""
    return {
        "kind": "quality",
        "config": asdict(config),
        "model": files.path.name,
        "text": text_name,
        "context": chunks.context,
        "chunks": len(chunks.tokens),
        "rows": [row.record() for row in rows],
        "load_average_after": load_average(),
    }


class _Bar:
    """Implements `penstock.bench.quality.Steps` as a progress bar."""

    def __init__(self, bar: tqdm[Any]) -> None:
        self._bar = bar

    def __call__(self, chunks: int = 1) -> None:
        self._bar.update(chunks)

    def name(self, what: str) -> None:
        """Say what is measured next."""
        self._bar.set_description(what)


@contextmanager
def progress(chunks: int) -> Iterator[_Bar]:
    """A progress bar over this many chunks."""
    with tqdm(total=chunks, unit="chunk", leave=False, disable=None) as bar:
        yield _Bar(bar)
