"""`do_sample` and `stop_on_eos`: Hugging Face's and RoseInfer's names for sampling, and for stopping at the end.

Decides which sampling parameters they become, and what happens if both spellings are given.
"""

from __future__ import annotations

from penstock.api_fields.fields import BOOLEAN, Field
from penstock.api_fields.strict_json import JsonObject
from penstock.contract.errors import InvalidParameter
from penstock.sampling.parameters.temperature import GREEDY

__all__ = ["DO_SAMPLE", "STOP_ON_EOS", "move_stop_on_eos", "temperature_of"]

DO_SAMPLE = Field(
    "do_sample",
    BOOLEAN,
    "false: always take the most likely token, like temperature 0, whatever temperature says. true: draw, even if the"
    " model's own default is not to.",
)
STOP_ON_EOS = Field("stop_on_eos", BOOLEAN, "The opposite of ignore_eos: false means ignore_eos true.")


def temperature_of(given: JsonObject, default: float) -> JsonObject:
    """The temperature that `do_sample` implies; {} for no change. `default` is the model's own temperature."""
    match given.get("do_sample"):
        case False:
            return {"temperature": GREEDY}
        case True if default == GREEDY and "temperature" not in given:
            return {"temperature": 1.0}
    return {}


def move_stop_on_eos(given: JsonObject) -> None:
    """Replace `stop_on_eos` in a request by `ignore_eos`.

    Raises:
        InvalidParameter: both are given and contradict each other.
    """
    if "stop_on_eos" not in given:
        return
    ignore = not given.pop("stop_on_eos")
    if given.setdefault("ignore_eos", ignore) != ignore:
        raise InvalidParameter("stop_on_eos", "stop_on_eos and ignore_eos contradict each other: give one of them.")
