"""`return_token_ids` in a chat: the ids that are recorded, in vLLM's fields, whole and streamed.

Collectors that read ids from replies (LiteLLM, rollout details, captures) got nothing, and nothing said so.
"""

from __future__ import annotations

from typing import Any

import pytest

from tests.support.engine.scripted_engine import ScriptedEngine
from tests.support.service.redis_server import RedisServer
from tests.support.service.running_service import RunningService, Session
from tests.support.sessions.conversations import TOOLS

IDS = {"return_token_ids": True}


def ask_for_ids(session: Session, *, stream: bool, **fields: Any) -> tuple[list[Any], dict[int, Any]]:
    """(what told the prompt's ids, the ids of each choice, as a client collects them)."""
    asked = session.ask("look up a", stream=stream, extra_body=IDS, **fields)
    prompts: list[Any] = []
    told: dict[int, Any] = {}
    for part in asked if stream else [asked]:
        shown = part.model_dump()
        prompts += [shown["prompt_token_ids"]] if "prompt_token_ids" in shown else []
        for choice in shown["choices"]:
            if "token_ids" in choice:
                told[choice["index"]] = (told.get(choice["index"]) or []) + choice["token_ids"] if choice["token_ids"] else None
    return prompts, told


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("reply", ["text", "calls"])
def test_a_chat_that_asks_for_ids_gets_those_that_are_recorded(
    engine: ScriptedEngine, service: RunningService, stream: bool, reply: str
) -> None:
    said = "a is 7" if reply == "text" else engine.family.speak("I look.", calls=[("lookup", {"key": "a"})])
    engine.say(said, said)
    session = service.session()
    prompts, told = ask_for_ids(session, stream=stream, tools=TOOLS, n=2)
    calls = session.calls
    assert prompts == [calls[0]["prompt_ids"]]
    assert told == {at: call["completion_ids"] for at, call in enumerate(calls)}
    assert all(call["completion_ids"] for call in calls)


@pytest.mark.parametrize("stream", [False, True])
def test_an_engine_without_ids_is_answered_as_null(redis_server: RedisServer, stream: bool) -> None:
    """It refuses the field; a chat that asks for ids is served all the same."""
    with (
        ScriptedEngine("qwen3", ids=False) as silent,
        RunningService(silent.url, redis_server.url, engine_api="chat") as service,
    ):
        silent.say("hello")
        session = service.session()
        assert ask_for_ids(session, stream=stream) == ([None], {0: None})
        assert session.calls[0]["reply"]["content"] == "hello"
