"""What a rollout takes up on a node, settled when its task is submitted, and what is said where no node has so much."""

from __future__ import annotations

import asyncio
import json
import re
import time
from dataclasses import replace
from typing import Any

import pytest

from cli.rollout_service import KNOWN
from contract.attempts import NodeState
from contract.tasks import Task
from proxy.store.connection import StoreConnection
from proxy.store.tasks import keys
from proxy.store.tasks.tasks import TaskStore, find_lack
from rollout.task_body import read_task
from tests.support.runtimes.rollout_stores import Stores, sized
from tests.support.service.redis_server import RedisServer
from tests.support.service.rollout_service import serving_tasks, submit
from tests.support.service.running_service import ADMIN, wait_until
from tests.support.service.verbatim_process import verbatim

LOOKS = {
    "http": {"url": "http://127.0.0.1:9/score"},
    "llm_judge": {"rubric": "is it short?", "model": "frozen"},
    "python": {"entry": "scores:score"},
}


def task(evaluator: dict[str, Any]) -> Task:
    made, _ = read_task(json.dumps({"instruction": "do it", "harness": "pi", "evaluator": evaluator}).encode(), KNOWN)
    return made


@pytest.mark.parametrize("kind", LOOKS)
def test_an_evaluator_that_only_looks_takes_no_runtime_of_its_own(kind: str) -> None:
    plain = task({"kind": kind, "options": LOOKS[kind]})
    assert plain.evaluator is not None and not plain.evaluator.fresh_runtime
    assert plain.demand == (plain.runtime.cpus, plain.runtime.memory_mb)
    for asked in ({"fresh_runtime": True}, {"prepare": [{"exec": "make"}]}, {"runtime": {"cpus": 2.0}}):
        own = task({"kind": kind, "options": LOOKS[kind], **asked})
        assert own.evaluator.fresh_runtime and own.demand > plain.demand


def test_an_evaluator_that_runs_commands_has_a_runtime_of_its_own_unless_it_is_said() -> None:
    fresh = task({"kind": "command", "options": {"command": "make test"}})
    assert fresh.demand == (2 * fresh.runtime.cpus, 2 * fresh.runtime.memory_mb)
    left = task({"kind": "command", "options": {"command": "make test"}, "fresh_runtime": False, "runtime": {"cpus": 4.0}})
    assert left.evaluator.runtime is None and left.demand == (1.0, 1024)


def node(name: str, cpus: float = 4.0, memory_mb: int = 4096, **more: Any) -> NodeState:
    return NodeState(
        **{"name": name, "labels": {}, "runtimes": ["local"], "seen_at": NOW, **more}, cpus=cpus, memory_mb=memory_mb
    )


NOW = 1000.0
SMALL, WIDE, LARGE = node("small", 1.0, 1024), node("wide", 8.0, 1024), node("large", 2.0, 9000)


@pytest.mark.parametrize(
    ("fields", "nodes", "lacks"),
    [
        ({}, [SMALL], None),
        ({}, [], None),
        ({"runtime": {"cpus": 9.0}}, [node("gone", seen_at=1.0), node("leaves", draining=True)], None),
        (
            {"runtime": {"cpus": 9.0}},
            [SMALL, WIDE, LARGE],
            "takes 9 CPUs and 1024 MB.*the largest node for it, wide, has 8 and 1024",
        ),
        ({"runtime": {"cpus": 4.0, "memory_mb": 4096}}, [WIDE, LARGE], "the largest node for it, large, has 2 and 9000"),
        ({"runtime": {"kind": "docker", "image": "i"}}, [SMALL], "no node has the runtime docker"),
        ({"labels": {"zone": "b", "disk": "fast"}}, [node("a", labels={"zone": "b"})], "labels disk=fast and zone=b"),
        ({"labels": {"zone": "b"}}, [node("a", labels={"zone": "b", "disk": "fast"})], None),
    ],
)
def test_what_no_node_has_is_named(fields: dict[str, Any], nodes: list[NodeState], lacks: str | None) -> None:
    made, _ = read_task(json.dumps({"instruction": "do it", "harness": "pi", **fields}).encode(), KNOWN)
    found = find_lack(keys.queue_of(made), nodes, NOW)
    if lacks is None:
        assert found is None
    else:
        assert found is not None and re.search(lacks, found), found


async def test_a_task_that_no_node_can_take_says_so_until_one_can(stores: Stores) -> None:
    await stores.submit("wide", num_samples=3, runtime=sized(8.0))
    await stores.submit("plain")
    small, large = stores.node("small"), stores.node("large")
    assert await stores.tasks.note_stranded(time.time()) == 0, "there are no nodes yet"
    await small.beat()
    for told in (1, 0):
        assert await stores.tasks.note_stranded(time.time()) == told
    said = (await stores.tasks.load("wide")).lacks
    assert said is not None and "takes 8 CPUs" in said
    ((listed, plain), _) = await stores.tasks.list_tasks(status=None, limit=2, cursor=None)
    assert (listed.task.task_id, listed.lacks, plain.lacks) == ("plain", None, said)
    assert await stores.kinds("wide") == ["task.created", "task.waits"]
    await large.work.beat(replace(large.state(), cpus=8.0), [], time.time())
    assert await stores.tasks.note_stranded(time.time()) == 1
    assert (await stores.tasks.load("wide")).lacks is None
    assert await stores.tasks.note_stranded(time.time()) == 0


async def test_what_a_task_lacked_is_forgotten_when_it_ends_or_begins(stores: Stores) -> None:
    for name in ("begins", "ends"):
        await stores.submit(name, runtime=sized(8.0))
    small = stores.node("small")
    await small.beat()
    assert await stores.tasks.note_stranded(time.time()) == 2
    await stores.node("large").must_take()
    await stores.tasks.cancel("ends", time.time())
    assert [(await stores.tasks.load(name)).lacks for name in ("begins", "ends")] == [None, None]


def test_a_task_is_shown_with_what_it_waits_for(redis_server: RedisServer, monkeypatch: pytest.MonkeyPatch) -> None:
    redis_server.flushall()
    monkeypatch.setattr("proxy.tasks.sweeper.SWEEP_SECONDS", 0.05)

    async def one_node() -> None:
        wire = StoreConnection(redis_server.url)
        await Stores(wire, TaskStore(wire)).node("small").beat()
        await wire.close()

    with serving_tasks(redis_server.url) as service:
        asyncio.run(one_node())
        submit(service, task_id="wide", runtime={"cpus": 16.0})
        wait_until(lambda: service.request("GET", "/tasks/wide").json()["lacks"] is not None, 120, "it is told")
        shown = verbatim("tasks", "show", "wide", VERBATIM_URL=service.url, VERBATIM_ADMIN_TOKEN=ADMIN)
    assert shown.returncode == 0 and "waiting: a rollout takes 16 CPUs" in " ".join(shown.stdout.split()), shown.stderr
