"""The contract of the weight store, on a real Redis, plain and cluster."""

from __future__ import annotations

import asyncio

import pytest
from redis_server import Store

from proxy.errors import Conflict
from proxy.store.base import WeightState


async def test_before_any_push_the_version_is_zero(store: Store) -> None:
    assert await store.weights.current() == WeightState()
    assert await store.weights.history() == []


async def test_versions_only_grow(store: Store) -> None:
    first, third = WeightState(1, "/w/1", "full", 10.0), WeightState(3, "/w/3", "lora", 30.0)
    await store.weights.advance(first)
    await store.weights.advance(third)
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
