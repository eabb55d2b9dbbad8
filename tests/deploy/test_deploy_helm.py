"""The Helm chart: Kubernetes and `penstock serve` accept what it renders, and a wrong value is named.

Without Helm, which `make test-helm` fetches, only the options are checked.
"""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml
from click.testing import CliRunner

from penstock.cli import penstock
from penstock.cli.serve import command as serve

CHART = Path(__file__).parents[2] / "deploy" / "helm" / "penstock"
HELM = os.environ.get("PENSTOCK_HELM", "")
VERSIONS = ("1.27", "1.32", "1.35")
KEY = "apiKey.key=a-key-of-many-letters"
FULL = """
model: org/model
args: ["--max-num-seqs", "16"]
replicas: 2
apiKey: {existingSecret: keys, name: client}
storage: {size: 20Gi, storageClassName: fast, accessModes: [ReadWriteMany]}
drainSeconds: 120
startSeconds: 61
service: {type: LoadBalancer, port: 80, annotations: {a: b}}
kvEvents: {enabled: true, port: 6000}
minAvailable: 1
podLabels: {team: blue}
podAnnotations: {c: d}
imagePullSecrets: [{name: pull}]
nodeSelector: {disk: fast}
tolerations: [{key: k, operator: Exists}]
affinity: {nodeAffinity: {}}
topologySpreadConstraints: [{maxSkew: 1, topologyKey: zone, whenUnsatisfiable: ScheduleAnyway}]
extraEnv: [{name: A, value: b}]
extraVolumes: [{name: more, emptyDir: {}}]
extraVolumeMounts: [{name: more, mountPath: /more}]
"""

with_helm = pytest.mark.skipif(not HELM, reason="needs Helm: make test-helm")


def rendered(*settings: str, values: str = "") -> list[dict[str, Any]]:
    """The documents that Helm renders from the chart."""
    command = [HELM, "template", "mine", str(CHART), "--values", "-"]
    command += [part for setting in settings for part in ("--set", setting)]
    made = subprocess.run(command, input=values, capture_output=True, text=True, check=False)
    if made.returncode:
        raise ValueError(made.stderr)
    return list(yaml.safe_load_all(made.stdout))


def of_kind(documents: list[dict[str, Any]], kind: str) -> dict[str, Any]:
    (document,) = (each for each in documents if each["kind"] == kind)
    return document


def test_the_chart_gives_the_server_options_that_it_has():
    written = set(re.findall(r"--[a-z][a-z-]+", (CHART / "templates" / "deployment.yaml").read_text(encoding="utf-8")))
    assert written >= {"--host", "--probe-port", "--kv-events-topic"}
    assert written <= {option for each in serve.params for option in each.opts}


def test_the_chart_is_of_this_version():
    from penstock.version import __version__

    chart = yaml.safe_load((CHART / "Chart.yaml").read_text(encoding="utf-8"))
    assert chart["appVersion"] == __version__


@with_helm
@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("values", ["", FULL])
def test_kubernetes_takes_what_is_rendered(values, version):
    import kubernetes_validate

    documents = rendered(*([] if values else [KEY]), values=values)
    assert {each["kind"] for each in documents} >= {"Deployment", "Service"}
    for document in documents:
        kubernetes_validate.validate(document, version, strict=True)


@with_helm
def test_the_server_takes_the_arguments_of_the_pod():
    deployment = of_kind(rendered(values=FULL), "Deployment")
    (container,) = deployment["spec"]["template"]["spec"]["containers"]
    assert container["args"][:2] == ["serve", "org/model"]
    assert "--kv-events-topic=kv@$(POD_IP):8000@org/model" in container["args"]
    assert container["args"][-2:] == ["--max-num-seqs", "16"]
    told = CliRunner().invoke(penstock, [*container["args"], "--help"])
    assert told.exit_code == 0, told.output


@with_helm
def test_a_pod_may_change_nothing_but_its_volumes_and_ends_after_its_answers():
    documents = rendered(values=FULL)
    pod = of_kind(documents, "Deployment")["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    assert pod["securityContext"]["runAsNonRoot"] is True
    assert container["securityContext"]["readOnlyRootFilesystem"] is True
    assert pod["terminationGracePeriodSeconds"] > 120
    assert container["startupProbe"]["periodSeconds"] * container["startupProbe"]["failureThreshold"] >= 61
    assert of_kind(documents, "PersistentVolumeClaim")["spec"]["accessModes"] == ["ReadWriteMany"]
    assert not [each for each in documents if each["kind"] == "Secret"], "it is there already"


@with_helm
@pytest.mark.parametrize(
    ("setting", "named"),
    [
        ("apiKey.key=", "apiKey.key or apiKey.existingSecret"),
        ("apiKey.key=short", "/apiKey/key"),
        ("replica=2", "replica"),
        ("drainSeconds=-1", "/drainSeconds"),
        ("service.type=Host", "/service/type"),
        ("storage.size=many", "/storage/size"),
    ],
)
def test_a_wrong_value_is_named(setting, named):
    with pytest.raises(ValueError, match=re.escape(named)):
        rendered(KEY, setting)
