"""`penstock bench quality`: what each form of weights and KV cache costs in quality, ours and llama.cpp's."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from tqdm import tqdm

from penstock.bench.forms import FORMS, form_name
from penstock.bench.machine import load_average, provenance
from penstock.bench.peer_install import install_peer
from penstock.bench.peers import Absent
from penstock.cli.bench_report import json_option, report
from penstock.cli.options import NOT_OFFLINE, build_configs, config_options
from penstock.cli.sections import SectionedCommand
from penstock.contract.config import EngineConfig
from penstock.contract.errors import ConfigError, EngineFault

if TYPE_CHECKING:
    from penstock.bench.quality import Quality, Reference
    from penstock.weights.files import ModelFiles

__all__ = ["command"]

# Options of the engine that a measurement of quality has no use for.
_LEFT_OUT = NOT_OFFLINE | {
    "model",
    "quantization",
    "max_model_len",
    "kv_cache_memory",
    "max_num_seqs",
    "prefix_caching",
    "tool_call_parser",
    "reasoning_parser",
    "record",
}


@click.command("quality", cls=SectionedCommand)
@click.option(
    "--quantization",
    "forms",
    multiple=True,
    type=click.Choice(FORMS),
    help="A form of the weights to measure, as the engine takes it; with :int8-kv over a KV cache in int8. May be given"
    " several times; by default all forms of the weights that the model and this machine allow.",
)
@click.option("--tokens", type=click.IntRange(1), help="Use only so many of the text's first tokens.")
@click.option(
    "--context",
    "context_tokens",
    type=click.IntRange(4),
    default=512,
    show_default=True,
    help="Tokens of a chunk; the second half of each is scored.",
)
@click.option(
    "--text",
    "text_file",
    type=click.Path(path_type=Path, dir_okay=False, exists=True),
    help="A UTF-8 text to measure on instead of ours, nine chapters of Jane Austen.",
)
@click.option(
    "--peer",
    "names",
    multiple=True,
    help="llama.cpp (on the same file), or llama.cpp:Q8_0 and the like, which convert it first. May be given several"
    " times; by default, if it is installed, the file, F32, Q8_0 and Q4_0.",
)
@click.option("--no-peers", is_flag=True, help="Measure Penstock alone.")
@click.option(
    "--peers-dir", type=click.Path(path_type=Path, file_okay=False), help="Where peers are; by default in the cache."
)
@click.option("--install", is_flag=True, help="Install llama.cpp first if it is missing (pip and cmake).")
@json_option
@config_options(EngineConfig, leave_out=_LEFT_OUT)
@click.pass_context
def command(
    context: click.Context,
    /,
    forms: tuple[str, ...],
    tokens: int | None,
    context_tokens: int,
    text_file: Path | None,
    names: tuple[str, ...],
    no_peers: bool,
    peers_dir: Path | None,
    install: bool,
    target: Path | None,
    **_: object,
) -> None:
    """Measure what each form of MODEL's weights costs: its predictions on a fixed text beside float32's.

    The mean Kullback-Leibler divergence says by how many nats a token a form departs from float32 of the same weights;
    llama.cpp's forms are scored against the same float32, on the same tokens.
    """
    if no_peers and (names or install):
        raise ConfigError("no_peers", "contradicts --peer and --install")
    (config,) = build_configs(context, EngineConfig)
    head = provenance()
    from penstock.app import find_model  # brings torch in: not for --help
    from penstock.bench import quality
    from penstock.text import open_text
    from penstock.weights.locate import default_cache_dir

    files = find_model(config)
    wanted = quality.possible_forms(config, files, forms)
    folder = peers_dir or default_cache_dir(os.environ) / "peers"
    found = {} if no_peers else _find_peers(names, folder, files.path, install)
    there = {name: each for name, each in found.items() if isinstance(each, Path)}
    absent = {name: each.reason for name, each in found.items() if isinstance(each, Absent)}
    source = text_file or quality.CORPUS
    chunks = quality.cut(open_text(files.text), _read(source), context_tokens, tokens or 0)
    with _progress(len(chunks.tokens), len(wanted), len(there)) as step:
        step.name("float32")
        reference = quality.Reference(quality.open_subject(_float32(config), files, chunks.context), chunks, step)
        rows = [_measure(each, files, reference, step) for each in wanted]
        rows += _measure_peers(there, folder, config.threads, rows[0], reference, absent, step)
    record = head | {
        "kind": "quality",
        "config": asdict(config),
        "model": files.path.name,
        "text": source.name,
        "context": chunks.context,
        "chunks": len(chunks.tokens),
        "rows": [row.record() for row in rows],
        "absent": absent,
        "load_average_after": load_average(),
    }
    lines = [quality.quality_table(rows), *_float32_check(rows)]
    report("\n".join([*lines, *(f"{name}: {reason}" for name, reason in absent.items())]), record, target)


def _float32(config: EngineConfig) -> EngineConfig:
    plain = replace(config, dtype="float32", quantization="none")
    return replace(plain, kv_cache_dtype="auto", linear_kernels="auto")


def _find_peers(names: tuple[str, ...], folder: Path, model: Path, install: bool) -> dict[str, Path | Absent]:
    """The files that llama.cpp is scored on, by name; what is asked for must be there."""
    from penstock.bench.llama_perplexity import DEFAULT_PEERS, find_peer_model

    if install:
        install_peer("llama.cpp", folder, _say)
    found: dict[str, Path | Absent] = {}
    for name in dict.fromkeys(names or DEFAULT_PEERS):
        found[name] = each = find_peer_model(name, folder, model)
        if isinstance(each, Absent):
            if names:
                raise ConfigError("peer", f"{each.name} {each.reason}")
            break  # one reason for all
    return found


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError("text", f"{path} cannot be read: {error}") from error


class _Steps:
    """A bar that is moved by being called, after each chunk."""

    def __init__(self, bar: tqdm[Any]) -> None:
        self._bar = bar

    def __call__(self, chunks: int = 1) -> None:
        self._bar.update(chunks)

    def name(self, what: str) -> None:
        """Say what is measured from now on."""
        self._bar.set_description(what)


@contextmanager
def _progress(chunks: int, forms: int, peers: int) -> Iterator[_Steps]:
    """A bar over the chunks of the reference, of each form, of the base logits and of each peer."""
    passes = 1 + forms + (1 + peers if peers else 0)
    with tqdm(total=chunks * passes, unit="chunk", leave=False, disable=None) as bar:
        yield _Steps(bar)


def _measure(config: EngineConfig, files: ModelFiles, reference: Reference, step: _Steps) -> Quality:
    """One form of ours; its weights are let go at the end."""
    from penstock.bench.quality import Quality, open_subject, score

    step.name(f"penstock {form_name(config)}")
    subject = open_subject(config, files, reference.chunks.context)
    name = f"penstock {subject.name}"
    if config.quantization == "none":
        name += f", {subject.dtype}"
    return Quality.of(name, subject.weight_bytes, score(reference, subject.scorer, step))


def _measure_peers(
    models: dict[str, Path],
    folder: Path,
    threads: int,
    ours: Quality,
    reference: Reference,
    absent: dict[str, str],
    step: _Steps,
) -> list[Quality]:
    """Every peer that can be scored; one that fails joins the absent, with its reason."""
    from penstock.bench.llama_perplexity import score_peer, write_base
    from penstock.exec.device import compute_threads

    rows: list[Quality] = []
    if not models:
        return rows
    chunks = reference.chunks
    with tempfile.TemporaryDirectory(prefix="base-logits-", dir=folder) as work:
        base = Path(work) / "base"
        step.name("base logits")
        write_base(reference, base, step)
        for name, model in models.items():
            step.name(name)
            try:
                rows.append(score_peer(name, folder, model, base, ours, chunks.context, compute_threads(threads)))
            except EngineFault as fault:
                absent[name] = str(fault)
            step(len(chunks.tokens))
    return rows


def _float32_check(rows: Sequence[Quality]) -> list[str]:
    """Whether both engines mean the same by float32 of these weights, where llama.cpp's was measured."""
    return [
        f"float32 of the same weights: perplexity {row.reference_perplexity:.4f} by Penstock,"
        f" {row.perplexity:.4f} by llama.cpp"
        for row in rows
        if row.name == "llama.cpp:F32"
    ]


def _say(line: str) -> None:
    click.echo(line, err=True)
