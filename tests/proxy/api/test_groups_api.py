"""Groups over HTTP and by `verbatim groups`: how far each is, and why no trainer has it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from tests.support.engine.scripted_engine import ScriptedEngine
from tests.support.service.running_service import ADMIN, TRAINER, RunningService
from tests.support.service.verbatim_process import verbatim


@pytest.fixture
def service(redis_url: str) -> Iterator[RunningService]:
    with (
        ScriptedEngine() as engine,
        RunningService(engine.url, redis_url, engine_api="token", group={"max_deliveries": 1}) as running,
    ):
        yield running


def show(service: RunningService, group: str) -> Any:
    answer = service.request("GET", f"/groups/{group}")
    assert answer.status_code == 200, answer.text
    return answer.json()


def test_a_group_says_what_it_waits_for_until_a_trainer_has_it(service: RunningService) -> None:
    first, second = (service.session(group_id="task-7", group_size=3) for _ in range(2))
    first.ask("q")
    second.ask("q")
    assert show(service, "task-7")["reason"] == "waits: 0 of 3 members usable; 2 open, 1 not opened yet"
    first.close(reward=1.0)
    second.close()
    found = show(service, "task-7")
    assert (found["delivery"], found["closed"], found["rewards"]) == ("filling", 2, [1.0])
    assert found["reason"] == "waits: 1 of 3 members usable; 1 without a reward, 1 not opened yet"
    third = service.session(group_id="task-7", group_size=3)
    third.ask("q")
    third.close(reward=0.0)
    rewarded = service.request("POST", f"/sessions/{second.session_id}/reward", json={"reward": 0.5})
    assert rewarded.status_code == 200, rewarded.text
    assert show(service, "task-7")["delivery"] == "ready"
    leased = service.request("POST", "/batches/lease", token=TRAINER, json={"max_groups": 1, "wait_seconds": 30})
    assert leased.status_code == 200, leased.text
    assert [member["delivery"] for member in show(service, "task-7")["members"]] == ["leased"] * 3
    service.request("POST", f"/batches/{leased.json()['lease_id']}/ack", token=TRAINER)
    assert show(service, "task-7")["reason"] == "delivered: a trainer acknowledged it"


def test_a_group_that_died_tells_the_reason_of_its_letter(service: RunningService) -> None:
    session = service.session(group_id="a/b", group_size=1)
    session.ask("q")
    session.close(reward=1.0)
    leased = service.request("POST", "/batches/lease", token=TRAINER, json={"max_groups": 1, "wait_seconds": 30}).json()
    service.request("POST", f"/batches/{leased['lease_id']}/nack", token=TRAINER)
    assert service.request("POST", "/batches/lease", token=TRAINER, json={"max_groups": 1}).status_code == 204
    (letter,) = service.request("GET", "/batches/dead").json()["dead_letters"]
    found = show(service, "a%2Fb")
    assert (found["delivery"], found["reason"]) == ("dead", f"no longer delivered: {letter['reason']}")


def test_groups_are_listed_newest_first_searched_and_for_the_admin_alone(service: RunningService) -> None:
    for name in ("one", "two", "Two more"):
        service.session(group_id=name).close("failed", error="it broke")
    listed = service.request("GET", "/groups?where=q=two").json()["groups"]
    assert [(group["group_id"], group["failed"]) for group in listed] == [("Two more", 1), ("two", 1)]
    assert len(service.request("GET", "/groups?limit=1").json()["groups"]) == 1
    assert service.request("GET", "/groups/nobody").status_code == 404
    for path in ("/groups", "/groups/one"):
        assert service.request("GET", path, token=TRAINER).status_code == 403
        assert service.request("GET", path, token="wrong").status_code == 401


def test_the_command_line_lists_and_shows_groups(service: RunningService) -> None:
    session = service.session(group_id="task-7", group_size=2)
    where: dict[str, Any] = {"VERBATIM_URL": service.url, "VERBATIM_ADMIN_TOKEN": ADMIN, "COLUMNS": "200"}
    listed = verbatim("groups", "list", **where)
    assert "task-7" in listed.stdout and "0/2" in listed.stdout and "1 open, 1 not opened yet" in listed.stdout, listed.stderr
    shown = verbatim("groups", "show", "task-7", **where)
    assert session.session_id in shown.stdout, shown.stderr
    (found,) = json.loads(verbatim("groups", "list", "--json", **where).stdout)
    assert found["group_id"] == "task-7"
    assert json.loads(verbatim("groups", "show", "task-7", "--json", **where).stdout)["members"][0]["status"] == "open"
    missing = verbatim("groups", "show", "nobody", **where)
    assert missing.returncode == 1 and "there is no group 'nobody'" in missing.stderr
