"""The current weight version of every policy, by which a lease and an admission measure age."""

from __future__ import annotations

import asyncio

from proxy.services import Services

DEFAULT = ""


async def current_versions(services: Services) -> dict[str, int]:
    """By policy, the default one ("") first: those that have engines, and those whose rows lie in groups though they have none any more."""
    rows_of, engines_of = await services.delivery.policies(), services.pool.policy_names
    names = [DEFAULT, *sorted({*rows_of, *engines_of} - {DEFAULT})]
    states = await asyncio.gather(*(services.weights.current(name) for name in names))
    return {name: state.version for name, state in zip(names, states, strict=True)}
