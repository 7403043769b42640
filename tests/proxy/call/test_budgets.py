"""Budgets of a session: the service holds them whatever the harness does, says so in its dialect, and tells the trainer."""

from __future__ import annotations

import asyncio
import itertools
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest

from proxy.store.connection import StoreConnection
from proxy.store.sessions import SessionStore
from proxy.store.states import Intent, Share
from tests.support.engine.scripted_engine import Say, ScriptedEngine
from tests.support.engine.scripted_fixtures import Running
from tests.support.service.running_service import TRAINER, RunningService, Session, hanging_up, wait_until
from tests.support.sessions.questions import QUESTIONS

USER: list[Any] = [{"role": "user", "content": "q"}]
REFUSED = dict.fromkeys(QUESTIONS, 401) | {"messages": 403, "gemini": 403}
"""The statuses that the clients of each dialect end on: LiteLLM repeats a 403 in OpenAI's shape."""
TOOLS = [{"type": "function", "function": {"name": "lookup", "parameters": {"type": "object", "properties": {}}}}]
CALL = '<tool_call>\n{"name": "lookup", "arguments": {}}\n</tool_call>'
LONG = "one two three four five six seven eight nine ten eleven twelve"


def ask(session: Session, dialect: str = "chat", **fields: Any) -> httpx.Response:
    path, body = QUESTIONS[dialect]
    return session.post(path, body | fields)


def ends(session: Session) -> list[tuple[str, bool]]:
    return [(row["finish_reason"], row["truncated"]) for row in session.trajectories()[0]]


@pytest.mark.case(42)
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("dialect", QUESTIONS)
def test_a_call_beyond_the_budget_is_refused_in_the_dialects_shape_and_not_to_be_repeated(
    engine: ScriptedEngine, service: RunningService, dialect: str, stream: bool
) -> None:
    session = service.session(max_calls=1)
    engine.say("hello")
    assert ask(session, dialect).status_code == 200
    refused = ask(session, dialect, **({"stream": True} if stream and dialect != "gemini" else {}))
    assert refused.status_code == REFUSED[dialect] and "has spent its budget (max_calls: 1)" in refused.text
    assert refused.headers["x-should-retry"] == "false"
    error = refused.json()["error"]
    if dialect == "gemini":
        assert (error["code"], error["status"]) == (403, "PERMISSION_DENIED")
    else:
        assert error["type"] == "permission_error"
        assert dialect == "messages" or error["code"] == "budget_exhausted"
    assert len(engine.generations) == len(session.calls) == 1
    assert ends(session) == [("budget", True)]


def test_a_run_that_ends_within_its_budget_is_whole(engine: ScriptedEngine, service: RunningService) -> None:
    session = service.session(max_calls=1, max_completion_tokens=500, max_total_tokens=5000)
    engine.say("done")
    assert ask(session).status_code == 200
    assert ends(session) == [("stop", False)]


def test_a_run_whose_last_reply_calls_a_tool_was_ended_by_its_budget_though_nobody_asked_again(
    engine: ScriptedEngine, service: RunningService
) -> None:
    session = service.session(max_calls=1)
    engine.say(CALL)
    assert ask(session, tools=TOOLS).json()["choices"][0]["finish_reason"] == "tool_calls"
    assert ends(session) == [("budget", True)]


@pytest.mark.parametrize("asked", [{}, {"max_tokens": 100}, {"max_tokens": 3}])
def test_no_more_tokens_are_sampled_than_the_budget_holds(
    engine: ScriptedEngine, service: RunningService, asked: dict[str, Any]
) -> None:
    session, limit = service.session(max_completion_tokens=10), 10
    engine.say(LONG, LONG, LONG, LONG)
    statuses = []
    while (answer := ask(session, **asked)).status_code == 200:
        statuses.append(answer.json()["choices"][0]["finish_reason"])
    assert answer.status_code == 401 and "max_completion_tokens: 10" in answer.text
    assert sum(len(call["completion_ids"]) for call in session.calls) == limit
    assert statuses == ["length"] * (4 if asked == {"max_tokens": 3} else 1)
    assert ends(session)[-1] == ("budget", True)


def test_prompts_count_in_the_budget_of_all_tokens(engine: ScriptedEngine, token_service: RunningService) -> None:
    first = token_service.session()
    engine.say(LONG)
    ask(first)
    prompt = len(first.calls[0]["prompt_ids"])
    session = token_service.session(max_total_tokens=prompt + 4)
    engine.say(LONG)
    assert ask(session).json()["usage"]["completion_tokens"] == 4
    refused = ask(session)
    assert refused.status_code == 401 and f"max_total_tokens: {prompt + 4}" in refused.text
    small = token_service.session(max_total_tokens=prompt)
    assert ask(small).status_code == 401 and small.calls == []


@pytest.mark.parametrize("ids_rise", [True, False])
def test_calls_at_once_do_not_go_over_the_budget(
    engine: ScriptedEngine, service: RunningService, ids_rise: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ids of one millisecond are in any order: a call that came last and had the lowest was let in beside the first two."""
    if not ids_rise:
        ids = itertools.count(2**96 - 1, -1)
        monkeypatch.setattr("proxy.call.run.new_call_id", lambda: f"{next(ids):024x}")
    session, gate = service.session(max_calls=2), threading.Event()
    engine.script = lambda generation, index: Say("hello", gate=gate)
    with ThreadPoolExecutor(6) as pool:
        answers = [pool.submit(ask, session) for _ in range(6)]
        wait_until(lambda: sum(answer.done() for answer in answers) == 4, 120, "the others are refused")
        gate.set()
    assert sorted(answer.result().status_code for answer in answers) == [200, 200, 401, 401, 401, 401]
    assert len(session.calls) == 2


def test_all_choices_of_a_call_under_way_count(engine: ScriptedEngine, service: RunningService) -> None:
    session, gate = service.session(max_calls=4), threading.Event()
    engine.script = lambda generation, index: Say("hello", gate=gate)
    with ThreadPoolExecutor(2) as pool:
        answers = [pool.submit(ask, session, n=3) for _ in range(2)]
        wait_until(lambda: any(answer.done() for answer in answers), 120, "one is refused")
        gate.set()
    assert sorted(answer.result().status_code for answer in answers) == [200, 401]
    assert len(session.calls) == 3


def ask_everywhere(running: Running, session: Session, count: int, **fields: Any) -> list[httpx.Response]:
    """So many calls at once, of two services by turns."""
    places, body = list(running[1].values()), {"model": "policy", "messages": USER, **fields}
    with ThreadPoolExecutor(count) as pool:
        calls = [pool.submit(session.post, "/v1/chat/completions", body, at=places[i % 2]) for i in range(count)]
        return [call.result() for call in calls]


@pytest.mark.parametrize("n", [1, 2])
def test_calls_at_once_in_two_processes_do_not_go_over_the_budget_of_calls(
    engine: ScriptedEngine, running: Running, n: int
) -> None:
    """Each process counted the calls that it had under way: two let in two too many."""
    session = running[1]["token"].session(max_calls=7)
    engine.script = lambda generation, index: Say("hello", seconds_per_token=0.05)
    statuses = [answer.status_code for answer in ask_everywhere(running, session, 24, n=n)]
    assert sorted(statuses) == [200] * (7 // n) + [401] * (24 - 7 // n)
    assert len(session.calls) == 7 // n * n


@pytest.mark.parametrize(("fields", "limit"), [({}, 40), ({"max_tokens": 5}, 40), ({"n": 3}, 41)])
def test_calls_at_once_in_two_processes_do_not_go_over_the_budget_of_tokens(
    engine: ScriptedEngine, running: Running, fields: dict[str, int], limit: int
) -> None:
    """Each could sample all that was left when it began: 150 calls at once sampled 495 tokens of 40."""
    session = running[1]["token"].session(max_completion_tokens=limit)
    engine.script = lambda generation, index: Say(LONG, seconds_per_token=0.01)
    answers = ask_everywhere(running, session, 40, **fields)
    sampled = [len(call["completion_ids"]) for call in session.calls]
    n = fields.get("n", 1)
    assert limit - n < sum(sampled) <= limit and {answer.status_code for answer in answers} == {200, 401}


def test_calls_at_once_do_not_go_over_the_budget_of_all_tokens(engine: ScriptedEngine, token_service: RunningService) -> None:
    first = token_service.session()
    engine.say("hello")
    ask(first)
    prompt = len(first.calls[0]["prompt_ids"])
    limit = 3 * (prompt + 8)
    session = token_service.session(max_total_tokens=limit)
    engine.script = lambda generation, index: Say(LONG, seconds_per_token=0.01)
    with ThreadPoolExecutor(20) as pool:
        list(pool.map(lambda _: ask(session), range(20)))
    spent = sum(len(call["prompt_ids"]) + len(call["completion_ids"]) for call in session.calls)
    assert limit - prompt <= spent <= limit


def test_a_call_waits_for_tokens_that_another_may_not_need(engine: ScriptedEngine, running: Running) -> None:
    session, gate = running[1]["token"].session(max_completion_tokens=30), threading.Event()
    engine.script = lambda generation, index: Say("hello", gate=gate)
    with ThreadPoolExecutor(2) as pool:
        calls = [pool.submit(ask, session) for _ in range(2)]
        engine.wait_for(lambda: len(engine.generations) == 1, 60)
        gate.set()
        assert [call.result().status_code for call in calls] == [200, 200]
    assert len(session.calls) == 2


async def test_what_a_killed_process_reserved_is_free_again(engine: ScriptedEngine, token_service: RunningService) -> None:
    """Its calls are begun for good, and nobody will record them."""
    session = token_service.session(max_calls=1, max_completion_tokens=30)
    assert token_service.settings.redis is not None
    store = StoreConnection(token_service.settings.redis)
    try:
        killed = SessionStore(store, "a process that never beats")
        intent = Intent("0" * 24, None, b"digest", "engine", 1.0)
        begun = await killed.begin(session.session_id, 0, intent, left=Share(1, 30), wanted=Share(1, 30))
        assert begun.accepted
    finally:
        await store.close()
    engine.say("hello")
    assert (await asyncio.to_thread(ask, session)).status_code == 200
    assert (await asyncio.to_thread(ask, session)).status_code == 401


def test_a_trainer_is_told_that_the_budget_ended_the_run(engine: ScriptedEngine, token_service: RunningService) -> None:
    session = token_service.session(max_calls=1)
    engine.say("hello")
    assert [ask(session).status_code for _ in range(2)] == [200, 401]
    session.close(reward=0.5)
    leased = token_service.request("POST", "/batches/lease", TRAINER, json={"wait_seconds": 10}).json()
    rows = [row for group in leased["groups"] for row in group["trajectories"] if row["session_id"] == session.session_id]
    assert [(row["finish_reason"], row["truncated"]) for row in rows] == [("budget", True)]


def test_a_budget_that_an_attempt_spent_cuts_the_row_before_it(engine: ScriptedEngine, token_service: RunningService) -> None:
    """The harness gives a call up while the engine samples; its next attempt is refused."""
    session = token_service.session(max_calls=2)
    engine.say("hello")
    said = ask(session).json()["choices"][0]["message"]
    engine.script = lambda generation, index: Say(LONG, seconds_per_token=0.3)
    history = [*USER, said, {"role": "user", "content": "and then?"}]
    body = {"model": "policy", "messages": history, "stream": True}
    with hanging_up(f"{session.base_url}/chat/completions", body, session.api_key):
        engine.wait_for(lambda: len(engine.generations) == 2 and bool(engine.last.sampled), 60)
    wait_until(lambda: [call["status"] for call in session.calls] == ["finished", "aborted"], 60, "the call is recorded")
    assert ask(session, messages=history).status_code == 401
    assert ends(session) == [("budget", True)]


def test_a_session_shows_its_budget_and_takes_no_other_than_positive_numbers(token_service: RunningService) -> None:
    session = token_service.session(max_calls=3, max_total_tokens=100)
    shown = token_service.request("GET", f"/sessions/{session.session_id}").json()
    assert (shown["max_calls"], shown["max_total_tokens"], shown["max_completion_tokens"]) == (3, 100, None)
    for name in ("max_calls", "max_total_tokens", "max_completion_tokens"):
        for value in (0, -1, 1.5, "3", 2**64):
            refused = token_service.request("POST", "/sessions", json={name: value})
            assert refused.status_code == 400 and name in refused.text
