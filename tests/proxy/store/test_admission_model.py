"""The store's count of versions ahead against a plain model of it, over random runs of rollouts and trainers on a real Redis."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import Any

import pytest

from proxy.store.delivery import Freshness
from proxy.store.groups import GroupMember
from tests.support.service.redis_server import Store
from tests.support.sessions.filled_groups import ALL, lease

PER_VERSION = 3
LONG: dict[str, Any] = {"lease_seconds": 10**6, "max_deliveries": 10**6}


@dataclass
class Model:
    """What is where, written down as a reader would: each group in one place, and the version it was last leased under."""

    version: int = 0
    opened: list[str] = field(default_factory=list)
    ready: list[str] = field(default_factory=list)
    leases: dict[str, list[str]] = field(default_factory=dict)
    leased_at: dict[str, int] = field(default_factory=dict)
    acknowledged: set[str] = field(default_factory=set)
    became_ready: list[str] = field(default_factory=list)

    def ahead(self) -> int:
        """A group is in training when it is leased, or was leased under this version and acknowledged. Of those leased under older
        versions and those of this one, the store keeps the greater number."""
        held = {group for groups in self.leases.values() for group in groups}
        of_this_version = {group for group in held | self.acknowledged if self.leased_at[group] == self.version}
        training = max(len(held), len(of_this_version))
        return (len(self.opened) + len(self.ready) + training) // PER_VERSION


@pytest.mark.parametrize("seed", range(6))
async def test_the_store_counts_as_the_model_does(store: Store, seed: int) -> None:
    chance, model, begun, now = random.Random(seed), Model(), 0, 0.0
    for _ in range(120):
        now += 1.0
        act = chance.choice(("begin", "begin", "begin", "close", "close", "lease", "end", "end", "push"))
        if act == "begin":
            bound, name = chance.randint(0, 3), f"g{begun}"
            asked = Freshness(model.version, bound, PER_VERSION)
            admission = await store.delivery.admit(name, f"s-{name}", 0, ALL, now, asked)
            assert (admission.versions_ahead, admission.granted) == (model.ahead(), model.ahead() <= bound)
            if admission.granted:
                begun += 1
                model.opened.append(name)
        elif act == "close" and model.opened:
            name = model.opened.pop(chance.randrange(len(model.opened)))
            await store.delivery.fill(name, 1, GroupMember(f"s-{name}", True, 1.0, 1, model.version), ALL, now)
            model.ready.append(name)
            model.became_ready.append(name)
        elif act == "lease" and model.ready:
            taken = await lease(store, now, max_groups=chance.randint(1, 3), version=model.version, **LONG)
            names = [group.group_id for group in taken.groups]
            assert names == model.ready[: len(names)]
            del model.ready[: len(names)]
            model.leases[taken.lease_id] = names
            model.leased_at |= dict.fromkeys(names, model.version)
        elif act == "end" and model.leases:
            lease_id = chance.choice(sorted(model.leases))
            names = model.leases.pop(lease_id)
            if chance.random() < 0.3:
                await store.delivery.nack(lease_id, now)
                model.ready = sorted({*model.ready, *names}, key=model.became_ready.index)
            else:
                await store.delivery.ack(lease_id, now)
                model.acknowledged.update(names)
        elif act == "push":
            model.version += chance.randint(1, 2)
        assert await store.delivery.count_versions_ahead(model.version, PER_VERSION) == model.ahead()
