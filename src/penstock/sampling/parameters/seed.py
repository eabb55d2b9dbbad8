"""`seed`: the key of all randomness of a request; see `penstock.sampling.uniform`."""

from __future__ import annotations

from penstock.sampling.kinds import Integer
from penstock.sampling.parameter import Home, Parameter

__all__ = ["PARAMETER"]

PARAMETER = Parameter(
    name="seed",
    kind=Integer(-(2**63), 2**63 - 1),
    default=None,
    neutral=None,
    nullable=True,
    home=Home.SPEC,
    field="seed",
    doc="Make a random request repeatable: the same request with the same seed gives the same tokens, whatever else is"
    " running. Without a seed, a fresh one is drawn.",
    random_only=True,
)
