"""The Grafana dashboard asks only for what a server shows."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from prometheus_client.core import Metric
from scripted_engine import nothing_measured

from penstock.contract.config import EngineConfig
from penstock.contract.hosting import HostedModel, HostLimits
from penstock.contract.memory_budget import MemoryBudget
from penstock.hosting import ModelHost
from penstock.server.admin.metrics import COUNTERS, HISTOGRAMS, EngineMetrics, RequestCounter, ServerMetrics
from penstock.server.application import ModelPart
from penstock.server.hosting.dispatch import Parts
from penstock.server.hosting.metrics import HostingMetrics

BOARD = json.loads((Path(__file__).parents[2] / "docs/dashboards/penstock.json").read_text(encoding="utf-8"))
WORDS = {"sum", "avg", "by", "rate", "histogram_quantile", "label_values", "le"}
NAME = re.compile(r"(?<![\w$:\"])[a-zA-Z_][\w:]*")


def expressions() -> Iterator[str]:
    for panel in BOARD["panels"]:
        for target in panel.get("targets", ()):
            yield target["expr"]
    for variable in BOARD["templating"]["list"]:
        if variable["type"] == "query":
            yield variable["query"]["query"]


def host() -> ModelHost[Any]:
    """A host of one model, which is not loaded."""

    async def load(*_: object) -> None:
        raise AssertionError

    return ModelHost([HostedModel(EngineConfig(), ("m",))], load, HostLimits())


def no_part(*_: object) -> ModelPart:
    raise AssertionError


def shown() -> tuple[set[str], set[str]]:
    """Names of samples, and names of labels, that a server shows."""
    requests = RequestCounter()
    requests.counts["/metrics", "GET", "2xx"] += 1
    client: Any = SimpleNamespace(measurements=nothing_measured)
    memory = MemoryBudget()
    memory.watch("requests", lambda: 1)
    collectors = (
        EngineMetrics(client, "m", memory),
        ServerMetrics(requests, "m"),
        HostingMetrics(Parts(host(), no_part)),
    )
    families: list[Metric] = [family for collector in collectors for family in collector.collect()]
    samples = [sample for family in families for sample in family.samples]
    return {sample.name for sample in samples}, {label for sample in samples for label in sample.labels}


@pytest.mark.parametrize("expression", sorted(set(expressions())))
def test_every_query_names_metrics_and_labels_that_exist(expression):
    samples, labels = shown()
    bare = re.sub(r'"[^"]*"|\[[^\]]*\]', "", expression)
    names = set(NAME.findall(bare)) - WORDS - labels
    assert names, expression
    assert names <= samples, names - samples


def test_every_counter_and_every_time_has_a_panel():
    said = " ".join(expressions())
    for name in COUNTERS:
        if name not in ("vllm:prompt_tokens", "vllm:prompt_tokens_cached"):  # shown by source
            assert f"{name}_total" in said
    for name in HISTOGRAMS:
        if name.endswith(("latency_seconds", "time_seconds")):
            assert f"{name}_bucket" in said or name == "vllm:request_inference_time_seconds"  # prefill and decode are


def test_panels_do_not_overlap_and_have_ids_of_their_own():
    taken: set[tuple[int, int]] = set()
    for panel in BOARD["panels"]:
        place = panel["gridPos"]
        cells = {
            (x, y)
            for x in range(place["x"], place["x"] + place["w"])
            for y in range(place["y"], place["y"] + place["h"])
        }
        assert not cells & taken, panel["title"]
        assert all(0 <= x < 24 for x, _ in cells)
        taken |= cells
    ids = [panel["id"] for panel in BOARD["panels"]]
    assert len(ids) == len(set(ids))


def test_the_page_describes_every_metric_and_no_other():
    page = (Path(__file__).parents[2] / "docs/metrics.md").read_text(encoding="utf-8")
    described = set(re.findall(r"`((?:vllm|penstock):\w+|http_requests_total)`", page))
    samples, _ = shown()
    suffixes = re.compile(r"_(bucket|count|sum)$")
    assert described == {suffixes.sub("", name) for name in samples}
