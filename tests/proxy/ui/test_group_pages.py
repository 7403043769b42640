"""The page of a group: its members with advantages, where its delivery stands and why, and the ways there and back."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import pytest

from proxy.ui.concepts import STATE_WORDS, STATES
from proxy.ui.pictures import DOT_RADIUS, HEIGHT, WIDTH, Rewards
from tests.support.engine.scripted_engine import ScriptedEngine
from tests.support.service.running_service import TRAINER, RunningService
from trainer_client.advantages import grpo


@pytest.fixture
def service(redis_url: str) -> Iterator[RunningService]:
    with (
        ScriptedEngine() as engine,
        RunningService(engine.url, redis_url, engine_api="token", group={"max_deliveries": 1}) as running,
    ):
        yield running


def close_member(service: RunningService, group: str, size: int, reward: float) -> str:
    session = service.session(group_id=group, group_size=size, run="lora-8")
    session.ask("q")
    session.close(reward=reward)
    return session.session_id


def show(service: RunningService, group: str) -> str:
    answer = service.request("GET", f"/ui/groups/{group}")
    assert answer.status_code == 200, answer.text
    return " ".join(answer.text.split())


def lease(service: RunningService) -> Any:
    leased = service.request(
        "POST", "/batches/lease", token=TRAINER, json={"max_groups": 1, "wait_seconds": 30, "consumer": "t1"}
    )
    assert leased.status_code == 200, leased.text
    return leased.json()["lease_id"]


def state_of(text: str) -> str:
    (word,) = re.findall(r'<h1>.*?</h1> <a class="tag delivery (\w+)"', text)
    return str(word)


def test_a_group_says_where_it_is_and_why_until_it_is_acknowledged(service: RunningService) -> None:
    close_member(service, "g", 2, 1.0)
    waiting = show(service, "g")
    assert state_of(waiting) == "waiting"
    assert "It waits: 1 of 2 members usable; 1 not opened yet. It is given up at " in waiting
    close_member(service, "g", 2, 0.0)
    ready = show(service, "g")
    assert state_of(ready) == "ready" and "It waits for a trainer. It is the next to be leased." in ready
    lease_id = lease(service)
    leased = show(service, "g")
    assert state_of(leased) == "leased" and "t1 leases it until " in leased and "; delivery 1." in leased
    service.request("POST", f"/batches/{lease_id}/ack", token=TRAINER)
    assert state_of(show(service, "g")) == "acknowledged"


def test_a_dead_group_says_its_cause(service: RunningService) -> None:
    close_member(service, "a/b ../c", 1, 1.0)
    service.request("POST", f"/batches/{lease(service)}/nack", token=TRAINER)
    assert service.request("POST", "/batches/lease", token=TRAINER, json={"max_groups": 1}).status_code == 204
    dead = show(service, "a%2Fb%20..%2Fc")
    assert state_of(dead) == "dead"
    assert "It was leased as often as allowed, and never acknowledged. delivered 1 time, never acknowledged" in dead


def test_a_group_leads_to_its_members_and_run_and_they_lead_back(service: RunningService) -> None:
    session_id = close_member(service, "a/b", 1, 1.0)
    text = show(service, "a%2Fb")
    assert f'href="/ui/sessions/{session_id}"' in text and 'href="/ui/run?run=lora-8"' in text
    for path in ("/ui", "/ui/groups", f"/ui/sessions/{session_id}"):
        assert 'href="/ui/groups/a%2Fb"' in service.request("GET", path).text
    assert service.request("GET", "/ui/groups/nobody").status_code == 404


def test_advantages_are_those_that_a_trainer_computes() -> None:
    numbers = [1.0, 0.0, 0.25, 1.0]
    rewards = Rewards.of((str(at), value) for at, value in enumerate(numbers))
    assert rewards is not None
    shown = rewards.advantages()
    assert [shown[str(at)][0] for at in range(4)] == pytest.approx([value - 0.5625 for value in numbers])
    assert [shown[str(at)][1] for at in range(4)] == pytest.approx(grpo(numbers, [0] * 4, range(4)).tolist(), abs=1e-5)
    equal = Rewards.of([("a", 0.5), ("b", 0.5)])
    assert equal is not None and equal.advantages() == {"a": (0.0, 0.0), "b": (0.0, 0.0)}


@pytest.mark.parametrize("values", [[0.5], [0.5] * 40, [0.0] * 12 + [1.0] * 28])
def test_every_dot_of_a_strip_is_whole_and_apart(values: list[float]) -> None:
    """Of more than four equal rewards all others lay on the top one, of which the upper half was cut off."""
    rewards = Rewards.of((str(at), value) for at, value in enumerate(values))
    assert rewards is not None
    dots = rewards.dots()
    assert len({(dot.x, dot.y) for dot in dots}) == len(values)
    assert all(DOT_RADIUS < dot.y < HEIGHT - DOT_RADIUS and DOT_RADIUS <= dot.x <= WIDTH - DOT_RADIUS for dot in dots)


def test_equal_rewards_are_one_bar_as_wide_as_any_other() -> None:
    """It filled the whole picture."""
    one, many = (Rewards.of((str(at), value) for at, value in enumerate(values)) for values in ([0.5] * 7, [0.0, 1.0]))
    assert one is not None and many is not None
    (bar,) = one.bars()
    assert bar.width == many.bars()[0].width and bar.x + bar.width / 2 == pytest.approx(WIDTH / 2, abs=2)


def test_every_mark_is_explained_under_its_own_anchor(service: RunningService) -> None:
    text = service.request("GET", "/ui/concepts").text
    anchors = re.findall(r'<dt id="([\w-]+)"', text)
    assert len(anchors) == len(set(anchors))
    assert set(STATE_WORDS.values()) == set(STATES)
    assert {*STATE_WORDS.values(), "not_delivered", "incomplete", "all_equal", "truncated", "lost", "group-incomplete"} <= set(
        anchors
    )
