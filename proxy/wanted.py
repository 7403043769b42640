"""What a session's calls are asked for beside what they need, and where their logprobs come from.

`POST /sessions {"sampling"}` holds two kinds of fields: parameters that win over the harness's own, and what the service keeps for the
trainer, which no harness sees: `top_logprobs`, `prompt_logprobs`, `routed_experts`. The settings hold where a session says nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from proxy.engine.details import Wanted
from proxy.engine.replica import Replica
from proxy.plan import place
from proxy.settings import Settings
from proxy.turn import Turn
from reconstruct.records import UNKNOWN_MODE

_KEPT = ("top_logprobs", "prompt_logprobs", "routed_experts")


def overrides(sampling: Mapping[str, Any]) -> dict[str, Any]:
    """The parameters of a session's `sampling`."""
    return {name: value for name, value in sampling.items() if name not in _KEPT}


def wanted_of(turn: Turn, settings: Settings) -> Wanted:
    """What is asked of the engine for the trainer; of routed experts only those of positions that no record has."""
    sampling = turn.tree.info.sampling
    kept = {name: sampling.get(name, getattr(settings, f"keep_{name}")) for name in _KEPT}
    wanted = Wanted(**kept)
    if not wanted.routed_experts or turn.plan is None or turn.found is None:
        return wanted
    where = place(turn.tree, turn.found, turn.plan.prompt_ids, turn.plan.branch_reason)
    base = turn.tree.forest.calls[where.base_id].node if where.base_id is not None else None
    if base is None or base.details is None or base.details.routed_experts is None:
        return wanted
    return replace(wanted, routed_from=where.base_length - 1)


def logprob_mode(replica: Replica, settings: Settings) -> str:
    """The mode of the replica's logprobs: as it says itself, else as its operator says of its policy's engines."""
    return replica.logprob_mode or settings.engine_logprob_modes.get(replica.policy) or UNKNOWN_MODE
