"""What one careless or hostile client can take: what it is refused leaves nothing behind, and what it is given is bounded."""

from __future__ import annotations

import gc
import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from proxy.session_tree import Draft, SessionTree
from proxy.trees import SessionTrees
from tests.support.engine.scripted_engine import Fail, ScriptedEngine
from tests.support.service import plain_http
from tests.support.service.redis_server import RedisServer
from tests.support.service.running_service import RunningService, Session

BODIES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"model": "policy", "messages": [{"role": "user", "content": "q"}]},
    "/v1/responses": {"model": "policy", "input": [{"role": "user", "content": "q"}]},
    "/v1/messages": {"model": "policy", "max_tokens": 9, "messages": [{"role": "user", "content": "q"}]},
    "/v1beta/models/policy:generateContent": {"contents": [{"role": "user", "parts": [{"text": "q"}]}]},
}
HISTORIES = ("messages", "input", "contents")


@pytest.fixture(scope="module")
def engine() -> Iterator[ScriptedEngine]:
    with ScriptedEngine("qwen3") as engine:
        yield engine


@pytest.fixture(scope="module")
def service(engine: ScriptedEngine, redis_server: RedisServer) -> Iterator[RunningService]:
    with RunningService(engine.url, redis_server.url, engine_api="token", max_session_bytes=10_000) as service:
        yield service


def post(service: RunningService, session: Session, path: str, body: Any) -> httpx.Response:
    headers = {"Authorization": f"Bearer {session.api_key}", "content-type": "application/json"}
    return plain_http.post(f"{service.url}/s/{session.session_id}{path}", content=json.dumps(body), headers=headers)


def trees_of(service: RunningService) -> SessionTrees:
    app: Any = service._server.config.app
    trees: SessionTrees = app._services.trees
    return trees


def tree_of(service: RunningService, session: Session) -> SessionTree:
    return trees_of(service)._trees[session.session_id]


def drafts() -> int:
    gc.collect()
    return sum(isinstance(each, Draft) for each in gc.get_objects())


# What is refused leaves nothing


@pytest.mark.parametrize("path", BODIES)
def test_messages_of_a_refused_body_are_not_remembered(service: RunningService, path: str) -> None:
    """They stayed with the session: 44 MB of them, each answered 400, filled a gigabyte."""
    session = service.session()
    assert post(service, session, path, BODIES[path]).status_code == 200
    tree = tree_of(service, session)
    before = (len(tree._seen), tree.memory_bytes, len(tree._chains))
    for number in range(3):
        body = json.loads(json.dumps(BODIES[path]))
        history = next(body[name] for name in HISTORIES if name in body)
        for at in range(20):
            history.append({**history[0], "number": f"{number} {at}"})
        history.append("no message at all")
        assert post(service, session, path, body).status_code == 400
    assert (len(tree._seen), tree.memory_bytes, len(tree._chains)) == before
    assert drafts() <= 1


def test_messages_that_the_engine_refuses_are_not_remembered(engine: ScriptedEngine, service: RunningService) -> None:
    session = service.session()
    session.ask("q")
    tree = tree_of(service, session)
    before = (len(tree._seen), tree.memory_bytes, len(tree._chains), len(tree._replays))
    said = session.calls[0]["reply"]
    for number in range(3):
        engine.fault("/inference/v1/generate", Fail(400, "no"))
        history = [{"role": "user", "content": "q"}, said, {"role": "user", "content": f"{number}"}]
        assert post(service, session, "/v1/chat/completions", {"model": "policy", "messages": history}).status_code == 400
    assert (len(tree._seen), tree.memory_bytes, len(tree._chains), len(tree._replays)) == before
    assert service.request("GET", f"/sessions/{session.session_id}").json()["calls"] == 1


# What is kept is bounded


def test_a_tree_goes_when_its_session_is_closed(service: RunningService) -> None:
    """Those of closed sessions stayed until 4,096 others came."""
    session = service.session()
    session.ask("q")
    assert session.session_id in trees_of(service)._trees
    session.close()
    assert session.session_id not in trees_of(service)._trees
    refused = post(service, session, "/v1/chat/completions", BODIES["/v1/chat/completions"])
    assert refused.status_code == 409, refused.text
    assert session.session_id not in trees_of(service)._trees


def test_trees_are_kept_by_their_bytes_and_a_session_that_is_not_kept_goes_on(
    engine: ScriptedEngine, redis_server: RedisServer
) -> None:
    room = 200_000
    with RunningService(engine.url, redis_server.url, engine_api="token", session_cache_bytes=room) as service:
        sessions = [service.session() for _ in range(20)]
        for session in sessions:
            session.ask("q" * 500)
            assert trees_of(service).memory_bytes <= room
        kept = set(trees_of(service)._trees)
        assert 0 < len(kept) < len(sessions)
        assert sessions[-1].session_id in kept
        # One whose tree would fill more than its share drives nobody else out.
        before = set(trees_of(service)._trees)
        large = service.session()
        history: list[Any] = [{"role": "user", "content": "q" * 4_000}]
        for _ in range(3):
            history += [large.answer(history), {"role": "user", "content": "go on"}]
        assert large.session_id not in trees_of(service)._trees
        assert len(before - set(trees_of(service)._trees)) <= 1
        rows, accounting = large.trajectories()
        assert (len(rows), accounting["quarantined"]) == (1, [])


@pytest.mark.parametrize("path", BODIES)
def test_a_session_that_holds_all_the_bytes_it_may_is_refused_in_its_dialects_shape(service: RunningService, path: str) -> None:
    """The records are compressed: what counts is what they are in memory."""
    session = service.session()
    session.ask("q" * 4_000)
    refused = post(service, session, path, BODIES[path])
    assert refused.status_code == 413, refused.text
    assert "VERBATIM_MAX_SESSION_BYTES" in refused.json()["error"]["message"]
    assert refused.headers["x-should-retry"] == "false"
    shown = service.request("GET", f"/sessions/{session.session_id}").json()
    assert (shown["calls"], len(session.calls)) == (1, 1)
    session.close(reward=1.0)
    assert session.trajectories()[1]["exported_tokens"] > 0
