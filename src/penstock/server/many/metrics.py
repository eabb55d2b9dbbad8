"""`GET /metrics` of a server of several models: every model's measurements beside each other, and their loads."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from penstock.contract.hosting import ModelState
from penstock.server.admin.metrics import EngineMetrics, RequestCounter, http_requests
from penstock.server.many.dispatch import Parts

__all__ = ["ManyMetrics"]

_MODEL = ("model_name",)
_OF_THE_SERVER = "http_requests"


class ManyMetrics(Collector):
    """Collects the metrics of each model that was loaded so far, as one server's.

    Args:
        parts: the models' parts.
        requests: counts HTTP requests, and refusals before a model was known.
    """

    def __init__(self, parts: Parts, requests: RequestCounter) -> None:
        self._parts = parts
        self._requests = requests

    def collect(self) -> Iterator[Metric]:
        """Yield every metric once, with the samples of all models."""
        families: dict[str, Metric] = {}
        for part in self._parts.present():
            serving = part.serving
            for family in EngineMetrics(serving.client, serving.card.name, RequestCounter(), serving.memory).collect():
                if family.name in families:
                    families[family.name].samples.extend(family.samples)
                elif family.name not in (_OF_THE_SERVER, "penstock:requests_refused"):
                    families[family.name] = family
        yield from families.values()
        yield from self._loads()
        yield self._refusals()
        yield http_requests(self._requests)

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

    def _refusals(self) -> Metric:
        text = "Requests refused, by the bound that they met."
        family = CounterMetricFamily("penstock:requests_refused", text, labels=("reason",))
        for cause, count in self._requests.refusals.items():
            family.add_metric((cause.value,), count)
        return family
