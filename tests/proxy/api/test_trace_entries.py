"""`GET /sessions/{id}/trace_entries`: what an agent with a sub-agent and an edited history leaves there."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from proxy.api import calls as calls_api
from tests.support.engine.scripted_engine import ScriptedEngine
from tests.support.service.redis_server import RedisServer
from tests.support.service.running_service import RunningService, Session


@pytest.fixture(scope="module")
def service(redis_server: RedisServer) -> Iterator[RunningService]:
    with ScriptedEngine("qwen3") as engine, RunningService(engine.url, redis_server.url) as running:
        yield running


def play(session: Session) -> None:
    """Two turns with a sub-agent between them, then a history that the agent changed."""
    question = {"role": "user", "content": "Say hello."}
    reply = session.ask([question]).choices[0].message
    said = {"role": "assistant", "content": reply.content}
    session.ask([{"role": "system", "content": "You help."}, {"role": "user", "content": "help"}])
    session.ask([question, said, {"role": "user", "content": "Again."}])
    session.ask([question, {"role": "assistant", "content": "edited"}, {"role": "user", "content": "Go on."}])


def test_the_trace_of_a_session_trains_what_its_trajectories_train(service: RunningService) -> None:
    session = service.session()
    play(session)
    path = f"/sessions/{session.session_id}"
    assert service.request("POST", f"{path}/close", json={"status": "completed", "reward": 0.5}).status_code == 200
    answer = service.request("GET", f"{path}/trace_entries").json()
    rows = service.request("GET", f"{path}/trajectories").json()
    calls = {call["call_id"]: call for call in service.request("GET", f"{path}/calls").json()["calls"]}
    assert answer["session_id"] == session.session_id
    entries = answer["entries"]
    trained = sum(sum(entry["loss_mask"]) for entry in entries)
    quarantined = sum(item["tokens"] for item in rows["accounting"]["quarantined"])
    assert rows["accounting"]["sampled_tokens"] == trained + quarantined > 0
    assert len(entries) == len(calls) == 4
    for entry in entries:
        call = calls[entry["metadata"]["node_id"]]
        names = {"prompt_token_ids": "prompt_ids", "completion_token_ids": "completion_ids", "per_token_logps": "logprobs"}
        assert {name: entry[name] for name in names} == {name: call[own] for name, own in names.items()}
        assert entry["request"]["messages"] == call["messages"] and entry["reward"] == 0.5


def test_a_trace_that_would_be_too_long_is_refused(service: RunningService, monkeypatch: pytest.MonkeyPatch) -> None:
    session = service.session()
    session.ask("q")
    monkeypatch.setattr(calls_api, "MOST_TRACE_IDS", 3)
    refused: dict[str, Any] = service.request("GET", f"/sessions/{session.session_id}/trace_entries").json()["error"]
    assert refused["code"] == "request_too_large" and "trajectories" in refused["message"]
