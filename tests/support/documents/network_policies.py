"""What NetworkPolicies let through, as Kubernetes defines it: a pod that a policy chooses is closed but for what policies allow."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from ipaddress import ip_address, ip_network
from typing import Any

Policy = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class End:
    """A pod, or, without a namespace, an address outside the cluster's pods."""

    namespace: str = ""
    labels: Mapping[str, str] = field(default_factory=dict)
    address: str = "10.1.2.3"


def reaches(policies: Sequence[Policy], source: End, target: End, port: int, protocol: str = "TCP") -> bool:
    out = _allowed(policies, "Egress", source, target, port, protocol)
    return out and _allowed(policies, "Ingress", target, source, port, protocol)


def _allowed(policies: Sequence[Policy], way: str, held: End, other: End, port: int, protocol: str) -> bool:
    """Whether what holds `held` allows that way between it and the other end."""
    about = [each for each in policies if way in each["spec"]["policyTypes"] and _holds(each, held)]
    if not about:
        return True
    peers, rules = ("to", "egress") if way == "Egress" else ("from", "ingress")
    return any(
        _has_port(rule, port, protocol) and (not rule.get(peers) or any(_is(peer, other, held) for peer in rule[peers]))
        for policy in about
        for rule in policy["spec"].get(rules) or ()
    )


def _holds(policy: Policy, pod: End) -> bool:
    return pod.namespace == policy["metadata"]["namespace"] and _chosen(policy["spec"]["podSelector"], pod.labels)


def _has_port(rule: Mapping[str, Any], port: int, protocol: str) -> bool:
    return not rule.get("ports") or any((each["port"], each["protocol"]) == (port, protocol) for each in rule["ports"])


def _is(peer: Mapping[str, Any], end: End, held: End) -> bool:
    if block := peer.get("ipBlock"):
        address = ip_address(end.address)
        return address in ip_network(block["cidr"]) and not any(address in ip_network(each) for each in block.get("except", ()))
    spaces = peer.get("namespaceSelector")
    in_space = (
        _chosen(spaces, {"kubernetes.io/metadata.name": end.namespace})
        if spaces is not None
        else end.namespace == held.namespace
    )
    return bool(end.namespace) and in_space and _chosen(peer.get("podSelector") or {}, end.labels)


def _chosen(selector: Mapping[str, Any], labels: Mapping[str, str]) -> bool:
    equal = (selector.get("matchLabels") or {}).items() <= labels.items()
    return equal and all(_fulfilled(each, labels) for each in selector.get("matchExpressions") or ())


def _fulfilled(expression: Mapping[str, Any], labels: Mapping[str, str]) -> bool:
    match expression["operator"]:
        case "In":
            return labels.get(expression["key"]) in expression["values"]
        case "Exists":
            return expression["key"] in labels
        case "DoesNotExist":
            return expression["key"] not in labels
    raise ValueError(f"no chart of ours says {expression['operator']}")
