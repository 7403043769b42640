"""Lookahead: of several candidates for each reply the harness sees the chosen one, and the others are recorded beside it."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from statistics import mean
from typing import Any

import aiohttp
import pytest
from openai import APIStatusError, AuthenticationError, InternalServerError

from proxy.engine.pool.membership import replica_at
from proxy.engine.pool.seats import rank_replicas
from tests.proxy.call.test_replay import Walk, call_tools, expected_logprobs, fork, tool_loop
from tests.support.engine.scripted_engine import Fail, Generation, Hang, Reply, Say, ScriptedEngine, logprobs_of
from tests.support.service.redis_server import RedisServer
from tests.support.service.running_service import RunningService, Session, hanging_up, streamed_text, wait_until
from tests.support.service.scripted_service import ScriptedService, json_answer
from tests.support.sessions.conversations import TOOLS, tool_result, turn

THREE: dict[str, Any] = {"n": 3, "choose": "logprob"}


SETTINGS = {"frozen_models": ["judge"]}


@pytest.fixture
def chooser(scripted_server: ScriptedService) -> ScriptedService:
    """An endpoint that chooses."""
    return scripted_server.reset()


def choose(chooser: ScriptedService, *choices: Any, seconds: float = 0.0) -> None:
    """Its next answers, each a number or a whole body, after so long."""
    bodies = [{"choice": choice} if isinstance(choice, int) else choice for choice in choices]
    chooser.script("POST /", *(replace(json_answer(body), delay_seconds=seconds) for body in bodies))


def candidates_of(engine: ScriptedEngine, number: int = -1) -> list[list[int]]:
    """What the engine sampled for one request."""
    sampled = engine.generations[number].sampled
    return [sampled[index] for index in sorted(sampled)]


# What the harness sees


@pytest.mark.case(93)
@pytest.mark.parametrize("stream", [False, True])
def test_the_harness_sees_the_most_probable_of_the_candidates_and_all_are_recorded(
    engine: ScriptedEngine, service: RunningService, stream: bool
) -> None:
    """Four turns; the candidates of each are sampled at random."""
    call_tools(engine)
    session = service.session(lookahead=THREE)
    messages = tool_loop(session, 4, stream=stream)
    assert len(engine.generations) == 4
    calls = session.calls
    assert len(calls) == 4 * 3
    for number in range(4):
        shown, *others = calls[3 * number : 3 * number + 3]
        means = [mean(logprobs_of(engine.generations[number].prompt_ids, ids)) for ids in candidates_of(engine, number)]
        best = candidates_of(engine, number)[means.index(max(means))]
        assert shown["completion_ids"] == best
        assert sorted(call["completion_ids"] for call in (shown, *others)) == sorted(candidates_of(engine, number))
        assert [call["lookahead"] for call in (shown, *others)] == ["chosen", "not_chosen", "not_chosen"]
        assert messages[2 * number + 1]["tool_calls"] == shown["reply"]["tool_calls"]
        assert {call["parent_id"] for call in (shown, *others)} == {calls[3 * number - 3]["call_id"] if number else None}
    rows, accounting = session.trajectories()
    chosen = [call for call in calls if call["lookahead"] == "chosen"]
    assert accounting["exported_tokens"] == sum(len(call["completion_ids"]) for call in chosen)
    assert {(item["call_id"], item["reason"]) for item in accounting["quarantined"]} == {
        (call["call_id"], "not_chosen") for call in calls if call["lookahead"] == "not_chosen"
    }
    assert accounting["complete"]
    if service.settings.engine_api == "token":
        (row,) = rows
        assert row["call_ids"] == [call["call_id"] for call in chosen]
        assert row["logprobs"] == pytest.approx(expected_logprobs(row, calls))
    wait_until(lambda: all(call["delivered"] for call in session.calls if call["lookahead"] == "chosen"), 60, "deliveries")
    assert not any(call["delivered"] for call in session.calls if call["lookahead"] == "not_chosen")


def test_a_streamed_reply_is_the_chosen_one_and_nothing_of_the_others(
    engine: ScriptedEngine, token_service: RunningService, chooser: ScriptedService
) -> None:
    engine.say("first", "second", "third")
    choose(chooser, 2)
    session = token_service.session(lookahead={"n": 3, "choose": "http", "url": chooser.url})
    text, chunks = streamed_text(session.ask("q", stream=True))
    assert text == "third"
    assert {choice.index for chunk in chunks for choice in chunk.choices} == {0}
    (asked,) = [request.body for request in chooser.received]
    assert [each["message"]["content"] for each in asked["candidates"]] == ["first", "second", "third"]
    assert asked["messages"] == [turn("user", "q")]
    assert [each["logprobs"] for each in asked["candidates"]] == [
        pytest.approx(logprobs_of(engine.last.prompt_ids, ids)) for ids in candidates_of(engine)
    ]


def test_an_endpoint_may_explain_its_choice_at_length(
    engine: ScriptedEngine, token_service: RunningService, chooser: ScriptedService
) -> None:
    """An answer that came in several pieces was read as far as the first."""
    choose(chooser, {"choice": 1, "why": "because " * 100_000})
    session = token_service.session(lookahead={"n": 2, "choose": "http", "url": chooser.url})
    session.ask("q", max_tokens=4)
    chosen = next(call for call in session.calls if call["lookahead"] == "chosen")
    assert chosen["completion_ids"] == candidates_of(engine)[1]


def test_what_follows_goes_on_from_the_chosen_one_also_where_another_said_the_same(
    engine: ScriptedEngine, token_service: RunningService, chooser: ScriptedService
) -> None:
    """The replies carry no ids: the history alone finds the parent, and a candidate that nobody saw is none."""
    engine.say("the same", "the same", "the same")
    choose(chooser, 1, 0)
    session = token_service.session(lookahead={"n": 3, "choose": "http", "url": chooser.url})
    said = session.answer("q")
    session.ask([turn("user", "q"), said, turn("user", "and then?")])
    calls = session.calls
    assert {call["parent_id"] for call in calls[3:]} == {calls[0]["call_id"]}
    assert calls[0]["lookahead"] == "chosen"
    assert calls[3]["prompt_ids"][: len(calls[0]["prompt_ids"])] == calls[0]["prompt_ids"]


@pytest.mark.parametrize("others", ["the same", "the same and then"])
def test_a_text_goes_on_from_the_chosen_candidate_also_where_another_said_the_same_or_more(
    engine: ScriptedEngine, token_service: RunningService, chooser: ScriptedService, others: str
) -> None:
    engine.say("the same", others, others)
    choose(chooser, 0, 0)
    session = token_service.session(lookahead={"n": 3, "choose": "http", "url": chooser.url})
    said = session.client.completions.create(model="policy", prompt="q", max_tokens=9).choices[0].text
    session.client.completions.create(model="policy", prompt=f"q{said} and then?", max_tokens=9)
    calls = session.calls
    assert {call["parent_id"] for call in calls[3:]} == {calls[0]["call_id"]}


def test_ids_go_on_from_the_chosen_candidate_in_one_row(
    engine: ScriptedEngine, token_service: RunningService, chooser: ScriptedService
) -> None:
    engine.say("the same", "the same", "the same")
    choose(chooser, 0, 0)
    session = token_service.session(lookahead={"n": 3, "choose": "http", "url": chooser.url})
    session.client.completions.create(model="policy", prompt="q", max_tokens=9)
    said = session.calls[0]["prompt_ids"] + session.calls[0]["completion_ids"]
    session.client.completions.create(model="policy", prompt=[*said, 7, 8], max_tokens=9)
    (row,) = session.trajectories()[0]
    assert row["call_ids"] == [call["call_id"] for call in session.calls if call["lookahead"] == "chosen"]


def test_a_harness_that_asks_for_several_choices_gets_them_and_a_role_can_be_left_out(
    engine: ScriptedEngine, token_service: RunningService
) -> None:
    both = token_service.session(lookahead=THREE)
    assert len(both.ask("q", n=2).choices) == 2
    assert [call["lookahead"] for call in both.calls] == [None, None]
    rules = [{"role": "side", "tools": False}]
    main = token_service.session(lookahead={**THREE, "roles": ["main"]}, role_rules=rules)
    main.ask("a title?")
    main.ask("q", tools=TOOLS)
    assert [(call["role"], call["lookahead"]) for call in main.calls] == [
        ("side", None),
        ("main", "chosen"),
        ("main", "not_chosen"),
        ("main", "not_chosen"),
    ]


# Choosers


def test_a_frozen_model_judges_and_nothing_of_that_is_recorded(engine: ScriptedEngine, service: RunningService) -> None:
    def script(generation: Generation, index: int) -> Reply:
        if "numbered candidates" not in generation.prompt:
            return Say(f"reply {index}")
        assert '"content": "reply 1"' in generation.prompt and '"content": "q"' in generation.prompt
        return Say(engine.family.speak("2", reasoning="The first says 0."))

    engine.script = script
    session = service.session(lookahead={"n": 2, "choose": "model", "model": "judge"})
    assert session.ask("q").choices[0].message.content == "reply 1"
    assert len(engine.generations) == 2
    assert [call["reply"]["content"] for call in session.calls] == ["reply 1", "reply 0"]
    assert [call["model"] for call in session.calls] == ["policy", "policy"]


def test_a_judge_whose_engine_has_gone_is_asked_at_another(redis_url: str) -> None:
    with ScriptedEngine("qwen3") as policy, ScriptedEngine("qwen3") as one, ScriptedEngine("qwen3") as other:
        judges = {replica_at(judge.url).name: judge for judge in (one, other)}
        for judge in judges.values():
            judge.say("2")
        policy.script = lambda generation, index: Say(f"reply {index}")
        engines = [policy.url, *(f"judge={judge.url}" for judge in judges.values())]
        with RunningService(engines, redis_url, frozen_models=["judge"]) as service:
            wait_until(lambda: service.request("GET", "/metrics").text.count("verbatim_engine_up{") == 3, 60, "all serve")
            session = service.session(lookahead={"n": 2, "choose": "model", "model": "judge"})
            ranked = rank_replicas(session.session_id, [replica_at(judge.url) for judge in judges.values()])
            first, second = (judges[replica.name] for replica in ranked)
            first.stop()
            assert session.ask("q").choices[0].message.content == "reply 1"
            assert (len(first.generations), len(second.generations)) == (0, 1)


@pytest.mark.parametrize("answer", [7, {"choice": "first"}, {"best": 0}, []])
def test_a_chooser_that_fails_fails_the_call_and_the_candidates_are_accounted_for(
    engine: ScriptedEngine, token_service: RunningService, chooser: ScriptedService, answer: Any
) -> None:
    """Another candidate would be another policy than the one asked for. The harness asks again."""
    choose(chooser, answer, 1)
    session = token_service.session(lookahead={"n": 2, "choose": "http", "url": chooser.url}, max_retries=1)
    said = session.answer("q", stream=False)
    calls = session.calls
    assert [call["status"] for call in calls] == ["failed", "failed", "finished", "finished"]
    assert calls[2]["reply"]["content"] == said["content"]
    reasons = {item["call_id"]: item["reason"] for item in session.trajectories()[1]["quarantined"]}
    assert reasons == {
        calls[0]["call_id"]: "not_delivered",
        calls[1]["call_id"]: "not_delivered",
        calls[3]["call_id"]: "not_chosen",
    }
    session.close(reward=1.0)
    (row,) = session.trajectories()[0]
    assert row["call_ids"] == [calls[2]["call_id"]]


def test_a_failed_choice_has_a_code_of_its_own(engine: ScriptedEngine, token_service: RunningService) -> None:
    def script(generation: Generation, index: int) -> Reply:
        return Say("none of them") if "numbered candidates" in generation.prompt else Say(f"reply {index}")

    engine.script = script
    judged = token_service.session(lookahead={"n": 2, "choose": "model", "model": "judge"})
    with pytest.raises(InternalServerError, match="the judge named no candidate") as failed:
        judged.ask("q")
    assert (failed.value.status_code, failed.value.code) == (502, "chooser_failed")
    away = token_service.session(lookahead={"n": 2, "choose": "http", "url": "http://127.0.0.1:9/"})
    with pytest.raises(InternalServerError, match=r"the chooser at http://127\.0\.0\.1:9/ was not reached"):
        away.ask("q")
    engine.script = lambda generation, index: Hang() if "numbered candidates" in generation.prompt else Say(f"reply {index}")
    slow = token_service.session(lookahead={"n": 2, "choose": "model", "model": "judge", "timeout_seconds": 0.2})
    with pytest.raises(InternalServerError, match="did not choose within"):
        slow.ask("q")
    told = token_service.request("GET", f"/sessions/{slow.session_id}").json()["unserved"]
    assert told["code"] == "chooser_failed"


def test_an_endpoint_may_take_as_long_as_the_session_says(
    engine: ScriptedEngine, token_service: RunningService, chooser: ScriptedService, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The HTTP client gave up after five minutes of its own, whatever was asked for."""
    monkeypatch.setattr("aiohttp.client.DEFAULT_TIMEOUT", aiohttp.ClientTimeout(total=0.1))
    engine.say("first", "second")
    choose(chooser, 1, seconds=0.5)
    session = token_service.session(lookahead={"n": 2, "choose": "http", "url": chooser.url, "timeout_seconds": 3600})
    assert session.answer("q")["content"] == "second"


def test_a_chooser_is_asked_only_where_the_operator_allows_it(redis_server: RedisServer, chooser: ScriptedService) -> None:
    with (
        ScriptedEngine("qwen3") as engine,
        RunningService(engine.url, redis_server.url, engine_api="token", outbound_allow=["public"]) as service,
    ):
        session = service.session(lookahead={"n": 2, "choose": "http", "url": chooser.url})
        with pytest.raises(InternalServerError, match=r"127\.0\.0\.1 is no address that this service may call"):
            session.ask("q")
    assert chooser.received == []


def test_an_engine_that_refuses_a_lookahead_leaves_nothing(engine: ScriptedEngine, service: RunningService) -> None:
    session = service.session(lookahead=THREE)
    engine.script = lambda generation, index: Fail(400)
    with pytest.raises(APIStatusError):
        session.ask("q")
    assert session.calls == []


def test_of_a_call_that_the_harness_gave_up_no_candidate_is_trained(
    engine: ScriptedEngine, token_service: RunningService
) -> None:
    engine.script = lambda generation, index: Say("at once") if index == 0 else Say("one two three four", seconds_per_token=0.3)
    session = token_service.session(lookahead=THREE)
    body = {"model": "policy", "messages": [turn("user", "q")], "stream": True}
    with hanging_up(f"{session.base_url}/chat/completions", body, session.api_key):
        engine.wait_for(lambda: bool(engine.generations) and 0 in engine.last.sampled, 60)
    wait_until(lambda: bool(session.calls) and session.calls[0]["status"] != "in_flight", 60, "the call is recorded")
    rows, accounting = session.trajectories()
    assert [row for row in rows if any(row["loss_mask"])] == []
    assert {item["reason"] for item in accounting["quarantined"]} == {"not_chosen"}


# Budgets, bad input


def test_a_budget_counts_every_candidate(engine: ScriptedEngine, token_service: RunningService) -> None:
    session = token_service.session(lookahead=THREE, max_calls=7)
    session.ask("q")
    session.ask("r")
    with pytest.raises(AuthenticationError, match="max_calls: 7"):
        session.ask("s")
    assert len(session.calls) == 6
    tokens = token_service.session(lookahead=THREE, max_completion_tokens=30)
    tokens.ask("q")
    assert all(call["sampling"]["max_tokens"] == 10 for call in tokens.calls)


def test_a_run_that_looked_ahead_is_cut_by_its_budget_as_any_other(
    engine: ScriptedEngine, token_service: RunningService
) -> None:
    for _ in range(3):
        session = token_service.session(lookahead=THREE, max_calls=3)
        session.ask("q")
        with pytest.raises(AuthenticationError, match="max_calls: 3"):
            session.ask("r")
        assert [(row["finish_reason"], row["truncated"]) for row in session.trajectories()[0]] == [("budget", True)]
    call_tools(engine)
    session = token_service.session(lookahead=THREE, max_calls=3)
    session.ask("q", tools=TOOLS)
    assert [(row["finish_reason"], row["truncated"]) for row in session.trajectories()[0]] == [("budget", True)]


@pytest.mark.parametrize(
    ("lookahead", "said"),
    [
        ({"n": 1}, "greater than or equal to 2"),
        ({"n": 2, "choose": "best"}, "choose"),
        ({"n": 2, "choose": "model"}, "model: goes with choose 'model'"),
        ({"n": 2, "url": "http://x/"}, "url: goes with choose 'http'"),
        ({"n": 2, "choose": "http", "url": "file:///etc"}, "url"),
        ({"n": 2, "roles": ["boss"]}, "roles"),
        ({"n": 2, "choose": "model", "model": "policy"}, "'policy' is not frozen"),
    ],
)
def test_a_lookahead_that_cannot_be_is_refused(
    engine: ScriptedEngine, token_service: RunningService, lookahead: dict[str, Any], said: str
) -> None:
    answer = token_service.request("POST", "/sessions", json={"lookahead": lookahead})
    assert (answer.status_code, said in answer.json()["error"]["message"]) == (400, True), answer.text


def test_a_session_shows_its_lookahead(engine: ScriptedEngine, token_service: RunningService) -> None:
    session = token_service.session(lookahead={"n": 2, "roles": ["main"]})
    shown = token_service.request("GET", f"/sessions/{session.session_id}").json()["lookahead"]
    assert shown == {
        **{"n": 2, "choose": "logprob", "model": None, "url": None},
        **{"roles": ["main"], "timeout_seconds": 60.0},
    }


# Forks and families


def test_a_fork_replays_what_was_chosen(engine: ScriptedEngine, token_service: RunningService) -> None:
    call_tools(engine)
    origin = token_service.session(lookahead=THREE)
    recorded = tool_loop(origin, 3)
    asked = len(engine.generations)
    chosen = [call for call in origin.calls if call["lookahead"] == "chosen"]
    copy = fork(token_service, origin, 2, on_divergence="fail", lookahead=THREE)
    assert tool_loop(copy, 2) == recorded[:5]
    assert len(engine.generations) == asked
    copy.ask(recorded[:5], tools=TOOLS)
    assert [call["call_id"] for call in copy.calls[:2]] == [call["call_id"] for call in chosen[:2]]
    assert [call["lookahead"] for call in copy.calls[2:]] == ["chosen", "not_chosen", "not_chosen"]
    assert [call["replay"] for call in copy.calls[2:]] == ["pivot"] * 3
    left_out = next(call["call_id"] for call in origin.calls if call["lookahead"] == "not_chosen")
    refused = token_service.request("POST", "/sessions", json={"replay": {"session_id": origin.session_id, "until": left_out}})
    assert (refused.status_code, "quarantined (not_chosen)" in refused.text) == (400, True)


@pytest.mark.case(93)
@pytest.mark.parametrize("seed", range(4))
def test_whatever_a_harness_does_every_candidate_is_counted_once_and_no_unseen_one_trained(
    engine: ScriptedEngine, token_service: RunningService, seed: int
) -> None:
    """Also in forks of the session, which look ahead from their pivots."""
    draw = random.Random(seed)
    policy = draw.choice(["strict", "minted"])
    ahead = {"n": draw.choice([2, 3]), "choose": "logprob"}
    origin = token_service.session(echo_policy=policy, lookahead=ahead)
    walk(origin, seed)
    pivot = draw.choice([call["call_id"] for call in origin.calls if call["lookahead"] == "chosen"])
    copy = fork(token_service, origin, pivot, echo_policy=policy, lookahead=ahead)
    walk(copy, seed)
    said = sum(len(ids) for made in engine.generations for ids in made.sampled.values())
    accounts = [session.trajectories() for session in (origin, copy)]
    assert sum(accounting["sampled_tokens"] for _, accounting in accounts) == said
    for session, (rows, accounting) in zip((origin, copy), accounts, strict=True):
        own = [call for call in session.calls if call["session_id"] == session.session_id]
        unseen = {call["call_id"] for call in own if call["lookahead"] == "not_chosen"}
        assert unseen <= {item["call_id"] for item in accounting["quarantined"]}
        assert not unseen & {call["parent_id"] for call in own}
        assert sum(sum(row["loss_mask"]) for row in rows) == accounting["exported_tokens"]
        for row in rows:
            assert not unseen & set(row["call_ids"])
            assert row["logprobs"] == pytest.approx(expected_logprobs(row, session.calls))


class ServedWalk(Walk):
    """Without requests for a model that is not served: here every name is."""

    def steps(self) -> dict[str, tuple[int, Callable[[], None]]]:
        return {name: step for name, step in super().steps().items() if name != "refused"}


def walk(session: Session, seed: int) -> None:
    harness = ServedWalk(session.base_url, session.api_key, seed)
    try:
        harness.run(8)
    finally:
        harness.close()


def test_tool_results_go_on_from_the_chosen_call(engine: ScriptedEngine, service: RunningService) -> None:
    call_tools(engine)
    session = service.session(lookahead=THREE, echo_policy="minted")
    first = session.answer("find it", tools=TOOLS)
    session.ask([turn("user", "find it"), first, tool_result(first, "there")], tools=TOOLS)
    calls = session.calls
    assert {call["parent_id"] for call in calls[3:]} == {calls[0]["call_id"]}
