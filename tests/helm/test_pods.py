"""What a platform asks of any chart's pods: Pod Security Standards, user ids of its own, registries, sidecars, claims, several models."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import helm_python
import kubernetes_validate
import pytest
import yaml

from proxy.engine.pool.membership import parse_engine
from proxy.store.node import Address
from tests.support.documents.helm_chart import (
    CHART,
    MATRIX,
    NAMESPACE,
    SIDECAR,
    Object,
    Values,
    container,
    environment,
    objects,
    pod_of,
    pods,
    rendered,
    the,
)

BOOK = MATRIX["pods by the book"]
OPENSHIFT: Values = {
    "podSecurityContext": {"runAsUser": None, "runAsGroup": None, "fsGroup": None},
    "runtimes": {"user": "image"},
}
RESTRICTED_VOLUMES = {
    "configMap",
    "csi",
    "downwardAPI",
    "emptyDir",
    "ephemeral",
    "persistentVolumeClaim",
    "projected",
    "secret",
}


def containers(pod: Object) -> list[Object]:
    spec = pod["spec"]
    found: list[Object] = [*spec.get("initContainers", ()), *spec["containers"]]
    return found


def violations(pod: Object) -> list[str]:
    """What the profile restricted of Kubernetes' Pod Security Standards refuses."""
    spec = pod["spec"]
    whole = spec.get("securityContext", {})
    found = [name for name in ("hostNetwork", "hostPID", "hostIPC") if spec.get(name)]
    found += [each["name"] for each in spec.get("volumes", ()) if (each.keys() - {"name"}) - RESTRICTED_VOLUMES]
    for each in containers(pod):
        own = each.get("securityContext", {})
        if (
            own.get("allowPrivilegeEscalation") is not False
            or own.get("privileged")
            or own.get("capabilities", {}).get("drop") != ["ALL"]
            or set(own["capabilities"].get("add", ())) - {"NET_BIND_SERVICE"}
            or not own.get("runAsNonRoot", whole.get("runAsNonRoot"))
            or own.get("runAsUser", whole.get("runAsUser")) == 0
            or own.get("seccompProfile", whole.get("seccompProfile", {})).get("type") not in ("RuntimeDefault", "Localhost")
            or [port for port in each.get("ports", ()) if port.get("hostPort")]
        ):
            found.append(each["name"])
    return found


@pytest.mark.parametrize("values", [*MATRIX.values(), OPENSHIFT], ids=[*MATRIX, "OpenShift"])
def test_every_pod_is_restricted_its_init_containers_and_sidecars_too(values: Values) -> None:
    assert [name for pod in pods(values) for name in violations(pod)] == []


def test_user_ids_are_left_to_a_cluster_that_gives_its_own() -> None:
    """OpenShift refuses a pod that names a user id outside its namespace's range."""
    for pod in pods({}):
        assert {pod["spec"]["securityContext"][name] for name in ("runAsUser", "runAsGroup", "fsGroup")} == {10001}
    for pod in pods(OPENSHIFT):
        assert pod["spec"]["securityContext"] == {"runAsNonRoot": True, "seccompProfile": {"type": "RuntimeDefault"}}
        # vLLM asks for the name of its user, which an arbitrary id has none of.
        assert container(pod)["name"] != "vllm" or environment(container(pod))["USER"]
    for each in objects(OPENSHIFT):
        kubernetes_validate.validate(each, "1.31", strict=True)
    own = {"podSecurityContext": {"runAsUser": 1000650000, "supplementalGroups": [5000]}}
    assert {pod["spec"]["securityContext"]["runAsUser"] for pod in pods(own)} == {1000650000}


@pytest.mark.parametrize("part", ["proxy", "vllm", "node"])
def test_a_part_takes_containers_and_variables_of_yours(part: str) -> None:
    values: Values = {
        {"node": "nodes"}.get(part, part): {
            "extraEnv": [{"name": "HTTPS_PROXY", "valueFrom": {"configMapKeyRef": {"name": "egress", "key": "proxy"}}}],
            "initContainers": [SIDECAR],
            "sidecars": [{**SIDECAR, "securityContext": {"readOnlyRootFilesystem": True}}],
            "extraVolumes": [{"name": "certificates", "secret": {"secretName": "certificates"}}],
            "extraVolumeMounts": [{"name": "certificates", "mountPath": "/certificates"}],
            "podLabels": {"example.com/part": part},
            "serviceAccount": {"annotations": {"iam.gke.io/gcp-service-account": "archive@example.com"}},
        }
    }
    pod = pod_of(the(values, "StatefulSet" if part == "vllm" else "Deployment", f"-{part}")) or {}
    assert (pod["metadata"]["labels"]["example.com/part"], [each["name"] for each in pod["spec"]["initContainers"]]) == (
        part,
        ["shipper"],
    )
    own, sidecar = pod["spec"]["containers"]
    assert own["name"] == part and sidecar["securityContext"] == {
        "readOnlyRootFilesystem": True,
        "allowPrivilegeEscalation": False,
        "capabilities": {"drop": ["ALL"]},
    }
    assert next(each for each in own["env"] if each["name"] == "HTTPS_PROXY")["valueFrom"]["configMapKeyRef"]["key"] == "proxy"
    assert "/certificates" in {each["mountPath"] for each in own["volumeMounts"]}
    assert "certificates" in {each["name"] for each in pod["spec"]["volumes"]}
    accounts = {each["metadata"]["name"]: each["metadata"] for each in objects(values) if each["kind"] == "ServiceAccount"}
    assert [name for name, each in accounts.items() if each.get("annotations")] == [pod["spec"]["serviceAccountName"]]


def test_common_labels_are_on_every_object_and_pod_and_in_no_selector() -> None:
    for each in [*objects(BOOK), *pods(BOOK)]:
        assert each["metadata"]["labels"]["example.com/team"] == "rl"
    assert "example.com/team" not in json.dumps([each["spec"].get("selector") for each in objects(BOOK) if "spec" in each])


def test_a_mirror_stands_before_every_image_and_a_digest_pins_it() -> None:
    values: Values = {**BOOK, "redis": {}, "image": {"registry": "elsewhere.example.com/rl"}}
    own = [each for pod in pods(values) for each in containers(pod) if each["name"] != "shipper"]
    images = {each["name"]: each["image"] for each in own}
    assert {image.partition("/")[0] for image in images.values()} == {"mirror.example.com"}
    assert images["redis"] == "mirror.example.com/valkey/valkey:8.1.10"
    assert images["proxy"] == f"mirror.example.com/verbatim-proxy:0.1.0@sha256:{'0' * 64}"
    assert {json.dumps(pod["spec"]["imagePullSecrets"]) for pod in pods(values) if container(pod)["name"] != "test"} == {
        '[{"name": "mirror"}]'
    }


def test_the_chart_renders_as_a_part_of_another_with_that_ones_globals(tmp_path: Path) -> None:
    """Helm gives every subchart the globals, of which some are others'."""
    shutil.copytree(CHART, tmp_path / "all" / "charts" / "verbatim")
    parent = {"apiVersion": "v2", "name": "all", "version": "1.0.0", "dependencies": [{"name": "verbatim", "version": "0.1.0"}]}
    (tmp_path / "all" / "Chart.yaml").write_text(yaml.safe_dump(parent))
    with helm_python.Chart.load(tmp_path / "all") as chart:
        values = {"global": {"imageRegistry": "mirror.example.com", "storageClass": "fast"}}
        texts = chart.render(values, name="demo", namespace=NAMESPACE)
    assert "image: mirror.example.com/verbatim-proxy:" in texts["all/charts/verbatim/templates/proxy.yaml"]


def test_another_model_has_engines_a_name_and_a_policy_of_its_own() -> None:
    first, judge = the(BOOK, "StatefulSet", "-vllm")["spec"], the(BOOK, "StatefulSet", "-vllm-judge")["spec"]
    assert first["selector"] != judge["selector"] and judge["replicas"] == 2 and "replicas" not in first

    def flag(spec: Any, name: str) -> str:
        args: list[str] = container(pod_of({"kind": "StatefulSet", "spec": spec}) or {})["args"]
        return args[args.index(name) + 1]

    assert [flag(spec, "--served-model-name") for spec in (first, judge)] == ["policy", "judge"]
    assert [flag(spec, "--model") for spec in (first, judge)] == ["Qwen/Qwen3-0.6B", "Qwen/Qwen3-8B"]
    assert flag(first, "--max-model-len") == flag(judge, "--max-model-len") == "32768"
    told = environment(container(pod_of(the(BOOK, "Deployment", "-proxy")) or {}))
    found = [parse_engine(url) for url in json.loads(told["VERBATIM_ENGINE"])]
    hosts = [
        f"dns://{the(BOOK, 'Service', name)['metadata']['name']}.{NAMESPACE}.svc:8000" for name in ("-vllm", "-vllm-judge")
    ]
    assert [(each.policy, each.url) for each in found] == list(zip(("", "judge"), hosts, strict=True))
    for name in ("-vllm", "-vllm-judge"):
        held = the(BOOK, "NetworkPolicy", name)["spec"]["podSelector"]
        assert (
            held == the(BOOK, "StatefulSet", name)["spec"]["selector"] == the(BOOK, "ServiceMonitor", name)["spec"]["selector"]
        )
    assert 'policy="judge"' in str(
        the({**BOOK, "vllm": {"extraModels": {"judge": {"keda": {"enabled": True}}}}}, "ScaledObject", "-judge")
    )


def test_models_lie_in_a_claim_that_is_there() -> None:
    for name in ("-vllm", "-vllm-judge"):
        spec = the(BOOK, "StatefulSet", name)["spec"]
        assert "volumeClaimTemplates" not in spec
        volumes = {each["name"]: each for each in spec["template"]["spec"]["volumes"]}
        assert volumes["cache"]["persistentVolumeClaim"] == {"claimName": "models"}
    assert the({}, "StatefulSet", "-vllm")["spec"]["volumeClaimTemplates"]


def test_engines_have_a_mirror_of_the_weights_where_it_has_a_size() -> None:
    values = {"vllm": {"mirrorSize": "400Gi", "extraModels": {"judge": {"model": "Qwen/Qwen3-8B", "mirrorSize": ""}}}}
    pod = pod_of(the(values, "StatefulSet", "-vllm")) or {}
    (mount,) = [each for each in container(pod)["volumeMounts"] if each["name"] == "mirror"]
    assert environment(container(pod))["VERBATIM_MIRROR"] == mount["mountPath"]
    assert {"name": "mirror", "emptyDir": {"sizeLimit": "400Gi"}} in pod["spec"]["volumes"]
    judge = pod_of(the(values, "StatefulSet", "-vllm-judge")) or {}
    assert "VERBATIM_MIRROR" not in environment(container(judge))
    assert "mirror" not in [each["name"] for each in judge["spec"]["volumes"]]


def test_the_store_sees_a_certificate_of_the_service() -> None:
    pod = pod_of(the(BOOK, "Deployment", "-proxy")) or {}
    address = Address.parse(environment(container(pod))["VERBATIM_REDIS"])
    folder = "/etc/verbatim/redis"
    asked = f"ssl_ca_certs={folder}/ca.crt&ssl_certfile={folder}/tls.crt&ssl_keyfile={folder}/tls.key"
    assert address.server(("c", 7000)) == f"rediss://c:7000?{asked}"
    (mount,) = [each for each in container(pod)["volumeMounts"] if each["mountPath"] == folder]
    (volume,) = [each for each in pod["spec"]["volumes"] if each["name"] == mount["name"]]
    there = {
        item["path"]: (source["secret"]["name"], item["key"])
        for source in volume["projected"]["sources"]
        for item in source["secret"]["items"]
    }
    assert there == {
        "ca.crt": ("store-ca", "ca.crt"),
        "tls.crt": ("store-client", "tls.crt"),
        "tls.key": ("store-client", "tls.key"),
    }


@pytest.mark.parametrize(
    ("values", "why"),
    [
        ({"global": {"storageClass": "fast"}}, "global.storageClass"),
        ({"podSecurityContext": {"runAsUser": 0}}, "runAsUser"),
        ({"podSecurityContext": {"runAsNonRoot": False}}, "runAsNonRoot"),
        ({"commonLabels": {"app.kubernetes.io/name": "mine"}}, "app.kubernetes.io/name"),
        ({"proxy": {"extraEnv": [{"name": "VERBATIM_REDIS", "value": "redis://a"}]}}, "extraEnv/0/name"),
        ({"proxy": {"extraEnv": {"A": "b"}}}, "extraEnv"),
        ({"proxy": {"image": {"digest": "0123"}}}, "digest"),
        ({"proxy": {"sidecars": [{"image": "a:1"}]}}, "name"),
        ({"vllm": {"extraModels": {"Judge!": {}}}}, "Judge"),
        ({"vllm": {"extraModels": {"judge": {"modle": "a"}}}}, "modle"),
        ({"vllm": {"extraModels": {"a" * 30: {}}}, "fullnameOverride": "b" * 30}, "vllm.extraModels"),
        ({"redis": {"mode": "external", "external": {"hosts": ["a:1"], "clientCertSecret": {"name": "a"}}}}, "redis.external.tls"),
    ],
)  # fmt: skip
def test_values_that_no_pod_can_have_are_refused(values: Values, why: str) -> None:
    with pytest.raises(helm_python.HelmError, match=why):
        rendered(values)
