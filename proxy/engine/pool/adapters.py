"""The replicas of an engine's LoRA adapters, which stand beside that of its base model.

Each adapter is a policy of its own: under the name that the settings map it to, else under its own. Two different models are never one
policy, so an adapter whose name is taken gets no calls, and a note says so.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import fields

from proxy.engine.pool.membership import Membership
from proxy.engine.replica import Replica
from proxy.engine.weights.adapters import list_adapters

_OWN = frozenset(
    {"name", "policy", "healthy", "listed", "reason", "models", "adapter", "served", "base", "adapters", "cards", "updatable"}
    | {"weight_version", "names", "in_flight", "store_problem", "notes"}
)
"""What an adapter's replica does not share with that of its base model."""
_SHARED = [field.name for field in fields(Replica) if field.name not in _OWN]


def follow_adapters(host: Replica, replicas: Sequence[Replica], membership: Membership) -> list[Replica]:
    """Bring `host.adapters` in line with what its engine lists; returns those that are new. `replicas` are all of the pool.

    An adapter that is no longer listed keeps its replica: calls for it are refused, not given another model's reply."""
    listed, unserved = list_adapters(host.cards), []
    for name in listed:
        if name in (replica.adapter for replica in host.adapters):
            continue
        policy = membership.declared.get(name, name)
        # An engine is often added with the names of all its models.
        policy = name if policy == host.policy else policy
        if taken := _find_holder(host, name, policy, replicas, {spec.policy for spec in membership.specs}):
            unserved.append(f"lists the adapter {name!r}, which gets no calls: {taken}")
            continue
        host.adapters.append(Replica(host.name, host.url, policy, adapter=name, base=host, models=(name,), names=(name,)))
    host.note("unserved_adapters", "; ".join(unserved))
    if len(listed) > 1 and not host.policy:
        named = ", ".join(listed)
        host.note("adapters", f"has several adapters ({named}): a call for a name that no model has goes to the base model")
    else:
        host.note("adapters", "")
    for replica in host.adapters:
        replica.listed = replica.adapter in listed
        replica.updatable = bool(host.loads_adapters) and not host.router
        for name in _SHARED:
            setattr(replica, name, getattr(host, name))
    return [replica for replica in host.adapters if replica not in replicas]


def explain_conflict(host: Replica) -> str:
    """Why nobody can tell which model of the engine a call for its policy means; "" where that is clear."""
    if not host.policy or host.policy not in list_adapters(host.cards):
        return ""
    return (
        f"its policy {host.policy!r} is the base model, and its adapter has the same name: name the engine's policy differently; the "
        "adapter is a policy by itself"
    )


def _find_holder(host: Replica, name: str, policy: str, others: Sequence[Replica], policies: Collection[str]) -> str:
    """Why the adapter cannot be the policy: another model is; "" if none."""
    if policy in policies:
        return f"{policy!r} is a policy with engines of its own; map the adapter to another with VERBATIM_POLICY_MODELS"
    for replica in others:
        if replica.policy != policy or replica.adapter is None:
            continue
        if replica.adapter != name:
            return f"the adapter {replica.adapter!r} is the policy {policy!r}"
        if replica.host.policy != host.policy:
            return f"the policy {policy!r} is the adapter of that name on engine {replica.name}, over another base model"
    return ""
