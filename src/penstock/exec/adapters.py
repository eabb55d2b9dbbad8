"""The adapters of a runner, and the slots whose sequences have one.

Decides the order of a step's rows: the rows of one adapter are neighbours, so that its tokens form one group and its
weights are read once. Does not know files: the caller passes a function that reads them.

Invariant: a slot keeps its adapter until it is released, whatever happens to the adapter's name.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from penstock.contract.adapter import AdapterFacts
from penstock.contract.errors import SetupError
from penstock.contract.plan import Admit, Row, RowResult
from penstock.nn.adapters import Adapted, AdaptedTokens, Adapter

__all__ = ["AdapterSlots", "LoadAdapter"]

LoadAdapter = Callable[[str, str], tuple[Adapter, AdapterFacts]]
"""Reads an adapter, given its name and a path. Raises SetupError."""

MISSING = "The adapter of this request is not loaded any more: its files have changed or are gone."


class AdapterSlots:
    """Holds loaded adapters, and the adapter of each slot. Owned by a runner; not thread-safe.

    Args:
        load: reads adapters; None for a model that takes none.
    """

    def __init__(self, load: LoadAdapter | None = None) -> None:
        self._load = load
        self._loaded: dict[str, Adapter] = {}
        self._names: dict[int, str] = {}  # by slot
        self._adapters: dict[int, Adapter | None] = {}  # by slot; None where it is missing

    @property
    def in_use(self) -> bool:
        """Whether any slot has an adapter."""
        return bool(self._names)

    def load(self, name: str, path: str, digest: str = "") -> AdapterFacts:
        """Load an adapter under a name that is free.

        Args:
            name: its name in plans.
            path: where its files are.
            digest: what its digest must be; "" for any.

        Raises:
            SetupError: the adapter cannot be used, or has another digest.
        """
        assert self._load is not None, "this model takes no adapters"
        assert name not in self._loaded, f"there is an adapter {name} already"
        adapter, facts = self._load(name, path)
        if digest not in ("", facts.digest):
            raise SetupError(f"the files of the adapter {name} in {path} have changed since it was loaded")
        self._loaded[name] = adapter
        return facts

    def shared(self) -> AdapterSlots:
        """New slots for another runner, with the adapters that are loaded here."""
        other = AdapterSlots(self._load)
        other._loaded = dict(self._loaded)
        return other

    def unload(self, name: str) -> None:
        """Forget an adapter; slots that have it keep it until they are released."""
        self._loaded.pop(name, None)

    def admit(self, admit: Admit) -> None:
        """Note the adapter of a sequence, if it has one."""
        if admit.adapter:
            self._names[admit.slot] = admit.adapter
            self._adapters[admit.slot] = self._loaded.get(admit.adapter)

    def release(self, slot: int) -> None:
        """Forget the sequence in `slot`."""
        self._names.pop(slot, None)
        self._adapters.pop(slot, None)

    def reset(self) -> None:
        """Forget every sequence."""
        self._names.clear()
        self._adapters.clear()

    def in_groups(self, rows: Sequence[Row]) -> list[Row]:
        """The rows, reordered: those without an adapter first, then those of each adapter in turn."""
        return sorted(rows, key=lambda row: self._names.get(row.slot, ""))

    def adapted(self, rows: Sequence[Row]) -> Adapted:
        """The tokens that have adapters; `rows` must be in the order of `in_groups`."""
        groups: list[AdaptedTokens] = []
        end = 0
        for row in rows:
            first, end = end, end + row.count
            adapter = self._adapters.get(row.slot)
            if adapter is None:
                continue
            if groups and groups[-1].adapter is adapter:
                first = groups.pop().first
            groups.append(AdaptedTokens(first, end, adapter))
        return groups

    def refused(self, rows: Sequence[Row], results: Sequence[RowResult]) -> tuple[RowResult, ...]:
        """The results, with a failure for each row whose adapter is missing: the row was computed without it."""
        missing = {row.slot for row in rows if self._adapters.get(row.slot, row) is None}
        if not missing:
            return tuple(results)
        kept = {result.slot: result for result in results}
        kept |= {slot: RowResult(slot, failure=MISSING) for slot in missing}
        return tuple(kept[row.slot] for row in rows if row.slot in kept)
