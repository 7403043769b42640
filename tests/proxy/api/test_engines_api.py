"""Engines over the admin API and by `verbatim engines`: listed, added, removed; kept over restarts and seen by every process."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from proxy.settings import Settings
from tests.cli.test_commands import refused
from tests.support.engine.scripted_engine import ScriptedEngine
from tests.support.service.running_service import ADMIN, RunningService, wait_until
from tests.support.service.verbatim_process import Serving, verbatim

NOBODY = "http://127.0.0.1:9"


@pytest.fixture
def engine() -> Iterator[ScriptedEngine]:
    with ScriptedEngine("qwen3") as made:
        yield made


def name(engine: ScriptedEngine) -> str:
    return engine.url.removeprefix("http://")


def replicas(service: RunningService) -> dict[str, dict[str, Any]]:
    answer = service.request("GET", "/engines")
    assert answer.status_code == 200, answer.text
    return {replica["name"]: replica for replica in answer.json()["replicas"]}


def serves(service: RunningService, engine: ScriptedEngine) -> bool:
    return replicas(service).get(name(engine), {}).get("status") == "serving"


def test_an_engine_that_is_added_serves_everywhere_and_after_a_restart_until_it_is_removed(
    engine: ScriptedEngine, redis_url: str
) -> None:
    with RunningService([], redis_url) as one, RunningService([], redis_url, engine_watch_seconds=0.1) as other:
        assert one.request("GET", "/readyz").status_code == 503
        added = one.request("POST", "/engines", json={"url": f"{engine.url}/v1/"})
        assert added.status_code == 201
        assert added.json() == {"name": name(engine), "url": engine.url, "policy": "", "source": "api"}
        assert one.request("POST", "/engines", json={"url": engine.url}).status_code == 201
        for service in (one, other):
            wait_until(lambda: serves(service, engine), 60, "it serves")  # noqa: B023
            service.session().ask("hello")
    with RunningService([], redis_url, engine_watch_seconds=0.1) as again:
        wait_until(lambda: serves(again, engine), 60, "the store knows it")
        removed = again.request("DELETE", f"/engines/{name(engine)}")
        assert (removed.status_code, removed.json()) == (200, {"name": name(engine), "removed": True})
        assert replicas(again) == {} and again.request("GET", "/engines").json()["engines"] == []
        assert again.request("DELETE", f"/engines/{name(engine)}").status_code == 404


def test_a_replica_says_all_about_itself(engine: ScriptedEngine, redis_url: str, often_visited: None) -> None:
    with RunningService([f"judge={engine.url}"], redis_url, engine_max_calls=4) as service:
        wait_until(lambda: serves(service, engine), 60, "it serves")
        assert replicas(service)[name(engine)] == {
            "name": name(engine),
            "url": engine.url,
            "policy": "judge",
            "source": "settings",
            "status": "serving",
            "reason": None,
            "api": "token",
            "version": "",
            "plugin": False,
            "trainable": True,
            "takes_weights": True,
            "router": False,
            "models": ["policy"],
            "max_model_len": 8192,
            "weight_version": 0,
            "in_flight": 0,
            "max_calls": 4,
            "description": "version unknown, path token, trainable, takes weights",
            "notes": [],
        }
        given = service.request("GET", "/engines").json()
        assert given["engines"] == [{"name": name(engine), "url": engine.url, "policy": "judge", "source": "settings"}]
        engine.stop()
        wait_until(lambda: "cannot connect" in (replicas(service)[name(engine)]["reason"] or ""), 60, "it died")
        assert not serves(service, engine)


def test_a_name_is_added_and_its_addresses_come_and_go_with_it(engine: ScriptedEngine, redis_url: str) -> None:
    with RunningService([], redis_url) as service:
        watched = f"dns://localhost:{engine.port}"
        added = service.request("POST", "/engines", json={"url": watched, "policy": "judge"})
        assert (added.status_code, added.json()["name"]) == (201, f"dns:localhost:{engine.port}")
        wait_until(lambda: serves(service, engine), 60, "an address serves")
        assert (replicas(service)[name(engine)]["policy"], replicas(service)[name(engine)]["source"]) == ("judge", watched)
        refusal = service.request("DELETE", f"/engines/{name(engine)}")
        assert refusal.status_code == 409 and watched in refusal.json()["error"]["message"]
        assert service.request("DELETE", f"/engines/dns:localhost:{engine.port}").status_code == 200
        assert replicas(service) == {}


@pytest.mark.parametrize(
    ("body", "status", "says"),
    [
        ({}, 400, "url"),
        ({"url": "localhost:1"}, 400, "'localhost:1' cannot be an engine: it is not a URL"),
        ({"url": "http://u:p@host"}, 400, "must not hold a password"),
        ({"url": "http://host", "policy": "a b"}, 400, "cannot be the name of a policy"),
        ({"url": NOBODY}, 409, "127.0.0.1:9 is in the settings"),
        ({"url": "http://10.0.0.1:1", "policy": "judge"}, 409, "10.0.0.1:1 is there already: http://10.0.0.1:1 of the default"),
    ],
)
def test_what_cannot_be_added_is_refused_with_the_reason(body: dict[str, Any], status: int, says: str, redis_url: str) -> None:
    with RunningService([NOBODY], redis_url) as service:
        assert service.request("POST", "/engines", json={"url": "http://10.0.0.1:1"}).status_code == 201
        refused = service.request("POST", "/engines", json=body)
        assert (refused.status_code, says in refused.json()["error"]["message"]) == (status, True), refused.text
        fixed = service.request("DELETE", "/engines/127.0.0.1:9")
        assert fixed.status_code == 409 and "in the settings" in fixed.json()["error"]["message"]


def test_no_policy_takes_over_the_calls_for_a_model_that_an_engine_serves(engine: ScriptedEngine, redis_url: str) -> None:
    """Sessions that are under way would go on under other weights."""
    with RunningService([engine.url], redis_url) as service:
        wait_until(lambda: serves(service, engine), 60, "it serves")
        refused = service.request("POST", "/engines", json={"url": NOBODY, "policy": "policy"})
        assert refused.status_code == 409
        assert f"'policy' go to engine {name(engine)}" in refused.json()["error"]["message"]


def test_names_that_are_declared_with_an_engine_go_to_its_policy(engine: ScriptedEngine, redis_url: str) -> None:
    """Nobody answers there, so what it serves cannot be learnt from it."""
    with RunningService([engine.url], redis_url) as service:
        wait_until(lambda: serves(service, engine), 60, "it serves")
        declared = {"url": NOBODY, "policy": "judge", "models": ["huge"]}
        added = service.request("POST", "/engines", json=declared)
        assert (added.status_code, added.json()["models"]) == (201, ["huge"]), added.text
        assert service.request("GET", "/engines").json()["engines"][1] == added.json()
        session = service.session()
        body = {"model": "huge", "messages": [{"role": "user", "content": "q"}]}
        answer = session.post("/v1/chat/completions", body)
        assert answer.status_code == 503 and "cannot connect" in answer.text
        assert engine.generations == []
        for taken in (
            {"policy": "critic", "models": ["huge"]},
            {"policy": "huge"},
            {"models": ["judge"]},
            {"models": ["policy"], "policy": "judge"},
        ):
            refused = service.request("POST", "/engines", json={"url": "http://10.0.0.1:1", **taken})
            assert refused.status_code == 409, refused.text


@pytest.mark.parametrize("models", [{"a": ["m"], "b": ["m"]}, {"a": ["b"], "b": []}])
def test_a_model_is_declared_for_one_policy(models: dict[str, list[str]]) -> None:
    with pytest.raises(ValueError, match="is declared for two policies"):
        Settings(policy_models=models)
    assert Settings(policy_models={"a": ["m", "a"], "": ["n"]}).policy_models["a"] == ["m", "a"]


def test_the_command_line_lists_adds_and_removes(engine: ScriptedEngine, redis_url: str) -> None:
    with RunningService([NOBODY], redis_url) as service:
        where: dict[str, Any] = {"VERBATIM_URL": service.url, "VERBATIM_ADMIN_TOKEN": ADMIN, "COLUMNS": "200"}
        added = verbatim("engines", "add", f"judge={engine.url}", **where)
        assert (added.returncode, added.stdout) == (0, f"{name(engine)} added to judge\n"), added.stderr
        wait_until(lambda: serves(service, engine), 60, "it serves")
        listed = verbatim("engines", "list", **where)
        assert listed.returncode == 0, listed.stderr
        rows = {line.split()[1]: line for line in listed.stdout.splitlines() if "127.0.0.1" in line}
        assert "judge" in rows[name(engine)] and "serving" in rows[name(engine)]
        assert "(default)" in rows["127.0.0.1:9"] and "down" in rows["127.0.0.1:9"] and "connect" in rows["127.0.0.1:9"]
        removed = verbatim("engines", "remove", name(engine), **where)
        assert (removed.returncode, name(engine) in removed.stdout) == (0, True), removed.stderr
        assert "no engine" in refused("engines", "remove", name(engine), **where)
        for given in (f"judge={engine.url}", f"{engine.url}/v1/"):
            assert verbatim("engines", "add", given, **where).returncode == 0
            again = verbatim("engines", "remove", given, **where)
            assert again.stdout == f"{name(engine)} removed; calls in flight finish on it\n", again.stderr
        assert "not a URL" in refused("engines", "add", "localhost:1", **where)
        verbatim("engines", "add", "judge=dns://nobody.invalid:1", "--model", "huge", **where)
        assert service.request("GET", "/engines").json()["engines"][1]["models"] == ["huge"]
        assert "dns://nobody.invalid:1: no address is known" in verbatim("engines", "list", **where).stdout


def test_a_service_starts_without_engines_where_that_is_said(tmp_path: Path) -> None:
    with Serving(data_dir=tmp_path / "data", VERBATIM_ENGINE="[]") as serving:
        assert "no engine is configured" in serving.request("GET", "/readyz").text
