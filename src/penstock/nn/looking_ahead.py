"""Turns a causal model's program into a bidirectional one: what `is_causal: false` in a config means.

Decides how windows change: as in transformers (`create_bidirectional_sliding_window_mask`), a token sees `window`
positions on either side of its own, but in a causal model `window` positions including its own. Knows no family.
"""

from __future__ import annotations

from dataclasses import replace

from penstock.contract.model import KvCacheSpec
from penstock.kernels.attention_spec import AttentionSpec
from penstock.nn.operations import Attend, Operations
from penstock.nn.program import Program

__all__ = ["looking_both_ways", "why_causal_only"]


def why_causal_only(program: Program) -> str | None:
    """The reason, in words, why a program cannot look ahead; None if it can."""
    if program.states:
        return "it carries recurrent state, which runs one way"
    if any(cache.value_dim for cache in program.caches):
        return "attention over a latent cache is causal"
    return None


def looking_both_ways(program: Program) -> Program:
    """The same program with each token seeing as far ahead as back; `why_causal_only` must return None for it."""
    layers = tuple(_both_ways(layer) for layer in program.layers)
    return replace(program, layers=layers, caches=tuple(map(_wider, program.caches)))


def _both_ways(operations: Operations) -> Operations:
    return tuple(replace(each, spec=_of(each.spec)) if isinstance(each, Attend) else each for each in operations)


def _of(spec: AttentionSpec) -> AttentionSpec:
    if spec.window is None:
        return replace(spec, ahead=None)
    return replace(spec, window=spec.window + 1, ahead=spec.window)


def _wider(cache: KvCacheSpec) -> KvCacheSpec:
    return cache if cache.window is None else replace(cache, window=cache.window + 1)
