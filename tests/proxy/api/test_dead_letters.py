"""Dead letters over HTTP and by `verbatim dead-letters`: listed with reasons, delivered again, taken off the list."""

from __future__ import annotations

import asyncio
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from proxy.store.delivery import LeaseQuery
from proxy.store.groups import GroupDefaults, GroupMember, LeaseRecord
from tests.proxy.api.test_control_api import Service, running, said
from tests.support.service.redis_server import Store
from tests.support.service.running_service import ADMIN, TRAINER, RunningService
from tests.support.service.verbatim_process import verbatim

NO_ENGINE = "http://127.0.0.1:9"
ALL = GroupDefaults()


async def bury(url: str, reasons: dict[str, str]) -> None:
    """Dead groups of one session each: reference in the store -> reason."""
    store = Store.at(url)
    for place, (group_id, reason) in enumerate(reasons.items()):
        await store.delivery.fill(group_id, 1, GroupMember(f"session-of-{group_id}", True, 1.0, 1, 0), ALL, 1.0)
        taken = await store.delivery.lease(
            LeaseQuery(
                consumer="t",
                max_groups=1,
                max_trajectories=None,
                oldest_version=None,
                lease_seconds=60.0,
                max_deliveries=5,
                now=1000.0 + place,
            )
        )
        assert isinstance(taken, LeaseRecord)
        await store.delivery.bury(taken.lease_id, taken.groups[0].reference, reason, 1000.0 + place)
    await store.connection.close()


async def die(service: Service, session_id: str) -> None:
    """A session of its own that was delivered as often as allowed: once."""
    await service.finished(session_id)
    batch = await service.lease()
    assert batch is not None
    await service.trainer.post(f"/batches/{batch['lease_id']}/nack")
    assert await service.lease() is None


@pytest.fixture
async def service(redis_url: str) -> Any:
    async with running(redis_url, group={"max_deliveries": 1}) as made:
        yield made


async def test_a_letter_says_what_died_when_and_why(service: Service) -> None:
    await die(service, "s0")
    answer = (await service.admin.get("/batches/dead")).json()
    (letter,) = answer["dead_letters"]
    assert answer["cursor"] is None
    assert letter.pop("died_at") > 1e9
    assert letter == {
        "letter_id": "1:s:s0",
        "group_id": "s0",
        "session_ids": ["s0"],
        "deliveries": 1,
        "reason": "delivered 1 time, never acknowledged; at last: given back by a trainer",
    }


async def test_letters_come_in_pages(service: Service, redis_url: str) -> None:
    await bury(redis_url, {f"g:{number}": "broken" for number in range(5)})
    pages, cursor = [], None
    for _ in range(3):
        asked = {"limit": 2} | ({} if cursor is None else {"cursor": cursor})
        page = (await service.admin.get("/batches/dead", params=asked)).json()
        pages.append([letter["group_id"] for letter in page["dead_letters"]])
        cursor = page["cursor"]
    assert (pages, cursor) == ([["4", "3"], ["2", "1"], ["0"]], None)
    for wrong in ("x", "1", "1:2", ":::", "1.2.3:4:x"):
        assert said(await service.admin.get("/batches/dead", params={"cursor": wrong}))[0] == 400


async def test_a_dead_group_is_delivered_again_with_the_same_rows(service: Service) -> None:
    await service.finished("s0")
    first = await service.lease()
    assert first is not None
    await service.trainer.post(f"/batches/{first['lease_id']}/nack")
    assert await service.lease() is None
    retried = await service.admin.post("/batches/dead/s0/retry")
    assert retried.json() == {"letters": ["1:s:s0"]}
    second = await service.lease()
    assert second is not None and second["groups"] == first["groups"]
    assert said(await service.admin.post("/batches/dead/s0/retry"))[:2] == (404, "not_found")


async def test_a_dead_group_is_dropped_for_good_and_its_session_stays(service: Service) -> None:
    await die(service, "s0")
    assert (await service.admin.delete("/batches/dead/1:s:s0")).json() == {"letters": ["1:s:s0"]}
    assert (await service.admin.get("/batches/dead")).json()["dead_letters"] == []
    assert said(await service.admin.delete("/batches/dead/1:s:s0"))[:2] == (404, "not_found")
    assert await service.lease() is None
    assert (await service.admin.get("/sessions/s0")).json()["status"] == "completed"


async def test_a_group_id_may_hold_anything(service: Service, redis_url: str) -> None:
    names = ["a/retry", "task 7/ü?#", "1:g:x"]
    await bury(redis_url, {f"g:{name}": "broken" for name in names})
    for name in names:
        path = "/batches/dead/" + "".join(f"%{byte:02X}" for byte in name.encode())
        assert (await service.admin.post(f"{path}/retry")).json() == {"letters": [f"1:g:{name}"]}


@pytest.fixture(scope="module")
def served(redis_server: Any) -> Iterator[RunningService]:
    with RunningService(NO_ENGINE, redis_server.url) as service:
        yield service


@pytest.fixture
def buried(served: RunningService, redis_url: str) -> RunningService:
    asyncio.run(
        bury(redis_url, {"g:broken-1": "cannot be read", "g:broken-2": "cannot be read", "s:tired": "delivered 5 times"})
    )
    return served


def command(service: RunningService, *args: str) -> subprocess.CompletedProcess[str]:
    return verbatim("dead-letters", *args, VERBATIM_URL=service.url, VERBATIM_ADMIN_TOKEN=ADMIN, COLUMNS="160")


def left(service: RunningService) -> list[str]:
    return [letter["group_id"] for letter in service.request("GET", "/batches/dead").json()["dead_letters"]]


def test_the_command_lists_letters_with_their_reasons(buried: RunningService) -> None:
    shown = command(buried, "list")
    assert shown.returncode == 0, shown.stderr
    for text in ("1:g:broken-1", "1:g:broken-2", "1:s:tired", "cannot be read", "delivered 5 times"):
        assert text in shown.stdout
    shown = command(buried, "list", "--reason", "read", "--limit", "1")
    assert "broken-2" in shown.stdout and "broken-1" not in shown.stdout and "tired" not in shown.stdout
    assert "There are more: raise --limit above 1." in shown.stderr


def test_the_command_retries_and_drops_the_letters_it_is_given(buried: RunningService) -> None:
    done = command(buried, "retry", "broken-1", "1:s:tired")
    assert (done.returncode, done.stderr) == (0, "")
    assert "2 letters delivered again" in done.stdout
    assert left(buried) == ["broken-2"]
    done = command(buried, "drop", "broken-2")
    assert "1 letter dropped" in done.stdout
    assert left(buried) == []
    counts = buried.request("GET", "/batches", TRAINER).json()["groups"]
    assert (counts["ready"], counts["dropped"]) == (2, 1)


def test_the_command_acts_on_all_letters_or_on_those_of_a_reason(buried: RunningService) -> None:
    assert "2 letters dropped" in command(buried, "drop", "--reason", "cannot be read").stdout
    assert left(buried) == ["tired"]
    assert "1 letter delivered again" in command(buried, "retry", "--reason", "").stdout
    assert left(buried) == []
    assert "0 letters dropped" in command(buried, "drop", "--reason", "").stdout


def test_the_command_names_a_letter_that_is_not_there_and_does_the_others(buried: RunningService) -> None:
    done = command(buried, "drop", "nobody", "tired")
    assert done.returncode == 1
    assert "1 letter dropped" in done.stdout
    assert done.stderr.strip() == "verbatim: there is no dead letter of 'nobody'"


@pytest.mark.parametrize("args", [(), ("x", "--reason", "y")])
def test_the_command_says_how_to_choose_letters(tmp_path: Path, args: tuple[str, ...]) -> None:
    done = verbatim("dead-letters", "drop", *args, VERBATIM_URL=NO_ENGINE, VERBATIM_ADMIN_TOKEN=ADMIN)
    assert done.returncode == 2
    assert "--reason" in done.stderr and len(done.stderr.strip().splitlines()) == 1
