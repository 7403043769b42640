"""A judge gives each call of a closed session a reward and a hint, from what came of the call."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from tests.support.engine.scripted_engine import Generation, Say, ScriptedEngine
from tests.support.service.redis_server import RedisServer
from tests.support.service.running_service import RunningService
from tests.support.service.scripted_service import Answer, ScriptedService, json_answer, serving
from tests.support.service.verbatim_process import TRAINER

LINE = "POST /turn"


@pytest.fixture(scope="module")
def judge() -> Iterator[ScriptedService]:
    with serving(ScriptedService()) as scripted:
        yield scripted


def advise(generation: Generation, index: int) -> Say:
    """What a model answers that rates a message, or is asked for a hint."""
    if generation.sampling.get("structured_outputs"):
        return Say("7")
    return Say("None." if "What came of it:\n[]" in generation.prompt else "look first")


@pytest.fixture(scope="module")
def service(judge: ScriptedService, redis_server: RedisServer) -> Iterator[RunningService]:
    redis_server.flushall()
    judges = {
        "prm": {"url": f"{judge.url}/turn"},
        "model": {"model": "judge", "votes": 2},
        "adviser": {"model": "judge", "hints": True},
    }
    with ScriptedEngine() as student, ScriptedEngine(default=advise) as other:
        engines = [student.url, f"judge={other.url}"]
        with RunningService(engines, redis_server.url, scorers=judges, frozen_models=["judge"]) as service:
            yield service


def play(service: RunningService, judge_name: str) -> str:
    session = service.session(scores=[judge_name])
    messages: list[Any] = [{"role": "user", "content": "first"}]
    messages += [session.answer(messages), {"role": "user", "content": "and what came of it"}]
    session.answer(messages)
    session.close(reward=1.0)
    return session.session_id


def lease(service: RunningService) -> list[dict[str, Any]]:
    answer = service.request(
        "POST", "/batches/lease", TRAINER, json={"max_groups": 1, "wait_seconds": 60, "builder": "per_call"}
    )
    assert answer.status_code == 200, answer.text
    service.request("POST", f"/batches/{answer.json()['lease_id']}/ack", TRAINER)
    (group,) = answer.json()["groups"]
    rows: list[dict[str, Any]] = group["trajectories"]
    return rows


def test_a_judge_sees_what_came_of_a_call_and_its_verdicts_are_rewards_of_calls(
    service: RunningService, judge: ScriptedService
) -> None:
    judge.reset().script(LINE, json_answer({"score": 0.25, "hint": "look first"}), json_answer({"score": 0.75}))
    session_id = play(service, "prm")
    assert sorted(row["reward"] for row in lease(service)) == [0.25, 0.75]
    first, second = (request.body for request in judge.received)
    assert [message["content"] for message in first["next"]] == ["and what came of it"]
    assert (second["next"], first["reply"]["role"], first["reward"]) == ([], "assistant", 1.0)
    session = service.request("GET", f"/sessions/{session_id}").json()
    assert session["reward_metadata"]["hints"] == {first["call_id"]: "look first"}
    assert session["per_call"] == {first["call_id"]: 0.25, second["call_id"]: 0.75}


@pytest.mark.parametrize(
    "fault", [Answer(500), json_answer({"score": "good"}), Answer(drop=True)], ids=["500", "no number", "gone"]
)
def test_a_judge_that_fails_is_asked_again(service: RunningService, judge: ScriptedService, fault: Answer) -> None:
    judge.reset().script(LINE, fault, json_answer({"score": 0.5}))
    play(service, "prm")
    assert [row["reward"] for row in lease(service)] == [0.5, 0.5]


def test_a_frozen_model_judges_in_tenths(service: RunningService) -> None:
    play(service, "model")
    assert [row["reward"] for row in lease(service)] == [0.7, 0.7]


def test_a_frozen_model_that_is_asked_for_hints_gives_one_where_the_message_could_be_better(service: RunningService) -> None:
    session_id = play(service, "adviser")
    assert [row["reward"] for row in lease(service)] == [0.7, 0.7]
    session = service.request("GET", f"/sessions/{session_id}").json()
    # Nothing came of the last call.
    assert list(session["reward_metadata"]["hints"].values()) == ["look first"]


def test_feedback_of_a_person_counts_before_a_judges_while_the_session_is_open_and_until_it_is_leased(
    service: RunningService, judge: ScriptedService
) -> None:
    judge.reset().script(LINE, json_answer({"score": 0.5, "hint": "look first"}))
    session = service.session(scores=["prm"])
    session.ask("a question")
    (call,) = session.calls
    path, call_id = f"/sessions/{session.session_id}/feedback", call["call_id"]
    said = [({"call_id": "c0", "reward": 1.0}, 404), ({"call_id": call_id}, 400), ({"call_id": call_id, "reward": 1.0}, 204)]
    for body, status in [*said, ({"call_id": call_id, "reward": -1.0, "hint": "too long"}, 204)]:
        assert service.request("POST", path, json=body).status_code == status
    session.close(reward=1.0)
    assert [row["reward"] for row in lease(service)] == [-1.0]
    assert service.request("GET", f"/sessions/{session.session_id}").json()["reward_metadata"]["hints"] == {call_id: "too long"}
    assert service.request("POST", path, json={"call_id": call_id, "reward": 0.0}).status_code == 409
