"""A sampling parameter as one value, which holds everything that other packages need to know about it.

Each parameter is declared once, in the file of its name, as `PARAMETER`. Validation, the public `SamplingParams`, the
HTTP schema, the documentation and the sampler's stages all derive from these values. Knows no particular parameter, and
no tensor library: a stage uses tensor methods only.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Any

from penstock.sampling.kinds import Kind

if TYPE_CHECKING:
    from torch import Tensor

    from penstock.sampling.row_views import RowViews

    Apply = Callable[[Tensor, Tensor], Tensor]
    ApplyToRows = Callable[[Tensor, RowViews], Tensor]

__all__ = ["Home", "Parameter", "RowStage", "Stage"]


class Home(StrEnum):
    """Which type of the contract carries the parameter."""

    REQUEST = "request"
    """`EngineRequest` itself: the parameter sets how many sequences there are, or their form."""
    SPEC = "spec"
    """`SamplingSpec`: the runner reads it."""
    STOP_RULES = "stop_rules"
    """`StopRules`: the parameter sets when a sequence ends."""


@dataclass(frozen=True, slots=True)
class Stage:
    """A reshaping of the distribution, applied to many rows at once.

    Attributes:
        order: stages run in ascending order; see `penstock.sampling`.
        apply: `(logits [R, V] float32, values [R, 1] float64 on the host) -> [R, V] float32`, leaving its arguments as
            they are. Row-wise: the bits of a row's result depend on that row and its value alone. Rows are finite or
            -inf, with at least one finite entry; ruled-out tokens come back as -inf, and at least one token stays.
    """

    order: int
    apply: Apply


@dataclass(frozen=True, slots=True)
class RowStage:
    """A reshaping that depends on more than one number per row: on earlier tokens, on lists, or on a random number.

    Attributes:
        order: as in `Stage`; both kinds run in one common order.
        apply: `(logits [R, V] float32, rows) -> [R, V] float32`, under the conditions of `Stage.apply`.
    """

    order: int
    apply: ApplyToRows


@dataclass(frozen=True, slots=True)
class Parameter:
    """One sampling parameter.

    Attributes:
        name: as callers write it; vLLM's name where vLLM has the parameter.
        kind: its type and range.
        default: its value if the caller gives none.
        neutral: the value that changes nothing; it is never stored in a `SamplingSpec`.
        nullable: whether None (null in JSON) is accepted; it stands for the neutral value.
        home: the type of the contract that carries it.
        field: its name there.
        doc: one or two sentences for users.
        stages: at most one: the maths of a parameter that shapes the distribution.
        random_only: whether it has no effect on greedy choices.
        from_model: whether a model's publisher may set its default; see `penstock.sampling.model_defaults`.
    """

    name: str
    kind: Kind
    default: Any
    neutral: Any
    nullable: bool
    home: Home
    field: str
    doc: str
    stages: tuple[Stage | RowStage, ...] = ()
    random_only: bool = False
    from_model: bool = False

    def check(self, value: object) -> Any:
        """`value` in canonical form.

        Raises:
            InvalidParameter: the value is invalid; names this parameter.
        """
        if value is None and self.nullable:
            return self.neutral
        return self.kind.check(self.name, value)

    def json_schema(self) -> dict[str, Any]:
        """The parameter as a property of a JSON schema: type, range, default, description."""
        kind = dict(self.kind.schema())
        if self.nullable:
            kind = {"anyOf": [*kind.get("anyOf", [kind]), {"type": "null"}]}
        return kind | {"default": self.default, "description": self.doc}
