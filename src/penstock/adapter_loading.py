"""From an adapter's files to an adapter of a loaded model: matches its factors with projections, and packs them.

Names concrete classes of several rooms, as `loading` and `building` do.

Decides which module names stand for which projections. A family uses the names of its text model for its weights; the
adapter of a model that also sees images, or that was saved without its head, has other prefixes.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from penstock import models
from penstock.contract.adapter import AdapterFacts, adapter_option
from penstock.contract.config import EngineConfig
from penstock.contract.errors import ConfigError, ModelFileError, SetupError
from penstock.exec.adapters import AdapterSlots
from penstock.kernels.backend import Backend
from penstock.kernels.cpu_backend import DTYPES, CpuBackend
from penstock.kernels.dense_weight import DenseWeight
from penstock.kernels.linear import Weight
from penstock.kernels.packed_weight import pack_bf16, pack_f32
from penstock.loading import LoadedModel
from penstock.nn.adapters import Adapter, LowRank, Up, columns_of, sites_of
from penstock.nn.program import Program
from penstock.weights.adapter_files import AdapterFiles, Factors
from penstock.weights.gguf_adapter import open_gguf_adapter
from penstock.weights.peft_adapter import open_peft

__all__ = ["adapter_slots", "load_adapters"]

_PREFIXES = (
    ("", ""),
    ("model.language_model.", "model."),
    ("language_model.model.", "model."),
    ("language_model.", ""),
    ("transformer.", ""),
    ("", "model."),
)
"""Prefixes of module names: in an adapter, and in place of that in a family's file. Tried in this order."""


def adapter_slots(config: EngineConfig, loaded: LoadedModel) -> AdapterSlots:
    """The adapter slots of a runner, with no adapter loaded yet."""
    return AdapterSlots(_Loader(loaded, config.max_lora_rank)) if config.most_adapters else AdapterSlots()


def load_adapters(config: EngineConfig, slots: AdapterSlots) -> Iterator[AdapterFacts]:
    """Load the adapters of the option `lora`; yields the facts of each.

    Raises:
        ConfigError: an adapter cannot be used.
    """
    for each in config.lora:
        name, path = adapter_option(each)
        try:
            yield slots.load(name, path)
        except SetupError as error:
            raise ConfigError("lora", f"{name}: {error}") from error


@dataclass(frozen=True, slots=True)
class _Place:
    """Where a module is: its projection's site, its first column in the projection's result, and its sizes."""

    site: int
    first: int
    outputs: int
    inputs: int


class _Loader:
    """Loads adapters of one model; see `exec.adapters.LoadAdapter`."""

    def __init__(self, loaded: LoadedModel, most_rank: int) -> None:
        self._loaded = loaded
        self._most_rank = most_rank
        self._places = dict(_places(loaded.program))

    def __call__(self, name: str, path: str) -> tuple[Adapter, AdapterFacts]:
        files = self._open(Path(path))
        by_site: dict[int, list[tuple[_Place, Factors]]] = defaultdict(list)
        for factors in files.factors.values():
            place = self._place_of(factors, files)
            if any(place == other for other, _ in by_site[place.site]):
                raise ModelFileError(files.file, factors.module, "is updated twice, under two names")
            by_site[place.site].append((place, factors))
        with torch.inference_mode():
            adapter = Adapter({site: self._update(files, parts) for site, parts in by_site.items()})
        rank = max(factors.rank for factors in files.factors.values())
        return adapter, AdapterFacts(name, path, files.digest, rank, len(files.factors), adapter.nbytes)

    def _open(self, path: Path) -> AdapterFiles:
        if path.is_dir():
            return open_peft(path)
        if path.suffix == ".gguf":
            return open_gguf_adapter(path, models.gguf_dialect, self._loaded.shape)
        raise ModelFileError(str(path), "", "is neither a directory as PEFT writes them nor a .gguf file")

    def _place_of(self, factors: Factors, files: AdapterFiles) -> _Place:
        """Where a module is in the model. Refuses a module that the model lacks, or that has other sizes there."""
        place = _found(factors.module, self._places)
        if place is None:
            known = ", ".join(sorted({each.rpartition(".")[2] for each in self._places}))
            message = f"the model has no linear module of this name that takes an update; those that do are {known}"
            raise ModelFileError(files.file, factors.module, message)
        (rank, inputs), (outputs, _) = factors.shapes
        if (inputs, outputs) != (place.inputs, place.outputs):
            sizes = f"{inputs} inputs and {outputs} outputs; the model's has {place.inputs} and {place.outputs}"
            raise ModelFileError(files.file, factors.module, f"is updated as a module of {sizes}")
        if rank > self._most_rank:
            message = f"has rank {rank}; at most {self._most_rank} is planned for, see --max-lora-rank"
            raise ModelFileError(files.file, factors.module, message)
        return place

    def _update(self, files: AdapterFiles, parts: list[tuple[_Place, Factors]]) -> LowRank:
        """The update of one projection; the scale becomes part of the second products."""
        downs, ups, inner = [], [], 0
        for place, factors in sorted(parts, key=lambda part: part[0].first):
            down, up = files.read(factors)
            downs.append(down)
            ups.append(Up(place.first, inner, self._weight(up.mul_(factors.scale))))
            inner += factors.rank
        return LowRank(self._weight(torch.cat(downs)), tuple(ups))

    def _weight(self, numbers: Tensor) -> Weight:
        return _as_weight(numbers, self._loaded.backend, self._loaded.dtype)


def _as_weight(numbers: Tensor, backend: Backend, dtype: torch.dtype) -> Weight:
    """Numbers as the backend multiplies them in this dtype, rounded once."""
    if isinstance(backend, CpuBackend) and dtype in DTYPES:
        pack = pack_f32 if dtype == torch.float32 else pack_bf16
        return pack(numbers, cpu=backend.cpu)
    return DenseWeight(numbers.to(device=backend.device, dtype=dtype))


def _places(program: Program) -> Iterator[tuple[str, _Place]]:
    for site, linear in enumerate(sites_of(program)):
        for module, first in columns_of(linear.modules):
            yield module.name, _Place(site, first, module.outputs, linear.weight.inputs)


def _found(module: str, places: Mapping[str, _Place]) -> _Place | None:
    for written, meant in _PREFIXES:
        if module.startswith(written) and meant + module[len(written) :] in places:
            return places[meant + module[len(written) :]]
    return None
