"""Which policy a model's name belongs to, and what the replicas that serve offer."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence

from proxy.engine.replica import Replica
from proxy.errors import EngineUnavailable, NotFound

DEFAULT = ""
"""The name of the default policy."""


def find_policy(
    model: str,
    replicas: Sequence[Replica],
    policies: Collection[str],
    declared: Mapping[str, str] | None = None,
    *,
    strict: bool = False,
) -> str:
    """The policy of calls for `model`: the policy of that name, the one it was declared for, the one whose engines serve it, or, unless
    names are `strict`, the default one, and in its place the only adapter of its engines. `declared` has the policy of each declared
    model.

    Replicas count whether they serve or not, so that no other policy answers for one whose engines are down. Raises EngineUnavailable
    while the model may belong to a policy whose engines were never reached, NotFound if it is unknown and there is no default policy,
    or names are strict and the engines list theirs."""
    declared = declared or {}
    if model and model in policies:
        return model
    if model in declared:
        known = declared[model]
        if known or DEFAULT in policies or not policies:
            return known
    elif model:
        return _find_serving(model, replicas, policies, declared, strict)
    elif DEFAULT in policies or not policies:
        return _find_default(replicas)
    raise _unknown(model, replicas, policies)


def _find_default(replicas: Sequence[Replica]) -> str:
    """The policy of calls that name no model there is: a harness often cannot be told to name the adapter that is trained."""
    adapters = {replica.policy for replica in replicas if replica.adapter and replica.host.policy == DEFAULT}
    return adapters.pop() if len(adapters) == 1 else DEFAULT


def _find_serving(
    model: str, replicas: Sequence[Replica], policies: Collection[str], declared: Mapping[str, str], strict: bool
) -> str:
    serving = {replica.policy for replica in replicas if model in replica.names}
    if serving:
        return DEFAULT if DEFAULT in serving else min(serving)
    if unmet := {*policies} - {DEFAULT, *declared.values(), *(replica.policy for replica in replicas if replica.met)}:
        raise EngineUnavailable(
            f"the model {model!r} is not known, and may be one of {', '.join(sorted(unmet))}, whose engines were not reached yet"
        )
    named = any(replica.names for replica in replicas if replica.policy == DEFAULT)
    if (DEFAULT in policies or not policies) and not (strict and named):
        return _find_default(replicas)
    raise _unknown(model, replicas, policies)


def _unknown(model: str, replicas: Sequence[Replica], policies: Collection[str]) -> NotFound:
    listed = catalogue([replica for replica in replicas if replica.healthy])
    there_are = ", ".join(sorted({*policies, *listed} - {DEFAULT}))
    return NotFound(f"the model '{model}' does not exist; there are: {there_are}", param="model")


def catalogue(serving: Sequence[Replica]) -> list[str]:
    """The models harnesses may ask for now: the names of serving policies, then the engines' own names."""
    names = [each.policy for each in serving] + [name for each in serving for name in each.models]
    return [name for name in dict.fromkeys(names) if name]


def find_smallest(replicas: Iterable[Replica]) -> int | None:
    """The smallest window of those that tell theirs, in tokens."""
    return min((each.max_model_len for each in replicas if each.max_model_len is not None), default=None)


def is_frozen(replica: Replica, model: str, frozen: Collection[str]) -> bool:
    """Whether what the replica samples for `model` is never trained: a frozen model, by the requested name, the policy's or the
    engine's own."""
    return not {model, replica.policy, replica.adapter or replica.name_served(model)}.isdisjoint(frozen)
