"""Sessions as files and back: the real commands against the real service, with an engine that says what it is told."""

from __future__ import annotations

import hashlib
import json
import os
import pty
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, fields, replace
from pathlib import Path
from traceback import format_exception
from typing import Any

import msgpack
import msgspec
import pyarrow.parquet as pq
import pytest
from openai import AuthenticationError, InternalServerError
from typer.testing import CliRunner

from cli.main import app
from cli.refusal import CommandError
from contract.sessions import Fork, GroupRule, Lookahead, SessionView
from proxy.api.sessions import session_as_wire, session_from_wire
from proxy.archive.folder import ArchiveReader, ArchiveWriter, KnownSessions, read_table
from proxy.archive.tables import SCHEMA_VERSION, TABLES, arrow_schema
from proxy.errors import Conflict
from proxy.store.archive import ArchiveStore
from proxy.store.states import Intent, SessionInfo, SessionState
from tests.support.engine.scripted_engine import Fail, ScriptedEngine
from tests.support.engine.scripted_images import SEEING, picture, url_of
from tests.support.service.forked import ForkedVerbatim
from tests.support.service.redis_server import RedisServer, Store, running_redis
from tests.support.service.running_service import ADMIN, TRAINER, RunningService, Session
from tests.support.service.verbatim_process import environment
from tests.support.sessions.random_harness import RandomHarness
from tests.support.sessions.stored_scores import scored

CALLS = 12
KILLED = """
import os, signal, sys
import cli.archive_api, cli.export, proxy.archive.folder, pyarrow.parquet
from cli.main import main
proxy.archive.folder.PART_SESSIONS = 1
folder, *steps = sys.argv[1:]
for step in steps:
    left = int(step)
    def dying(descriptor, sync=os.fsync):
        global left
        left -= 1
        if left < 0:
            os.kill(os.getpid(), signal.SIGKILL)
        return sync(descriptor)
    if (pid := os.fork()) == 0:
        proxy.archive.folder.os.fsync = dying
        sys.argv[1:] = ["export", "--out", os.path.join(folder, step)]
        main()
    print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), flush=True)
"""
"""Runs an export per step, with parts of one session each, into a folder named for the step, and kills it before that many syncs to
disk."""


def test_an_archive_has_a_column_for_every_field_that_a_session_is_shown_with() -> None:
    """A field without one made every archive refuse to be imported again."""
    assert {each.name for each in fields(SessionView)} <= TABLES["sessions"].keys()


@pytest.fixture(scope="module")
def engine() -> Iterator[ScriptedEngine]:
    with ScriptedEngine(SEEING, most_images=4) as engine:
        yield engine


@pytest.fixture(scope="module")
def other_redis() -> Iterator[RedisServer]:
    with running_redis() as server:
        yield server


@pytest.fixture(scope="module")
def running(engine: ScriptedEngine, redis_server: RedisServer) -> Iterator[RunningService]:
    with RunningService(engine.url, redis_server.url, strict_models=True) as service:
        yield service


@pytest.fixture
def service(running: RunningService, redis_url: str) -> RunningService:
    """It has no session yet."""
    return running


@pytest.fixture
def second(engine: ScriptedEngine, other_redis: RedisServer) -> Iterator[RunningService]:
    """A service with an empty store of its own."""
    other_redis.flushall()
    with RunningService(engine.url, other_redis.url) as service:
        yield service


@dataclass(frozen=True)
class Ended:
    returncode: int
    stdout: str
    stderr: str


def command(service: RunningService, *args: str) -> Ended:
    """The command, in this process: starting one for each would take most of the time."""
    variables = {"VERBATIM_URL": service.url, "VERBATIM_ADMIN_TOKEN": ADMIN}
    done = CliRunner().invoke(app, args, env=variables)
    if isinstance(done.exception, CommandError):
        return Ended(done.exception.exit_code, done.stdout, f"verbatim: {done.exception}\n")
    assert done.exception is None, "".join(format_exception(done.exception))
    return Ended(done.exit_code, done.stdout, done.stderr)


def export(service: RunningService, out: Path, *args: str) -> str:
    done = command(service, "export", "--out", str(out), *args)
    assert (done.returncode, done.stderr) == (0, ""), done.stderr
    return done.stdout


def imported(service: RunningService, folder: Path, *args: str) -> str:
    done = command(service, "import", str(folder), *args)
    assert (done.returncode, done.stderr) == (0, ""), done.stderr
    return done.stdout


def table(folder: Path, name: str) -> list[dict[str, Any]]:
    """The rows of one table in all its parts, in order."""
    return [row for path in sorted(folder.glob(f"{name}-*")) for row in read_table(path)]


def talked(
    service: RunningService, reward: float | None = 1.0, status: str = "completed", error: str | None = None, **fields: Any
) -> Session:
    """A closed session of two branches: the second question is asked in two ways."""
    session = service.session(**fields)
    asked: list[Any] = [{"role": "user", "content": "hello"}]
    said = session.answer(asked)
    for question in ("and then?", "why?"):
        session.answer([*asked, said, {"role": "user", "content": question}])
    session.close(status, reward=reward, error=error)
    return session


def walked(service: RunningService, seed: int) -> str:
    """A closed session of a random harness: retries, edits, helpers, compaction, replies cut short."""
    session = service.session(session_id=f"walk-{seed}", metadata={"seed": seed, "names": {"ü": [1, None]}}, task_id="walk")
    harness = RandomHarness(session.base_url, session.api_key, seed)
    try:
        harness.run(CALLS)
    finally:
        harness.close()
    calls = [call["call_id"] for call in session.calls]
    reward = {"reward": 0.25, "per_call": {calls[0]: -1.0}, "per_branch": {calls[-1]: 2.0}, "metadata": {"judge": "j"}}
    assert service.request("POST", f"/sessions/{session.session_id}/reward", json=reward).status_code == 200
    session.close()
    return session.session_id


def pictured(service: RunningService, *images: bytes, **fields: Any) -> Session:
    """A closed session that showed the model these images, one a turn."""
    session = service.session(**fields)
    history: list[Any] = []
    for data in images:
        history.append({"role": "user", "content": [{"type": "image_url", "image_url": {"url": url_of(data)}}]})
        history.append(session.answer(history))
    session.close(reward=1.0)
    return session


def leased(service: RunningService, groups: int = 100) -> list[dict[str, Any]]:
    answer = service.request("POST", "/batches/lease", TRAINER, json={"max_groups": groups})
    return [] if answer.status_code == 204 else [row for g in answer.json()["groups"] for row in g["trajectories"]]


def test_an_export_has_one_row_for_each_trajectory_with_all_that_the_wire_has(service: RunningService, tmp_path: Path) -> None:
    sessions = [talked(service, group_id="g", group_size=2, task_id="t", metadata={"a": 1}) for _ in range(2)]
    told = export(service, tmp_path / "out")
    assert told.startswith("exported 2 sessions with 4 trajectories, ")
    on_the_wire = {row["trajectory_id"]: row for session in sessions for row in session.trajectories()[0]}
    rows = table(tmp_path / "out", "trajectories")
    assert [row["trajectory_id"] for row in rows] == [*list(on_the_wire)[2:], *list(on_the_wire)[:2]], "newest session first"
    for row in rows:
        wire = on_the_wire[row["trajectory_id"]]
        assert {
            name: json.loads(row[name]) if name in ("metadata", "media", "logprob_modes") else row[name] for name in wire
        } == wire
        assert (row["session_status"], row["session_reward"], row["group_size"], row["row_weight"]) == (
            "completed",
            1.0,
            2,
            0.5,
        )
        assert row["rollout_id"] == row["session_id"]


def test_the_files_say_their_version_and_the_types_that_datasets_should_use(service: RunningService, tmp_path: Path) -> None:
    scored(service, talked(service).session_id, "teacher", top_k=1)
    pictured(service, picture())
    export(service, tmp_path)
    for name, columns in TABLES.items():
        schema = pq.read_schema(tmp_path / f"{name}-000000.parquet")
        assert schema.equals(arrow_schema(name))
        assert json.loads(schema.metadata[b"verbatim"]) == {
            "schema": "verbatim-archive",
            "schema_version": SCHEMA_VERSION,
            "table": name,
        }
        assert list(json.loads(schema.metadata[b"huggingface"])["info"]["features"]) == list(columns) == schema.names
    schema = pq.read_schema(tmp_path / "trajectories-000000.parquet")
    features = json.loads(schema.metadata[b"huggingface"])["info"]["features"]
    for name, value in {"token_ids": "int32", "loss_mask": "int8", "logprobs": "float32", "call_ids": "string"}.items():
        assert features[name] == [{"dtype": value, "_type": "Value"}]
        assert str(schema.field(name).type.value_type) == value.replace("float32", "float")
    assert features["weight_versions"] == [[{"dtype": "int64", "_type": "Value"}]]
    manifest = ArchiveReader(tmp_path).manifest
    assert (manifest["schema_version"], manifest["complete"], manifest["builder"]) == (SCHEMA_VERSION, True, "merged")


def test_what_an_export_holds_comes_back_as_it_was(service: RunningService, second: RunningService, tmp_path: Path) -> None:
    sessions = [*(walked(service, seed) for seed in range(3)), pictured(service, picture()).session_id]
    talked(service, reward=None, group_id="waiting", group_size=2)
    talked(service, status="failed", error="it broke")
    log = {"text": "$ agent --print\nAll \u65e5\u672c done.\n"}
    assert service.request("PUT", f"/sessions/{sessions[0]}/log", json=log).status_code == 204
    assert command(service, "sessions", "flag", sessions[0], "good", "--note", "wait: <b>").returncode == 0
    scored(service, sessions[0], "teacher", top_k=2)
    scored(service, sessions[0], "raw", top_k=0)
    export(service, tmp_path / "first")
    assert imported(second, tmp_path / "first") == f"imported 6 sessions from {tmp_path / 'first'}\n"
    export(second, tmp_path / "second")
    for name in TABLES:
        rows = table(tmp_path / "first", name)
        assert rows and table(tmp_path / "second", name) == rows
    for session_id in sessions:
        for what in ("", "/calls?limit=1000", "/trajectories", "/trajectories?builder=per_call"):
            here, there = (each.request("GET", f"/sessions/{session_id}{what}").json() for each in (service, second))
            assert here == there
    for page in ("", "/download/page.html"):
        assert log["text"] in second.request("GET", f"/ui/sessions/{sessions[0]}{page}").text


def test_an_export_of_a_flag_has_the_sessions_that_a_person_gave_it(service: RunningService, tmp_path: Path) -> None:
    chosen, taken_back, _ = (walked(service, seed) for seed in range(3))
    for session_id, flag in ((chosen, "good"), (taken_back, "good"), (taken_back, "")):
        assert service.request("PUT", f"/sessions/{session_id}/review", json={"flag": flag}).status_code == 200
    export(service, tmp_path / "out", "--flag", "good")
    assert [row["session_id"] for row in table(tmp_path / "out", "sessions")] == [chosen]
    for review in ({"flag": "<b>"}, {"flag": "x" * 65}, {"note": "x" * 4001}, {"mark": "good"}):
        assert service.request("PUT", f"/sessions/{chosen}/review", json=review).status_code == 400
    assert service.request("GET", f"/sessions/{chosen}").json()["flag"] == "good"
    assert service.request("PUT", "/sessions/nobodys/review", json={"flag": "good"}).status_code == 404


@pytest.mark.parametrize("seed", [1, 2])
def test_an_export_has_each_trained_token_in_one_step_of_atif(
    service: RunningService, engine: ScriptedEngine, tmp_path: Path, seed: int
) -> None:
    """Harbor's own models read such documents in tests/joins."""
    session_id = walked(service, seed)
    assert "wrote 1 sessions as ATIF" in export(service, tmp_path / "out", "--atif", str(tmp_path / "atif"))
    document = json.loads((tmp_path / "atif" / f"{session_id}.json").read_text(encoding="utf-8"))
    answer = service.request("GET", f"/sessions/{session_id}/trajectories").json()
    calls = {
        call["call_id"]: call for call in service.request("GET", f"/sessions/{session_id}/calls?limit=1000").json()["calls"]
    }
    trained: list[int] = []
    for trajectory in (document, *document.get("subagent_trajectories", ())):
        (row,) = [row for row in answer["trajectories"] if row["trajectory_id"] == trajectory["trajectory_id"]]
        for step in trajectory["steps"]:
            if ids := step.get("metrics", {}).get("completion_token_ids"):
                call = calls[step["extra"]["call_id"]]
                start = len(call["prompt_ids"])
                assert step["metrics"]["prompt_token_ids"] == row["token_ids"][:start] == call["prompt_ids"]
                assert ids == row["token_ids"][start : start + len(ids)] and set(
                    row["loss_mask"][start : start + len(ids)]
                ) == {1}
                assert step["metrics"]["logprobs"] == row["logprobs"][start : start + len(ids)]
                trained += ids
    assert len(trained) == answer["accounting"]["exported_tokens"] > 0


def test_an_export_has_the_scores_of_its_rows(service: RunningService, tmp_path: Path) -> None:
    session = talked(service)
    plain = talked(service)
    scored(service, session.session_id, "teacher", top_k=2)
    scored(service, session.session_id, "raw", top_k=0)
    export(service, tmp_path)
    for row in table(tmp_path, "trajectories"):
        names = ["scores", "score_logprobs", "score_top_ids", "score_top_logprobs"]
        if row["session_id"] == plain.session_id:
            assert [row[name] for name in names] == [None] * 4
            continue
        (wire,) = (each for each in session.trajectories()[0] if each["trajectory_id"] == row["trajectory_id"])
        told = json.loads(row["scores"])
        assert list(told) == ["raw", "teacher"] == sorted(wire["scores"])
        for at, name in enumerate(told):
            given = {key: row[f"score_{key}"][at] for key in ("logprobs", "top_ids", "top_logprobs")}
            assert {**given, **told[name]} == wire["scores"][name]
        known = [logprob is not None for logprob in row["score_logprobs"][0]]
        assert known == [mask == 1 for mask in row["loss_mask"]]


def test_an_export_says_which_sessions_were_scored_after_it(service: RunningService, tmp_path: Path) -> None:
    session = talked(service)
    export(service, tmp_path)
    scored(service, session.session_id, "teacher", top_k=0)
    assert "1 of them with other rewards or scores than they have now" in export(service, tmp_path)


def test_a_score_that_cannot_be_read_is_not_restored(service: RunningService, second: RunningService, tmp_path: Path) -> None:
    session = talked(service)
    scored(service, session.session_id, "teacher", top_k=0)
    export(service, tmp_path)
    (archived,) = ArchiveReader(tmp_path).sessions()
    part = {"session": dict(archived.state), "start": 0, "records": [], "last": False}
    for scores, said in (
        ({"teacher=c": b"x"}, "teacher=c"),
        ({"a b=c": next(iter(archived.scores.values()))}, "a scorer's name"),
    ):
        body = msgpack.packb({**part, "scores": scores})
        answer = second.request("POST", f"/sessions/{session.session_id}/records", content=body)
        assert (answer.status_code, said in answer.json()["error"]["message"]) == (400, True), answer.text


def test_an_export_has_the_preference_pairs_of_lookaheads(
    service: RunningService, engine: ScriptedEngine, tmp_path: Path
) -> None:
    session = service.session(lookahead={"n": 3})
    engine.say("same", "same", "other", "rest", "rest", "rest")
    said = session.answer("q")
    session.ask([{"role": "user", "content": "q"}, said, {"role": "user", "content": "r"}])
    calls = session.calls
    session.close("failed")
    file = tmp_path / "pairs.jsonl"
    for _ in range(2):
        told = export(service, tmp_path / "out", "--pairs", str(file))
        assert f"preference pairs to {file}" in told
    lines = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]
    assert len(lines) == (1 if calls[0]["reply"]["content"] == "same" else 2)
    for line in lines:
        chosen, rejected = (
            [call for call in calls if call["call_id"] == line[f"{name}_call_id"]] for name in ("chosen", "rejected")
        )
        for name, (call,) in (("chosen", chosen), ("rejected", rejected)):
            assert line[name] == [call["reply"]]
            assert (line[f"{name}_ids"], line[f"{name}_logprobs"]) == (call["completion_ids"], call["logprobs"])
            assert line["prompt_ids"] == call["prompt_ids"]
        assert (line["prompt"], line["session_id"]) == ([{"role": "user", "content": "q"}], session.session_id)


def test_a_fork_has_the_pairs_that_it_sampled_after_what_it_replays(
    service: RunningService, engine: ScriptedEngine, tmp_path: Path
) -> None:
    origin = service.session(lookahead={"n": 2}, group_id="origins")
    engine.say("one", "other", "this", "that")
    asked: list[Any] = [{"role": "user", "content": "q"}]
    asked += [origin.answer(asked), {"role": "user", "content": "r"}]
    fork = service.session(replay={"session_id": origin.session_id, "until": 1}, lookahead={"n": 2}, group_id="forks")
    assert fork.answer("q") == asked[1]
    fork.ask(asked)
    replayed, *sampled = fork.calls
    for session in (origin, fork):
        session.close("failed")
    file = tmp_path / "pairs.jsonl"
    export(service, tmp_path / "forks", "--group", "forks", "--pairs", str(file))
    (line,) = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]
    assert line["prompt"] == asked and line["prompt_ids"] == sampled[0]["prompt_ids"]
    assert {line["chosen_call_id"], line["rejected_call_id"]} == {call["call_id"] for call in sampled}
    export(service, tmp_path / "all", "--pairs", str(file))
    lines = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]
    owners = {line["session_id"]: line["chosen_call_id"] for line in lines}
    assert len(lines) == 2 and owners[origin.session_id] == replayed["call_id"]


def test_an_exported_fork_is_whole(service: RunningService, second: RunningService, tmp_path: Path) -> None:
    origin = talked(service, group_id="origins")
    fork = talked(service, replay={"session_id": origin.session_id, "until": 1}, group_id="forks").session_id
    export(service, tmp_path, "--group", "forks")
    assert imported(second, tmp_path) == f"imported 1 sessions from {tmp_path}\n"
    for what in ("", "/calls?limit=1000", "/trajectories"):
        here, there = (each.request("GET", f"/sessions/{fork}{what}").json() for each in (service, second))
        # When replies were given matters only to whoever runs the harness.
        assert {**here, "replayed_at": None} == {**there, "replayed_at": None}
    assert there["accounting"]["replayed_tokens"] > 0
    again = second.session(replay={"session_id": fork, "until": 1})
    assert again.answer("hello") == origin.calls[0]["reply"]
    assert second.request("DELETE", f"/sessions/{again.session_id}").status_code == 204
    # The origin is not here, but its calls are: they could not be told from those of a session of its name.
    named = {"session_id": origin.session_id, "replay": {"session_id": fork}}
    assert second.request("POST", "/sessions", json=named).status_code == 400


def test_an_import_may_be_repeated_and_delivers_nothing(
    service: RunningService, second: RunningService, tmp_path: Path
) -> None:
    session = talked(service)
    export(service, tmp_path)
    imported(second, tmp_path)
    assert "imported 0 sessions" in imported(second, tmp_path)
    assert leased(second) == []
    again = second.request("POST", f"/sessions/{session.session_id}/reward", json={"reward": 0.0})
    assert again.status_code == 409
    used = second.request("POST", f"/s/{session.session_id}/v1/chat/completions", session.api_key, json={"messages": []})
    assert used.status_code == 401


def test_an_import_may_be_repeated_also_where_metadata_is_not_a_number(
    service: RunningService, second: RunningService, tmp_path: Path
) -> None:
    """Python's JSON writes NaN and Infinity, and an evaluator's metrics have them."""
    odd = {"loss": float("nan"), "best": float("-inf")}
    content = json.dumps({"session_id": "odd", "metadata": odd}).encode()
    assert service.request("POST", "/sessions", content=content).status_code == 201
    content = json.dumps({"reward": 1.0, "metadata": odd}).encode()
    assert service.request("POST", "/sessions/odd/reward", content=content).status_code == 200
    service.request("POST", "/sessions/odd/close", json={"status": "timeout"})
    export(service, tmp_path)
    assert "imported 1 sessions" in imported(second, tmp_path)
    assert "imported 0 sessions" in imported(second, tmp_path)


def test_an_import_delivers_when_it_is_told_to_and_never_what_was_acknowledged(
    service: RunningService, second: RunningService, tmp_path: Path
) -> None:
    sessions = [talked(service, group_id="g", group_size=2, reward=reward) for reward in (0.0, 1.0)]
    ids = {row["trajectory_id"] for session in sessions for row in session.trajectories()[0]}
    export(service, tmp_path)
    imported(second, tmp_path)
    assert "2 were there already" in imported(second, tmp_path, "--deliver")
    assert {row["trajectory_id"] for row in leased(second)} == ids
    batch = service.request("POST", "/batches/lease", TRAINER, json={}).json()
    assert service.request("POST", f"/batches/{batch['lease_id']}/ack", TRAINER).status_code == 200
    imported(service, tmp_path, "--deliver")
    assert leased(service) == []


def test_an_import_refuses_a_session_that_differs(service: RunningService, second: RunningService, tmp_path: Path) -> None:
    talked(service, session_id="same")
    export(service, tmp_path)
    talked(second, session_id="same")
    before = second.request("GET", "/sessions/same").json()
    refused = command(second, "import", str(tmp_path))
    assert (refused.returncode, refused.stderr) == (1, "verbatim: another session has the id same\n")
    assert second.request("GET", "/sessions/same").json() == before
    service.request("POST", "/sessions/same/reward", json={"reward": 0.5})
    refused = command(service, "import", str(tmp_path))
    assert refused.returncode == 1 and "with another state" in refused.stderr
    assert service.request("GET", "/sessions/same").json()["reward"] == 0.5


def test_a_session_of_which_a_part_has_come_is_no_closed_one(
    service: RunningService, second: RunningService, tmp_path: Path
) -> None:
    session = talked(service)
    export(service, tmp_path)
    (whole,) = ArchiveReader(tmp_path).sessions()
    path = f"/sessions/{session.session_id}"
    part = {"session": whole.state, "start": 0, "records": whole.records[:1], "last": False}
    assert second.request("POST", f"{path}/records", content=msgpack.packb(part)).json()["outcome"] == "part"
    assert second.request("GET", path).json()["status"] == "restoring"
    assert export(second, tmp_path / "other").startswith("exported 0 sessions")
    gap = {**part, "start": 2, "records": whole.records[2:], "last": True}
    assert second.request("POST", f"{path}/records", content=msgpack.packb(gap)).status_code == 409
    short = {**part, "last": True}
    answer = second.request("POST", f"{path}/records", content=msgpack.packb(short))
    assert (answer.status_code, "has 1 calls instead of 3" in answer.text) == (409, True)
    imported(second, tmp_path)
    assert second.request("GET", path).json() == service.request("GET", path).json()


@pytest.mark.parametrize(
    ("changes", "status", "said"),
    [
        ({"session_id": "other"}, 400, "the part is of session 'other'"),
        ({"status": "open"}, 409, "only closed sessions"),
        ({"calls": "many"}, 400, "not part of a session"),
        ({"group_size": "many"}, 400, "not part of a session"),
    ],
)
def test_a_part_that_is_none_is_refused(
    service: RunningService, tmp_path: Path, changes: dict[str, Any], status: int, said: str
) -> None:
    session = talked(service)
    export(service, tmp_path)
    (whole,) = ArchiveReader(tmp_path).sessions()
    part = {"session": {**whole.state, **changes}, "start": 0, "records": [], "last": True}
    answer = service.request("POST", f"/sessions/{session.session_id}/records", content=msgpack.packb(part))
    assert (answer.status_code, said in answer.json()["error"]["message"]) == (status, True)


def test_a_session_as_it_is_shown_has_every_field_and_is_the_same_session_again() -> None:
    info = SessionInfo(
        "s", b"the hash of a key", 1.5, task_id="t", group_id="g", group_size=4, metadata={"a": [1]}, sampling={"seed": 7}
    )
    state = SessionState(
        info,
        status="failed",
        calls=3,
        reward=0.5,
        per_call={"c0": 1.0},
        per_branch={"b": 0.25},
        reward_metadata={"by": "judge"},
        error="broke",
        closed_at=9.5,
        updated_at=10.5,
    )
    wire = session_as_wire(state)
    # The other fields tell what the session needs.
    hidden = ("key_hash", "role_rules", "needs", *(each.name for each in fields(GroupRule)))
    assert {*wire, "info", *hidden, "unserved", "replayed_at", "accounting", "scored", "verdicts"} == {
        each.name for kind in (SessionInfo, SessionState) for each in fields(kind)
    }
    assert session_from_wire(wire) == replace(state, info=replace(info, key_hash=b""))
    bounded = replace(state, info=replace(info, key_hash=b"", max_calls=3, max_completion_tokens=40, max_total_tokens=500))
    assert session_from_wire(session_as_wire(bounded)) == bounded
    forked = replace(
        state,
        info=replace(info, key_hash=b"", replay=Fork("origin", 0.5, 7, "c7", on_divergence="fail", tokens_per_second=50.0)),
    )
    assert session_from_wire(session_as_wire(forked)) == forked
    ahead = replace(state, info=replace(info, key_hash=b"", lookahead=Lookahead(3, "model", "judge", roles=("main",))))
    assert session_from_wire(session_as_wire(ahead)) == ahead
    ruled = replace(state, info=replace(info, group_policy="drop"))
    assert session_as_wire(ruled) == wire
    for name in wire:
        with pytest.raises(msgspec.ValidationError, match=name):
            session_from_wire({other: value for other, value in wire.items() if other != name})


def test_a_session_keeps_its_budget_in_the_archive(service: RunningService, tmp_path: Path) -> None:
    """Without it, rows that the budget cut would be whole ones after an import, and the session another one than before."""
    budget: dict[str, Any] = {"max_calls": 9, "max_completion_tokens": 4_000, "max_total_tokens": 50_000}
    talked(service, session_id="bounded", **budget)
    export(service, tmp_path)
    assert "1 were there already" in imported(service, tmp_path)
    service.request("DELETE", "/sessions/bounded")
    imported(service, tmp_path)
    shown = service.request("GET", "/sessions/bounded").json()
    assert {name: shown[name] for name in budget} == budget


def test_a_row_that_the_budget_cut_is_still_cut_after_an_import(
    service: RunningService, second: RunningService, tmp_path: Path
) -> None:
    """The last reply calls for no other turn: that another was asked for is known of the refused call alone."""
    session = service.session(max_calls=1)
    session.answer("hello")
    with pytest.raises(AuthenticationError):
        session.answer("and then?")
    session.close(reward=1.0)
    export(service, tmp_path)
    imported(second, tmp_path)
    for what in ("", "/trajectories"):
        here, there = (each.request("GET", f"/sessions/{session.session_id}{what}").json() for each in (service, second))
        assert here == there
    assert [(row["finish_reason"], row["truncated"]) for row in there["trajectories"]] == [("budget", True)]


def test_a_session_with_a_rule_for_its_group_is_found_to_be_the_one_that_was_archived(
    service: RunningService, tmp_path: Path
) -> None:
    talked(service, session_id="ruled", group_id="g", group_policy="drop", group_minimum=1, zero_variance="keep")
    export(service, tmp_path)
    imported(service, tmp_path)
    assert service.request("GET", "/sessions/ruled").json()["status"] == "completed"


def test_a_session_that_no_trainer_gets_or_whose_last_call_failed_is_found_to_be_the_one_that_was_archived(
    service: RunningService, engine: ScriptedEngine, tmp_path: Path
) -> None:
    """What is said of the call is left out of the comparison: once the import found another session there."""
    talked(service, session_id="judge", trained=False)
    session = service.session(session_id="unserved")
    session.answer("hello")
    engine.say(Fail(500))
    with pytest.raises(InternalServerError):
        session.answer("and then?")
    session.close(reward=1.0)
    assert service.request("GET", "/sessions/unserved").json()["unserved"]
    export(service, tmp_path)
    for options in ((), ("--deliver",)):
        assert "2 were there already" in imported(service, tmp_path, *options)
    assert {row["session_id"] for row in leased(service)} == {"unserved"}


def test_a_session_that_no_trainer_gets_is_marked_in_its_archive_and_delivered_nowhere(
    service: RunningService, second: RunningService, tmp_path: Path
) -> None:
    """Its rows were once as good as any in a file, and `--deliver` gave it to the trainers of another store."""
    talked(service, session_id="judge", trained=False)
    talked(service, session_id="agent")
    export(service, tmp_path)
    told = {"judge": False, "agent": True}
    assert {row["session_id"]: row["trained"] for row in table(tmp_path, "sessions")} == told
    assert {row["session_id"]: row["session_trained"] for row in table(tmp_path, "trajectories")} == told
    imported(second, tmp_path, "--deliver")
    assert {row["session_id"] for row in leased(second)} == {"agent"}
    assert {name: second.request("GET", f"/sessions/{name}").json()["trained"] for name in told} == told


def test_records_of_another_session_are_refused(service: RunningService, tmp_path: Path) -> None:
    talked(service, session_id="a")
    talked(service, session_id="b")
    export(service, tmp_path)
    b, a = ArchiveReader(tmp_path).sessions()
    part = {"session": {**a.state, "session_id": "c"}, "start": 0, "records": b.records, "last": True}
    answer = service.request("POST", "/sessions/c/records", content=msgpack.packb(part))
    assert answer.status_code == 400 and "of session b" in answer.json()["error"]["message"]
    assert service.request("GET", "/sessions/c").status_code == 404


async def test_dangling_calls_and_damaged_records_come_back_as_what_they_are(
    service: RunningService, redis_server: RedisServer, second: RunningService, tmp_path: Path
) -> None:
    session = service.session(session_id="hurt")
    said = session.answer("hello")
    session.answer([{"role": "user", "content": "hello"}, said, {"role": "user", "content": "more"}])
    store = Store.at(redis_server.url)
    await store.sessions.begin("hurt", 2, Intent("lost", None, b"\x00\xff", "r", 7.0))
    await store.connection.close()
    with redis_server.client() as client:
        record = client.lindex("vb:{s:hurt}:calls", 1)
        client.lset("vb:{s:hurt}:calls", 1, record[:-9] + bytes([record[-9] ^ 1]) + record[-8:])
    session.close()
    export(service, tmp_path / "first")
    (row,) = table(tmp_path / "first", "sessions")
    reasons = {item["call_id"]: item["reason"] for item in json.loads(row["quarantined"])}
    assert reasons == {"lost": "dangling", "record-1": "unreadable_record"}
    imported(second, tmp_path / "first")
    export(second, tmp_path / "second")
    for name in TABLES:
        assert table(tmp_path / "second", name) == table(tmp_path / "first", name)


def test_an_image_is_in_a_folder_once_whatever_sessions_have_it(
    service: RunningService, second: RunningService, other_redis: RedisServer, tmp_path: Path
) -> None:
    red, blue = picture("red"), picture("blue")
    names = {hashlib.sha256(data).hexdigest(): data for data in (red, blue)}
    first = pictured(service, red, blue)
    export(service, tmp_path)
    other = pictured(service, blue, red)
    export(service, tmp_path)
    assert {row["digest"]: row["data"] for row in table(tmp_path, "media")} == names and len(table(tmp_path, "media")) == 2
    found = ArchiveReader(tmp_path).find(other.session_id)
    assert found is not None and found.media == names
    imported(second, tmp_path)
    imported(second, tmp_path)
    for session_id in (first.session_id, other.session_id):
        for digest, data in names.items():
            assert second.request("GET", f"/sessions/{session_id}/media/{digest}").content == data
        assert second.request("DELETE", f"/sessions/{session_id}").status_code == 204
    with other_redis.client() as client:
        assert not client.keys("vb:{m:*")


def test_an_image_is_archived_again_once_the_folder_that_has_it_was_moved_away(service: RunningService, tmp_path: Path) -> None:
    """The old bug: retention, which remembers what it has archived, left the image out of the new folder and freed it in Redis."""
    first, second = (pictured(service, picture("red")).session_id for _ in range(2))
    export(service, tmp_path / "all")
    archive, known = tmp_path / "archive", KnownSessions()
    for session_id in (first, second):
        session = ArchiveReader(tmp_path / "all").find(session_id)
        assert session is not None
        with ArchiveWriter(archive, known=known) as writer:
            writer.add(session)
            writer.flush()
        assert [each.media for each in ArchiveReader(archive).sessions()] == [session.media]
        archive.rename(tmp_path / session_id)


def test_a_fork_that_samples_nothing_is_exported_with_the_images_that_it_replayed(
    service: RunningService, second: RunningService, tmp_path: Path
) -> None:
    red, blue = picture("red"), picture("blue")
    origin = pictured(service, red, blue)
    replay = {"session_id": origin.session_id, "on_divergence": "fail"}
    fork = pictured(service, red, blue, replay=replay, group_id="forked")
    assert fork.trajectories()[1]["sampled_tokens"] == 0
    export(service, tmp_path, "--group", "forked")
    imported(second, tmp_path)
    for data in (red, blue):
        digest = hashlib.sha256(data).hexdigest()
        assert second.request("GET", f"/sessions/{fork.session_id}/media/{digest}").content == data


def test_an_image_that_is_not_what_its_digest_says_is_not_restored(
    service: RunningService, second: RunningService, tmp_path: Path
) -> None:
    session = pictured(service, picture())
    export(service, tmp_path)
    (whole,) = ArchiveReader(tmp_path).sessions()
    body = {"session": dict(whole.state), "start": 0, "records": [], "last": False, "media": {"0" * 64: b"x"}}
    content = msgpack.packb(body)
    answer = second.request("POST", f"/sessions/{session.session_id}/records", content=content)
    assert answer.status_code == 400 and "has another digest" in answer.text


def test_only_the_sessions_that_were_asked_for_are_exported(service: RunningService, tmp_path: Path) -> None:
    service.session(session_id="open")
    talked(service, session_id="early", group_id="g")
    time.sleep(0.05)
    middle = time.time()
    time.sleep(0.05)
    talked(service, session_id="late", task_id="t")
    talked(service, session_id="broken", status="failed", reward=None)

    def chosen(*args: str) -> set[str]:
        out = tmp_path / "-".join(["out", *(arg.strip("-") for arg in args)])
        export(service, out, *args)
        return {row["session_id"] for row in table(out, "sessions")}

    assert chosen() == {"early", "late", "broken"}
    assert chosen("--since", repr(middle)) == {"late", "broken"}
    assert chosen("--until", repr(middle)) == {"early"}
    assert chosen("--since", "1h") == {"early", "late", "broken"}
    assert chosen("--since", "2100-01-01") == set()
    assert chosen("--group", "g") == {"early"}
    assert chosen("--task", "t") == {"late"}
    assert chosen("--status", "failed") == {"broken"}


def test_an_export_can_have_a_row_for_each_call(service: RunningService, tmp_path: Path) -> None:
    session = talked(service)
    export(service, tmp_path, "--builder", "per_call")
    assert [row["trajectory_id"] for row in table(tmp_path, "trajectories")] == [
        row["trajectory_id"] for row in session.trajectories("per_call")[0]
    ]


@pytest.mark.parametrize(
    ("args", "code", "said"),
    [
        (("--since", "yesterday"), 2, "--since 'yesterday' is invalid"),
        (("--status", "open"), 2, "--status 'open' is invalid"),
        (("--builder", "best"), 1, "there is no builder 'best'"),
        (("--builder", "per_call"), 1, "whose builder is merged, not per_call"),
    ],
)
def test_an_export_that_cannot_be_made_is_refused(
    service: RunningService, tmp_path: Path, args: tuple[str, ...], code: int, said: str
) -> None:
    talked(service)
    out = tmp_path / ("new" if "best" in args else "old")
    export(service, tmp_path / "old")
    refused = command(service, "export", "--out", str(out), *args)
    assert refused.returncode == code and said in refused.stderr and "Traceback" not in refused.stderr


def test_a_folder_that_is_no_archive_or_was_changed_is_not_imported(service: RunningService, tmp_path: Path) -> None:
    refused = command(service, "import", str(tmp_path))
    assert refused.returncode == 1 and "holds no archive" in refused.stderr
    talked(service)
    export(service, tmp_path)
    with (tmp_path / "records-000000.parquet").open("ab") as file:
        file.write(b"\n")
    refused = command(service, "import", str(tmp_path))
    assert refused.returncode == 1 and "is missing or was changed" in refused.stderr


def test_an_export_that_ended_adds_what_is_new(service: RunningService, tmp_path: Path) -> None:
    talked(service, session_id="one")
    export(service, tmp_path)
    talked(service, session_id="two")
    assert "exported 1 sessions" in (told := export(service, tmp_path)) and "1 were there already" in told
    assert [row["session_id"] for row in table(tmp_path, "sessions")] == ["one", "two"]


def test_an_export_says_which_sessions_it_holds_with_an_earlier_reward(service: RunningService, tmp_path: Path) -> None:
    walked(service, 7)
    late = talked(service, reward=None)
    assert "exported 2 sessions" in export(service, tmp_path)
    assert "2 were there already\n" in export(service, tmp_path)
    service.request("POST", f"/sessions/{late.session_id}/reward", json={"reward": 0.25})
    assert "2 were there already, 1 of them with other rewards or scores than they have now" in export(service, tmp_path)


def test_an_export_killed_at_any_step_goes_on_where_it_was(service: RunningService, tmp_path: Path) -> None:
    """Each part is three files and the manifest, each synced with its folder: 8 steps."""
    ids = [talked(service, session_id=f"s{at}").session_id for at in range(3)]
    variables = environment(VERBATIM_URL=service.url, VERBATIM_ADMIN_TOKEN=ADMIN)
    whole = tmp_path / "whole"
    export(service, whole)
    steps = (*range(8), 11, 15, 23)
    killed = [sys.executable, "-c", KILLED, str(tmp_path), *map(str, steps)]
    codes = subprocess.run(killed, env=variables, capture_output=True, text=True, check=True).stdout.split()
    assert codes == [str(-signal.SIGKILL)] * len(steps)
    for step in steps:
        out = tmp_path / str(step)
        with suppress(FileNotFoundError):
            parts = json.loads((out / "manifest.json").read_text())["parts"]
            assert len(parts) == (step + 1) // 8 or len(parts) == step // 8
            for part in parts:
                assert all((out / entry["name"]).is_file() for entry in part["files"].values())
        export(service, out)
        assert [row["session_id"] for row in table(out, "sessions")] == list(reversed(ids))
        assert table(out, "trajectories") == table(whole, "trajectories")
        assert not [path.name for path in out.iterdir() if path.name.endswith(".part")]


def test_two_exports_into_one_folder_do_not_meet(service: RunningService, tmp_path: Path) -> None:
    import fcntl

    with (tmp_path / ".lock").open("a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        refused = command(service, "export", "--out", str(tmp_path))
    assert refused.returncode == 1 and "another process is writing" in refused.stderr


def test_a_terminal_sees_how_far_it_is(service: RunningService, tmp_path: Path) -> None:
    talked(service)
    master, slave = pty.openpty()
    variables = environment(VERBATIM_URL=service.url, VERBATIM_ADMIN_TOKEN=ADMIN, TERM="xterm")
    shown = b""
    with ForkedVerbatim(
        ("export", "--out", str(tmp_path / "out")), env=variables, stderr=slave, stdout=subprocess.DEVNULL
    ) as done:
        os.close(slave)
        # A terminal that nobody reads is full soon, and who writes to it waits.
        with suppress(OSError):
            while more := os.read(master, 65536):
                shown += more
    os.close(master)
    assert done.returncode == 0 and b"1/1" in shown and b"tokens" in shown


async def test_a_session_is_restored_in_parts_that_may_be_repeated(store: Store) -> None:
    """On a plain Redis and on a cluster."""
    archive = ArchiveStore(store.connection, store.sessions)
    info = SessionInfo("s", b"", 5.0, group_id="g", metadata={"a": 1})
    intent = Intent("lost", "c1", b"\x00", "r", 7.0)
    state = SessionState(
        info,
        status="completed",
        calls=3,
        reward=0.5,
        per_call={"c1": 1.0},
        per_branch={"c3": 2.0},
        reward_metadata={"by": "x"},
        error="late",
        closed_at=8.0,
        updated_at=9.0,
    )
    for start, records in ((0, [("c1", b"one"), ("c2", b"two")]), (0, [("c1", b"one")]), (2, [("c3", b"three")])):
        await archive.restore(info, start, records)
    with pytest.raises(Conflict, match="its call c2 differs"):
        await archive.restore(info, 1, [("c2", b"other")])
    assert (await store.sessions.begin("s", 3, intent)).accepted is False
    assert await archive.finish(state, ["c1", "c2"], [intent], 10.0, "$ agent")
    assert not await archive.finish(state, ["c2", "c1"], [intent], 10.0)
    assert await store.sessions.load("s") == state
    assert await store.sessions.load_log("s") == "$ agent"
    assert await archive.load_named_records("s", 1, -1) == [("c2", b"two"), ("c3", b"three")]
    assert (await store.sessions.load_delivered("s"), await store.sessions.load_intents("s")) == ({"c1", "c2"}, [intent])
    listed, _ = await store.sessions.listing.load_page(status="completed", group_id="g", limit=9, cursor=None)
    assert listed == [state]
    await archive.restore(info, 0, [("c1", b"one")])
    for differs in (replace(state, reward=0.25), replace(state, status="failed"), replace(state, calls=2)):
        with pytest.raises(Conflict):
            await archive.finish(differs, ["c1", "c2"], [intent], 10.0)
    for marks in ((["c1"], [intent]), (["c1", "c2"], [])):
        with pytest.raises(Conflict):
            await archive.finish(state, *marks, 10.0)
    with pytest.raises(Conflict, match="another session"):
        await archive.restore(replace(info, created_at=6.0), 0, [])


def test_a_part_is_written_as_soon_as_it_is_full(
    service: RunningService, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Memory is bounded by a part: by its number of sessions, or by their bytes."""
    ids = [talked(service, session_id=f"s{at}").session_id for at in range(5)]
    monkeypatch.setattr("proxy.archive.folder.PART_SESSIONS", 2)
    export(service, tmp_path / "few")
    monkeypatch.setattr("proxy.archive.folder.PART_BYTES", 1)
    export(service, tmp_path / "small")
    for name, sizes in (("few", [2, 2, 1]), ("small", [1] * 5)):
        reader = ArchiveReader(tmp_path / name)
        assert [part["sessions"] for part in reader.parts] == sizes
        assert [session.state["session_id"] for session in reader.sessions()] == list(reversed(ids))
