"""Which adapters requests may name: those that are loaded and not about to be unloaded.

Decides which names are taken and how many adapters there may be. Does not load anything. Owned by the engine's thread:
only this thread changes it; every other thread may read `known`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Set
from dataclasses import replace
from types import MappingProxyType

from penstock.contract.adapter import AdapterFacts, is_adapter_name
from penstock.contract.errors import InvalidParameter, RequestError, UnknownModel
from penstock.contract.request import SequenceRequest

__all__ = ["AdapterBook"]


class AdapterBook:
    """The adapters of one engine.

    Args:
        most: how many may be loaded at once; 0 for a model that takes none.

    Attributes:
        known: the adapters that requests may name. Immutable: replaced when an adapter is loaded or retired.
    """

    def __init__(self, most: int) -> None:
        self.most = most
        self.known: Mapping[str, AdapterFacts] = MappingProxyType({})
        self._retired: dict[str, list[Callable[[], None]]] = {}  # still loaded, with callbacks for their unloading

    @property
    def retiring(self) -> bool:
        """Whether an adapter is to be unloaded once no request uses it."""
        return bool(self._retired)

    def check_name(self, name: str) -> None:
        """Make sure that an adapter of this name may be loaded.

        Raises:
            RequestError: it may not be loaded.
        """
        if not self.most:
            message = "This server takes no adapters; start it with --lora NAME=DIRECTORY or --lora-dir DIRECTORY."
            raise RequestError(message, code="adapters_off")
        if not is_adapter_name(name):
            raise InvalidParameter("lora_name", "must be a printable name of 1 to 256 characters")
        if name in self.known or name in self._retired:
            where = "is loaded already" if name in self.known else "is being unloaded"
            raise InvalidParameter("lora_name", f"an adapter of this name {where}", code="adapter_loaded")
        if len(self.known) + len(self._retired) >= self.most:
            message = f"{self.most} adapters are loaded, as many as there may be; unload one, or raise --max-loras."
            raise RequestError(message, code="too_many_adapters")

    def add(self, facts: AdapterFacts) -> AdapterFacts:
        """Note that an adapter was loaded; returns its facts with the time of loading."""
        facts = replace(facts, created=int(time.time()))
        self.known = MappingProxyType({**self.known, facts.name: facts})
        return facts

    def check(self, sequence: SequenceRequest) -> None:
        """Make sure that a sequence's adapter is the one that it was resolved with.

        Raises:
            UnknownModel: the adapter was unloaded meanwhile.
        """
        if not sequence.adapter:
            return
        found = self.known.get(sequence.adapter)
        if found is None or found.digest != sequence.adapter_digest:
            raise UnknownModel(sequence.adapter, *self.known)

    def retire(self, name: str, gone: Callable[[], None]) -> None:
        """Let no more requests name an adapter; `gone` is called when it is unloaded, or when the engine ends.

        Raises:
            UnknownModel: no adapter has this name.
        """
        if name in self._retired:
            self._retired[name].append(gone)
            return
        if name not in self.known:
            raise UnknownModel(name, *self.known)
        self.known = MappingProxyType({each: facts for each, facts in self.known.items() if each != name})
        self._retired[name] = [gone]

    def unused(self, used: Set[str]) -> list[str]:
        """The retired adapters that are not among `used`."""
        return [name for name in self._retired if name not in used]

    def remove(self, name: str) -> None:
        """Note that a retired adapter was unloaded."""
        for gone in self._retired.pop(name):
            gone()

    def close(self) -> None:
        """Call all callbacks that wait for an unloading: the engine ends."""
        for name in list(self._retired):
            self.remove(name)
