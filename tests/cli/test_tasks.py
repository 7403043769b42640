"""`verbatim tasks` as its users run it, against the real service; the test plays the node."""

from __future__ import annotations

import json
import os
import pty
import signal
import subprocess
import threading
from collections.abc import Iterator
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import httpx
import pytest

from contract.attempts import Failure, FailureRecord, Verdict
from tests.support.runtimes.rollout_stores import work_off
from tests.support.service.forked import ForkedVerbatim
from tests.support.service.redis_server import RedisServer
from tests.support.service.rollout_service import BODY, serving_tasks, submit
from tests.support.service.running_service import ADMIN, RunningService
from tests.support.service.verbatim_process import environment, verbatim

SECONDS = 120.0


@pytest.fixture(scope="module")
def service(redis_server: RedisServer) -> Iterator[RunningService]:
    redis_server.flushall()
    with serving_tasks(redis_server.url) as running:
        yield running


@pytest.fixture
def fresh(service: RunningService, redis_server: RedisServer) -> RunningService:
    redis_server.flushall()
    return service


def tasks(service: RunningService, *args: str) -> subprocess.CompletedProcess[str]:
    return verbatim(
        "tasks", *args, timeout_seconds=SECONDS, VERBATIM_URL=service.url, VERBATIM_ADMIN_TOKEN=ADMIN, COLUMNS="200"
    )


def begin(service: RunningService, *args: str) -> subprocess.Popen[str]:
    variables = environment(VERBATIM_URL=service.url, VERBATIM_ADMIN_TOKEN=ADMIN, COLUMNS="200")
    return ForkedVerbatim(("tasks", *args), env=variables, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def lines(path: Path, *bodies: dict[str, Any]) -> str:
    path.write_text("\n".join(json.dumps({**BODY, **body}) for body in bodies) + "\n\n")
    return str(path)


def test_a_file_of_tasks_is_submitted_and_again_without_harm(fresh: RunningService, tmp_path: Path) -> None:
    file = lines(tmp_path / "tasks.jsonl", {"task_id": "a", "num_samples": 2}, {"task_id": "b"})
    for _ in range(2):
        done = tasks(fresh, "submit", file)
        assert (done.returncode, done.stdout, done.stderr) == (0, "a\nb\n", "2 tasks submitted\n")
    shown = tasks(fresh, "list")
    assert shown.returncode == 0 and "0/2" in shown.stdout and "2 queued" in shown.stdout
    assert "There are more" in tasks(fresh, "list", "--limit", "1").stderr
    assert "a" not in tasks(fresh, "list", "--where", "status=running").stdout.split()


def test_the_run_of_the_command_line_or_the_environment_is_that_of_lines_that_name_none(
    fresh: RunningService, tmp_path: Path
) -> None:
    file = lines(tmp_path / "tasks.jsonl", {"task_id": "a"}, {"task_id": "b", "run": "own"})
    assert tasks(fresh, "submit", file, "--run", "grpo-3").returncode == 0
    runs = {task_id: fresh.request("GET", f"/tasks/{task_id}").json()["task"]["run"] for task_id in "ab"}
    assert runs == {"a": "grpo-3", "b": "own"}
    for where, names in (("run=own", ["b"]), ("q=A", ["a"]), ("before=2026-01-01", [])):
        listed = json.loads(tasks(fresh, "list", "--where", where, "--json").stdout)
        assert [task["task_id"] for task in listed] == names


def test_lines_with_the_same_mistakes_are_refused_once_and_with_all_of_them(fresh: RunningService, tmp_path: Path) -> None:
    """Each line was named by itself, with the first of its mistakes."""
    bad = {"harness": {"definition": {"name": "mine", "argv": "mine"}}}
    unknown = {"instruction": "Fix it.", "harness": "nobodys", "runtime": "cloud", "evaluator": "oracle"}
    file = tmp_path / "tasks.jsonl"
    file.write_text("\n".join(json.dumps(body) for body in [bad, bad, unknown, bad]))
    said = tasks(fresh, "submit", str(file)).stderr
    assert (
        said.count("instruction") == 1
        and "lines 1-2, 4: instruction: Field required; harness: mine: dialect is missing" in said
    )
    assert "argv must be a list of strings" in said
    for problem in ("no harness 'nobodys'", "no runtime 'cloud'", "no evaluator 'oracle'"):
        assert problem in said.partition("line 3: ")[2]


def test_lines_that_are_refused_are_named_and_the_others_submitted(fresh: RunningService, tmp_path: Path) -> None:
    file = lines(tmp_path / "tasks.jsonl", {"task_id": "a"}, {"harness": "nobodys"}, {"task_id": "a", "num_samples": 3})
    done = tasks(fresh, "submit", file)
    assert done.returncode == 1 and done.stdout == "a\n"
    said = done.stderr.splitlines()[-1]
    assert said.startswith("verbatim: 2 of 3 tasks were refused: line 2: harness: there is no harness 'nobodys'")
    assert "line 3: task a was submitted before with another body" in said


def test_tasks_come_from_standard_input_too(fresh: RunningService) -> None:
    with ForkedVerbatim(
        ("tasks", "submit", "-"),
        env=environment(VERBATIM_URL=fresh.url, VERBATIM_ADMIN_TOKEN=ADMIN),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        stdout, _ = process.communicate(json.dumps({**BODY, "task_id": "piped"}), timeout=SECONDS)
    assert (process.returncode, stdout) == (0, "piped\n")


def test_waiting_ends_with_the_tasks(fresh: RunningService, redis_server: RedisServer, tmp_path: Path) -> None:
    file = lines(tmp_path / "tasks.jsonl", {"task_id": "a", "num_samples": 2}, {"task_id": "b"})
    waiting = begin(fresh, "submit", file, "--wait")
    assert [waiting.stdout.readline() for _ in "ab"] == ["a\n", "b\n"]
    work_off(redis_server.url, 3, Verdict("failed"))
    _, stderr = waiting.communicate(timeout=SECONDS)
    assert waiting.returncode == 0, stderr
    assert "2/2" in stderr and "1/1" in stderr and "1 failed" in stderr


def test_a_terminal_sees_how_many_rollouts_have_ended(fresh: RunningService, redis_server: RedisServer, tmp_path: Path) -> None:
    """First that the lines are being submitted, then the rollouts; one of two has ended when it looks again."""
    file = lines(tmp_path / "tasks.jsonl", {"task_id": "a", "num_samples": 2})
    master, slave = pty.openpty()
    variables = environment(VERBATIM_URL=fresh.url, VERBATIM_ADMIN_TOKEN=ADMIN, COLUMNS="120", TERM="xterm")
    waiting = ForkedVerbatim(
        ("tasks", "submit", file, "--wait"), env=variables, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=slave
    )
    os.close(slave)
    shown = b""
    try:
        for seen in (b"0/2", b"1/2"):
            while seen not in shown:
                shown += os.read(master, 65536)
            work_off(redis_server.url, 1)
        with suppress(OSError):
            while more := os.read(master, 65536):
                shown += more
        assert waiting.wait(SECONDS) == 0, shown
    finally:
        waiting.kill()
        waiting.communicate()
        os.close(master)
    assert b"submitting" in shown and b"1 usable" in shown


def test_watching_tells_what_happens_until_the_end(fresh: RunningService, redis_server: RedisServer) -> None:
    submit(fresh, task_id="a")
    watching = begin(fresh, "watch", "a")
    assert "task.created" in watching.stdout.readline()
    work_off(redis_server.url, 1)
    stdout, stderr = watching.communicate(timeout=SECONDS)
    assert (watching.returncode, stderr) == (0, "")
    told = [line.split()[1] for line in stdout.splitlines()]
    assert told == ["rollout.preparing", "rollout.concluding", "rollout.completed", "task.ended"]
    assert "reward=1" in stdout and "node=node-1" in stdout and stdout.rstrip().endswith("completed")


def test_watching_and_waiting_outlive_a_server_that_is_replaced(redis_server: RedisServer, tmp_path: Path) -> None:
    """The second one listens where the first did."""
    redis_server.flushall()
    with serving_tasks(redis_server.url, grace_seconds=1) as first:
        waiting = begin(first, "submit", lines(tmp_path / "tasks.jsonl", {"task_id": "a"}), "--wait")
        assert waiting.stdout.readline() == "a\n"
        watching = begin(first, "watch", "a")
        assert "task.created" in watching.stdout.readline()
        port = httpx.URL(first.url).port or 0
    again = RunningService("http://127.0.0.1:9", redis_server.url, adding=first.adding, engine_api="chat")
    with again.on(port):
        work_off(redis_server.url, 1)
        stdout, stderr = watching.communicate(timeout=SECONDS)
        assert watching.returncode == 0, stderr
        assert stdout.count("task.created") == 0 and stdout.count("task.ended") == 1
        _, stderr = waiting.communicate(timeout=SECONDS)
        assert waiting.returncode == 0 and "1/1" in stderr, stderr


def test_who_waits_may_stop_and_the_tasks_go_on(fresh: RunningService, tmp_path: Path) -> None:
    waiting = begin(fresh, "submit", lines(tmp_path / "tasks.jsonl", {"task_id": "a"}), "--wait")
    assert waiting.stdout.readline() == "a\n"
    waiting.send_signal(signal.SIGINT)
    _, stderr = waiting.communicate(timeout=SECONDS)
    assert waiting.returncode == 130
    assert stderr.splitlines()[-1] == "verbatim: no longer waiting; the tasks continue (verbatim tasks cancel stops them)"
    assert "1 queued" in tasks(fresh, "list").stdout


def test_a_submission_that_breaks_off_tells_how_far_it_came(tmp_path: Path) -> None:
    """The service takes the first line, and then its store is gone."""

    class Service(BaseHTTPRequestHandler):
        answers = iter([(201, {"task_id": "a"}), (503, {"error": {"message": "the store is away"}})])

        def do_POST(self) -> None:
            status, answer = next(self.answers)
            self.rfile.read(int(self.headers["Content-Length"]))
            body = json.dumps(answer).encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            pass

    file = lines(tmp_path / "tasks.jsonl", {"task_id": "a"}, {"task_id": "b"}, {"task_id": "c"})
    with ThreadingHTTPServer(("127.0.0.1", 0), Service) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        url = f"http://127.0.0.1:{server.server_address[1]}"
        done = verbatim("tasks", "submit", file, timeout_seconds=SECONDS, VERBATIM_URL=url, VERBATIM_ADMIN_TOKEN=ADMIN)
        server.shutdown()
    assert (done.returncode, done.stdout) == (1, "a\n")
    submitted, said = done.stderr.splitlines()
    assert submitted == "1 task submitted"
    assert "broke off at line 2" in said and said.endswith("the store is away")


def test_tasks_are_cancelled(fresh: RunningService) -> None:
    submit(fresh, task_id="a", num_samples=3)
    submit(fresh, task_id="b")
    done = tasks(fresh, "cancel", "a", "none", "b")
    assert done.stdout.splitlines() == [
        "a: 3 rollouts cancelled; the task is cancelled",
        "b: 1 rollout cancelled; the task is cancelled",
    ]
    assert (done.returncode, done.stderr) == (1, "verbatim: there is no task none\n")


def test_a_task_is_shown_with_its_rollouts_and_their_failures(fresh: RunningService, redis_server: RedisServer) -> None:
    submit(fresh, task_id="a", num_samples=2, callback_url="http://127.0.0.1:9/x")
    message = "it never called the model: \x1b[2J\x1b]0;title\x07[/b] of what it printed"
    failed = FailureRecord(Failure.NO_CALLS, message, "node-1:/logs/a.1.1")
    work_off(redis_server.url, 2, Verdict("failed", failure=failed))
    shown = tasks(fresh, "show", "a")
    assert shown.returncode == 0, shown.stderr
    for text in (
        "2/2",
        "node-1",
        "no_calls",
        "it never called the model",
        "node-1:/logs/a.1.1",
        "callback to http://127.0.0.1:9/x",
        "[/b] of what it printed",
    ):
        assert text in shown.stdout
    assert "\x1b" not in shown.stdout and "\x07" not in shown.stdout, "an agent cannot steer the terminal"


def test_a_task_that_nothing_was_begun_of_says_what_it_waits_for(fresh: RunningService, redis_server: RedisServer) -> None:
    submit(fresh, task_id="a")
    assert "waiting: for a node; verbatim node starts one" in tasks(fresh, "show", "a").stdout
    submit(fresh, task_id="b", priority=100)
    work_off(redis_server.url, 1)
    assert "waiting: for a node with capacity" in tasks(fresh, "show", "a").stdout
    assert "waits:" not in tasks(fresh, "show", "b").stdout


@pytest.mark.parametrize(
    ("args", "code", "said"),
    [
        (("submit", "nowhere.jsonl"), 1, "nowhere.jsonl cannot be read: No such file"),
        (("submit", "broken.jsonl"), 1, "line 2 of broken.jsonl is not JSON at character 2: "),
        (("submit", "empty.jsonl"), 1, "there are no tasks in empty.jsonl"),
        (("submit", "list.jsonl"), 1, "line 1 of list.jsonl is not a JSON object"),
        (("watch", "none"), 1, "there is no task none"),
        (("show", "none"), 1, "there is no task none"),
        (("list", "--where", "status=asleep"), 1, "status is 'asleep'; it can be: queued, "),
        (("cancel",), 2, "name the tasks to cancel"),
    ],
)
def test_misuse_gives_one_sentence(
    service: RunningService, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, args: tuple[str, ...], code: int, said: str
) -> None:
    (tmp_path / "broken.jsonl").write_text(json.dumps(BODY) + "\n{oops\n")
    (tmp_path / "list.jsonl").write_text("[1]\n")
    (tmp_path / "empty.jsonl").write_text("\n")
    monkeypatch.chdir(tmp_path)
    done = tasks(service, *args)
    assert (done.returncode, done.stdout) == (code, "")
    assert len(done.stderr.splitlines()) == 1 and said in done.stderr and done.stderr.startswith("verbatim: ")


def test_a_service_that_is_away_is_named(tmp_path: Path) -> None:
    file = lines(tmp_path / "tasks.jsonl", {})
    done = verbatim("tasks", "submit", file, VERBATIM_URL="http://127.0.0.1:9", VERBATIM_ADMIN_TOKEN=ADMIN)
    assert done.returncode == 1 and "no service at http://127.0.0.1:9" in done.stderr
    assert len(done.stderr.splitlines()) == 1


def fork(service: RunningService, *args: str) -> subprocess.CompletedProcess[str]:
    return verbatim("fork", *args, timeout_seconds=SECONDS, VERBATIM_URL=service.url, VERBATIM_ADMIN_TOKEN=ADMIN)


def test_a_fork_of_a_session_is_its_task_again(fresh: RunningService, tmp_path: Path) -> None:
    steps = [{"upload": {"path": "a.txt", "text": "x"}}]
    plain: dict[str, Any] = {"evaluator": {"kind": "command", "options": {"command": "true"}}, "budgets": {"max_calls": 3}}
    submit(fresh, task_id="t", num_samples=2, early_stop_usable_samples=1, metadata={"a": 1}, **plain)
    submit(fresh, task_id="u", prepare=steps)
    for session_id, task_id in (("t.0.1", "t"), ("u.0.1", "u"), ("alone", None)):
        fresh.request("POST", "/sessions", json={"session_id": session_id, "task_id": task_id})
    done = fork(fresh, "t.0.1", "--at", "0", "--samples", "3", "--on-divergence", "fail")
    assert (done.returncode, done.stderr) == (0, "")
    made, old = (fresh.request("GET", f"/tasks/{name}").json()["task"] for name in (done.stdout.strip(), "t"))
    assert made["fork"] == {"session_id": "t.0.1", "until": 0, "on_divergence": "fail", "tokens_per_second": None}
    assert (made["num_samples"], made["early_stop_usable_samples"], made["group"]["minimum"]) == (3, None, None)
    differing = {"task_id", "num_samples", "early_stop_usable_samples", "fork", "group"}
    assert {name for name in made if made[name] != old[name]} <= differing
    refused = fork(fresh, "u.0.1", "--at", "0")
    assert refused.returncode == 1 and "task u uploads files" in refused.stderr
    file = lines(tmp_path / "tasks.jsonl", {"task_id": "other"}, {"task_id": "u", "prepare": steps})
    done = fork(fresh, "u.0.1", "--at", "0", "--task", file)
    body = fresh.request("GET", f"/tasks/{done.stdout.strip()}").json()["task"]
    assert body["fork"]["session_id"] == "u.0.1" and body["prepare"]
    refused = fork(fresh, "alone", "--at", "0")
    assert refused.returncode == 1 and "session alone is of no task" in refused.stderr


@pytest.mark.case(92)
def test_a_fork_that_cannot_be_is_no_task(fresh: RunningService) -> None:
    submit(fresh, task_id="t")
    fresh.request("POST", "/sessions", json={"session_id": "t.0.1", "task_id": "t"})
    for at, reason in (
        ("f" * 24, f"fork: session 't.0.1' has no call '{'f' * 24}'"),
        ("2", "fork: session 't.0.1' has 0 recorded requests that can be replayed, not 2"),
    ):
        refused = fork(fresh, "t.0.1", "--at", at)
        assert (refused.returncode, refused.stdout) == (1, "") and reason in refused.stderr
    given = {**BODY, "task_id": "fork", "fork": {"session_id": "t.0.1", "until": 0}}
    assert fresh.request("POST", "/tasks", json=given).status_code == 201
    fresh.request("DELETE", "/sessions/t.0.1")
    # The task is there: what it replays was checked when it was submitted.
    assert fresh.request("POST", "/tasks", json=given).status_code == 200
    answer = fresh.request("POST", "/tasks", json={**given, "task_id": "late"})
    assert answer.status_code == 400 and answer.json()["error"]["param"] == "fork.session_id"
    assert "there is no session 't.0.1'" in answer.json()["error"]["message"]
    assert [each["task_id"] for each in fresh.request("GET", "/tasks").json()["tasks"]] == ["fork", "t"]
