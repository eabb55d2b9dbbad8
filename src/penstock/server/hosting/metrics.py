"""The metrics of a server of several models: the measurements of every model, and how models are loaded."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from penstock.contract.hosting import ModelState
from penstock.server.admin.metrics import EngineMetrics
from penstock.server.hosting.dispatch import Parts

__all__ = ["HostingMetrics"]

_MODEL = ("model_name",)


class HostingMetrics(Collector):
    """Collects the metrics of every model that has been loaded so far, in the form of one engine's metrics."""

    def __init__(self, parts: Parts) -> None:
        self._parts = parts

    def collect(self) -> Iterator[Metric]:
        """Yield every metric once, with the samples of all models: Prometheus refuses a second description."""
        families: dict[str, Metric] = {}
        for part in self._parts.present():
            serving = part.serving
            for family in EngineMetrics(serving.client, serving.card.name, serving.memory).collect():
                families.setdefault(family.name, family)
                if families[family.name] is not family:
                    families[family.name].samples.extend(family.samples)
        yield from families.values()
        yield from self._loads()

    def _loads(self) -> Iterator[Metric]:
        loaded = GaugeMetricFamily("penstock:model_loaded", "Whether a model is loaded.", labels=_MODEL)
        size = GaugeMetricFamily("penstock:model_bytes", "Memory of a model's weights and caches.", labels=_MODEL)
        waiting = GaugeMetricFamily("penstock:model_waiting", "Requests that wait for their model.", labels=_MODEL)
        loads = CounterMetricFamily("penstock:model_loads", "How often a model was loaded.", labels=_MODEL)
        for status in self._parts.models.statuses():
            name = (status.model.names[0],)
            loaded.add_metric(name, status.state is ModelState.LOADED)
            size.add_metric(name, status.bytes)
            waiting.add_metric(name, status.waiting)
            loads.add_metric(name, status.loads)
        yield from (loaded, size, waiting, loads)
