"""A dialect that an installed package adds is served like the built-in ones: one class and one entry point."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import httpx
import pytest

from contract.plugins import PluginError
from proxy.call.http import Routes
from proxy.dialects.catalogue import base_urls, dialects
from proxy.dialects.chat import ChatDialect
from proxy.errors import NotFound
from rollout.harnesses.definition import parse
from rollout.harnesses.prepared import SessionAccess
from tests.support.distributions import Distributions
from tests.support.engine.scripted_engine import Fail, ScriptedEngine
from tests.support.engine.scripted_fixtures import fresh_engine
from tests.support.service.redis_server import RedisServer
from tests.support.service.running_service import RunningService, Session
from tests.support.service.toy_dialect import ToyDialect

__all__ = ["fresh_engine"]

TOY = "tests.support.service.toy_dialect:ToyDialect"


@pytest.fixture
def service(engine: ScriptedEngine, redis_server: RedisServer, distributions: Distributions) -> Iterator[RunningService]:
    distributions.install("more-dialects", "verbatim.dialects", f"toy = {TOY}")
    with RunningService(engine.url, redis_server.url) as service:
        yield service


def ask(session: Session, path: str = "/ask", **body: Any) -> httpx.Response:
    return session.post(f"/toy{path}", {"model": "policy", "turns": [{"me": "hello"}], "most": 8, **body})


def test_a_session_says_its_base_url(service: RunningService) -> None:
    created = service.request("POST", "/sessions", json={"session_id": "one"}).json()
    assert created["base_urls"] == {
        "openai": f"{service.url}/s/one/v1",
        "anthropic": f"{service.url}/s/one",
        "gemini": f"{service.url}/s/one",
        "toy": f"{service.url}/s/one/toy",
    }


def test_a_harness_definition_names_it_and_is_pointed_at_its_base_url(
    service: RunningService, engine: ScriptedEngine, tmp_path: Path
) -> None:
    engine.script = lambda generation, index: "well said"
    created = service.request("POST", "/sessions", json={"session_id": "pointed"}).json()
    ask = (
        "import json, os, urllib.request as http; body = json.dumps({'model': 'policy', 'turns': [{'me': 'hello'}], 'most': 8});"
        "header = {'Authorization': 'Bearer ' + os.environ['TOY_KEY']};"
        "print(http.urlopen(http.Request(os.environ['TOY_URL'] + '/ask', body.encode(), header)).read().decode())"
    )
    env = {"TOY_URL": "{base_url:toy}", "TOY_KEY": "{api_key}"}
    harness = parse({"description": "speaks toy", "dialect": "toy", "argv": [sys.executable, "-c", ask], "env": env}, "toys")
    ready = harness.prepare(SessionAccess(created["base_urls"], created["api_key"]), "policy", "", tmp_path)
    done = subprocess.run(ready.argv, env={**os.environ, **ready.env}, capture_output=True, check=True, text=True)
    assert json.loads(done.stdout) == {"you": "well said", "why": "stop"}
    assert [call["dialect"] for call in service.request("GET", "/sessions/pointed/calls").json()["calls"]] == ["toy"]


def test_whole_and_streamed_calls_are_answered_in_its_shape_and_recorded(
    service: RunningService, engine: ScriptedEngine
) -> None:
    """Two turns that go on from one another are one row."""
    engine.script = lambda generation, index: "well said"
    session = service.session()
    first = ask(session)
    assert (first.status_code, first.headers["content-type"]) == (200, "application/json")
    turns = [{"me": "hello"}, {"you": first.json()["you"]}, {"me": "go on"}]
    streamed = ask(session, turns=turns, stream=True)
    assert (streamed.status_code, streamed.headers["content-type"]) == (200, "application/x-ndjson")
    opening, *middle, end = [json.loads(line) for line in streamed.text.splitlines()]
    assert (opening, end) == ({"hello": True}, {"why": "stop"})
    calls = session.calls
    assert [call["dialect"] for call in calls] == ["toy", "toy"]
    assert first.json() == {"you": "well said", "why": "stop"}
    assert "".join(piece["you"] for piece in middle) == "well said"
    assert calls[1]["parent_id"] == calls[0]["call_id"]
    (row,), accounting = session.trajectories()
    assert row["call_ids"] == [call["call_id"] for call in calls]
    assert accounting["exported_tokens"] == sum(len(call["completion_ids"]) for call in calls)


def test_errors_have_its_shape(service: RunningService, engine: ScriptedEngine) -> None:
    session = service.session()
    empty = ask(session, turns=[])
    assert (empty.status_code, empty.json()) == (400, {"oops": "bad_request", "at": "turns"})
    unknown = ask(session, "/sing")
    assert (unknown.status_code, unknown.json()["oops"]) == (404, "not_found")
    engine.script = lambda generation, index: Fail(500, "broken")
    for stream in (False, True):
        broken = ask(session, stream=stream)
        assert (broken.status_code, list(broken.json())) == (502, ["oops", "at"])
    assert session.calls == []


def test_a_closed_session_is_refused_in_its_shape(service: RunningService) -> None:
    session = service.session()
    ask(session)
    session.close()
    for stream in (False, True):
        refused = ask(session, stream=stream)
        assert (refused.status_code, refused.json()["oops"]) == (409, "conflict")
        assert refused.headers["x-should-retry"] == "false"
    assert len(session.calls) == 1


def test_its_endpoint_is_described(service: RunningService) -> None:
    described = service.request("GET", "/openapi.json").json()["paths"]["/s/{session_id}/toy/ask"]["post"]
    assert described["summary"] == "Ask"


def test_without_it_its_path_is_no_harness_path() -> None:
    routes = Routes(dialects().values())
    assert not routes.is_harness("POST", "/toy/ask")
    with pytest.raises(NotFound):
        routes.find("POST", "/s/one/toy/ask", {})
    assert base_urls("u") == {"openai": "u/v1", "anthropic": "u", "gemini": "u"}


class TwinDialect(ToyDialect):
    name = "twin"


class CountingDialect(ChatDialect):
    """Has an endpoint that counts and no way to render a count."""

    name = "counting"
    client = "counting"
    endpoints: ClassVar[Any] = tuple(each for each in dialects()["messages"].endpoints if each.action == "count")


@pytest.mark.parametrize(
    ("lines", "says"),
    [
        ("toy = nowhere.at_all:Toy", "the dialect 'toy' (nowhere.at_all:Toy of more-dialects 1.0) cannot be loaded"),
        (f"other = {TOY}", "must name a subclass of Dialect of that name"),
        ("toy = builtins:dict", "must name a subclass of Dialect of that name"),
        (f"toy = {TOY}\ntwin = {__name__}:TwinDialect", "both serve POST /toy/ask"),
        (f"counting = {__name__}:CountingDialect", "needs the methods of Counts to serve /v1/messages/count_tokens"),
    ],
)
def test_a_dialect_that_cannot_be_served_stops_the_service_from_starting(
    distributions: Distributions, lines: str, says: str
) -> None:
    distributions.install("more-dialects", "verbatim.dialects", lines)
    with pytest.raises(PluginError) as raised:
        dialects()
    assert says in str(raised.value)
