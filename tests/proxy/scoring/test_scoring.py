"""Sessions that name a scorer are scored before their group is delivered, and no number is believed that no engine computed.

The scripted engines give every id the same logprob, sampled or scored: a function of the ids before it (`given_logprobs`).
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from tests.support.engine.scripted_details import given_logprobs
from tests.support.engine.scripted_engine import Fail, Generation, Hang, Reply, Say, ScriptedEngine
from tests.support.service.redis_server import RedisServer
from tests.support.service.running_service import RunningService
from tests.support.service.verbatim_process import ADMIN, TRAINER, verbatim, wait_until

SCORERS = {
    "teacher": {"policy": "teacher", "top_k": 2},
    "optional": {"policy": "teacher", "required": False},
    "later": {"policy": "teacher", "at": "demand"},
    "raw": {"at": "call", "when": "grammar"},
}
Engines = tuple[ScriptedEngine, ScriptedEngine, RunningService]


@pytest.fixture(scope="module")
def running(redis_server: RedisServer) -> Iterator[Engines]:
    redis_server.flushall()
    with ScriptedEngine() as student, ScriptedEngine() as teacher:
        engines = [student.url, f"teacher={teacher.url}"]
        limits = {"at_once": 2, "request_seconds": 3.0}
        with RunningService(engines, redis_server.url, scorers=SCORERS, scoring=limits) as service:
            yield student, teacher, service


@pytest.fixture
def student(running: Engines) -> ScriptedEngine:
    return running[0].reset()


@pytest.fixture
def teacher(running: Engines) -> ScriptedEngine:
    running[1].clear_faults()
    return running[1].reset()


@pytest.fixture
def service(running: Engines) -> RunningService:
    return running[2]


def lease(service: RunningService, group_id: str) -> list[dict[str, Any]]:
    """The rows of the group, once it is delivered."""
    while True:
        answer = service.request("POST", "/batches/lease", TRAINER, json={"max_groups": 1, "wait_seconds": 60})
        assert answer.status_code == 200, answer.text
        found = answer.json()
        service.request("POST", f"/batches/{found['lease_id']}/ack", TRAINER)
        for group in found["groups"]:
            if group["group_id"] == group_id:
                rows: list[dict[str, Any]] = group["trajectories"]
                return rows


def array(values: Sequence[float | None]) -> NDArray[np.float64]:
    """NaN where the list has none."""
    return np.array([np.nan if each is None else each for each in values])


def play(service: RunningService, *, turns: int = 2, branches: int = 1, **fields: Any) -> str:
    """A session of so many turns, the last of which is asked `branches` times. Its id."""
    session = service.session(**fields)
    messages: list[Any] = [{"role": "user", "content": "a long question " * 8}]
    for turn in range(turns):
        replies = [session.answer(messages, seed=seed) for seed in range(branches if turn == turns - 1 else 1)]
        messages += [replies[0], {"role": "user", "content": f"and then {turn}"}]
    session.close(reward=1.0)
    return session.session_id


def scored(generations: list[Generation]) -> list[Generation]:
    return [each for each in generations if each.sampling.get("prompt_logprobs") is not None]


def check_row(row: dict[str, Any], name: str = "teacher") -> None:
    """Each sampled token has its own logprob, at its own place, and nothing else has one."""
    expected = array(given_logprobs(row["token_ids"]))
    mask = np.array(row["loss_mask"], bool)
    own = array(row["scores"][name]["logprobs"])
    np.testing.assert_array_equal(own[mask], expected[mask])
    assert np.isnan(own[~mask]).all()
    assert "error" not in row["scores"][name]


def test_a_teacher_scores_each_sampled_token_at_its_own_place_before_the_group_is_delivered(
    student: ScriptedEngine, teacher: ScriptedEngine, service: RunningService
) -> None:
    session_id = play(service, scores=["teacher"])
    (row,) = lease(service, session_id)
    check_row(row)
    told = row["scores"]["teacher"]
    assert (told["policy"], told["mode"]) == ("teacher", "raw")
    sampled = [at for at, trained in enumerate(row["loss_mask"]) if trained]
    assert [told["top_ids"][at] for at in sampled] == [[row["token_ids"][at], row["token_ids"][at] + 1] for at in sampled]
    assert [span[0] for span in told["weight_versions"]] == [0] * len(told["weight_versions"])
    assert not scored(student.generations)
    # One request for the row has both turns.
    assert len(scored(teacher.generations)) == 1


def test_a_group_waits_for_its_scores(student: ScriptedEngine, teacher: ScriptedEngine, service: RunningService) -> None:
    scored_now = threading.Event()
    teacher.script = lambda generation, index: Say(token_ids=[1], gate=scored_now)
    session_id = play(service, scores=["teacher"])
    assert service.request("POST", "/batches/lease", TRAINER, json={"max_groups": 1}).status_code == 204
    scored_now.set()
    (row,) = lease(service, session_id)
    check_row(row)


def test_rows_that_share_their_beginning_are_computed_once_and_never_read_from_the_cache(
    student: ScriptedEngine, teacher: ScriptedEngine, service: RunningService
) -> None:
    """What was cached comes back as whatever was in memory: it is taken from the row before, or asked for again."""
    play(service, scores=["teacher"])
    teacher.reset()
    rows = lease(service, play(service, turns=3, branches=6, scores=["teacher"]))
    assert len(rows) == 6
    for row in rows:
        check_row(row)
    asked = scored(teacher.generations)
    assert any(each.cached_tokens for each in asked)


def test_each_score_is_what_its_own_version_says_where_a_push_comes_between_two_requests(
    student: ScriptedEngine, teacher: ScriptedEngine, service: RunningService
) -> None:
    """Version 3 says one less of every token. Nothing of one version is laid beside what another says of the same call."""
    asked: list[Generation] = []
    before = teacher.sampler.version

    def script(generation: Generation, index: int) -> None:
        if generation.sampling.get("prompt_logprobs") is not None:
            asked.append(generation)
            teacher.sampler.version = "3" if len(asked) == 2 else before

    def bend(generation: Generation, told: list[Any]) -> list[Any]:
        if teacher.sampler.version == before:
            return told
        lower = ({key: {**one, "logprob": one["logprob"] - 1} for key, one in entry.items()} for entry in told[1:])
        return [None, *lower]

    teacher.script, teacher.bend_scores = script, bend
    try:
        rows = lease(service, play(service, branches=3, scores=["teacher"]))
    finally:
        teacher.sampler.version = before
    for row in rows:
        expected, told = array(given_logprobs(row["token_ids"])), row["scores"]["teacher"]
        own = array(told["logprobs"])
        for version, start, end in told["weight_versions"]:
            np.testing.assert_array_equal(own[start:end], expected[start:end] - (version == 3))


FAULTS: dict[str, Any] = {
    "a short list": lambda generation, told: told[:-1],
    "no list": lambda generation, told: [],
    "the end of an abort": lambda generation, told: [None],
    "another id": lambda generation, told: [told[0], {"7": {"logprob": -1.0, "rank": 1}}, *told[2:]],
    "a logprob above 0": lambda generation, told: [
        None,
        *({key: {"logprob": 902171.0, "rank": 1} for key in entry} for entry in told[1:]),
    ],
}


@pytest.mark.parametrize("fault", FAULTS)
def test_an_answer_that_is_not_to_be_believed_is_asked_for_again(
    student: ScriptedEngine, teacher: ScriptedEngine, service: RunningService, fault: str
) -> None:
    left = [FAULTS[fault]] * 2
    teacher.bend_scores = lambda generation, told: left.pop()(generation, told) if left else told
    (row,) = lease(service, play(service, scores=["teacher"]))
    check_row(row)
    assert not left


def test_an_answer_about_what_is_cached_that_cannot_be_written_is_asked_for_without_the_cache(
    student: ScriptedEngine, teacher: ScriptedEngine, service: RunningService
) -> None:
    lease(service, play(service, scores=["teacher"]))

    def script(generation: Generation, index: int) -> Reply | None:
        reads_cache = generation.sampling.get("skip_reading_prefix_cache") is False
        unwritten = Fail(400, "Out of range float values are not JSON compliant", "BadRequestError")
        return unwritten if reads_cache else None

    teacher.script = script
    for row in lease(service, play(service, branches=3, scores=["teacher"])):
        check_row(row)


@pytest.mark.parametrize("reply", [Fail(500), Fail(503), Hang()], ids=["HTTP 500", "HTTP 503", "no answer"])
def test_an_engine_that_fails_is_asked_again(
    student: ScriptedEngine, teacher: ScriptedEngine, service: RunningService, reply: Reply
) -> None:
    left: list[Reply] = [reply]
    teacher.script = lambda generation, index: left.pop() if left else None
    (row,) = lease(service, play(service, scores=["teacher"]))
    check_row(row)


def test_a_probability_of_0_is_unknown_and_said(
    student: ScriptedEngine, teacher: ScriptedEngine, service: RunningService
) -> None:
    def bend(generation: Generation, told: list[Any]) -> list[Any]:
        last = str(generation.prompt_ids[-1])
        return [*told[:-1], {last: {"logprob": -9999.0, "rank": 9}}]

    teacher.bend_scores = bend
    (row,) = lease(service, play(service, scores=["optional"]))
    assert row["scores"]["optional"]["logprobs"][-1] is None
    assert row["scores"]["optional"]["logprobs"][-2] is not None
    assert "probability of 0" in row["scores"]["optional"]["error"]


def state_of(service: RunningService, session_id: str, scorer: str) -> dict[str, Any]:
    told: dict[str, Any] = service.request("GET", f"/sessions/{session_id}/scores").json()["scorers"][scorer]
    return told


@pytest.mark.case(95)
def test_ids_masks_and_logprobs_are_those_of_an_unscored_session(
    student: ScriptedEngine, teacher: ScriptedEngine, service: RunningService
) -> None:
    plain = lease(service, play(service, branches=3))
    teacher.script = lambda generation, index: Fail(400, "no logprobs here", "BadRequestError")
    failed = lease(service, play(service, branches=3, scores=["optional"]))
    assert all("no logprobs here" in row["scores"]["optional"]["error"] for row in failed)
    teacher.script = None
    given = lease(service, play(service, branches=3, scores=["optional"]))
    for rows in (failed, given):
        for row, other in zip(rows, plain, strict=True):
            for name in ("token_ids", "loss_mask", "logprobs", "weight_versions"):
                assert row[name] == other[name]


def test_scores_that_are_demanded_are_in_the_rows_of_a_closed_session(
    student: ScriptedEngine, teacher: ScriptedEngine, service: RunningService
) -> None:
    session = service.session(trained=False)
    session.ask("a question")
    refused = service.request("POST", f"/sessions/{session.session_id}/scores", json={"scorer": "later"})
    assert (refused.status_code, refused.json()["error"]["code"]) == (409, "conflict")
    session.close()
    path = f"/sessions/{session.session_id}/scores"
    assert service.request("POST", path, json={"scorer": "later"}).status_code == 202
    wait_until(lambda: state_of(service, session.session_id, "later")["state"] == "scored", 60, "it is scored")
    (row,) = session.trajectories()[0]
    check_row(row, "later")
    asked = ("score", session.session_id, "--scorer", "later", "--url", service.url)
    done = verbatim(*asked, VERBATIM_ADMIN_TOKEN=ADMIN)
    assert (done.returncode, "tokens of 1 calls scored by later" in done.stdout) == (0, True), done.stderr


GRAMMAR = {"structured_outputs": {"regex": "[a-z]+"}}


def test_masked_tokens_get_raw_logprobs_of_the_version_that_sampled_them_while_the_session_is_open(
    student: ScriptedEngine, teacher: ScriptedEngine, service: RunningService
) -> None:
    session = service.session(scores=["raw"])
    session.ask("without a grammar")
    assert not scored(student.generations)
    session.ask("with one", extra_body=GRAMMAR)
    wait_until(lambda: state_of(service, session.session_id, "raw")["calls"] == 1, 60, "the masked call is scored")
    (masked,) = [call for call in session.calls if call["logprob_modes"] and call["logprob_modes"][0][0] == "masked"]
    (row,) = [row for row in session.trajectories()[0] if masked["call_id"] in row["call_ids"]]
    check_row(row, "raw")
    assert not scored(teacher.generations)
    session.close(reward=1.0)
    lease(service, session.session_id)
    assert len(scored(student.generations)) == 1


def test_masked_tokens_whose_version_serves_no_more_stay_without_and_say_so(
    student: ScriptedEngine, teacher: ScriptedEngine, service: RunningService
) -> None:
    session = service.session(scores=["raw"])
    at_once = threading.Event()
    student.script = lambda generation, index: (
        Say(token_ids=[1, 2, 3], gate=at_once) if generation.sampling.get("prompt_logprobs") is not None else None
    )
    session.ask("with a grammar", extra_body=GRAMMAR)
    before, student.sampler.version = student.sampler.version, "7"
    try:
        at_once.set()
        session.close(reward=1.0)
        wait_until(lambda: state_of(service, session.session_id, "raw")["state"] == "failed", 60, "it is said")
        assert "sampled under version 0, and version 7 serves" in state_of(service, session.session_id, "raw")["error"]
        (row,) = session.trajectories()[0]
        assert not any(row["scores"]["raw"]["logprobs"])
    finally:
        student.sampler.version = before


@pytest.mark.parametrize(("names", "said"), [(["teachr"], "no scorer 'teachr'"), (["later"], "on demand")])
def test_a_session_names_scorers_that_there_are(service: RunningService, names: list[str], said: str) -> None:
    answer = service.request("POST", "/sessions", json={"scores": names})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "scores")
    assert said in answer.json()["error"]["message"]
