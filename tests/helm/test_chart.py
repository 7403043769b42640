"""The chart, rendered by Helm's own library over a matrix of values, against Helm's lint, Kubernetes' schemas and rules of our own."""

from __future__ import annotations

import json
import re
import tomllib
from functools import cache
from typing import Any

import helm_python
import kubernetes_validate
import pytest
import yaml

from tests.support.documents.helm_chart import (
    CHART,
    MATRIX,
    NAMESPACE,
    Values,
    container,
    environment,
    objects,
    pods,
    rendered,
    the,
)

KUBERNETES = ("1.25", "1.31", "1.37")
"""The oldest that the chart takes, one between, and the newest whose schemas are at hand."""
UNKNOWN_TO_KUBERNETES = {"ServiceMonitor", "PrometheusRule", "ScaledObject", "HTTPRoute"}
OURS = CHART.parents[1]


@pytest.mark.parametrize("values", MATRIX.values(), ids=MATRIX.keys())
def test_helm_finds_nothing_wrong(values: Values) -> None:
    report = helm_python.lint(CHART, dict(values), strict=True, namespace=NAMESPACE, kube_version="v1.31.0")
    assert report["errors"] == []
    assert [each["error"] for each in report["messages"]] == ["icon is recommended"]


@pytest.mark.parametrize("version", KUBERNETES)
def test_every_object_is_one_that_kubernetes_takes(version: str, monkeypatch: pytest.MonkeyPatch) -> None:
    # The definitions of one version are megabytes, and would be read anew for each object.
    monkeypatch.setattr(kubernetes_validate.utils, "schema_contents", cache(kubernetes_validate.utils.schema_contents))
    distinct = {json.dumps(each, sort_keys=True) for values in MATRIX.values() for each in objects(values)}
    of_kubernetes = [each for each in map(json.loads, sorted(distinct)) if each["kind"] not in UNKNOWN_TO_KUBERNETES]
    assert len(of_kubernetes) > 60
    for each in of_kubernetes:
        kubernetes_validate.validate(each, version, strict=True)


@pytest.mark.parametrize("values", MATRIX.values(), ids=MATRIX.keys())
def test_no_name_is_given_twice_and_every_selector_finds_its_pods(values: Values) -> None:
    found = objects(values)
    names = [(each["kind"], each["metadata"].get("namespace", NAMESPACE), each["metadata"]["name"]) for each in found]
    assert len(set(names)) == len(names)
    assert all(len(name) <= 63 for _, _, name in names)
    labels = [pod["metadata"]["labels"] for pod in pods(values)]
    for each in found:
        if each["kind"] in ("Service", "PodDisruptionBudget", "ServiceMonitor"):
            selector = each["spec"]["selector"]
            wanted = selector.get("matchLabels", selector).items()
            assert sum(wanted <= own.items() for own in labels) == 1, each["metadata"]["name"]


@pytest.mark.parametrize("values", MATRIX.values(), ids=MATRIX.keys())
def test_every_pod_keeps_to_the_rules(values: Values) -> None:
    for pod in pods(values):
        one, whole, test = container(pod), pod["spec"], "helm.sh/hook" in pod["metadata"].get("annotations", {})
        assert whole["securityContext"]["runAsNonRoot"] and whole["securityContext"]["runAsUser"] > 0
        assert whole["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
        assert one["securityContext"] == {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
        }
        assert re.fullmatch(r"[a-z0-9./-]+:[0-9][\w.-]*(@sha256:[0-9a-f]{64})?", one["image"]), one["image"]
        assert one["resources"]["requests"] and one["resources"]["limits"]["memory"]
        assert test or whole.get("restartPolicy") == "Never" or {"startupProbe", "readinessProbe"} <= one.keys()
        assert whole["automountServiceAccountToken"] is (one["name"] == "node")
        assert {mount["name"] for mount in one.get("volumeMounts", ())} == {
            *(volume["name"] for volume in whole.get("volumes", ())),
            *({"redis": ["data"], "vllm": ["cache"]}.get(one["name"], [])),
        }


def test_proxies_stand_apart_and_are_never_all_gone_at_once() -> None:
    for name, least in (("defaults", 2), ("everything", 2)):
        proxy = the(MATRIX[name], "Deployment", "-proxy")["spec"]
        scaler = [each["spec"]["minReplicas"] for each in objects(MATRIX[name]) if each["kind"] == "HorizontalPodAutoscaler"]
        assert proxy.get("replicas", *scaler) == least
        assert proxy["strategy"]["rollingUpdate"]["maxUnavailable"] == 0
        assert the(MATRIX[name], "PodDisruptionBudget", "-proxy")["spec"]["maxUnavailable"] < least
        spread = proxy["template"]["spec"]["topologySpreadConstraints"]
        assert [each["topologyKey"] for each in spread] == ["topology.kubernetes.io/zone", "kubernetes.io/hostname"]
        assert all(each["labelSelector"] == proxy["selector"] for each in spread)


@pytest.mark.parametrize("values", MATRIX.values(), ids=MATRIX.keys())
def test_secrets_are_named_and_never_written(values: Values) -> None:
    assert [each for each in objects(values) if each["kind"] == "Secret"] == []
    for pod in pods(values):
        for variable in container(pod).get("env", ()):
            if re.search("TOKEN$|PASSWORD|KEY$|AUTH$", variable["name"]):
                assert variable["valueFrom"]["secretKeyRef"]["name"]
        url = environment(container(pod)).get("VERBATIM_REDIS", "")
        assert "@" not in url or re.search(r"^rediss?[+\w]*://\w*:\$\(REDIS_PASSWORD\)@", url)


def test_the_default_values_are_what_the_schema_says_and_no_value_is_without_a_rule() -> None:
    def lacking(values: Any, schema: Any, path: str = "") -> list[str]:
        if (ref := schema.get("$ref", "")).startswith("#/definitions/model/"):
            schema = whole["definitions"]["model"]["properties"][ref.rpartition("/")[2]]
        if not isinstance(values, dict) or "$ref" in schema:
            return []
        assert schema["additionalProperties"] is False, path
        return [
            found
            for name, value in values.items()
            for found in (
                lacking(value, schema["properties"][name], f"{path}.{name}") if name in schema["properties"] else [name]
            )
        ]

    whole = json.loads((CHART / "values.schema.json").read_text())
    assert lacking(yaml.safe_load((CHART / "values.yaml").read_text()), whole) == []


@pytest.mark.parametrize(
    ("values", "why"),
    [
        ({"proxy": {"replica": 3}}, "replica"),
        ({"proxy": {"image": {"tag": "latest"}}}, "tag"),
        ({"proxy": {"env": {"VERBATIM_ADMIN_TOKEN": "in-clear-text"}}}, "VERBATIM_ADMIN_TOKEN"),
        ({"redis": {"waitReplicas": 1}}, "redis.waitReplicas"),
        ({"redis": {"mode": "external"}}, "redis.external.hosts"),
        ({"redis": {"mode": "external", "external": {"kind": "sentinel", "hosts": ["a:1"]}}}, "redis.external.service"),
        ({"redis": {"mode": "external", "external": {"hosts": ["user:secret@a:1"]}}}, "hosts"),
        ({"redis": {"bundled": {"backup": {"schedule": "daily"}}}}, "schedule"),
        ({"redis": {"bundled": {"backup": {"keep": 1}}}}, "keep"),
        ({"vllm": {"keda": {"minReplicas": 0}}}, "minReplicas"),
        ({"engines": ["vllm:8000"]}, "engines"),
        ({"ingress": {"enabled": True}}, "ingress.host"),
        ({"runtimes": {"podSecurity": "restricted", "user": 0}}, "user"),
        ({"nodes": {"resources": {"limits": {"memory": None}}}}, "memory"),
    ],
)
def test_values_that_cannot_be_meant_are_refused(values: Values, why: str) -> None:
    with pytest.raises(helm_python.HelmError, match=why):
        rendered(values)


def test_the_chart_is_of_the_projects_version() -> None:
    version = tomllib.loads((OURS / "pyproject.toml").read_text())["project"]["version"]
    chart = yaml.safe_load((CHART / "Chart.yaml").read_text())
    assert (chart["version"], chart["appVersion"]) == (version, version)


def test_dashboard_and_alerts_are_carried_as_they_are() -> None:
    values = MATRIX["everything"]
    board = the(values, "ConfigMap", "-dashboard")["data"]["verbatim.json"]
    assert json.loads(board) == json.loads((CHART / "files" / "dashboard.json").read_text())
    rules = the(values, "PrometheusRule", "demo-verbatim")["spec"]
    assert rules == yaml.safe_load((CHART / "files" / "alerts.yaml").read_text())


def test_what_is_read_after_an_installation_names_what_has_to_be_there() -> None:
    said = rendered({})["templates/NOTES.txt"]
    assert (
        "verbatim-tokens: admin-tokens, trainer-tokens, node-tokens, node-token" in said and "verbatim-redis: password" in said
    )
    assert "NOTHING of this chart keeps them from the network" not in said
    # `helm test` fails before an engine serves.
    assert said.index("rollout status statefulset/demo-verbatim-vllm ") < said.index("helm -n rl test demo")
    assert "statefulset" not in rendered({"vllm": {"enabled": False}})["templates/NOTES.txt"]
    for values, warned in (({}, True), (MATRIX["everything"], False), (MATRIX["a cluster over TLS"], False)):
        assert ("Nothing backs up Redis" in rendered(values)["templates/NOTES.txt"]) is warned
    open_network = {"networkPolicy": {"enabled": False}}
    assert "NOTHING of this chart keeps them from the network" in rendered(open_network)["templates/NOTES.txt"]
