"""Whatever the chart lets in passes its own network policy, and whatever the policy would shut out is refused with the value to set."""

from __future__ import annotations

import json
import re
from typing import Any

import helm_python
import pytest
import yaml

from tests.helm.test_network import CONTROL, PORTS, STRANGER, part, policies
from tests.support.documents.helm_chart import Values, objects, rendered, the
from tests.support.documents.network_policies import End, reaches

HOST = {"enabled": True, "host": "verbatim.example.com"}
ROUTE = {"enabled": True, "parentRefs": [{"name": "gateway", "namespace": "gateways"}], "hostnames": ["verbatim.example.com"]}
NGINX = End("ingress-nginx", {"app.kubernetes.io/name": "ingress-nginx"})
TRAEFIK = End("traefik", {"app.kubernetes.io/name": "traefik"})
GATEWAY = End("gateways", {"gateway.networking.k8s.io/gateway-name": "gateway"})
PROMETHEUS = End("monitoring", {"app.kubernetes.io/name": "prometheus"})
CLIENT = End(address="198.51.100.7")


def namespace(name: str) -> list[dict[str, Any]]:
    return [{"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": name}}}]


@pytest.mark.parametrize(
    ("values", "outside"),
    [
        ({"ingress": HOST}, NGINX),
        ({"ingress": {**HOST, "className": "traefik"}, "networkPolicy": {"ingressFrom": namespace("traefik")}}, TRAEFIK),
        ({"httpRoute": ROUTE, "networkPolicy": {"gatewayFrom": namespace("gateways")}}, GATEWAY),
    ],
    ids=["nginx", "another class", "a gateway"],
)
def test_the_policy_lets_in_the_controller_of_an_ingress_or_route(values: Values, outside: End) -> None:
    """The default policy shut out the chart's own ingress."""
    for port in (8700, CONTROL):
        assert reaches(policies(values), outside, part(values, "proxy"), port)
        assert not reaches(policies({}), outside, part({}, "proxy"), port), "only where there is an ingress or a route"
    for other in (STRANGER, CLIENT):
        assert not reaches(policies(values), other, part(values, "proxy"), 8700)
    for inside in ("vllm", "redis"):
        assert not reaches(policies(values), outside, part(values, inside), PORTS[inside])


@pytest.mark.parametrize("kind", ["ingress", "httpRoute"])
def test_an_entrance_for_harnesses_alone_leads_to_their_side_alone(kind: str) -> None:
    given = {"ingress": HOST, "httpRoute": ROUTE}[kind]
    values: Values = {kind: {**given, "control": False}, "networkPolicy": {"gatewayFrom": namespace(NGINX.namespace)}}
    held, proxy = policies(values), part(values, "proxy")
    assert reaches(held, NGINX, proxy, 8700) and not reaches(held, NGINX, proxy, CONTROL)
    assert "/sessions" not in rendered(values)[f"templates/{kind.lower()}.yaml"]


def test_the_policy_lets_in_the_prometheus_of_the_service_monitor() -> None:
    values: Values = {"monitoring": {"serviceMonitor": {"enabled": True}}}
    held, proxy = policies(values), part(values, "proxy")
    assert reaches(held, PROMETHEUS, proxy, CONTROL) and not reaches(held, STRANGER, proxy, CONTROL)
    assert not reaches(held, PROMETHEUS, proxy, 8700) and not reaches(held, PROMETHEUS, part(values, "vllm"), 8000)
    assert not reaches(policies({}), PROMETHEUS, part({}, "proxy"), CONTROL)


def test_engines_are_scraped_by_a_prometheus_that_is_named() -> None:
    """Whoever reaches an engine can change its weights, so that no guess is made."""
    values: Values = {
        "monitoring": {"serviceMonitor": {"enabled": True, "engines": True}},
        "networkPolicy": {"prometheusFrom": namespace("monitoring")},
    }
    held = policies(values)
    assert reaches(held, PROMETHEUS, part(values, "vllm"), 8000) and reaches(held, PROMETHEUS, part(values, "proxy"), CONTROL)
    elsewhere = End("default", PROMETHEUS.labels)
    assert not reaches(held, elsewhere, part(values, "vllm"), 8000)
    assert not reaches(held, elsewhere, part(values, "proxy"), CONTROL)


@pytest.mark.parametrize(
    ("values", "named"),
    [
        ({"ingress": {**HOST, "className": "traefik"}}, "networkPolicy.ingressFrom"),
        ({"httpRoute": ROUTE}, "networkPolicy.gatewayFrom"),
        ({"httpRoute": {"enabled": True}, "networkPolicy": {"gatewayFrom": namespace("gateways")}}, "httpRoute.parentRefs"),
        ({"monitoring": {"serviceMonitor": {"enabled": True, "engines": True}}}, "networkPolicy.prometheusFrom"),
        ({"proxy": {"service": {"type": "LoadBalancer"}}}, "networkPolicy.harnessFrom"),
        ({"proxy": {"service": {"type": "NodePort"}}}, "networkPolicy.harnessFrom"),
    ],
)
def test_an_entrance_that_the_policy_would_shut_is_refused(values: Values, named: str) -> None:
    with pytest.raises(helm_python.HelmError, match=named) as refused:
        rendered(values)
    # It is a value as it stands: without its brackets it was refused as no array.
    if example := re.search(r"for example (\[.*\])", str(refused.value)):
        rendered({**values, "networkPolicy": {named.partition(".")[2]: yaml.safe_load(example[1])}})
    if not named.startswith("httpRoute"):
        rendered({**values, "networkPolicy": {"enabled": False}})


def test_a_load_balancer_lets_in_the_addresses_that_are_named() -> None:
    values: Values = {
        "proxy": {"service": {"type": "LoadBalancer"}},
        "networkPolicy": {"harnessFrom": [{"ipBlock": {"cidr": "198.51.100.0/24"}}]},
    }
    assert the(values, "Service", "-proxy")["spec"]["type"] == "LoadBalancer"
    held, proxy = policies(values), part(values, "proxy")
    assert reaches(held, CLIENT, proxy, 8700) and not reaches(held, CLIENT, proxy, CONTROL)
    assert not reaches(held, End(address="203.0.113.9"), proxy, 8700)


def test_ingress_and_route_lead_to_the_same_paths_and_say_whether_the_service_is_there() -> None:
    """/healthz had no route: from outside nothing told a service from another program."""
    values: Values = {"ingress": HOST, "httpRoute": ROUTE, "networkPolicy": {"gatewayFrom": namespace("gateways")}}
    service = the(values, "Service", "-proxy")
    ports = {each["name"]: each["port"] for each in service["spec"]["ports"]}
    (rule,) = the(values, "Ingress", "verbatim")["spec"]["rules"]
    by_ingress = {
        (each["path"], each["pathType"].removesuffix("Prefix"), ports[each["backend"]["service"]["port"]["name"]])
        for each in rule["http"]["paths"]
    }
    rules = the(values, "HTTPRoute", "verbatim")["spec"]["rules"]
    by_route = {
        (match["path"]["value"], match["path"]["type"].removesuffix("PathPrefix"), backend["port"])
        for each in rules
        for match in each["matches"]
        for backend in each["backendRefs"]
    }
    assert by_ingress == by_route and ("/healthz", "Exact", 8700) in by_route
    assert {path for path, _, _ in by_route} & {"/metrics", "/readyz"} == set()
    assert all(len(each["matches"]) <= 8 for each in rules), "older releases of the Gateway API refuse more"
    assert {backend["name"] for each in rules for backend in each["backendRefs"]} == {service["metadata"]["name"]}


def test_a_route_is_as_its_values_say() -> None:
    values: Values = {"httpRoute": ROUTE, "networkPolicy": {"enabled": False}}
    spec = the(values, "HTTPRoute", "verbatim")["spec"]
    assert (spec["parentRefs"], spec["hostnames"]) == (ROUTE["parentRefs"], ROUTE["hostnames"])
    assert "HTTPRoute" not in json.dumps(objects({}))
