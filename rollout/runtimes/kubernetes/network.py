"""What keeps pods from everything but the proxy: a NetworkPolicy, which the node makes, or which is there.

A policy that is made holds for all pods that are to reach the same proxy: one that came with each pod might be carried out only after the
pod began. Its name says what it allows, so that any number of nodes make the same one, and it stays. Whether the cluster's network carries
policies out cannot be seen.
"""

from __future__ import annotations

import asyncio
import hashlib
import ipaddress
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from rollout.runtimes.base import Route, RuntimeFailed
from rollout.runtimes.kubernetes.cluster import Cluster
from rollout.runtimes.kubernetes.manifest import MANAGED, NETWORK_LABEL, PROXY_LABEL, Way
from rollout.runtimes.settings import RuntimeSettings

MODES = ("made", "given", "elsewhere")
_EXAMPLE = Way("", ("192.0.2.1",), 80)


@dataclass(frozen=True, slots=True)
class Holding:
    """How the pods of one node are kept from the network."""

    cluster: Cluster
    settings: RuntimeSettings

    async def missing(self) -> None:
        """Raises `RuntimeFailed` for what would keep every pod from being held."""
        mode = self.settings.kubernetes_network_policy
        if mode not in MODES:
            raise RuntimeFailed(f"VERBATIM_KUBERNETES_NETWORK_POLICY cannot be {mode!r}: choose one of {', '.join(MODES)}")
        if mode == "made":
            await self.cluster.allowed_to_make(policy(_EXAMPLE, self.settings))
        if mode == "given":
            await self._found({NETWORK_LABEL: "proxy"})

    async def ensured(self, way: Way, labels: Mapping[str, str]) -> dict[str, str]:
        """What a pod with those labels has for further ones; when it is made, it is held. Raises `RuntimeFailed`."""
        mode = self.settings.kubernetes_network_policy
        if mode == "made":
            made = policy(way, self.settings)
            await self.cluster.policy_made(made)
            return {PROXY_LABEL: made["metadata"]["labels"][PROXY_LABEL]}
        if mode == "given":
            await self._found(labels)
        return {}

    async def _found(self, labels: Mapping[str, str]) -> None:
        if not held(labels, await self.cluster.policies()):
            raise RuntimeFailed(
                f"no NetworkPolicy for egress in the namespace {self.cluster.namespace} chooses pods with the label "
                f"{NETWORK_LABEL}=proxy: nothing would keep them from the network"
            )


async def way(route: Route) -> Way:
    """To the proxy. Raises `RuntimeFailed` when its name is not known here, or its address is this machine's own for itself."""
    try:
        found = await asyncio.get_running_loop().getaddrinfo(route.host, route.port, type=1)
    except OSError as error:
        raise RuntimeFailed(f"the proxy's address is not known: {route.host}: {error}") from error
    addresses = tuple(sorted({str(each[4][0]) for each in found}))
    if any(ipaddress.ip_address(each).is_loopback for each in addresses):
        raise RuntimeFailed(f"{route.host} is the proxy's address on the node only: give the node one that pods reach it at")
    return Way(route.host, addresses, route.port)


def policy(way: Way, settings: RuntimeSettings) -> dict[str, Any]:
    """A NetworkPolicy that lets pods out to the proxy alone, and nobody in. Where the proxy is a Service, most networks look at what it
    stands for: the pods of the settings, on whatever port they listen."""
    blocks = [{"ipBlock": {"cidr": str(ipaddress.ip_network(each))}} for each in way.addresses]
    egress: list[dict[str, Any]] = [{"to": blocks, "ports": [{"protocol": "TCP", "port": way.port}]}]
    if settings.kubernetes_proxy_pods:
        peer: dict[str, Any] = {"podSelector": {"matchLabels": dict(settings.kubernetes_proxy_pods)}}
        if settings.kubernetes_proxy_namespace is not None:
            peer["namespaceSelector"] = {"matchLabels": {"kubernetes.io/metadata.name": settings.kubernetes_proxy_namespace}}
        egress.append({"to": [peer]})
    which = hashlib.sha256(json.dumps(egress, sort_keys=True).encode()).hexdigest()[:16]
    return {
        "apiVersion": "networking.k8s.io/v1",
        "kind": "NetworkPolicy",
        "metadata": {"name": f"verbatim-{which}", "labels": {**MANAGED, PROXY_LABEL: which}},
        "spec": {
            "podSelector": {"matchLabels": {NETWORK_LABEL: "proxy", PROXY_LABEL: which}},
            "policyTypes": ["Ingress", "Egress"],
            "ingress": [],
            "egress": egress,
        },
    }


def held(labels: Mapping[str, str], policies: Iterable[Mapping[str, Any]]) -> bool:
    """Whether one of the policies keeps pods with those labels from what it does not allow."""
    specs = (policy.get("spec") or {} for policy in policies)
    return any(_about_egress(spec) and _chosen(labels, spec.get("podSelector") or {}) for spec in specs)


def _about_egress(spec: Mapping[str, Any]) -> bool:
    """Without types named, a policy is about egress when it has rules for it."""
    types = spec.get("policyTypes")
    return "Egress" in types if types else bool(spec.get("egress"))


def _chosen(labels: Mapping[str, str], selector: Mapping[str, Any]) -> bool:
    wanted = selector.get("matchLabels") or {}
    if any(labels.get(name) != value for name, value in wanted.items()):
        return False
    return all(_fulfilled(labels, each) for each in selector.get("matchExpressions") or ())


def _fulfilled(labels: Mapping[str, str], expression: Mapping[str, Any]) -> bool:
    value, values = labels.get(expression["key"]), expression.get("values") or ()
    match expression["operator"]:
        case "In":
            return value in values
        case "NotIn":
            return value not in values
        case "Exists":
            return value is not None
        case "DoesNotExist":
            return value is None
    return False
