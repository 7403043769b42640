"""Projects: one key for a whole run, rollouts named by their calls, and secrets that open nothing of anybody else."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any

import httpx
import pytest
from starlette.requests import Request

from cli.serving.logs import OneLine
from proxy.api.sessions import find_harness_url
from proxy.settings import Settings
from tests.support.engine.scripted_engine import ScriptedEngine
from tests.support.service import plain_http
from tests.support.service.redis_server import RedisServer
from tests.support.service.running_service import ADMIN, NODE, TRAINER, RunningService, wait_until
from trainer_client import Sessions

BODY = {"model": "policy", "messages": [{"role": "user", "content": "q"}]}


@pytest.fixture(scope="module")
def services(redis_server: RedisServer) -> Iterator[list[RunningService]]:
    """Two processes over one store."""
    redis_server.flushall()
    with (
        ScriptedEngine("qwen3") as engine,
        RunningService(engine.url, redis_server.url) as first,
        RunningService(engine.url, redis_server.url) as second,
    ):
        yield [first, second]


@dataclass
class Project:
    service: RunningService
    name: str
    key: str
    token: str

    def call(
        self, rollout: str | None = None, *, at: RunningService | None = None, path: str = "", session: str = ""
    ) -> httpx.Response:
        """`rollout` and `session`: what the two headers say."""
        named = {name: said for name, said in (("X-Session-ID", rollout), ("X-Verbatim-Session", session)) if said}
        url = f"{(at or self.service).url}{path}/v1/chat/completions"
        return plain_http.post(url, json=BODY, headers={"Authorization": f"Bearer {self.key}", **named})

    def ask(self, method: str, path: str, **more: Any) -> httpx.Response:
        return self.service.request(method, path, self.token, **more)

    def state(self, rollout: str) -> dict[str, Any]:
        shown: dict[str, Any] = self.ask("GET", f"/sessions/{self.name}.{rollout}").json()
        return shown


def make(service: RunningService, name: str, **fields: Any) -> Project:
    made = service.request("POST", "/projects", json={"name": name, **fields})
    assert made.status_code == 201, made.text
    answer = made.json()
    return Project(service, name, answer["key"], answer["token"])


@pytest.fixture(scope="module")
def project(services: list[RunningService]) -> Project:
    return make(services[0], "swe", defaults={"sampling": {"max_tokens": 4}})


@pytest.fixture(scope="module")
def other(services: list[RunningService]) -> Project:
    return make(services[0], "other")


def test_the_first_call_of_a_name_opens_its_session_and_later_ones_are_its_calls(
    project: Project, services: list[RunningService]
) -> None:
    for at in (services[0], services[1], services[0]):
        assert project.call("run-1", at=at).status_code == 200
    assert project.call(path="/r/run-1").status_code == 200
    assert project.call("another", session="run-1").status_code == 200
    state = project.state("run-1")
    assert (state["calls"], state["project"], state["sampling"], state["status"]) == (5, "swe", {"max_tokens": 4}, "open")


def test_concurrent_first_calls_in_two_processes_open_one_session_for_each_name(
    project: Project, services: list[RunningService]
) -> None:
    with ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(lambda n: project.call(f"many-{n % 2}", at=services[n // 2 % 2]), range(8)))
    assert [answer.status_code for answer in answers] == [200] * 8
    assert [project.state(f"many-{n}")["calls"] for n in range(2)] == [4, 4]


def test_declared_rollouts_are_a_group_that_a_trainer_gets_with_their_rewards(project: Project) -> None:
    for name in ("a", "b"):
        declared = project.ask("PUT", f"/projects/swe/rollouts/{name}", json={"group_id": "bug-7", "group_size": 2})
        assert declared.status_code == 200, declared.text
        # Repeating it is not an error, also once it was called.
        assert project.call(name).status_code == 200
        again = project.ask("PUT", f"/projects/swe/rollouts/{name}", json={"group_id": "bug-7", "group_size": 2})
        assert (again.status_code, again.json()["calls"], again.json()["group_id"]) == (200, 1, "swe/bug-7")
        closed = project.ask("POST", f"/sessions/swe.{name}/close", json={"status": "completed", "reward": 1.0})
        assert closed.status_code == 200, closed.text
    leased = project.service.request("POST", "/batches/lease", TRAINER, json={}).json()
    (group,) = leased["groups"]
    assert (group["group_id"], len(group["trajectories"])) == ("swe/bug-7", 2)
    assert project.call("a").status_code == 409


def test_a_rollout_that_was_opened_as_something_else_is_not_declared(project: Project) -> None:
    assert project.call("early").status_code == 200
    late = project.ask("PUT", "/projects/swe/rollouts/early", json={"group_id": "g", "group_size": 2})
    assert (late.status_code, late.json()["error"]["code"]) == (409, "conflict")
    assert "group_id" in late.json()["error"]["message"]


def test_a_rollout_whose_candidates_no_judge_can_compare_is_not_declared(project: Project) -> None:
    """It was taken, and failed at its first call; `POST /sessions` refuses it."""
    judged = {"lookahead": {"n": 2, "choose": "model", "model": "nobody"}}
    refused = project.ask("PUT", f"/projects/{project.name}/rollouts/judged", json=judged)
    assert (refused.status_code, refused.json()) == (400, project.ask("POST", "/sessions", json=judged).json())


def test_a_projects_urls_lead_to_the_harness_side_where_the_control_side_has_a_port_of_its_own() -> None:
    asked = Request({"type": "http", "scheme": "http", "server": ("service", 8701), "path": "/projects", "headers": []})
    settings = Settings(engine=["http://127.0.0.1:1"], port=8700, control_port=8701)
    assert find_harness_url(asked, settings) == "http://service:8700"


def test_the_token_that_opens_a_session_reads_its_calls_and_rows(project: Project) -> None:
    with Sessions(project.service.url, project.token) as sessions, sessions.open(group_id="own") as session:
        answer = plain_http.post(
            f"{session.base_urls['openai']}/chat/completions", json=BODY, headers={"Authorization": f"Bearer {session.api_key}"}
        )
        assert answer.status_code == 200
        session.reward = 1.0
        assert len(session.calls()) == len(session.rows()) == 1
    assert project.service.request("GET", f"/sessions/{session.session_id}").json()["group_id"] == "swe/own"


@pytest.mark.parametrize(
    ("rollout", "problem"), [(None, "X-Session-ID"), ("a b", "letters"), ("../x", "letters"), ("x" * 125, "1 to 124")]
)
def test_a_call_without_a_plain_name_is_refused_and_opens_nothing(project: Project, rollout: str | None, problem: str) -> None:
    before = project.service.request("GET", "/sessions?limit=1000").json()["sessions"]
    answer = project.call(rollout)
    assert answer.status_code == 400 and problem in answer.json()["error"]["message"]
    assert project.service.request("GET", "/sessions?limit=1000").json()["sessions"] == before


# Who gets in


def test_a_key_opens_its_projects_calls_and_nothing_else(project: Project, other: Project) -> None:
    assert project.call("mine").status_code == other.call("mine").status_code == 200
    assert [each.state("mine")["calls"] for each in (project, other)] == [1, 1]
    session = project.service.session()
    for path in (f"/s/{session.session_id}", "/s/other.mine", "/s/swe.mine"):
        assert project.call(path=path).status_code == 401
    for method, path in (
        ("GET", "/sessions/swe.mine"),
        ("POST", "/sessions"),
        ("PUT", "/projects/swe/rollouts/x"),
        ("GET", "/weights"),
    ):
        assert project.service.request(method, path, project.key, json={}).status_code in (401, 403), path


def test_a_session_that_is_called_like_a_rollout_is_not_the_projects(project: Project) -> None:
    project.service.session(session_id="swe.taken")
    assert project.call("taken").status_code == 401
    assert project.ask("GET", "/sessions/swe.taken").status_code == 404


def test_a_token_opens_its_own_sessions_and_nobody_elses(project: Project, other: Project) -> None:
    assert project.call("closed").status_code == 200
    foreign = project.service.session()
    for session_id in (foreign.session_id, "swe.closed"):
        for method, path, body in (
            ("GET", "", None),
            ("GET", "/calls", None),
            ("GET", "/trajectories", None),
            ("POST", "/reward", {"reward": 1.0}),
            ("POST", "/close", {"status": "failed"}),
            ("DELETE", "", None),
        ):
            assert other.ask(method, f"/sessions/{session_id}{path}", json=body).status_code == 404
    for method, path in (
        *(("GET", path) for path in ("/sessions", "/groups", "/engines", "/projects", "/weights")),
        *(("POST", path) for path in ("/projects", "/batches/lease", "/weights")),
        ("DELETE", "/projects/other"),
        ("PUT", "/projects/swe/rollouts/x"),
    ):
        assert other.ask(method, path, json={}).status_code in (401, 403), path
    assert other.call("closed").status_code == 200, "a rollout of its own"
    assert project.state("closed")["calls"] == 1


@pytest.mark.parametrize(
    ("body", "field"),
    [
        ({"project": "swe"}, "project"),
        ({"session_id": "swe.x"}, "session_id"),
        ({"group_id": "g" * 256}, "group_id"),
        ({"replay": {"session_id": "swe.run-1"}}, "replay"),
    ],
)
def test_a_token_cannot_reach_into_another_project(other: Project, body: dict[str, Any], field: str) -> None:
    refused = other.ask("POST", "/sessions", json=body)
    assert refused.status_code == 400 and field in refused.json()["error"]["message"]


@pytest.mark.parametrize("secret", [TRAINER, NODE, "vt-" + "0" * 40 + "-swe", "vp-" + "0" * 40 + "-swe", "vt-none", "vp-none"])
def test_no_other_secret_is_a_projects(project: Project, secret: str) -> None:
    url = f"{project.service.url}/r/x/v1/chat/completions"
    assert plain_http.post(url, json=BODY, headers={"Authorization": f"Bearer {secret}"}).status_code == 401
    assert project.service.request("POST", "/sessions", secret, json={}).status_code in (401, 403)


def test_a_project_that_is_removed_lets_nobody_in_in_any_process(services: list[RunningService]) -> None:
    gone = make(services[0], "gone")
    assert [gone.call("x", at=at).status_code for at in services] == [200, 200]
    assert services[0].request("DELETE", "/projects/gone").status_code == 204
    for at in services:
        wait_until(lambda at=at: gone.call("x", at=at).status_code == 401, 60, "the key is not known any more")  # type: ignore[misc]
    again = make(services[0], "gone")
    assert gone.call("y").status_code == 401 and again.call("y").status_code == 200


def test_a_secret_that_is_renewed_replaces_the_old_one_in_every_process(services: list[RunningService]) -> None:
    old = make(services[0], "renewed")
    assert [old.call("x", at=at).status_code for at in services] == [200, 200]
    answer = services[1].request("POST", "/projects/renewed/secrets", json={"renew": ["key"]}).json()
    assert answer["token"] is None
    new = replace(old, key=answer["key"])
    before = new.state("x")["created_at"]
    for at in services:
        wait_until(lambda at=at: old.call("x", at=at).status_code == 401, 60, "the old key is not known any more")  # type: ignore[misc]
        assert new.call("x", at=at).status_code == 200
    assert new.state("x")["created_at"] == before, "the token is the old one, and the session too"
    both = services[0].request("POST", "/projects/renewed/secrets", json={}).json()
    wait_until(lambda: new.ask("GET", "/sessions/renewed.x").status_code == 401, 60, "the old token is not known any more")
    last = replace(old, key=both["key"], token=both["token"])
    assert last.state("x")["created_at"] == before and last.call("x").status_code == 200


@pytest.mark.parametrize(
    ("name", "secret", "body", "status"),
    [
        ("none", ADMIN, {}, 404),
        ("swe", ADMIN, {"renew": []}, 400),
        ("swe", ADMIN, {"renew": ["name"]}, 400),
        ("swe", TRAINER, {}, 403),
    ],
)
def test_secrets_are_renewed_for_the_admin_alone(
    project: Project, name: str, secret: str, body: dict[str, Any], status: int
) -> None:
    assert project.service.request("POST", f"/projects/{name}/secrets", secret, json=body).status_code == status
    assert project.ask("POST", f"/projects/{name}/secrets", json=body).status_code in (401, 403)
    assert project.call("still").status_code == 200


def test_rollouts_that_only_their_close_puts_into_a_group_are_leased_as_the_projects_group(project: Project) -> None:
    """What belongs together may be known only from the files that a framework leaves."""
    said = {"status": "completed", "reward": 1.0, "group_id": "late", "group_size": 2, "task_id": "bug-8"}
    for name in ("late-a", "late-b"):
        assert project.call(name).status_code == 200
        for _ in range(2):
            closed = project.ask("POST", f"/sessions/swe.{name}/close", json=said)
            assert (closed.status_code, closed.json()["group_id"]) == (200, "swe/late"), closed.text
    leased = project.service.request("POST", "/batches/lease", TRAINER, json={"max_groups": 9}).json()["groups"]
    assert ("swe/late", 2) in [(group["group_id"], len(group["trajectories"])) for group in leased]
    assert project.call("late-c").status_code == 200
    refused = project.ask("POST", "/sessions/swe.late-c/close", json={**said, "group_id": "g" * 256})
    assert (refused.status_code, project.state("late-c")["status"]) == (400, "open")


def test_a_project_is_made_once_listed_without_secrets_and_checked(services: list[RunningService], project: Project) -> None:
    admin = services[0]
    assert admin.request("POST", "/projects", json={"name": "swe"}).status_code == 409
    listed = admin.request("GET", "/projects")
    assert "swe" in [each["name"] for each in listed.json()["projects"]]
    assert project.key not in listed.text and project.token not in listed.text
    for body in ({"name": "No.dots"}, {"name": "x" * 41}, {"name": "p", "defaults": {"group_size": 0}}):
        assert admin.request("POST", "/projects", json=body).status_code == 400
    assert admin.request("POST", "/projects", TRAINER, json={"name": "p"}).status_code == 403
    assert admin.request("DELETE", "/projects/none", ADMIN).status_code == 404


def test_a_projects_secrets_are_masked_in_the_log() -> None:
    said = " ".join(f"{kind}-{'0a' * 20}-swe" for kind in ("vb", "vp", "vt"))
    record = logging.LogRecord("x", logging.INFO, "", 0, said, (), None)
    assert OneLine("%(message)s").format(record) == "vb-...-swe vp-...-swe vt-...-swe"
