"""The numbers of a run, on a real Redis, plain and cluster: every closed session counts once, whatever is repeated."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from dataclasses import replace
from typing import Any

import pytest

from contract.sessions import GroupRule
from proxy.store.groups import GroupDefaults, GroupMember
from proxy.store.run import Axis, Point, PolicyOutcome, choose_label, merge, round_reward
from tests.support.service.redis_server import Store
from tests.support.sessions.filled_groups import ALL, lease, partial


def outcome(reward: float | None = 1.0, version: int | None = 0, **more: Any) -> PolicyOutcome:
    given = {"closed_at": 60.0, "status": "completed", "seconds": 2.0, "calls": 3, "sampled_tokens": 10, **more}
    return PolicyOutcome(reward=reward, version=version, solved=reward is not None and reward >= 1, **given)


async def fill(
    store: Store,
    session_id: str,
    *outcomes: PolicyOutcome,
    group: str = "",
    size: int = 1,
    policy: GroupDefaults = ALL,
    rule: GroupRule | None = None,
) -> str:
    reward = outcomes[0].reward
    member = GroupMember(session_id, reward is not None, reward, 1, 0)
    return await store.delivery.fill(group or session_id, size, member, policy, 1.0, rule, outcomes)


async def sums(store: Store, axis: Axis = "all") -> dict[int, dict[str, float]]:
    return {point.start: {k: v for k, v in point.sums.items() if v} for point in merge(await store.delivery.load_curves(axis))}


async def test_a_session_counts_on_every_axis(store: Store) -> None:
    await fill(store, "a", outcome(0.5, 45, closed_at=100_000.0, behind=2, truncated=True, invalid_tool_calls=1))
    counted = {
        "rollouts": 1,
        "completed": 1,
        "truncated": 1,
        "calls": 3,
        "invalid_tool_calls": 1,
        "sampled_tokens": 10,
        "seconds": 2.0,
        "versioned": 1,
        "behind": 2,
        "rewarded": 1,
        "reward": 0.5,
        "r:0.5": 1,
    }
    starts = {"version": 45, "versions": 40, "minute": 99_960, "quarter": 99_900, "hours": 86_400, "all": 0}
    for axis, start in starts.items():
        assert await sums(store, axis) == {start: counted}  # type: ignore[arg-type]


async def test_a_member_filled_again_counts_once_and_with_its_last_reward(store: Store) -> None:
    """A close is repeated by its client and by the sweep after a crash; a reward may be corrected until the group is leased."""
    for _ in range(3):
        await fill(store, "a", outcome(0.0, 3), group="g", size=2)
    (point,) = merge(await store.delivery.load_curves("version"))
    assert (point.rollouts, point.reward, point.solved) == (1, 0.0, 0.0)
    await fill(store, "a", outcome(1.0, 3), group="g", size=2)
    (point,) = merge(await store.delivery.load_curves("version"))
    assert (point.rollouts, point.reward, point.solved, point.quantile(0.5)) == (1, 1.0, 1.0, 1.0)


async def test_a_leased_or_acknowledged_session_stays_counted_and_counts_no_more(store: Store) -> None:
    await fill(store, "a", outcome(1.0))
    taken = await lease(store)
    await fill(store, "a", outcome(0.0))
    await store.delivery.ack(taken.lease_id, 11.0)
    await fill(store, "a", outcome(0.0))
    assert (await sums(store))[0]["reward"] == 1.0
    # What could take it back is gone with its group.
    assert await store.connection.execute("HLEN", "vb:{delivery}:outcomes") == 0


async def test_a_deleted_session_stays_counted_and_one_filled_after_that_does_not_count_again(store: Store) -> None:
    await fill(store, "a", outcome(), group="g", size=2)
    await store.delivery.withdraw("a", ALL)
    assert (await sums(store))[0]["rollouts"] == 1
    # A reward came while it was deleted, and filled it into its group once more.
    await fill(store, "a", outcome(), group="g", size=2)
    await store.delivery.withdraw("a", ALL, uncount=True)
    assert (await sums(store))[0]["rollouts"] == 1


async def test_a_decided_group_says_whether_its_rewards_are_equal(store: Store) -> None:
    for group, rewards in (("same", (1.0, 1.0)), ("mixed", (1.0, 0.0)), ("one", (1.0,)), ("open", (1.0, 1.0))):
        size = 3 if group == "open" else len(rewards)
        for number, reward in enumerate(rewards):
            await fill(store, f"{group}-{number}", outcome(reward), group=group, size=size)
    (point,) = merge(await store.delivery.load_curves("all"))
    assert (point.count("groups"), point.count("equal_groups"), point.equal_groups) == (2, 1, 0.5)
    # A corrected reward changes the verdict on its group, and a group is judged once however often it is filled.
    await fill(store, "same-0", outcome(0.0), group="same", size=2)
    await fill(store, "mixed-0", outcome(1.0), group="mixed", size=2)
    (point,) = merge(await store.delivery.load_curves("all"))
    assert (point.count("groups"), point.count("equal_groups")) == (2, 0)


async def test_a_group_that_is_given_up_incomplete_is_judged(store: Store) -> None:
    await fill(store, "a", outcome(1.0), group="g", size=3, policy=partial(1))
    await fill(store, "b", outcome(1.0), group="g", size=3, policy=partial(1))
    assert "groups" not in (await sums(store))[0]
    await store.delivery.tend(partial(1), 10.0, 100.0)
    assert (await sums(store))[0]["equal_groups"] == 1


async def test_policies_and_labels_have_curves_of_their_own(store: Store) -> None:
    await fill(store, "a", outcome(1.0, 7, label="math"), outcome(1.0, 2, policy="judge", label="math", calls=1))
    await fill(store, "b", outcome(0.0, 7, label="a=b|c"))
    found = {(curve.policy, curve.label): curve.points for curve in await store.delivery.load_curves("version")}
    assert {name: [(p.start, p.rollouts, p.count("calls")) for p in points] for name, points in found.items()} == {
        ("", "math"): [(7, 1, 3)],
        ("judge", "math"): [(2, 1, 1)],
        ("", "a=b|c"): [(7, 1, 3)],
    }
    both = merge(curve for curve in await store.delivery.load_curves("version") if not curve.policy)
    assert [(point.start, point.rollouts, point.reward) for point in both] == [(7, 2, 0.5)]


async def test_a_session_without_calls_or_reward_counts_over_time_alone(store: Store) -> None:
    await fill(store, "a", outcome(None, None, status="failed", calls=0, sampled_tokens=0))
    assert await store.delivery.load_curves("version") == []
    (point,) = merge(await store.delivery.load_curves("minute"))
    assert (point.rollouts, point.failed, point.reward, point.quantile(0.5), point.staleness) == (1, 1.0, None, None, None)


async def test_a_curve_keeps_its_newest_cells_and_loses_nothing_of_the_whole(store: Store) -> None:
    """Out of order, as sessions close: what is older than all that a full curve keeps is counted in the wider cells alone."""
    order = [*range(20, 530), *range(20)]
    for version in order:
        await fill(store, f"s{version}", outcome(1.0, version))
    assert [point.start for point in merge(await store.delivery.load_curves("version"))] == list(range(30, 530))
    assert [(p.start, p.rollouts) for p in merge(await store.delivery.load_curves("versions"))] == [
        (start, 20 if start < 520 else 10) for start in range(0, 530, 20)
    ]
    assert (await sums(store))[0]["rollouts"] == len(order)
    # Its cell is gone: there is nothing to take back there.
    await fill(store, "s20", outcome(0.0, 20))
    assert (await sums(store))[0]["solved"] == len(order) - 1
    assert await store.connection.execute("HLEN", "vb:{delivery}:cells") == 500 + 27 + 3 + 1


async def test_labels_without_number_share_one(store: Store) -> None:
    for number in range(60):
        await fill(store, f"s{number}", outcome(label=f"label {number}"))
    curves = await store.delivery.load_curves("all")
    assert len(curves) < 40 and await store.connection.execute("HLEN", "vb:{delivery}:curves") < 192 + 12
    others = next(curve for curve in curves if curve.label == "(other)")
    assert sum(point.rollouts for curve in curves for point in curve.points) == 60
    before = others.points[0].rollouts
    # One of those counted there is taken back there.
    await fill(store, "s59", outcome(0.0, label="label 59"))
    (others,) = [curve for curve in await store.delivery.load_curves("all") if curve.label == "(other)"]
    assert (others.points[0].rollouts, others.points[0].count("solved")) == (before, before - 1)


@pytest.mark.parametrize("seed", range(3))
async def test_the_sums_are_those_of_the_sessions_whatever_is_repeated_at_once(store: Store, seed: int) -> None:
    """Several processes fill the same sessions with changing rewards in any order; afterwards each with its last one."""
    chance = random.Random(seed)
    made = {
        f"s{number}": outcome(chance.choice((0.0, 0.25, 1.0)), chance.randrange(4), closed_at=60.0 * chance.randrange(5))
        for number in range(40)
    }
    place = {name: f"g{number // 4}" for number, name in enumerate(made)}
    rewards = [(name, chance.choice((0.0, 0.25, 1.0))) for name in made for _ in range(3)]
    chance.shuffle(rewards)
    await asyncio.gather(
        *(
            fill(store, name, replace(made[name], reward=reward, solved=reward >= 1), group=place[name], size=4)
            for name, reward in rewards
        )
    )
    for name, each in made.items():
        await fill(store, name, each, group=place[name], size=4)
    expected: dict[int, Counter[str]] = {}
    for each in made.values():
        assert each.version is not None
        expected.setdefault(each.version, Counter()).update({name: int(n * 100) for name, n in each.numbers.items()})
    found = await sums(store, "version")
    groups = {name: [made[each].reward for each in made if place[each] == name] for name in place.values()}
    assert sum(cell.get("groups", 0) for cell in found.values()) == len(groups)
    assert sum(cell.get("equal_groups", 0) for cell in found.values()) == sum(len(set(each)) == 1 for each in groups.values())
    for cell in found.values():
        cell.pop("groups", None)
        cell.pop("equal_groups", None)
    assert {at: {name: round(n * 100) for name, n in cell.items()} for at, cell in found.items()} == expected


def test_quantiles_are_of_rewards_rounded_to_two_digits() -> None:
    rewards = (-1.234, 0.0, 0.333333, 0.5, 1.0, 1e-9, 3e15)
    assert [round_reward(each) for each in rewards] == ["-1.2", "0", "0.33", "0.5", "1", "0", "1e+12"]
    point = Point(0, {"rewarded": 10, "r:0": 4, "r:0.5": 4, "r:-1.2": 1, "r:1": 1})
    assert [point.quantile(share) for share in (0.0, 0.1, 0.5, 0.9, 1.0)] == [-1.2, -1.2, 0.0, 0.5, 1.0]


def test_a_label_is_a_short_printable_text() -> None:
    assert choose_label({"label": "math"}, "label") == "math"
    assert choose_label({"split": 3}, "split") == "3"
    assert choose_label({"label": ["math"]}, "label") == choose_label({}, "label") == ""
    assert choose_label({"label": "a\nb" + "x" * 100}, "label") == "a b" + "x" * 61
