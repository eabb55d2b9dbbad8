"""`logprobs`: whether the log probability of each generated token is wanted."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from penstock.contract.errors import InvalidParameter
from penstock.sampling.kinds import Integer
from penstock.sampling.parameter import Home, Parameter

__all__ = ["PARAMETER"]


class _ChosenOnly:
    """The integer 0, with an error for higher counts that says what is missing rather than what is out of range."""

    def check(self, name: str, value: object) -> int:
        """`value` itself."""
        count = Integer(0, 2**31 - 1).check(name, value)
        if count:
            raise InvalidParameter(
                name,
                f"alternatives to the generated token are not supported yet; 0 is, got {count}",
                code="unsupported",
            )
        return count

    def schema(self) -> Mapping[str, Any]:
        """The one integer."""
        return Integer(0, 0).schema()


PARAMETER = Parameter(
    name="logprobs",
    kind=_ChosenOnly(),
    default=None,
    neutral=None,
    nullable=True,
    home=Home.SPEC,
    field="logprobs",
    doc="0 returns the log probability of each generated token, under the model's own distribution before temperature"
    " and the filters. Alternatives to the generated token are not supported yet.",
)
