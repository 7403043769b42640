"""llama.cpp's real server, found out by `auto`: served, recorded and never trained, for it returns no token ids."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pytest

from tests.support.engine.llama_cpp import running_llama_cpp
from tests.support.service.redis_server import running_redis
from tests.support.service.running_service import RunningService
from tests.support.sessions.conversations import TOOLS, assemble

LIMIT = {"max_tokens": 4, "temperature": 0}


@pytest.fixture(scope="module")
def llama_cpp() -> Iterator[str]:
    with running_llama_cpp(window=512) as url:
        yield url


@pytest.fixture(scope="module")
def service(llama_cpp: str) -> Iterator[RunningService]:
    with running_redis() as redis, RunningService(llama_cpp, redis.url) as service:
        yield service


def describe(service: RunningService) -> dict[str, Any]:
    (replica,) = service.request("GET", "/engines").json()["replicas"]
    return dict(replica)


@pytest.mark.case(11)
@pytest.mark.parametrize(
    ("stream", "tools"),
    [(False, None), (True, None), (False, TOOLS), (True, TOOLS)],
    ids=["whole", "streamed", "tools", "both"],
)
def test_its_replies_are_served_recorded_and_quarantined(service: RunningService, stream: bool, tools: Any) -> None:
    """It refuses logprobs in a stream with tools: those of the service are left out."""
    session = service.session()
    offered = {} if tools is None else {"tools": tools}
    asked = session.ask("Say hello.", stream=stream, **LIMIT, **offered)
    message = assemble(asked) if stream else asked.choices[0].message.model_dump(exclude_none=True)
    (call,) = session.calls
    assert (call["api"], call["status"]) == ("chat", "finished") and call["finish_reason"] in ("length", "stop")
    assert call["reply"]["content"] == message["content"] != ""
    rows, accounting = session.trajectories()
    assert rows == []
    assert accounting["quarantined"] == [{"call_id": call["call_id"], "tokens": 0, "reason": "no_token_ids"}]
    if stream and tools:
        assert [note for note in describe(service)["notes"] if note.startswith("does not take logprobs")]


def test_the_list_of_engines_says_what_it_is_and_that_it_is_not_trained(service: RunningService, llama_cpp: str) -> None:
    service.session().ask("Say hello.", **LIMIT)
    replica = describe(service)
    assert (replica["status"], replica["trainable"], replica["takes_weights"]) == ("serving", False, False)
    assert replica["version"] == httpx.get(f"{llama_cpp}/props").json()["build_info"]
    assert replica["models"] == [httpx.get(f"{llama_cpp}/v1/models").json()["data"][0]["id"]]
    assert [note for note in replica["notes"] if note.startswith("returns no token ids, or no logprobs")]


def test_a_prompt_that_is_too_long_is_said_in_the_words_of_the_harnesss_dialect(service: RunningService) -> None:
    session = service.session()
    with pytest.raises(openai.BadRequestError) as raised:
        session.ask("cat " * 1000, **LIMIT)
    assert raised.value.code == "context_length_exceeded"
    with pytest.raises(openai.BadRequestError) as raised:
        list(session.ask("cat " * 1000, stream=True, **LIMIT))
    assert raised.value.code == "context_length_exceeded"
    body = {"model": "policy", "max_tokens": 4, "messages": [{"role": "user", "content": "cat " * 1000}]}
    headers = {"x-api-key": session.api_key, "anthropic-version": "2023-06-01"}
    answer = httpx.post(f"{session.base_url}/messages", json=body, headers=headers, timeout=120)
    error = answer.json()["error"]
    assert (answer.status_code, error["type"]) == (400, "invalid_request_error") and "prompt is too long" in error["message"]
    assert session.calls == []
