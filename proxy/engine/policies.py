"""Policies: named models, each with replicas of its own; which of them a call is for.

The name "" is the default policy's. A harness says a model, not a policy: it may be the name of a policy, or one under which a
policy's engines serve; everything else is for the default policy, whose engine then takes or refuses it.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from proxy.engine.replica import Replica
from proxy.errors import NotFound

DEFAULT = ""


def policy_for(model: str, replicas: Sequence[Replica], policies: Collection[str]) -> str:
    """The policy that a call for `model` goes to; replicas count whether they serve or not, so that a policy whose engines are
    down is not answered by another. Raises NotFound when the model is unknown and there is no default policy."""
    if model and model in policies:
        return model
    serving = {replica.policy for replica in replicas if model in replica.names}
    if serving:
        return DEFAULT if DEFAULT in serving else min(serving)
    if DEFAULT in policies or not policies:
        return DEFAULT
    there_are = ", ".join(sorted({*policies, *catalogue(replicas)}))
    raise NotFound(f"the model '{model}' does not exist; there are: {there_are}", param="model")


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
