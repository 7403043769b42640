"""Processes of two builds on one store: the older one serves no session that it would serve as something else."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from contract.sessions import Fork, Lookahead
from proxy.store import keys, states
from proxy.store.service import LEVEL
from proxy.store.states import FEATURES, SessionInfo
from tests.support.engine.scripted_engine import ScriptedEngine
from tests.support.service.redis_server import RedisServer
from tests.support.service.running_service import RunningService
from tests.support.service.verbatim_process import verbatim
from tests.support.sessions.questions import QUESTIONS


def test_an_older_process_leaves_a_session_it_does_not_understand_to_a_newer_one(
    redis_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It answered a fork with a freshly sampled reply that was trained, and skipped budgets and lookaheads."""
    with ScriptedEngine() as engine, RunningService(engine.url, redis_url, engine_api="token") as newer:
        with monkeypatch.context() as newest:
            newest.setitem(states.FEATURES, "telepathy", lambda info: info.session_id == "new")
            session, plain = newer.session(session_id="new"), newer.session(session_id="plain")
            engine.say("hello")
            assert session.post(*QUESTIONS["chat"], at=newer).status_code == 200
        with RunningService(engine.url, redis_url, engine_api="token") as older:
            for dialect in QUESTIONS:
                refused = session.post(*QUESTIONS[dialect], at=older)
                # Anthropic's own number for a temporary failure is 529.
                assert refused.status_code == (529 if dialect == "messages" else 503), refused.text
                assert float(refused.headers["retry-after"]) > 0, dialect
                assert "telepathy" in refused.text and "error" in refused.json(), dialect
            for method, path, body in (
                ("POST", "close", {"status": "completed", "reward": 1.0}),
                ("POST", "reward", {"reward": 1.0}),
                ("GET", "trajectories", None),
            ):
                answer = (
                    older.request(method, f"/sessions/new/{path}", json=body)
                    if body
                    else older.request(method, f"/sessions/new/{path}")
                )
                assert answer.status_code == 503 and "telepathy" in answer.text, path
            assert {each["session_id"] for each in older.request("GET", "/sessions").json()["sessions"]} == {"new", "plain"}
            engine.say("hello")
            assert plain.post(*QUESTIONS["chat"], at=older).status_code == 200
        with monkeypatch.context() as newest:
            newest.setitem(states.FEATURES, "telepathy", lambda info: info.session_id == "new")
            closed = newer.request("POST", "/sessions/new/close", json={"status": "completed", "reward": 1.0})
            assert closed.status_code == 200, closed.text


@pytest.mark.parametrize(
    ("fields", "needs"),
    [
        ({}, ()),
        ({"max_calls": 3}, ("budget",)),
        ({"replay": Fork("o", 1.0, 2), "lookahead": Lookahead(2)}, ("fork", "lookahead")),
        ({"trained": False, "echo_policy": "minted"}, ("echo", "untrained")),
        ({"needs": ("telepathy",), "max_total_tokens": 9}, ("budget", "telepathy")),
    ],
)
def test_a_session_says_what_its_server_has_to_know(fields: dict[str, Any], needs: tuple[str, ...]) -> None:
    info = SessionInfo("s", b"hash", 1.0, **fields)
    assert info.needs == needs
    assert keys.unpack_versioned(keys.pack_versioned(info), SessionInfo) == info
    assert set(needs) - {"telepathy"} <= set(FEATURES)


def test_a_store_that_a_newer_build_has_served_is_refused_at_the_start(redis_server: RedisServer, tmp_path: Path) -> None:
    redis_server.flushall()
    with redis_server.client() as client:
        client.set(keys.LEVEL, LEVEL + 1)
        place = ("--engine", "http://127.0.0.1:9", "--redis", redis_server.url, "--data-dir", str(tmp_path))
        done = verbatim("serve", *place)
        assert done.returncode == 2
        assert f"it asks for level {LEVEL + 1} and this build has {LEVEL}" in done.stderr and "Traceback" not in done.stderr
        assert client.get(keys.LEVEL) == str(LEVEL + 1).encode()
        client.delete(keys.LEVEL)
