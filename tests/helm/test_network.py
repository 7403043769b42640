"""Who reaches whom in a cluster that carries the chart's NetworkPolicies out: a rollout reaches the service and nothing else."""

from __future__ import annotations

from typing import Any

import pytest

from tests.support.documents.helm_chart import (
    MATRIX,
    NAMESPACE,
    Values,
    container,
    environment,
    namespace_of,
    objects,
    pods,
    the,
)
from tests.support.documents.network_policies import End, reaches

OPEN_WORLD = End(address="93.184.215.14")
PRIVATE = End(address="192.168.7.7")
API_SERVER = End(address="10.96.0.1")
NAMES = End("kube-system", {"k8s-app": "kube-dns"})
STRANGER = End("default", {"app": "anything"})
CONTROL = 8701
PORTS = {"proxy": 8700, "redis": 6379, "vllm": 8000}
SAME = "rollouts in the same namespace"


def policies(values: Values) -> list[dict[str, Any]]:
    found = [each for each in objects(values) if each["kind"] == "NetworkPolicy"]
    return [each | {"metadata": {**each["metadata"], "namespace": namespace_of(each)}} for each in found]


def part(values: Values, name: str) -> End:
    (labels,) = [
        pod["metadata"]["labels"] for pod in pods(values) if pod["metadata"]["labels"]["app.kubernetes.io/component"] == name
    ]
    return End(NAMESPACE, labels)


def rollout(values: Values, network: str) -> End:
    """A pod as the runtime kind kubernetes labels it."""
    own = values.get("runtimes", {}).get("namespace") or f"{NAMESPACE}-runtimes"
    return End(own, {"app.kubernetes.io/managed-by": "verbatim", "verbatim.runtime": "vb-1", "verbatim.network": network})


@pytest.mark.parametrize("network", ["proxy", "full"])
@pytest.mark.parametrize("name", ["defaults", SAME])
def test_a_rollout_reaches_the_service_and_nothing_else(name: str, network: str) -> None:
    values = MATRIX[name]
    held, agent = policies(values), rollout(values, network)
    assert reaches(held, agent, part(values, "proxy"), 8700)
    for other_port in (CONTROL, 22):
        assert not reaches(held, agent, part(values, "proxy"), other_port)
    for inside in ("redis", "vllm", "node"):
        assert not reaches(held, agent, part(values, inside), PORTS.get(inside, 80)), inside
    for other in (OPEN_WORLD, PRIVATE, API_SERVER, STRANGER, rollout(values, "proxy")):
        assert not reaches(held, agent, other, 443), other
    assert not reaches(held, agent, NAMES, 53, "UDP")


def test_only_a_rollout_that_asks_for_it_gets_out_and_not_to_private_addresses() -> None:
    values = MATRIX["everything"]
    held, closed, full = policies(values), rollout(values, "proxy"), rollout(values, "full")
    assert reaches(held, full, OPEN_WORLD, 443) and not reaches(held, closed, OPEN_WORLD, 443)
    for agent in (closed, full):
        assert reaches(held, agent, part(values, "proxy"), 8700)
        assert reaches(held, agent, NAMES, 53, "UDP") is (agent is full) and not reaches(held, agent, NAMES, 443)
        for other in (PRIVATE, API_SERVER, STRANGER):
            assert not reaches(held, agent, other, 443)
        for inside in ("redis", "vllm"):
            if inside != "redis" or values.get("redis", {}).get("mode") != "external":
                assert not reaches(held, agent, part(values, inside), PORTS[inside])


def test_names_are_answered_by_those_who_are_named_and_ipv6_is_open_where_its_private_addresses_are_known() -> None:
    values = MATRIX["IPv6 and a name service of one's own"]
    held, full = policies(values), rollout(values, "full")
    assert reaches(held, full, End("openshift-dns", {"dns": "default"}), 5353, "UDP")
    assert not reaches(held, full, NAMES, 53, "UDP") and not reaches(held, rollout(values, "proxy"), NAMES, 53, "UDP")
    for address, answer in (("2606:2800::1", True), ("2001:db8:5::9", False), ("fd00::1", False), ("10.0.0.1", False)):
        assert reaches(held, full, End(address=address), 443) is answer, address
    closed = MATRIX["everything"]
    assert not reaches(policies(closed), rollout(closed, "full"), End(address="2606:2800::1"), 443)


@pytest.mark.parametrize("name", ["defaults", "everything", SAME])
def test_store_and_engines_are_reached_by_those_alone_who_need_them(name: str) -> None:
    values = MATRIX[name]
    held = policies(values)
    proxy, node = part(values, "proxy"), part(values, "node")
    redis, vllm = part(values, "redis"), part(values, "vllm")
    assert reaches(held, proxy, redis, 6379) and not reaches(held, node, redis, 6379)
    assert reaches(held, proxy, vllm, 8000) and not reaches(held, node, vllm, 8000)
    assert not reaches(held, vllm, redis, 6379)
    copies = End(NAMESPACE, {**redis.labels, "app.kubernetes.io/component": "backup"})
    assert reaches(held, copies, redis, 6379) is (name != "defaults") and not reaches(held, copies, vllm, 8000)
    neighbour = End(NAMESPACE, {"app": "trainer"})
    for port in (8700, CONTROL):
        assert reaches(held, neighbour, proxy, port) and reaches(held, node, proxy, port)
    for other in (neighbour, STRANGER, OPEN_WORLD):
        assert (
            not reaches(held, other, redis, 6379)
            and not reaches(held, other, vllm, 8000)
            and not reaches(held, other, node, 80)
        )


def test_the_service_takes_who_is_named_and_no_stranger() -> None:
    trainers = {"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "training"}}}
    for values, answer in (({}, False), ({"networkPolicy": {"proxyFrom": [trainers]}}, True)):
        for port in (8700, CONTROL):
            assert reaches(policies(values), End("training", {"app": "trainer"}), part(values, "proxy"), port) is answer
            assert not reaches(policies(values), STRANGER, part(values, "proxy"), port)


def test_who_is_named_for_the_harness_side_reaches_that_alone() -> None:
    gateway = {"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "gateway"}}}
    values: Values = {"networkPolicy": {"harnessFrom": [gateway]}}
    outside, proxy = End("gateway", {"app": "envoy"}), part(values, "proxy")
    assert reaches(policies(values), outside, proxy, 8700) and not reaches(policies(values), outside, proxy, CONTROL)


def test_a_pod_that_nothing_was_said_about_reaches_nothing_where_rollouts_are() -> None:
    values = MATRIX["defaults"]
    unlabelled = End(f"{NAMESPACE}-runtimes", {})
    assert not reaches(policies(values), unlabelled, part(values, "proxy"), 8700)
    assert not reaches(policies(values), unlabelled, OPEN_WORLD, 443)


@pytest.mark.parametrize("name", ["defaults", "everything", SAME])
def test_the_test_pods_stand_where_they_see_what_they_are_to_test(name: str) -> None:
    """One reaches the service by the name and port that it is told; the other is held as a rollout is, in no other way."""
    values = MATRIX[name]
    held = policies(values)
    ends = {
        each["metadata"]["name"].rpartition("-")[2]: (each, pod_end(each)) for each in objects(values) if each["kind"] == "Pod"
    }
    assert ends.keys() == {"service", "network"}
    asks, end = ends["service"]
    service, told = the(values, "Service", "-proxy"), environment(container(asks))
    for name, port in zip(("VERBATIM_HARNESS_URL", "VERBATIM_URL"), service["spec"]["ports"], strict=True):
        assert told[name] == f"http://{service['metadata']['name']}:{port['port']}"
    assert reaches(held, end, part(values, "proxy"), 8700) and reaches(held, end, part(values, "proxy"), CONTROL)
    _, end = ends["network"]
    agent = rollout(values, "proxy")
    assert end.namespace == agent.namespace
    for other, number in (
        (part(values, "proxy"), 8700),
        (part(values, "proxy"), CONTROL),
        (part(values, "vllm"), 8000),
        (API_SERVER, 443),
        (OPEN_WORLD, 443),
    ):
        assert reaches(held, end, other, number) is reaches(held, agent, other, number), other
    assert reaches([], end, API_SERVER, 443) and not reaches(held, end, API_SERVER, 443)


def pod_end(pod: dict[str, Any]) -> End:
    return End(namespace_of(pod), pod["metadata"]["labels"])
