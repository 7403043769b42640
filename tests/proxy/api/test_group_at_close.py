"""Group and task of a session that says them at its close: what is taken, what is refused, and what a trainer then gets."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import fields, replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from proxy.api.sessions import Close, assign
from proxy.errors import RequestError
from proxy.store.states import SessionInfo
from tests.support.engine.scripted_engine import ScriptedEngine
from tests.support.service.redis_server import RedisServer
from tests.support.service.running_service import TRAINER, RunningService, Session

SAID = ("group_id", "group_size", "task_id")


@pytest.fixture(scope="module")
def service(redis_server: RedisServer) -> Iterator[RunningService]:
    redis_server.flushall()
    with ScriptedEngine("qwen3") as engine, RunningService(engine.url, redis_server.url) as running:
        yield running


def called(service: RunningService, **opened: Any) -> Session:
    session = service.session(**opened)
    session.ask("q")
    return session


def close(service: RunningService, session: Session, **said: Any) -> Any:
    body = {"status": "completed", "reward": 1.0, **said}
    return service.request("POST", f"/sessions/{session.session_id}/close", json=body)


def state(service: RunningService, session: Session) -> dict[str, Any]:
    shown: dict[str, Any] = service.request("GET", f"/sessions/{session.session_id}").json()
    return shown


def test_sessions_that_say_their_group_at_their_close_are_leased_and_listed_as_that_group(service: RunningService) -> None:
    said = {"group_id": "late", "group_size": 2, "task_id": "bug-7"}
    sessions = [called(service) for _ in range(2)]
    for session in sessions:
        closed = close(service, session, **said)
        assert closed.status_code == 200, closed.text
        assert {name: closed.json()[name] for name in SAID} == said
    listed = service.request("GET", "/sessions?group_id=late").json()["sessions"]
    assert {each["session_id"] for each in listed} == {each.session_id for each in sessions}
    (group,) = service.request("POST", "/batches/lease", TRAINER, json={}).json()["groups"]
    assert group["group_id"] == "late"
    assert [(row["group_id"], row["task_id"]) for row in group["trajectories"]] == [("late", "bug-7")] * 2


def test_a_close_may_repeat_what_was_said_before(service: RunningService) -> None:
    said = {"group_id": "again", "group_size": 2, "task_id": "t"}
    session = called(service, **said)
    for more in (said, {}, {"group_id": "again"}, {"task_id": "t"}, said):
        assert close(service, session, **more).status_code == 200


@pytest.mark.parametrize(
    ("opened", "said", "status", "problem"),
    [
        ({"group_id": "a", "group_size": 2}, {"group_id": "b", "group_size": 2}, 409, "group_id 'a'"),
        ({"group_id": "a", "group_size": 2}, {"group_id": "a", "group_size": 3}, 409, "group_size 2"),
        ({"task_id": "t"}, {"task_id": "u", "group_id": "b"}, 409, "task_id 't'"),
        ({}, {"group_size": 2}, 400, "needs a group_id"),
        ({"trained": False}, {"group_id": "b"}, 409, "not trained"),
        ({}, {"group_id": "b", "group_size": 0}, 400, "group_size"),
        ({}, {"group_id": ""}, 400, "group_id"),
    ],
)
def test_a_close_that_contradicts_what_was_said_is_refused_and_changes_nothing(
    service: RunningService, opened: dict[str, Any], said: dict[str, Any], status: int, problem: str
) -> None:
    session = called(service, **opened)
    before = state(service, session)
    refused = close(service, session, **said)
    assert (refused.status_code, problem in refused.json()["error"]["message"]) == (status, True), refused.text
    assert state(service, session) == before
    assert service.request("GET", "/sessions?group_id=b").json()["sessions"] == []


def test_a_session_without_a_call_is_not_put_into_a_group_by_the_close_that_is_refused(service: RunningService) -> None:
    session = service.session()
    assert close(service, session, group_id="b").json()["error"]["code"] == "no_calls"
    assert state(service, session)["group_id"] is None


def test_a_session_that_is_closed_gets_no_group_any_more(service: RunningService) -> None:
    session = called(service)
    assert close(service, session).status_code == 200
    refused = close(service, session, group_id="b")
    assert (refused.status_code, refused.json()["error"]["code"]) == (409, "conflict")
    assert state(service, session)["group_id"] is None
    assert service.request("GET", "/sessions?group_id=b").json()["sessions"] == []


def test_of_closes_that_name_different_groups_one_alone_is_heard(service: RunningService) -> None:
    session = called(service)
    names = [f"race-{n}" for n in range(6)]
    with ThreadPoolExecutor(len(names)) as pool:
        answers = list(pool.map(lambda name: close(service, session, group_id=name).status_code, names))
    assert sorted(answers) == [200] + [409] * 5
    listed = [name for name in names if service.request("GET", f"/sessions?group_id={name}").json()["sessions"]]
    assert listed == [names[answers.index(200)]]


def test_a_place_that_was_kept_for_a_group_of_its_own_is_free_once_a_session_joins_another(redis_server: RedisServer) -> None:
    """Each session was counted as a group that would come, and never did: the places were gone for good."""
    redis_server.flushall()
    with (
        ScriptedEngine("qwen3") as engine,
        RunningService(engine.url, redis_server.url, admission={"undelivered_groups": 2, "hold_seconds": 0}) as service,
    ):
        sessions = [called(service) for _ in range(2)]
        assert service.request("POST", "/sessions", json={}).status_code == 429
        for session in sessions:
            assert close(service, session, group_id="g", group_size=2).status_code == 200
        # One group waits for a trainer, so that there is a place for another.
        assert service.request("POST", "/sessions", json={}).status_code == 201
        assert service.request("POST", "/sessions", json={}).status_code == 429


NAMES = st.sampled_from((None, "a", "b"))
SIZES = st.sampled_from((None, 1, 2))


@given(NAMES, SIZES, NAMES, NAMES, SIZES, NAMES, st.booleans())
def test_what_a_close_says_is_added_and_never_changes_what_was_said(
    group: str | None,
    size: int | None,
    task: str | None,
    late: str | None,
    late_size: int | None,
    done: str | None,
    trained: bool,
) -> None:
    opened: dict[str, Any] = {
        "group_id": group,
        "group_size": size or 1 if group else 1,
        "task_id": task,
        "trained": trained or group is not None,
    }
    info = SessionInfo("s", b"", 1.0, metadata={"kept": 1}, **opened)
    body = Close(status="completed", group_id=late, group_size=late_size, task_id=done)
    try:
        assigned = assign(info, body)
    except RequestError:
        contradicts = (group and late not in (None, group)) or (group and late_size not in (None, info.group_size))
        assert contradicts or (task and done not in (None, task)) or (late_size == 2 and not late) or not trained
        return
    for name, given_late in zip(SAID, (late, late_size, done), strict=True):
        assert given_late is None or getattr(assigned, name) == given_late
    assert group is None or (assigned.group_id, assigned.group_size) == (group, info.group_size)
    assert task is None or assigned.task_id == task
    untouched = {each.name: getattr(info, each.name) for each in fields(info) if each.name in SAID}
    assert replace(assigned, **untouched) == info
    assert assign(assigned, body) == assigned
