"""How scoring ends without scores: refused, too long, or given up; the reason stands with the session and in its rows."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from proxy import rows
from proxy.errors import StoreUnavailable
from proxy.scoring.scoring import MOST_LOST
from proxy.scoring.work import SessionScoring
from proxy.store.score_jobs import ScoreJobStore, TakenJob
from proxy.store.scores import ScoreStore
from tests.proxy.scoring.test_scoring import lease, play, scored, state_of
from tests.support.engine.scripted_engine import Fail, Generation, ScriptedEngine
from tests.support.service.redis_server import RedisServer
from tests.support.service.running_service import RunningService
from tests.support.service.verbatim_process import TRAINER, wait_until


@contextmanager
def scoring(
    redis_server: RedisServer, student: ScriptedEngine, teacher: ScriptedEngine, **limits: Any
) -> Iterator[RunningService]:
    """A service that gives up at the first failure, unless `limits` say otherwise."""
    redis_server.flushall()
    scorers: dict[str, Any] = {
        "teacher": {"policy": "teacher"},
        "optional": {"policy": "teacher", "required": False},
        "nobody": {"policy": "nobody"},
        "hindsight": {"policy": "teacher", "prompt": "hindsight"},
        # Nobody listens there.
        **{name: {"url": "http://127.0.0.1:9/turn", "required": name == "strict"} for name in ("strict", "lenient")},
    }
    with student, teacher:
        engines = [student.url, f"teacher={teacher.url}"]
        asked: Any = {"scorers": scorers, "scoring": {"timeout_seconds": 0.001, **limits}, "group": {"policy": "drop"}}
        with RunningService(engines, redis_server.url, **asked) as service:
            yield service


@pytest.mark.case(95)
def test_a_group_fails_whose_required_scorer_is_dead_and_another_is_delivered_with_the_reason(
    redis_server: RedisServer,
) -> None:
    teacher = ScriptedEngine()
    with scoring(redis_server, ScriptedEngine(), teacher) as service:
        teacher.script = lambda generation, index: Fail(500, "out of order")
        failed = play(service, scores=["teacher"])
        (row,) = lease(service, play(service, scores=["optional"]))
        told = row["scores"]["optional"]
        assert "not scored within" in told["error"] and "out of order" in told["error"]
        assert all(each is None for each in told["logprobs"])
        wait_until(lambda: state_of(service, failed, "teacher")["state"] == "failed", 60, "the scorer is given up")
        assert "out of order" in state_of(service, failed, "teacher")["error"]
        assert service.request("POST", "/batches/lease", TRAINER, json={"max_groups": 1}).status_code == 204


def test_a_scorer_whose_policy_has_no_engine_is_not_replaced_by_another_policy(redis_server: RedisServer) -> None:
    student, teacher = ScriptedEngine(), ScriptedEngine()
    with scoring(redis_server, student, teacher) as service:
        session_id = play(service, scores=["nobody"])
        wait_until(lambda: state_of(service, session_id, "nobody")["state"] == "failed", 60, "it is given up")
        assert "no engine of the policy 'nobody'" in state_of(service, session_id, "nobody")["error"]
        assert not scored(student.generations + teacher.generations)


def test_rows_over_the_scorers_window_are_said_and_the_calls_before_them_scored(redis_server: RedisServer) -> None:
    with scoring(redis_server, ScriptedEngine(), ScriptedEngine(max_model_len=90)) as service:
        (row,) = lease(service, play(service, turns=4, scores=["optional"]))
        told = row["scores"]["optional"]
        assert "window of 90" in told["error"]
        known = [at for at, each in enumerate(told["logprobs"]) if each is not None]
        assert known and max(known) < 90


def test_a_scorer_with_another_vocabulary_is_refused_by_name(redis_server: RedisServer) -> None:
    teacher = ScriptedEngine("llama3")
    with scoring(redis_server, ScriptedEngine("qwen3"), teacher) as service:
        (row,) = lease(service, play(service, scores=["optional"]))
        assert "another vocabulary" in row["scores"]["optional"]["error"]
        assert not scored(teacher.generations)


def test_a_session_without_required_verdicts_is_not_delivered_and_says_why(redis_server: RedisServer) -> None:
    with scoring(redis_server, ScriptedEngine(), ScriptedEngine()) as service:
        session_id = play(service, scores=["strict"])
        wait_until(lambda: state_of(service, session_id, "strict")["state"] == "failed", 60, "it is given up")
        assert "was not reached" in state_of(service, session_id, "strict")["error"]
        assert service.request("POST", "/batches/lease", TRAINER, json={"max_groups": 1}).status_code == 204


def test_a_session_whose_judge_gives_no_hints_is_delivered_without_hindsight(redis_server: RedisServer) -> None:
    teacher = ScriptedEngine()
    with scoring(redis_server, ScriptedEngine(), teacher) as service:
        (row,) = lease(service, play(service, scores=["hindsight", "lenient"]))
        assert "scores" not in row or not row["scores"]
        assert not scored(teacher.generations)


def test_hindsight_is_queued_while_its_judge_is_asked(redis_server: RedisServer) -> None:
    """It had no state: its job comes after the judge's."""
    with scoring(redis_server, ScriptedEngine(), ScriptedEngine(), timeout_seconds=60) as service:
        session_id = play(service, scores=["hindsight", "lenient"])
        assert {state_of(service, session_id, name)["state"] for name in ("hindsight", "lenient")} == {"queued"}


def test_a_session_does_not_wait_for_a_scorer_that_no_process_has_any_more(redis_server: RedisServer) -> None:
    """Nobody looked for jobs where no scorer was set: its group waited forever."""
    redis_server.flushall()
    with ScriptedEngine() as student:
        with RunningService([student.url], redis_server.url, scorers={"gone": {"policy": "nobody"}}) as service:
            session_id = play(service, scores=["gone"])
        with RunningService([student.url], redis_server.url, scoring={"timeout_seconds": 0.001}) as service:
            wait_until(lambda: state_of(service, session_id, "gone")["state"] == "failed", 60, "it is given up")
            assert "there is no scorer 'gone'" in state_of(service, session_id, "gone")["error"]


@pytest.mark.parametrize(("holder", "name"), [(SessionScoring, "run"), (rows, "session_rows")])
def test_what_a_fault_of_the_service_breaks_ends_with_its_reason_and_its_group_with_it(
    redis_server: RedisServer, monkeypatch: pytest.MonkeyPatch, holder: Any, name: str
) -> None:
    """It was tried each minute for ever, and its group never ended."""

    async def fail(*_: Any) -> None:
        raise KeyError("broken")

    def script(generation: Generation, index: int) -> Fail:
        # When it was closed its rows could be built.
        monkeypatch.setattr(holder, name, fail)
        return Fail(500, "out of order")

    teacher = ScriptedEngine()
    with scoring(redis_server, ScriptedEngine(), teacher) as service:
        teacher.script = script
        session_id = play(service, scores=["teacher"], group_id="alone", group_size=1)
        wait_until(lambda: state_of(service, session_id, "teacher")["state"] == "failed", 60, "it is given up")
        assert "KeyError: 'broken'" in state_of(service, session_id, "teacher")["error"]
        assert {"fault", "gave_up"} <= failures(service)
        path = "/groups/alone"
        wait_until(lambda: service.request("GET", path).json()["delivery"] == "dropped", 60, "its group ends")
        monkeypatch.undo()
        teacher.script = None
        service.request("POST", f"/sessions/{session_id}/scores", json={"scorer": "teacher"})
        wait_until(lambda: state_of(service, session_id, "teacher")["state"] == "scored", 60, "it is tried again")


@pytest.mark.parametrize(("holder", "name"), [(SessionScoring, "run"), (rows, "session_rows")])
def test_a_session_with_which_process_after_process_vanishes_ends_with_that_reason(
    redis_server: RedisServer, monkeypatch: pytest.MonkeyPatch, holder: Any, name: str
) -> None:
    """It was taken again for ever, by one process after the other. Here each loses the job instead of its life."""
    keep, hanging = ScoreJobStore.keep, False

    async def hang(*_: Any) -> None:
        nonlocal hanging
        hanging = True
        try:
            await asyncio.sleep(60)
        finally:
            hanging = False

    async def lose(jobs: ScoreJobStore, taken: TakenJob, seconds: float) -> bool:
        return not hanging and await keep(jobs, taken, seconds)

    def script(generation: Generation, index: int) -> Fail:
        # When it was closed its rows could be built.
        monkeypatch.setattr(holder, name, hang)
        return Fail(500, "out of order")

    monkeypatch.setattr(ScoreJobStore, "keep", lose)
    hurry(monkeypatch)
    teacher = ScriptedEngine()
    with scoring(redis_server, ScriptedEngine(), teacher, timeout_seconds=60, at_once=1) as service:
        teacher.script = script
        session_id = play(service, scores=["teacher"], group_id="alone", group_size=1)
        wait_until(lambda: state_of(service, session_id, "teacher")["state"] == "failed", 60, "it is given up")
        assert f"none of {MOST_LOST + (holder is rows)} tries" in state_of(service, session_id, "teacher")["error"]
        wait_until(lambda: service.request("GET", "/groups/alone").json()["delivery"] == "dropped", 60, "its group ends")


def test_a_store_that_takes_no_scores_for_a_while_is_waited_for(
    redis_server: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each try that it broke off counted as a process that had vanished."""
    keep, refused = ScoreStore.keep, 0

    async def refuse(store: ScoreStore, *args: Any, **options: Any) -> None:
        nonlocal refused
        refused += 1
        if refused <= MOST_LOST + 3:
            raise StoreUnavailable("the store is full")
        await keep(store, *args, **options)

    monkeypatch.setattr(ScoreStore, "keep", refuse)
    hurry(monkeypatch)
    with scoring(redis_server, ScriptedEngine(), ScriptedEngine(), timeout_seconds=60, at_once=1) as service:
        session_id = play(service, scores=["teacher"])
        wait_until(lambda: state_of(service, session_id, "teacher")["state"] in ("scored", "failed"), 60, "it ends")
        assert state_of(service, session_id, "teacher")["state"] == "scored"


def hurry(monkeypatch: pytest.MonkeyPatch) -> None:
    """For one worker: another one would take what the first still has."""
    for limit in ("TAKEN_SECONDS", "LOOK_SECONDS"):
        monkeypatch.setattr(f"proxy.scoring.scoring.{limit}", 0.1)


def failures(service: RunningService) -> set[str]:
    """The reasons that were counted of the teacher."""
    page = service.request("GET", "/metrics").text
    return set(re.findall(r'^verbatim_score_failures_total\{reason="(\w+)",scorer="teacher"\} [1-9]', page, re.MULTILINE))
