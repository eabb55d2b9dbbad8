"""How much a model thinks before it answers: maps the APIs' efforts to variables of the model's chat template.

Decides which variable each effort sets, and which efforts a model cannot follow. A template has a level
(`reasoning_effort`), a switch (`enable_thinking`, `thinking`), both or neither; with neither, the model always or never
thinks. A model that never thinks accepts every effort as a hint without effect, because agents send one to any model.
"""

from __future__ import annotations

from penstock.api_fields.fields import Kind
from penstock.contract.errors import InvalidParameter
from penstock.contract.model import ModelCard
from penstock.contract.request import TemplateValue

__all__ = ["EFFORT", "EFFORTS", "Variables", "effort_variables", "level_variables", "switch_variables"]

EFFORTS = ("none", "minimal", "low", "medium", "high", "xhigh", "max")
EFFORT = Kind(
    f"one of {', '.join(EFFORTS)}", {"type": "string", "enum": list(EFFORTS)}, lambda value: value in list(EFFORTS)
)
LEVEL = "reasoning_effort"
SWITCHES = ("enable_thinking", "thinking")

Variables = dict[str, TemplateValue]


def effort_variables(effort: str, card: ModelCard, field: str) -> Variables:
    """The variables that `effort` sets. With only a switch there are two levels: `none`, and everything else.

    Args:
        effort: one of `EFFORTS`.
        card: the served model.
        field: the request field that names the effort, for errors.

    Raises:
        InvalidParameter: the template has no variable for it, and the model does not behave that way anyway.
    """
    if effort == "none":
        return _without_thinking(card, field)
    switched = switch_variables(card, on=True)
    if switched and LEVEL not in card.template_variables:
        return switched
    return switched | level_variables(effort, card, field)


def level_variables(effort: str, card: ModelCard, field: str) -> Variables:
    """The variables that set the level, whether or not thinking is on.

    Raises:
        InvalidParameter: the model thinks, and its template has no levels.
    """
    if LEVEL not in card.template_variables and not card.thinks:
        return {}  # the model never thinks, so the level has no effect
    if LEVEL not in card.template_variables:
        raise _refusal(field, "this model's chat template has no variable that says how much to think")
    return {LEVEL: effort}


def switch_variables(card: ModelCard, *, on: bool) -> Variables:
    """The variables that turn thinking on or off; empty if the template has no switch."""
    return {name: on for name in SWITCHES if name in card.template_variables}


def _without_thinking(card: ModelCard, field: str) -> Variables:
    off = switch_variables(card, on=False)
    if not off and LEVEL in card.template_variables:
        return {LEVEL: "none"}
    if off or not card.thinks:
        return off
    raise _refusal(field, "this model always thinks; its chat template has no switch")


def _refusal(field: str, reason: str) -> InvalidParameter:
    return InvalidParameter(field, f"{field}: {reason}.", code="unsupported_parameter")
