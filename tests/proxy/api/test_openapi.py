"""The OpenAPI description is true: every endpoint is in it, and answers of a running service are as it says.

One walk through the control side gives each documented answer once, and each is held against its schema. Schemathesis then asks what the
description allows and what it does not: the answer has a status, a type and a shape that it names, and is never a 5xx of our own.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import jsonschema
import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, settings
from schemathesis.checks import CHECKS, load_all_checks

from cli.rollout_service import add_rollouts
from contract.attempts import NODE_HEADER, NODE_KEY_HEADER
from proxy.app import create_app
from proxy.call.http import Routes
from proxy.dialects.catalogue import dialects
from proxy.settings import Settings
from tests.support.engine.scripted_engine import ScriptedEngine
from tests.support.service.redis_server import RedisServer
from tests.support.service.rollout_service import KNOWN
from tests.support.service.running_service import ADMIN, TRAINER, RunningService, wait_until
from tests.support.service.verbatim_process import NODE as NODE_TOKEN

DOCUMENT = create_app(Settings(engine=[], redis="redis://127.0.0.1:1/0"), partial(add_rollouts, KNOWN)).description()
OPERATIONS = [(method, path) for path, methods in DOCUMENT["paths"].items() for method in methods]
NODE = {NODE_HEADER: "n", NODE_KEY_HEADER: "the-key-of-node-n"}
EXAMPLES = 4
"""Per endpoint."""


@pytest.fixture(scope="module")
def running(redis_server: RedisServer) -> Iterator[RunningService]:
    redis_server.flushall()
    adding = [partial(add_rollouts, KNOWN)]
    scoring: dict[str, Any] = {"engine_api": "token", "scorers": {"self": {"at": "demand"}}}
    with ScriptedEngine() as engine, RunningService(engine.url, redis_server.url, adding=adding, **scoring) as service:
        yield service


def schema_of(method: str, path: str, status: int) -> dict[str, Any]:
    """Of the JSON that the endpoint answers with that status, its references within reach."""
    content = DOCUMENT["paths"][path][method]["responses"][str(status)]["content"]["application/json"]
    return {**content["schema"], "components": DOCUMENT["components"]}


def told_on_success(operation: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Media type and content of its answers that are no errors."""
    for status, answer in operation["responses"].items():
        if int(status) < 300:
            yield from answer.get("content", {}).items()


def test_the_description_is_served(running: RunningService) -> None:
    served = httpx.get(f"{running.url}/openapi.json", timeout=60).json()
    assert served == json.loads(json.dumps(DOCUMENT))


def test_every_endpoint_is_described_with_its_role_and_its_answers() -> None:
    for method, path in OPERATIONS:
        operation = DOCUMENT["paths"][path][method]
        assert operation["summary"] and operation["description"] and operation["tags"], f"{method} {path} is not described"
        assert all(parameter.get("description") for parameter in operation["parameters"]), f"{method} {path}"
        assert any(int(status) < 300 for status in operation["responses"]), f"{method} {path}"
        if "requestBody" in operation and "msgpack" not in json.dumps(operation["requestBody"]):
            assert all("example" in content for content in operation["requestBody"]["content"].values()), f"{method} {path}"
        told = [content for _, content in told_on_success(operation) if "schema" in content]
        assert not told or any("example" in content for content in told), f"{method} {path}"


ROLES = {"AdminToken": ADMIN, "TrainerToken": TRAINER, "NodeToken": NODE_TOKEN}


def test_every_control_route_opens_to_the_roles_that_its_description_names_and_to_nobody_else(running: RunningService) -> None:
    for method, path in OPERATIONS:
        named = {name for each in DOCUMENT["paths"][path][method].get("security", ()) for name in each}
        if not named & ROLES.keys():
            continue
        filled = re.sub(r"\{\w+\}", "nothing", path)
        answers = {role: running.request(method.upper(), filled, token).status_code for role, token in ROLES.items()}
        assert {role for role, status in answers.items() if status != 403} == named & ROLES.keys(), (
            f"{method} {path}: {answers}"
        )
        assert running.request(method.upper(), filled, "wrong").status_code == 401, f"{method} {path}"


def test_operation_ids_are_unique() -> None:
    """Client generators make a function of each."""
    ids = [DOCUMENT["paths"][path][method]["operationId"] for method, path in OPERATIONS]
    assert len(set(ids)) == len(ids)


def test_every_endpoint_of_the_harness_side_is_described() -> None:
    """The patterns of `routes` match what the description names, each at least once."""
    filled = [
        (method.upper(), path.replace("{session_id}", "s").replace("{model}", "m").replace("{response_id}", "r"))
        for method, path in OPERATIONS
        if path.startswith("/s/")
    ]
    entries = Routes(dialects().values()).entries
    for entry in entries:
        assert any(entry.endpoint.method == method and entry.pattern.match(path) for method, path in filled), (
            entry.endpoint.path
        )
    for method, path in filled:
        assert any(entry.endpoint.method == method and entry.pattern.match(path) for entry in entries), path


def test_examples_fit_their_schemas() -> None:
    for method, path in OPERATIONS:
        operation = DOCUMENT["paths"][path][method]
        bodies = [operation["requestBody"]] if "requestBody" in operation else []
        for holder in (*bodies, *operation["responses"].values()):
            for content in holder.get("content", {}).values():
                if "example" in content and "schema" in content:
                    jsonschema.validate(content["example"], {**content["schema"], "components": DOCUMENT["components"]})


class Walk:
    """Asks the service and holds each answer against the description; remembers what was answered."""

    def __init__(self, service: RunningService) -> None:
        self._service = service
        self.seen: set[tuple[str, str, int]] = set()

    def __call__(self, method: str, path: str, status: int, body: Any = None, *, query: str = "", **names: str) -> Any:
        url = path + query
        for name, value in names.items():
            url = url.replace(f"{{{name}}}", value)
        headers = NODE if path.startswith("/attempts") else {}
        answer = self._service.request(method.upper(), url, headers=headers, **({} if body is None else {"json": body}))
        assert answer.status_code == status, (method, url, answer.text)
        self.seen.add((method, path, status))
        if not answer.content:
            return None
        told = answer.json()
        jsonschema.validate(told, schema_of(method, path, status))
        return told


def documented() -> set[tuple[str, str, int]]:
    """What has a schema and is no error, on the control side."""
    return {
        (method, path, int(status))
        for method, path in OPERATIONS
        for status, answer in DOCUMENT["paths"][path][method]["responses"].items()
        if int(status) < 300
        and not path.startswith("/s/")
        and (not answer.get("content") or "application/json" in answer["content"])
    }


def test_each_documented_answer_is_given_and_is_as_documented(running: RunningService, tmp_path: Path) -> None:
    walk = Walk(running)
    session: dict[str, Any] = {"session_id": "walked"}
    ask = "/sessions/{session_id}"
    walk("post", "/sessions", 201, {**session, "group_id": "g", "metadata": {"a": 1}, "sampling": {"temperature": 0.5}})
    running.request("DELETE", "/sessions/walked")
    harness = running.session(**session, group_id="g", metadata={"a": 1}, sampling={"temperature": 0.5, "top_logprobs": 2})
    call = harness.ask("hello").id
    assert call
    harness.ask([{"role": "user", "content": "hello"}, {"role": "user", "content": "again"}])
    walk("get", "/sessions", 200)
    walk("get", ask, 200, **session)
    calls = walk("get", f"{ask}/calls", 200, **session)["calls"]
    walk("get", f"{ask}/trajectories", 200, **session)
    walk("get", f"{ask}/trace_entries", 200, **session)
    walk("put", f"{ask}/log", 204, {"text": "done"}, **session)
    walk("post", f"{ask}/feedback", 204, {"call_id": calls[0]["call_id"], "hint": "why"}, **session)
    walk("put", f"{ask}/review", 200, {"flag": "good", "note": "why"}, **session)
    walk("post", f"{ask}/reward", 200, {"reward": 0.5, "per_call": {calls[0]["call_id"]: 1.0}}, **session)
    walk("post", f"{ask}/close", 200, {"status": "completed"}, **session)
    walk("post", f"{ask}/scores", 202, {"scorer": "self"}, **session)
    walk("get", f"{ask}/scores", 200, **session)

    lease = walk("post", "/batches/lease", 200, {"max_groups": 1})["lease_id"]
    walk("post", "/batches/{lease_id}/extend", 200, {"lease_seconds": 60}, lease_id=lease)
    walk("post", "/batches/{lease_id}/nack", 200, lease_id=lease)
    lease = walk("post", "/batches/lease", 200, {"max_groups": 1})["lease_id"]
    walk("post", "/batches/{lease_id}/ack", 200, lease_id=lease)
    walk("post", "/batches/lease", 204, {})
    for status in ("completed", "failed"):
        member = running.session(group_id="dead", group_size=2, group_replacements=False)
        member.ask("q")
        member.close(status, reward=1.0)
    (letter,) = walk("get", "/batches/dead", 200)["dead_letters"]
    walk("get", "/groups", 200)
    walk("get", "/groups/{group_id}", 200, group_id="dead")
    walk("get", "/batches", 200)
    walk("post", "/batches/dead/{group}/retry", 200, group=letter["letter_id"])
    third = running.session(group_id="dead", group_size=2)
    third.close("failed")
    for left in walk("get", "/batches/dead", 200)["dead_letters"] or [{"letter_id": kill(running)}]:
        walk("delete", "/batches/dead/{group}", 200, group=left["letter_id"])

    walk("post", "/projects", 201, {"name": "swe", "defaults": {"trained": True}})
    walk("get", "/projects", 200)
    walk("put", "/projects/{project}/rollouts/{name}", 200, {"group_id": "g", "group_size": 2}, project="swe", name="a")
    walk("post", "/projects/{project}/secrets", 200, {"renew": ["key"]}, project="swe")
    walk("delete", "/projects/{project}", 204, project="swe")

    (tmp_path / "version-1").mkdir()
    walk("post", "/weights", 200, {"version": 1, "path": str(tmp_path / "version-1")})
    walk("get", "/weights", 200)
    walk("get", "/run", 200)
    (run,) = walk("get", "/runs", 200)["runs"]
    walk("get", "/runs/{run}", 200, run=run["run"])
    walk("patch", "/runs/{run}", 200, {"ended": True}, run=run["run"])
    plan = walk("get", "/weights/group", 200)
    place = {"master_address": "127.0.0.1", "master_port": 29600, "world_size": plan["world_size"]}
    walk("post", "/weights/group", 200, place)

    walk("post", "/engines", 201, {"url": "http://127.0.0.1:9", "policy": "away", "models": ["far"]})
    walk("get", "/engines", 200)
    walk("delete", "/engines/{name}", 200, name="127.0.0.1:9")

    task = {
        "task_id": "t",
        "instruction": "Do.",
        "harness": "pi",
        "evaluator": {"kind": "pytest"},
        "callback_url": "http://127.0.0.1:9/",
    }
    walk("post", "/tasks", 201, task)
    walk("post", "/tasks", 200, task)
    walk("get", "/tasks", 200)
    walk("get", "/tasks/{task_id}", 200, task_id="t")
    walk("get", "/tasks/{task_id}/rollouts", 200, task_id="t")
    walk("get", "/nodes", 200)
    walk("delete", "/tasks/{task_id}", 200, task_id="t")
    walk("get", "/tasks/{task_id}/rollouts", 200, task_id="t")
    after_the_end(running, walk)
    walk_attempts(running, walk)

    part = running.request("GET", "/sessions/walked/records").content
    restored = httpx.post(
        f"{running.url}/sessions/walked/records",
        content=closing(part),
        headers={"authorization": f"Bearer {ADMIN}"},
        timeout=120,
    )
    assert restored.status_code == 200, restored.text
    jsonschema.validate(restored.json(), schema_of("post", f"{ask}/records", 200))
    walk.seen.add(("post", f"{ask}/records", 200))
    walk("delete", ask, 204, **session)
    walk("get", "/healthz", 200)
    walk("get", "/readyz", 200)
    assert documented() - walk.seen == set()


def kill(service: RunningService) -> str:
    """The id of another dead letter."""
    for status in ("completed", "failed"):
        member = service.session(group_id="dead-too", group_size=2, group_replacements=False)
        member.ask("q")
        member.close(status, reward=1.0)
    letter: str = service.request("GET", "/batches/dead").json()["dead_letters"][0]["letter_id"]
    return letter


def walk_attempts(service: RunningService, walk: Walk) -> None:
    """As a node that takes two rollouts, of which it finishes one and puts the other back."""
    walk("post", "/tasks", 201, {"task_id": "taken", "instruction": "Do.", "harness": "pi", "num_samples": 2})
    room = {"labels": {}, "runtimes": ["local"], "cpus": 4.0, "memory_mb": 8192}
    wanted = {"room": room, "lease_seconds": 30.0}
    for token in ("token-one", "token-two"):
        assert service.request("POST", "/attempts/take", json={**wanted, "token": token}, headers=NODE).status_code == 200
    walk("post", "/attempts/take", 204, {**wanted, "token": "token-three"})
    first, second = ({"task_id": "taken", "index": index, "attempt": "1"} for index in ("0", "1"))
    walk("post", "/attempts/extend", 200, {"state": {"name": "n", **room}, "held": [{**first, "index": 0, "attempt": 1}]})
    at = "/attempts/{task_id}/{index}/{attempt}"
    walk("post", f"{at}/report", 204, {"status": "ready"}, **first)
    walk("post", f"{at}/report", 200, {"status": "running"}, **first)
    walk("put", f"{at}/log", 204, {"text": "done"}, **first)
    walk("get", f"{at}/session", 200, **first)
    walk("get", f"{at}/calls", 200, **first)
    judge = walk("post", f"{at}/judges", 201, **first)["session_id"]
    walk("post", f"{at}/judges/{{session_id}}/close", 204, session_id=judge, **first)
    walk("post", f"{at}/finish", 204, {"verdict": {"status": "failed"}}, **first)
    walk("post", f"{at}/release", 200, {"why": "put_back"}, **second)
    walk("post", "/attempts/leave", 204)
    service.request("DELETE", "/tasks/taken")


def after_the_end(service: RunningService, walk: Walk) -> None:
    """Who has read all events of a task that ended gets 204. What became of its callback may still come after the first reading."""
    headers = {"authorization": f"Bearer {ADMIN}"}

    def read_to_the_end() -> bool:
        answer = httpx.get(f"{service.url}/tasks/t/events", headers=headers, timeout=60)
        ids = [line.removeprefix("id:").strip() for line in answer.text.splitlines() if line.startswith("id:")]
        headers["last-event-id"] = ids[-1] if ids else headers["last-event-id"]
        return answer.status_code == 204

    wait_until(read_to_the_end, 60, "all events were read")
    walk.seen.add(("get", "/tasks/{task_id}/events", 204))


def closing(part: bytes) -> bytes:
    """An exported session as the part of an import that is its last."""
    import msgspec

    exported = msgspec.msgpack.decode(part)
    kept = {name: exported[name] for name in ("session", "records", "delivered", "intents")}
    return msgspec.msgpack.encode({**kept, "start": 0, "last": True})


load_all_checks()
CONFORM = CHECKS.get_by_names(["status_code_conformance", "content_type_conformance", "response_schema_conformance"])
"""Whether a request that the schema forbids is refused is not asked: some rules (ids, one field that needs another) are in no schema."""
# Left out: what speaks msgpack, what may never end, and what waits for a trainer at an address that schemathesis makes up.
asked = (
    schemathesis.openapi.from_dict(DOCUMENT)
    .exclude(method="POST", path="/sessions/{session_id}/records")
    .exclude(method="GET", path="/tasks/{task_id}/events")
    .exclude(method="POST", path="/weights/group")
)


# The service runs in this process, and a thread of its own may draw a random number while hypothesis generates.
@pytest.mark.filterwarnings("ignore:Do not use the `random` module:hypothesis.errors.HypothesisDeprecationWarning")
@asked.parametrize()  # type: ignore[untyped-decorator]
@settings(
    max_examples=EXAMPLES,
    deadline=None,
    database=None,
    derandomize=True,
    phases=[Phase.generate],
    suppress_health_check=list(HealthCheck),
)
def test_what_schemathesis_asks_is_answered_as_described(case: Any, running: RunningService) -> None:
    if isinstance(case.body, dict) and "wait_seconds" in case.body:
        case.body["wait_seconds"] = 0
    case.call_and_validate(base_url=running.url, headers={"authorization": f"Bearer {ADMIN}"}, checks=CONFORM, timeout=60)
