"""`penstock show`."""

from __future__ import annotations

import os

import click

from penstock.cli.options import build_configs, config_options
from penstock.contract.config import EngineConfig

__all__ = ["command"]

OPTIONS = ("device", "dtype", "quantization", "linear_kernels", "kv_cache_dtype")
LEFT_OUT = frozenset(EngineConfig.__dataclass_fields__) - frozenset(OPTIONS)


@click.command("show")
@click.option("--program", "with_program", is_flag=True, help="Print every operation of a step, layer by layer.")
@config_options(EngineConfig, leave_out=LEFT_OUT)
@click.pass_context
def command(context: click.Context, /, with_program: bool, **_: object) -> None:
    """Say what MODEL is made of: sizes, how weights are kept, what a step reads and computes."""
    (config,) = build_configs(context, EngineConfig)
    from penstock.app import find_model, load_model
    from penstock.contract.model import StepRow
    from penstock.nn.cost import cost
    from penstock.weights.locate import default_cache_dir

    loaded = load_model(config, find_model(config, default_cache_dir(os.environ)), click.echo)
    shape, caches = loaded.shape, loaded.program.caches
    windows = sorted({cache.window for cache in caches if cache.window is not None})
    click.echo(f"family           {loaded.files.config['model_type']}")
    click.echo(
        f"sizes            {shape.num_layers} layers, {shape.hidden_size} wide, {shape.num_heads} heads of"
        f" {shape.head_dim}, {shape.num_kv_heads} of keys, vocabulary {shape.vocab_size}, context {shape.max_positions}"
    )
    click.echo(f"windows          {', '.join(map(str, windows)) or 'none'}")
    click.echo(f"weights          {loaded.weight_bytes / 2**20:.1f} MiB: {loaded.weight_formats}")
    one = cost(loaded.program, [StepRow(1023, 1)], loaded.kv_dtype)
    ops = one.fp32_ops + one.bf16_ops + one.int8_ops
    click.echo(
        f"a token          at 1,024 positions reads {one.weight_bytes / 2**20:.1f} MiB of weights and"
        f" {one.kv_bytes / 2**20:.1f} MiB of keys and values, and takes {ops / 1e6:.0f} million operations"
    )
    if with_program:
        click.echo(f"\n{loaded.program}")
