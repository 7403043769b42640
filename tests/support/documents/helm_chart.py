"""The chart as Helm renders it: helm-python-sdk carries Helm's own library, so that no binary and no cluster are needed."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from functools import cache
from typing import Any

import helm_python
import yaml

from tests import ROOT

CHART = ROOT / "helm" / "verbatim"
RELEASE, NAMESPACE = "demo", "rl"

Object = dict[str, Any]
Values = Mapping[str, Any]

SENTINEL = {
    "kind": "sentinel",
    "hosts": ["a.redis:26379", "b.redis:26379"],
    "service": "mymaster",
    "tls": True,
    "username": "verbatim",
    "passwordSecret": {"name": "store", "key": "password"},
    "caSecret": {"name": "store-ca", "key": "ca.crt"},
}
SIDECAR = {"name": "shipper", "image": "registry.example.com/shipper:1.2.0"}
MATRIX: Mapping[str, Values] = {
    "defaults": {},
    "everything": {
        "image": {"registry": "registry.example.com/rl", "pullSecrets": ["pull"]},
        "proxy": {
            "publicUrl": "https://verbatim.example.com",
            "autoscaling": {"enabled": True},
            "env": {"VERBATIM_FROZEN_MODELS": ["judge"], "VERBATIM_SESSION_IDLE_SECONDS": 600},
            "engineApiKey": {"existingSecret": "engines"},
            "extraVolumes": [{"name": "archive", "persistentVolumeClaim": {"claimName": "archive"}}],
            "extraVolumeMounts": [{"name": "archive", "mountPath": "/archive"}],
            "tolerations": [{"key": "rl", "operator": "Exists"}],
            "podAnnotations": {"example.com/team": "rl"},
        },
        "vllm": {
            "replicas": 4,
            "tensorParallelSize": 2,
            "reasoningParser": "qwen3",
            "extraArgs": ["--enable-lora"],
            "extraEnv": [{"name": "VLLM_ALLOW_RUNTIME_LORA_UPDATING", "value": "1"}],
            "hubToken": {"existingSecret": "hub"},
            "runtimeClassName": "nvidia",
            "nodeSelector": {"gpu": "h200"},
            "cache": {"storageClass": "fast"},
            "mirrorSize": "400Gi",
            "keda": {"enabled": True, "callsPerEngine": 48},
        },
        "nodes": {"keda": {"enabled": True}, "labels": {"region": "north"}},
        "redis": {"bundled": {"backup": {"enabled": True}, "tolerations": [{"key": "rl", "operator": "Exists"}]}},
        "runtimes": {
            "fullNetwork": True,
            "user": 2000,
            "podSecurity": "restricted",
            "quota": {"pods": "500"},
            "podAnnotations": {"example.com/team": "rl"},
            "nodeSelector": {"pool": "rollouts"},
            "tolerations": [{"key": "rl", "operator": "Exists", "effect": "NoExecute", "tolerationSeconds": 60}],
            "runtimeClassName": "gvisor",
            "priorityClassName": "rollouts",
        },
        "networkPolicy": {
            "prometheusFrom": [{"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "monitoring"}}}],
            "gatewayFrom": [{"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "gateways"}}}],
        },
        "ingress": {"enabled": True, "host": "verbatim.example.com", "tlsSecret": "tls"},
        "httpRoute": {"enabled": True, "parentRefs": [{"name": "gateway", "namespace": "gateways"}]},
        "monitoring": {
            "serviceMonitor": {"enabled": True, "engines": True},
            "alerts": {"enabled": True},
            "dashboard": {"enabled": True},
        },
    },
    "on a CPU": {
        "vllm": {"device": "cpu", "toolCallParser": "", "resources": {"requests": {"cpu": "4"}, "limits": {"memory": "16Gi"}}}
    },
    "engines and Sentinels of one's own": {
        "vllm": {"enabled": False},
        "engines": ["dns://vllm-engines.serving.svc:8000", "judge=https://judge.example.com"],
        "redis": {"mode": "external", "external": SENTINEL},
        "weights": {"existingClaim": "shared"},
    },
    "a cluster without a password": {
        "redis": {"mode": "external", "waitReplicas": 1, "external": {"kind": "cluster", "hosts": ["a:7000", "b:7000"]}}
    },
    "a cluster over TLS": {
        "redis": {
            "mode": "external",
            "external": {
                "kind": "cluster",
                "hosts": ["a:7000"],
                "tls": True,
                "passwordSecret": {"name": "store"},
                "caSecret": {"name": "store-ca"},
            },
        }
    },
    "a URL from a Secret": {"redis": {"mode": "external", "waitAof": True, "external": {"urlSecret": {"name": "store"}}}},
    "IPv6 and a name service of one's own": {
        "ipFamily": "IPv6",
        "runtimes": {"fullNetwork": True, "privateAddresses": ["10.0.0.0/8", "fc00::/7", "fe80::/10", "2001:db8:5::/48"]},
        "networkPolicy": {
            "dns": {
                "port": 5353,
                "to": [
                    {"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "openshift-dns"}}, "podSelector": {}}
                ],
            }
        },
    },
    "rollouts in the same namespace": {
        "runtimes": {"namespace": NAMESPACE},
        "fullnameOverride": "verbatim",
        "redis": {
            "bundled": {"backup": {"enabled": True, "existingClaim": "copies", "restore": "verbatim-20260102T030405Z.rdb"}}
        },
    },
    "pods by the book": {
        "commonLabels": {"example.com/team": "rl"},
        "global": {"imageRegistry": "mirror.example.com", "imagePullSecrets": ["mirror"]},
        "proxy": {
            "image": {"digest": f"sha256:{'0' * 64}"},
            "extraEnv": [
                {"name": "OTEL_TRACES_EXPORTER", "valueFrom": {"configMapKeyRef": {"name": "traces", "key": "exporter"}}}
            ],
            "initContainers": [SIDECAR],
            "sidecars": [SIDECAR],
            "podLabels": {"example.com/part": "proxy"},
            "serviceAccount": {"annotations": {"eks.amazonaws.com/role-arn": "arn:aws:iam::1:role/archive"}},
        },
        "vllm": {
            "cache": {"existingClaim": "models"},
            "extraVolumes": [{"name": "templates", "configMap": {"name": "chat-templates"}}],
            "extraVolumeMounts": [{"name": "templates", "mountPath": "/templates", "readOnly": True}],
            "keda": {"enabled": True},
            "sidecars": [SIDECAR],
            "extraModels": {"judge": {"model": "Qwen/Qwen3-8B", "keda": {"enabled": False}, "replicas": 2}},
        },
        "nodes": {"initContainers": [SIDECAR], "sidecars": [SIDECAR], "priorityClassName": "nodes"},
        "redis": {
            "mode": "external",
            "external": {
                "kind": "cluster",
                "hosts": ["a:7000"],
                "tls": True,
                "caSecret": {"name": "store-ca"},
                "clientCertSecret": {"name": "store-client"},
            },
        },
        "monitoring": {"serviceMonitor": {"enabled": True, "engines": True}},
        "networkPolicy": {"prometheusFrom": [{"namespaceSelector": {}}]},
    },
    "the service alone": {"nodes": {"enabled": False}, "weights": {"enabled": False}, "networkPolicy": {"enabled": False}},
}


def rendered(values: Values) -> dict[str, str]:
    """Text by template, without the chart's name. Raises `HelmError`."""
    return _rendered(json.dumps(values))


@cache
def _rendered(values: str) -> dict[str, str]:
    with helm_python.Chart.load(CHART) as chart:
        texts = chart.render(json.loads(values), name=RELEASE, namespace=NAMESPACE)
    return {path.partition("/")[2]: text for path, text in texts.items()}


def objects(values: Values) -> list[Object]:
    """What would be applied, tests included. Not to be changed: others get the same."""
    return _objects(json.dumps(values))


@cache
def _objects(values: str) -> list[Object]:
    texts = (text for path, text in _rendered(values).items() if path.endswith(".yaml"))
    return [each for text in texts for each in yaml.load_all(text, yaml.CSafeLoader) if each]


def the(values: Values, kind: str, name: str, namespace: str | None = None) -> Object:
    """The one object of that kind whose name ends so."""
    named = [each for each in objects(values) if each["kind"] == kind and each["metadata"]["name"].endswith(name)]
    (found,) = [each for each in named if namespace is None or namespace_of(each) == namespace]
    return found


def namespace_of(each: Object) -> str:
    return str(each["metadata"].get("namespace", NAMESPACE))


def pod_of(each: Object) -> Object | None:
    """The pod, or the template of one, with its metadata."""
    if each["kind"] == "Pod":
        return each
    spec = each.get("spec") or {}
    template: Object | None = spec.get("jobTemplate", {}).get("spec", spec).get("template")
    return template if template and "spec" in template else None


def pods(values: Values) -> Iterator[Object]:
    """Every pod that the chart makes or has made."""
    return (pod for each in objects(values) if (pod := pod_of(each)) is not None)


def container(pod: Object) -> Object:
    """The chart's own, which stands before those of the values."""
    own, *others = pod["spec"]["containers"]
    assert [each["name"] for each in others] in ([], [SIDECAR["name"]])
    found: Object = own
    return found


def environment(one: Object) -> dict[str, str]:
    """Variables that have values of their own; those from Secrets and the pod's own description are empty."""
    return {variable["name"]: variable.get("value", "") for variable in one.get("env", ())}
