"""The sampling parameters, one module each, found by looking: to add a parameter, add its file.

Every module here is named after its parameter and has one `PARAMETER`. `PARAMETERS` holds them sorted by name, and
`STAGES` those that reshape the distribution in the order in which they run: temperature, top_k, top_p, min_p. Each
filter thus sees the distribution that the ones before it left, as in transformers. (Only top_p and min_p would notice
another order: top_k and min_p compare single tokens with the likeliest one, which every filter keeps.)
"""

from __future__ import annotations

from importlib import import_module
from pkgutil import iter_modules

from penstock.sampling.parameter import Parameter, Stage

__all__ = ["PARAMETERS", "STAGES"]


def _collect() -> tuple[Parameter, ...]:
    names = sorted(module.name for module in iter_modules(__path__))
    return tuple(import_module(f"{__name__}.{name}").PARAMETER for name in names)


PARAMETERS: tuple[Parameter, ...] = _collect()

STAGES: tuple[tuple[str, Stage], ...] = tuple(
    sorted(((p.name, stage) for p in PARAMETERS for stage in p.stages), key=lambda named: named[1].order)
)
