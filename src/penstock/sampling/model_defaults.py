"""Sampling defaults that come with a model: its publisher's recommendations, from `generation_config.json`.

Decides which entries are used here: the parameters that are `from_model`, and `do_sample`. A length such as
`max_new_tokens` is not used, because the caller decides how long an answer may be. Other entries are for generation
methods of other engines.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from penstock.contract.errors import InvalidParameter, ModelFileError
from penstock.contract.sampling import SamplingScalar
from penstock.sampling.parameters import PARAMETERS
from penstock.sampling.parameters.temperature import GREEDY

__all__ = ["read_model_defaults"]


def read_model_defaults(config: Mapping[str, Any], file: str) -> tuple[tuple[str, SamplingScalar], ...]:
    """(name, value) of each parameter whose default the model sets; values equal to our own defaults are left out.

    `do_sample: false` means temperature 0, whatever `temperature` says, as in transformers.

    Args:
        config: the decoded JSON.
        file: the file it came from, for errors.

    Raises:
        ModelFileError: a value is of the wrong type or out of range.
    """
    given = {p: config[p.name] for p in PARAMETERS if p.from_model and config.get(p.name) is not None}
    values: dict[str, SamplingScalar] = {}
    for parameter, value in given.items():
        try:
            checked = parameter.check(value)
        except InvalidParameter as error:
            reason = f"{error.message}; --generation-config none leaves the file's values out"
            raise ModelFileError(file, parameter.name, reason) from error
        if checked != parameter.default:
            values[parameter.name] = checked
    if config.get("do_sample") is False:
        values["temperature"] = GREEDY
    return tuple(sorted(values.items()))
