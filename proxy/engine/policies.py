"""Policies: named models, each with replicas of its own; which of them a call is for.

The name "" is the default policy's. A harness says a model, not a policy: it may be the name of a policy, one that was declared for
a policy, or one under which a policy's engines serve; every other name means the default policy, unless names are taken strictly. What
the engines of a policy serve under is known once one of them was reached: until then a name that nobody is known by may be that
policy's, and is answered by nobody.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from types import MappingProxyType

from proxy.engine.replica import Replica
from proxy.errors import EngineUnavailable, NotFound

DEFAULT = ""
NONE_DECLARED: Mapping[str, str] = MappingProxyType({})


def policy_for(
    model: str,
    replicas: Sequence[Replica],
    policies: Collection[str],
    declared: Mapping[str, str] = NONE_DECLARED,
    *,
    strict: bool = False,
) -> str:
    """The policy that a call for `model` goes to; `declared` has the policy of each model that was declared for one. Replicas count
    whether they serve or not, so that a policy whose engines are down is not answered by another.

    Raises EngineUnavailable while the model may be that of a policy whose engines were never reached, NotFound when it is unknown
    and there is no default policy, or names are taken strictly and the engines say theirs."""
    if not model or model in policies:
        known = model
    elif model in declared:
        known = declared[model]
    else:
        return _serving(model, replicas, policies, declared, strict)
    if known or DEFAULT in policies or not policies:
        return known
    raise _unknown(model, replicas, policies)


def _serving(
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
        return DEFAULT
    raise _unknown(model, replicas, policies)


def _unknown(model: str, replicas: Sequence[Replica], policies: Collection[str]) -> NotFound:
    there_are = ", ".join(sorted({*policies, *catalogue(replicas)} - {DEFAULT}))
    return NotFound(f"the model '{model}' does not exist; there are: {there_are}", param="model")


def catalogue(replicas: Sequence[Replica]) -> dict[str, int | None]:
    """What harnesses may ask for now: the names of policies that serve, then the engines' own names of their models; each with
    the window in tokens, None where the engine does not say."""
    serving = [replica for replica in replicas if replica.healthy]
    named = {replica.policy: replica.max_model_len for replica in serving if replica.policy}
    return named | {name: replica.max_model_len for replica in serving for name in replica.models}


def is_frozen(replica: Replica, model: str, frozen: Collection[str]) -> bool:
    """Whether what the replica samples for `model` is never trained: a frozen model by the name that was asked for, by that of the
    policy, or by the engine's own."""
    return not {model, replica.policy, replica.model_for(model)}.isdisjoint(frozen)
