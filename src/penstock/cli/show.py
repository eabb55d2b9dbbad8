"""`penstock show`."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import TYPE_CHECKING

import click

from penstock.cli.fallback import tell_torch_computes
from penstock.cli.options import build_configs, config_options
from penstock.contract.config import EngineConfig

if TYPE_CHECKING:
    from penstock.loading import PlannedModel
    from penstock.nn.program import Program
    from penstock.weights.files import ModelFiles

__all__ = ["command"]

_CONTEXTS = (2048, 8192, 32768, 131072)
_STREAMS = (1, 8, 32)
_POSITIONS = 1024

OPTIONS = ("device", "dtype", "quantization", "kv_cache_dtype")
LEFT_OUT = frozenset(EngineConfig.__dataclass_fields__) - frozenset(OPTIONS)


@click.command("show")
@click.option("--program", "with_program", is_flag=True, help="Print every operation of a step, layer by layer.")
@click.option(
    "--rates",
    "with_rates",
    is_flag=True,
    help="Measure this machine's limits (about a second), and print how many tokens a second they allow at best.",
)
@config_options(EngineConfig, leave_out=LEFT_OUT)
@click.pass_context
def command(context: click.Context, /, with_program: bool, with_rates: bool, **_: object) -> None:
    """Show what MODEL is made of, and how much memory it takes, from its headers alone, without loading it."""
    (config,) = build_configs(context, EngineConfig)
    from penstock.exec.free_memory import free_memory
    from penstock.exec.start_report import weight_formats
    from penstock.loading import find_model, plan_model, resolve_choices
    from penstock.weights.locate import default_cache_dir

    tell_torch_computes(config.device)
    files = find_model(config, default_cache_dir(os.environ))
    planned = plan_model(config, files, resolve_choices(config, files))
    formats = weight_formats(planned.formats, files.stored_dtype, planned.choices.dtype)
    click.echo(f"model            {files.path}, {files.num_weights / 1e6:.1f} M weights")
    for line in (*_what_it_is(files, planned.program), *_text(files), *_what_it_takes(planned, formats)):
        click.echo(line)
    for line in _memory(planned, config, free_memory(planned.choices.backend.device)):
        click.echo(line)
    if with_rates:
        for line in _rates(planned):
            click.echo(line)
    if with_program:
        click.echo(f"\n{planned.program}")
        if planned.program.predictor is not None:
            click.echo(f"\npredictor\n{planned.program.predictor.program}")


def _what_it_is(files: ModelFiles, program: Program) -> Iterator[str]:
    shape = program.shape
    windows = sorted({cache.window for cache in program.caches if cache.window is not None})
    yield f"family           {files.config['model_type']}"
    yield (
        f"sizes            {shape.num_layers} layers, {shape.hidden_size} wide, {shape.num_heads} heads of"
        f" {shape.head_dim}, {shape.num_kv_heads} of keys, vocabulary {shape.vocab_size}, context {shape.max_positions}"
    )
    yield f"windows          {', '.join(map(str, windows)) or 'none'}"
    if program.predictor is not None:
        yield "predictor        a layer of its own predicts a second token, for guesses"
    if files.stored:
        yield f"stored as        {_kinds(files)}"


def _text(files: ModelFiles) -> Iterator[str]:
    """Licence and chat template, and the template's handling of tools."""
    from penstock.contract.errors import SetupError
    from penstock.text import open_text
    from penstock.weights.licence import licence_of

    yield f"licence          {licence_of(files) or 'not said in its files'}"
    try:
        text = open_text(files.text)
    except SetupError as error:  # the rest of the model can be shown anyway
        yield f"chat template    unknown: {error}"
        return
    if text.chat_template is None:
        yield "chat template    none: conversations become plain text"
        return
    template, calls = text.tool_template or text.chat_template, text.reply_format.calls
    assert calls is not None, "only an operator's choice can turn calls off"
    tools = f"calls of tools in the format {calls.name}"
    if not template.takes_tools:
        tools += ", and no place for tools: they are described in the system message"
    yield f"chat template    {tools}{'; answers may begin with reasoning' if text.reply_format.thinks else ''}"


def _kinds(files: ModelFiles) -> str:
    """Types of the checkpoint's tensors with their share of its bytes, largest first."""
    sizes = sorted(files.stored.items(), key=lambda item: -item[1])
    return ", ".join(f"{kind} {size / files.num_bytes:.0%}" for kind, size in sizes)


def _what_it_takes(planned: PlannedModel, formats: str) -> Iterator[str]:
    from penstock.contract.model import StepRow
    from penstock.nn.cost import cost

    yield f"weights          {planned.weight_bytes / 2**20:.1f} MiB: {formats}"
    one = cost(planned.program, [StepRow(1023, 1)], planned.choices.kv_dtype)
    ops = one.fp32_ops + one.bf16_ops + one.int8_ops
    yield (
        f"a token          at 1,024 positions reads {one.weight_bytes / 2**20:.1f} MiB of weights and"
        f" {one.kv_bytes / 2**20:.1f} MiB of keys and values, and takes {ops / 1e6:.0f} million operations"
    )


def _rates(planned: PlannedModel) -> Iterator[str]:
    """Tokens per second that the machine's limits allow: an upper bound that no engine reaches."""
    from penstock.bench.kernels import measure_limits
    from penstock.bench.limits import limits_line
    from penstock.contract.errors import ConfigError
    from penstock.contract.model import StepRow
    from penstock.kernels.cpu_backend import CpuBackend
    from penstock.nn.cost import cost

    backend = planned.choices.backend
    if not isinstance(backend, CpuBackend):
        raise ConfigError(
            "--rates", f"needs the compiled kernels, which measure the limits; here computes {backend.isa}"
        )
    limits = measure_limits(backend)

    def rate(tokens: int, rows: list[StepRow]) -> str:
        return f"{tokens / limits.seconds(cost(planned.program, rows, planned.choices.kv_dtype)):,.0f} tokens/s"

    yield f"rates            an upper bound, by the {limits_line(limits)}"
    for streams in _STREAMS:
        rows = [StepRow(_POSITIONS - 1, 1)] * streams
        yield f"  {streams:>9,}      {'streams' if streams > 1 else 'stream'} at 1,024 positions: {rate(streams, rows)}"
    yield f"    prefill      of 1,024 tokens: {rate(_POSITIONS, [StepRow(0, _POSITIONS)])}"


def _memory(planned: PlannedModel, config: EngineConfig, free: int) -> Iterator[str]:
    """The memory that contexts take, up to the model's context length, and whether they fit beside the weights."""
    from penstock.contract.memory import readable_bytes

    context = planned.program.shape.max_positions
    yield f"memory           {readable_bytes(free)} free; for one request of so many tokens:"
    for tokens in (*(size for size in _CONTEXTS if size < context), context):
        needs = planned.needs(config, tokens)
        fits = "fits" if needs.total <= free else "does not fit"
        yield (f"  {tokens:>9,}      KV cache {readable_bytes(needs.kv)}, {readable_bytes(needs.total)} in all: {fits}")
