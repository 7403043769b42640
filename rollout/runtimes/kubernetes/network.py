"""Network isolation of pods: a NetworkPolicy, made by the node or already present, that lets them reach the proxy alone.

A policy covers all pods with the same proxy: one made together with each pod might take effect only after the pod has begun. Its name is a
hash of what it allows, so any number of nodes make the same one, and it is never removed. Whether the cluster's network enforces policies
cannot be detected.
"""

from __future__ import annotations

import asyncio
import hashlib
import ipaddress
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from rollout.runtimes.base import ProxyAddress, RuntimeFailed
from rollout.runtimes.kubernetes.cluster import PodApi
from rollout.runtimes.kubernetes.manifest import MANAGED, NETWORK_LABEL, PROXY_LABEL, ResolvedProxy
from rollout.runtimes.settings import RuntimeSettings

MODES = ("made", "given", "elsewhere")
_EXAMPLE = ResolvedProxy("", ("192.0.2.1",), 80)


@dataclass(frozen=True, slots=True)
class Isolation:
    """How the settings of a node isolate its pods."""

    cluster: PodApi
    settings: RuntimeSettings

    async def check(self) -> None:
        """Raises `RuntimeFailed` for what would keep every pod from being isolated."""
        mode = self.settings.kubernetes_network_policy
        if mode not in MODES:
            raise RuntimeFailed(f"VERBATIM_KUBERNETES_NETWORK_POLICY cannot be {mode!r}: choose one of {', '.join(MODES)}")
        if mode == "made":
            await self.cluster.ensure_policy(make_policy(_EXAMPLE, self.settings), dry_run="All")
        if mode == "given":
            await self._check_given({NETWORK_LABEL: "proxy"})

    async def ensure(self, proxy: ResolvedProxy, labels: Mapping[str, str]) -> dict[str, str]:
        """Further labels for a pod with these: with both it is isolated from its first moment. Raises `RuntimeFailed`."""
        mode = self.settings.kubernetes_network_policy
        if mode == "made":
            policy = make_policy(proxy, self.settings)
            await self.cluster.ensure_policy(policy)
            return {PROXY_LABEL: policy["metadata"]["labels"][PROXY_LABEL]}
        if mode == "given":
            await self._check_given(labels)
        return {}

    async def _check_given(self, labels: Mapping[str, str]) -> None:
        if not is_isolated(labels, await self.cluster.list_policies()):
            raise RuntimeFailed(
                f"no NetworkPolicy for egress in the namespace {self.cluster.namespace} selects pods with the label "
                f"{NETWORK_LABEL}=proxy: nothing would keep them from the network"
            )


async def resolve_proxy(proxy: ProxyAddress) -> ResolvedProxy:
    """Raises `RuntimeFailed` if the proxy's name does not resolve here, or only to a loopback address."""
    try:
        found = await asyncio.get_running_loop().getaddrinfo(proxy.host, proxy.port, type=1)
    except OSError as error:
        raise RuntimeFailed(f"the proxy's name does not resolve: {proxy.host}: {error}") from error
    addresses = tuple(sorted({str(each[4][0]) for each in found}))
    if any(ipaddress.ip_address(each).is_loopback for each in addresses):
        raise RuntimeFailed(f"{proxy.host} reaches the proxy on the node only: give the node an address that pods can reach")
    return ResolvedProxy(proxy.host, addresses, proxy.port)


def make_policy(proxy: ResolvedProxy, settings: RuntimeSettings) -> dict[str, Any]:
    """A NetworkPolicy that lets pods out to the proxy alone, and nothing in. For a proxy behind a Service most networks match the pods it
    stands for, which the settings name, on any port."""
    blocks = [{"ipBlock": {"cidr": str(ipaddress.ip_network(each))}} for each in proxy.addresses]
    egress: list[dict[str, Any]] = [{"to": blocks, "ports": [{"protocol": "TCP", "port": proxy.port}]}]
    if settings.kubernetes_proxy_pods:
        peer: dict[str, Any] = {"podSelector": {"matchLabels": dict(settings.kubernetes_proxy_pods)}}
        if settings.kubernetes_proxy_namespace is not None:
            peer["namespaceSelector"] = {"matchLabels": {"kubernetes.io/metadata.name": settings.kubernetes_proxy_namespace}}
        egress.append({"to": [peer]})
    digest = hashlib.sha256(json.dumps(egress, sort_keys=True).encode()).hexdigest()[:16]
    return {
        "apiVersion": "networking.k8s.io/v1",
        "kind": "NetworkPolicy",
        "metadata": {"name": f"verbatim-{digest}", "labels": {**MANAGED, PROXY_LABEL: digest}},
        "spec": {
            "podSelector": {"matchLabels": {NETWORK_LABEL: "proxy", PROXY_LABEL: digest}},
            "policyTypes": ["Ingress", "Egress"],
            "ingress": [],
            "egress": egress,
        },
    }


def is_isolated(labels: Mapping[str, str], policies: Iterable[Mapping[str, Any]]) -> bool:
    """Whether one of the policies restricts the egress of pods with these labels."""
    specs = (policy.get("spec") or {} for policy in policies)
    return any(_restricts_egress(spec) and _selects(spec.get("podSelector") or {}, labels) for spec in specs)


def _restricts_egress(spec: Mapping[str, Any]) -> bool:
    """Without `policyTypes`, a policy restricts egress if it has rules for it."""
    types = spec.get("policyTypes")
    return "Egress" in types if types else bool(spec.get("egress"))


def _selects(selector: Mapping[str, Any], labels: Mapping[str, str]) -> bool:
    if any(labels.get(name) != value for name, value in (selector.get("matchLabels") or {}).items()):
        return False
    return all(_matches(each, labels) for each in selector.get("matchExpressions") or ())


def _matches(expression: Mapping[str, Any], labels: Mapping[str, str]) -> bool:
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
