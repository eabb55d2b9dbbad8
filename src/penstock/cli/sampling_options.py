"""Command-line options for sampling, one per file in `penstock.sampling.parameters`."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from typing import Any

import click

from penstock.cli.sections import SectionedOption
from penstock.sampling import PARAMETERS, Parameter, SamplingParams

__all__ = ["given_sampling", "sampling_options", "sampling_params"]

SECTION = "Sampling"


class JsonObject(click.ParamType[dict[str, Any]]):
    """A JSON object, as text."""

    name = "json"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> dict[str, Any]:
        """Parse the value, or fail and name the option."""
        try:
            parsed = json.loads(value) if isinstance(value, str) else value
        except ValueError as error:
            self.fail(f"not JSON: {error}", param, ctx)
        if not isinstance(parsed, dict):
            self.fail("must be a JSON object", param, ctx)
        return parsed


_TYPES: dict[str, Any] = {
    "number": click.FLOAT,
    "integer": click.INT,
    "object": JsonObject(),
    "string": click.STRING,
}


def sampling_options(*, leave_out: frozenset[str] = frozenset(), **defaults: Any) -> Callable[[Any], Any]:
    """A decorator that gives a command one option per sampling parameter.

    Args:
        leave_out: parameters that make no sense for the command.
        defaults: the command's defaults that differ from the library's.
    """

    def decorate(command: Any) -> Any:
        for parameter in reversed(PARAMETERS):
            if parameter.name not in leave_out:
                command = _option(parameter, defaults.get(parameter.name, parameter.default))(command)
        return command

    return decorate


def _option(parameter: Parameter, default: Any) -> Callable[[Any], Any]:
    flag = "--" + parameter.name.replace("_", "-")
    kind, several = _json_type(parameter.json_schema())
    if kind == "boolean":
        return click.option(
            flag,
            parameter.name,
            is_flag=True,
            default=default,
            help=parameter.doc,
            cls=SectionedOption,
            section=SECTION,
        )
    return click.option(
        flag,
        parameter.name,
        type=_TYPES[kind],
        default=None if several else default,
        multiple=several,
        show_default=_shown_default(parameter, default) if default is not None and not several else False,
        help=parameter.doc + (" May be given several times." if several else ""),
        cls=SectionedOption,
        section=SECTION,
    )


def _shown_default(parameter: Parameter, default: Any) -> str | bool:
    return f"the model's, else {default}" if parameter.from_model else True


def _json_type(schema: dict[str, Any]) -> tuple[str, bool]:
    """The JSON type of one value, and whether a list of them is accepted."""
    alternatives = schema.get("anyOf", [schema])
    for alternative in alternatives:
        if alternative["type"] == "array":
            return str(alternative["items"]["type"]), True
    return next(str(one["type"]) for one in alternatives if one["type"] != "null"), False


def sampling_params(context: click.Context, model_defaults: Iterable[tuple[str, Any]] = ()) -> SamplingParams:
    """The command's options as `SamplingParams`, on top of the model's own defaults.

    Raises:
        InvalidParameter: a value is out of range; names the option.
    """
    return SamplingParams.from_fields(dict(model_defaults) | given_sampling(context))


def given_sampling(context: click.Context) -> dict[str, Any]:
    """The sampling parameters that a model's defaults cannot change: given as options, or never taken from it."""
    from_model = {parameter.name: parameter.from_model for parameter in PARAMETERS}
    return {
        name: value
        for name, value in context.params.items()
        if name in from_model
        and value != ()  # a repeatable option that was not given
        and not (from_model[name] and context.get_parameter_source(name) is click.core.ParameterSource.DEFAULT)
    }
