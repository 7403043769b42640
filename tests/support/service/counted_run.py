"""The numbers of a run to look at: closed sessions counted as their closing counts them, without the sessions themselves."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence

from proxy.store.connection import StoreConnection
from proxy.store.delivery import DeliveryStore
from proxy.store.groups import GroupDefaults, GroupMember
from proxy.store.run import PolicyOutcome

BEGAN = 1_750_000_000.0
LABELS = ("math", "code", "web")
PARTIAL = GroupDefaults("allow_partial", 1)


def play_rollouts(number: int, per_version: int = 8) -> list[PolicyOutcome]:
    """One a minute; the reward rises over the first half of the weight versions, from about 0.2 to 0.8."""
    chance = random.Random(7)
    half = max(1, number // per_version // 2)
    made = []
    for at in range(number):
        version = at // per_version
        status = chance.choices(("completed", "timeout", "failed"), (0.9, 0.06, 0.04))[0]
        solved = chance.random() < 0.2 + 0.6 * min(1.0, version / half)
        reward = None if status == "failed" else 1.0 if solved else chance.choice((0.0, 0.0, 0.25))
        made.append(
            PolicyOutcome(
                closed_at=BEGAN + 60 * at,
                status=status,
                reward=reward,
                solved=reward == 1.0,
                seconds=chance.uniform(100, 400),
                label=LABELS[at // 4 % len(LABELS)],
                version=version,
                behind=chance.randrange(4),
                calls=chance.randint(5, 40),
                invalid_tool_calls=chance.randrange(2),
                sampled_tokens=chance.randint(1000, 9000),
                truncated=chance.random() < 0.1,
            )
        )
    return made


def count(redis_url: str, outcomes: Sequence[PolicyOutcome], prefix: str = "") -> None:
    """In groups of four, under ids with this prefix."""

    async def fill() -> None:
        connection = StoreConnection(redis_url)
        delivery = DeliveryStore(connection)
        for at, outcome in enumerate(outcomes):
            member = GroupMember(
                f"{prefix}s{at}", outcome.reward is not None, outcome.reward, 1, outcome.version or 0, run=outcome.run
            )
            await delivery.fill(f"{prefix}g{at // 4}", 4, member, PARTIAL, 1.0, None, [outcome])
        await connection.close()

    asyncio.run(fill())
