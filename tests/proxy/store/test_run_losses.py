"""What a run loses, on a real Redis: quarantine by reason and groups by state, counted once whatever is repeated."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import replace
from typing import Any

import pytest

from proxy.store.groups import GroupDefaults, GroupMember, LeaseRecord
from proxy.store.run import PolicyOutcome, merge
from tests.support.service.redis_server import Store
from tests.support.sessions.filled_groups import ask, lease

ALL = GroupDefaults("require_all")
ENDED = PolicyOutcome(closed_at=60.0, status="completed", reward=1.0, solved=True, seconds=1.0, version=0, sampled_tokens=10)


async def fill(store: Store, session_id: str, outcome: PolicyOutcome, group: str, size: int = 1) -> str:
    usable = outcome.reward is not None
    member = GroupMember(session_id, usable, outcome.reward, 1, 0, run=outcome.run)
    return await store.delivery.fill(group, size, member, ALL, 1.0, None, [outcome])


async def groups_of(store: Store, run: str) -> dict[tuple[str, str], int]:
    (record,) = [each for each in await store.delivery.load_runs() if each.run == run]
    return dict(record.groups)


async def test_tokens_are_counted_by_reason_and_one_that_nobody_knows_is_other(store: Store) -> None:
    lost = {"no_token_ids": (2, 4), "dangling": (1, 0), "a-plugin's own": (1, 1), "frozen_model": (1, 2)}
    outcome = replace(ENDED, run="a", exported_tokens=3, quarantined=lost, incomplete=True)
    for _ in range(2):
        await fill(store, "one", outcome, "g")
    (point,) = merge(await store.delivery.load_curves("all"))
    assert point.quarantined == {"no_token_ids": (2, 4), "frozen_model": (1, 2), "other": (1, 1), "dangling": (1, 0)}
    assert (point.lost, point.incomplete, point.exported_tokens) == (0.5, 1.0, 3.0)


async def test_every_number_is_that_of_its_own_run(store: Store) -> None:
    await fill(store, "one", replace(ENDED, run="a"), "g")
    for name in ("two", "three"):
        await fill(store, name, replace(ENDED, run="b", reward=0.0), f"g-{name}")
    curves = {curve.run: curve.points for curve in await store.delivery.load_curves("all")}
    assert {run: (point.rollouts, point.zero_rewards) for run, (point,) in curves.items()} == {"a": (1, 0.0), "b": (2, 1.0)}
    assert [curve.run for curve in await store.delivery.load_curves("version", runs=["b"])] == ["b"]


async def test_groups_are_counted_by_state_and_cause_through_lease_return_and_acknowledgement(store: Store) -> None:
    for name in ("one", "two"):
        await fill(store, name, replace(ENDED, run="a"), f"g-{name}")
    await fill(store, "half", replace(ENDED, run="a"), "g-half", 2)
    assert await groups_of(store, "a") == {("ready", ""): 2, ("filling", ""): 1}
    taken = await lease(store)
    assert await groups_of(store, "a") == {("ready", ""): 1, ("leased", ""): 1, ("filling", ""): 1}
    await store.delivery.ack(taken.lease_id, 11.0)
    await store.delivery.tend(ALL, 10.0, 100.0)
    assert await groups_of(store, "a") == {("ready", ""): 1, ("acked", ""): 1, ("dead", "incomplete"): 1}
    await store.delivery.drop_dead(["g-half"])
    assert await groups_of(store, "a") == {("ready", ""): 1, ("acked", ""): 1, ("dropped", "discarded"): 1}


async def test_states_add_up_to_the_groups_whatever_happens_to_them(store: Store) -> None:
    """Fills, repeats, deletes and leases in any order: the runs' groups together are the service's."""
    chance = random.Random(3)
    for _ in range(120):
        name = f"s{chance.randrange(30)}"
        if chance.random() < 0.7:
            reward = chance.choice((None, 0.0, 1.0))
            run = chance.choice("ab")
            await fill(store, name, replace(ENDED, run=run, reward=reward), f"g{chance.randrange(8)}", 2)
        elif chance.random() < 0.5:
            if isinstance(taken := await ask(store), LeaseRecord):
                await chance.choice((store.delivery.ack, store.delivery.nack))(taken.lease_id, 11.0)
        else:
            await store.delivery.withdraw(name, ALL)
    together: Counter[str] = Counter()
    for record in await store.delivery.load_runs():
        assert all(number > 0 for number in record.groups.values())
        for (state, _), number in record.groups.items():
            together[state] += number
    counted = await store.delivery.count_groups()
    for state in ("filling", "leased", "acked", "dropped", "dead"):
        assert together[state] == counted[state], state


async def test_the_number_of_runs_is_bounded_and_further_ones_share_a_name(store: Store) -> None:
    for number in range(205):
        await fill(store, f"s{number}", replace(ENDED, run=f"run-{number}"), f"g{number}")
    records = {record.run: record for record in await store.delivery.load_runs()}
    assert len(records) == 201 and sum(records["(other)"].groups.values()) == 5
    assert await store.delivery.load_runs("run-7", "nobodys", "run-7") == [records["run-7"]]
    whole = {curve.run: curve.points[0].rollouts for curve in await store.delivery.load_curves("all")}
    assert whole["(other)"] == 5 and sum(whole.values()) == 205


async def test_curves_are_the_same_however_many_are_read_at_once(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    for number in range(40):
        run, label, policy = f"run-{number % 3}", "ab"[number % 2], ("", "judge")[number % 5 == 0]
        await fill(store, f"s{number}", replace(ENDED, version=number % 7, run=run, label=label, policy=policy), f"g{number}")
    read = []
    for at_once in (1, 5, 2000):
        monkeypatch.setattr("proxy.store.delivery.CELLS_AT_ONCE", at_once)
        wanted: tuple[dict[str, Any], ...] = ({}, {"runs": ["run-1", "none"]}, {"newest": 2}, {"runs": []})
        read.append([await store.delivery.load_curves("version", **each) for each in wanted])
    assert read[0] == read[1] == read[2]
    whole, of_one, newest, of_none = read[0]
    assert sum(point.rollouts for curve in whole for point in curve.points) == 40 and of_none == []
    assert of_one == [curve for curve in whole if curve.run == "run-1"] and of_one
    assert [curve.points for curve in newest] == [curve.points[-2:] for curve in whole]


async def test_a_run_is_ended_and_hidden_and_taken_back(store: Store) -> None:
    await fill(store, "one", replace(ENDED, run="a"), "g")
    assert await store.delivery.mark_run("a", 7.0, ended=True, hidden=True)
    (record,) = await store.delivery.load_runs()
    assert (record.ended_at, record.hidden) == (7.0, True)
    await fill(store, "two", replace(ENDED, run="a"), "h")
    assert await store.delivery.mark_run("a", 9.0, ended=False, hidden=False)
    (record,) = await store.delivery.load_runs()
    assert (record.ended_at, record.hidden) == (None, False)
    assert not await store.delivery.mark_run("nobody", 9.0, ended=True, hidden=False)


async def test_a_mark_of_a_run_leaves_the_other_as_it_is(store: Store) -> None:
    await fill(store, "one", replace(ENDED, run="a"), "g")
    steps: tuple[tuple[dict[str, bool], tuple[float | None, bool]], ...] = (
        ({"ended": True}, (7.0, False)),
        ({"hidden": True}, (7.0, True)),
        ({"ended": False}, (None, True)),
        ({}, (None, True)),
    )
    for marks, expected in steps:
        assert await store.delivery.mark_run("a", 7.0, **marks)
        (record,) = await store.delivery.load_runs()
        assert (record.ended_at, record.hidden) == expected
