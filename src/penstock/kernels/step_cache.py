"""Values that are computed once per step, because all layers with the same attention share them."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Generic, TypeVar

from torch import Tensor

__all__ = ["StepCache"]

_Value = TypeVar("_Value")


class StepCache(Generic[_Value]):
    """Holds the values of the last step, identified by its block table: on a device every step makes a new one."""

    def __init__(self) -> None:
        self._step: Tensor | None = None
        self._values: dict[Hashable, _Value] = {}

    def get(self, step: Tensor, key: Hashable, make: Callable[[], _Value]) -> _Value:
        """The value of `key` in the step with this block table; `make` makes it on the first call."""
        if self._step is not step:
            self._step, self._values = step, {}
        if key not in self._values:
            self._values[key] = make()
        return self._values[key]
