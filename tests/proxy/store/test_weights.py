"""The contract of the weight store, on a real Redis, plain and cluster."""

from __future__ import annotations

import asyncio

import pytest

from proxy.errors import Conflict
from proxy.store import keys
from proxy.store.service import WeightState
from tests.support.service.redis_server import Store


async def test_before_any_push_the_version_is_zero(store: Store) -> None:
    assert await store.weights.current() == WeightState()
    assert await store.weights.history() == []


async def test_versions_only_grow(store: Store) -> None:
    first, third = WeightState(1, "/w/1", "full", 10.0), WeightState(3, "/w/3", "lora", 30.0)
    await store.weights.advance(first)
    await store.weights.advance(third)
    await store.weights.advance(third)  # sent again by a connection that broke before it had the answer
    for version in (0, 2, 3):
        with pytest.raises(Conflict, match=f"{version} is not greater than the current 3"):
            await store.weights.advance(WeightState(version))
    assert await store.weights.current() == third
    assert await store.weights.history() == [third, first]
    assert await store.weights.history(limit=1) == [third]


async def test_version_zero_is_no_push(store: Store) -> None:
    with pytest.raises(Conflict):
        await store.weights.advance(WeightState(0))


async def test_the_push_lock_has_one_owner_until_it_is_given_back_or_expires(store: Store) -> None:
    assert await store.weights.lock("a", 10.0)
    assert await store.weights.lock("a", 10.0), "renewed"
    assert not await store.weights.lock("b", 10.0)
    await store.weights.unlock("b")
    assert not await store.weights.lock("b", 10.0), "only its owner gives it back"
    await store.weights.unlock("a")
    assert await store.weights.lock("b", 0.05)
    await asyncio.sleep(0.1)
    assert await store.weights.lock("a", 10.0)


async def test_each_policy_has_a_version_line_and_a_lock_of_its_own(store: Store) -> None:
    """The default one keeps the keys it had before there were others."""
    await store.weights.advance(WeightState(5, "/w/5"))
    await store.weights.advance(WeightState(2, "/j/2"), "judge")
    assert (await store.weights.current(), await store.weights.current("judge")) == (
        WeightState(5, "/w/5"),
        WeightState(2, "/j/2"),
    )
    assert await store.weights.history("judge") == [WeightState(2, "/j/2")]
    assert await store.weights.current("other") == WeightState()
    assert await store.weights.lock("a", 10.0)
    assert await store.weights.lock("b", 10.0, "judge"), "not held by the push of another policy"
    assert not await store.weights.lock("b", 10.0)
    assert (keys.weights("current", ""), keys.weights("lock", "")) == ("vb:{weights}:current", "vb:{weights}:lock")


async def test_every_holder_of_the_lock_gets_a_greater_fence_and_keeps_it_when_it_renews(store: Store) -> None:
    first = await store.weights.lock("a", 10.0)
    assert await store.weights.lock("a", 10.0, fence=first) == first
    await store.weights.unlock("a")
    assert await store.weights.lock("a", 10.0, fence=first) == first, "nobody else had it meanwhile"
    await store.weights.unlock("a")
    second = await store.weights.lock("b", 10.0)
    assert second > first > 0
    await store.weights.unlock("b")
    assert not await store.weights.lock("a", 10.0, fence=first), "b may have pushed"


async def test_a_version_becomes_current_only_under_the_last_fence(store: Store) -> None:
    stale = await store.weights.lock("a", 10.0)
    await store.weights.unlock("a")
    await store.weights.advance(WeightState(1), fence=stale)
    fresh = await store.weights.lock("b", 10.0)
    with pytest.raises(Conflict, match="another process has taken over since the push of version 2 began"):
        await store.weights.advance(WeightState(2), fence=stale)
    await store.weights.advance(WeightState(2, "/w/2"), fence=fresh)
    assert await store.weights.current() == WeightState(2, "/w/2")


async def test_a_store_is_called_the_same_for_good(store: Store) -> None:
    names = await asyncio.gather(*(store.weights.identity() for _ in range(5)))
    assert len(set(names)) == 1
    assert len(names[0]) == 32
