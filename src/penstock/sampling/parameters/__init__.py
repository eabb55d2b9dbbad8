"""The sampling parameters, one module each, discovered automatically: to add a parameter, add its file.

Every module here is named after its parameter and has one `PARAMETER`. `PARAMETERS` holds them sorted by name, and
`STAGES` holds the stages that reshape the distribution, in the order in which they run. Constraints and biases
(allowed_token_ids, bad_words, logit_bias, in vLLM's order) and the penalties (repetition, frequency, presence, DRY) run
before temperature and apply to greedy choices too. The filters run after temperature: top_n_sigma, top_k, typical_p,
top_p, min_p, and finally XTC, which must see what the others left (llama.cpp's order). Each filter sees the
distribution that the filters before it left, as in transformers.
"""

from __future__ import annotations

from importlib import import_module
from pkgutil import iter_modules

from penstock.sampling.parameter import Parameter, RowStage, Stage

__all__ = ["PARAMETERS", "STAGES"]


def _collect() -> tuple[Parameter, ...]:
    names = sorted(module.name for module in iter_modules(__path__))
    return tuple(import_module(f"{__name__}.{name}").PARAMETER for name in names)


PARAMETERS: tuple[Parameter, ...] = _collect()

STAGES: tuple[tuple[str, Stage | RowStage], ...] = tuple(
    sorted(((p.name, stage) for p in PARAMETERS for stage in p.stages), key=lambda named: named[1].order)
)
