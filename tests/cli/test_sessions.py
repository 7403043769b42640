"""`verbatim sessions`, and the evaluator's feedback wherever a command shows a reward."""

from __future__ import annotations

import json
import subprocess
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from cli.feedback import print_feedback
from contract.attempts import Verdict
from tests.support.runtimes.rollout_stores import work_off
from tests.support.service.redis_server import RedisServer
from tests.support.service.rollout_service import submit
from tests.support.service.running_service import ADMIN, RunningService
from tests.support.service.verbatim_process import verbatim

FEEDBACK = "3 passed, 1 failed\nFAILED test_four: AssertionError: IIII != IV\n" + "\n".join(f"line {n}" for n in range(20))


def run(service: RunningService, *args: str, **variables: Any) -> subprocess.CompletedProcess[str]:
    return verbatim(*args, "--url", service.url, **{"VERBATIM_ADMIN_TOKEN": ADMIN, "COLUMNS": "200", **variables})


def test_a_session_is_opened_rewarded_and_closed(service: RunningService) -> None:
    words = ("--session-id", "first", "--group-id", "g", "--group-size", "2", "--metadata", '{"a": 1}')
    opened = run(service, "sessions", "open", *words)
    assert opened.returncode == 0, opened.stderr
    told = dict(line.split(maxsplit=1) for line in opened.stdout.splitlines())
    assert told["session:"] == "first" and told["openai:"] == f"{service.url}/s/first/v1" and told["key:"].endswith("-first")
    rewarded = run(service, "sessions", "reward", "first", "-0.5", "--feedback", FEEDBACK)
    assert (rewarded.returncode, rewarded.stdout) == (0, "session first: reward -0.5\n"), rewarded.stderr
    refused = run(service, "sessions", "close", "first")
    assert refused.returncode == 1 and "session first cannot be completed" in refused.stderr
    closed = run(service, "sessions", "close", "first", "--status", "timeout")
    assert closed.stdout == "session first timeout: 0 calls, reward -0.5\n", closed.stderr
    state = service.request("GET", "/sessions/first").json()
    assert (state["reward"], state["group_size"], state["metadata"]) == (-0.5, 2, {"a": 1})
    for command in (("sessions", "show"), ("audit",)):
        shown = run(service, *command, "first").stdout
        assert "reward -0.5\n" in shown and "  FAILED test_four: AssertionError: IIII != IV\n" in shown and "line 19" in shown


def test_an_audit_as_json_has_the_tree_the_rows_and_what_is_wrong(service: RunningService) -> None:
    session = service.session(metadata={"a": 1})
    session.ask("q")
    session.close(reward=1.0)
    report = json.loads(run(service, "audit", session.session_id, "--json").stdout)
    (call,) = report["calls"]
    (row,) = report["rows"]
    assert row["call_ids"] == [call["call_id"]] and call["completion_tokens"] == report["accounting"]["sampled_tokens"] > 0
    assert (call["parent_id"], call["quarantined"], report["session"]["reward"]) == (None, None, 1.0)
    assert (report["problems"], report["logprobs"]) == ([], {})


def test_rewards_of_calls_and_branches_are_passed_on(service: RunningService) -> None:
    session = service.session()
    session.ask("q")
    (call,) = service.request("GET", f"/sessions/{session.session_id}/calls").json()["calls"]
    done = run(service, "sessions", "reward", session.session_id, "1", "--call", f"{call['call_id']}=0.25")
    assert done.returncode == 0, done.stderr
    assert service.request("GET", f"/sessions/{session.session_id}").json()["per_call"] == {call["call_id"]: 0.25}


@pytest.mark.parametrize(
    ("args", "says"),
    [
        (("reward", "s", "nan"), "REWARD nan is invalid"),
        (("reward", "s", "1", "--call", "x"), "--call 'x' is not ID=NUMBER"),
        (("close", "s", "--reward", "inf"), "--reward inf is invalid"),
        (("open", "--metadata", "[1]"), "--metadata is not a JSON object"),
        (("open", "--metadata", "{oops"), "--metadata is not JSON"),
    ],
)
def test_what_cannot_be_sent_is_refused_with_a_sentence(service: RunningService, args: tuple[str, ...], says: str) -> None:
    done = run(service, "sessions", *args)
    assert done.returncode == 2 and done.stdout == ""
    assert done.stderr.startswith(f"verbatim: {says}") and len(done.stderr.splitlines()) == 1


def test_lists_are_json_arrays_on_request_and_say_on_stderr_that_there_are_more(service: RunningService) -> None:
    for _ in range(2):
        service.session()
    listed = run(service, "sessions", "list", "--json", "--limit", "1")
    assert len(json.loads(listed.stdout)) == 1 and "There are more" in listed.stderr
    for command in (("tasks", "list"), ("engines", "list"), ("dead-letters", "list")):
        assert isinstance(json.loads(run(service, *command, "--json").stdout), list), command
    session_id = json.loads(listed.stdout)[0]["session_id"]
    assert json.loads(run(service, "sessions", "show", session_id, "--json").stdout)["accounting"]["sampled_tokens"] == 0
    assert json.loads(run(service, "weights", "status", "--json").stdout)["current"]["version"] == 0


def test_a_token_may_come_from_the_file_that_the_service_reads(service: RunningService, tmp_path: Path) -> None:
    (tmp_path / "tokens").write_text(f"# admins\n\n{ADMIN}\nanother\n")
    listed = verbatim("sessions", "list", VERBATIM_URL=service.url, VERBATIM_ADMIN_TOKEN_FILE=str(tmp_path / "tokens"))
    assert listed.returncode == 0, listed.stderr
    listed = verbatim("sessions", "list", VERBATIM_URL=service.url, VERBATIM_ADMIN_TOKEN=f"{ADMIN}\n")
    assert listed.returncode == 0, listed.stderr
    missing = verbatim("sessions", "list", VERBATIM_URL=service.url, VERBATIM_ADMIN_TOKEN_FILE=str(tmp_path / "none"))
    assert missing.returncode == 2 and "VERBATIM_ADMIN_TOKEN_FILE" in missing.stderr and "cannot be read" in missing.stderr


def test_a_task_shows_why_each_reward_is_what_it_is(service: RunningService, redis_server: RedisServer) -> None:
    submit(service, task_id="roman")
    session = {"session_id": "roman.0.1", "task_id": "roman"}
    service.request("POST", "/sessions", json=session)
    service.request("POST", "/sessions/roman.0.1/reward", json={"reward": 0.0, "metadata": {"feedback": FEEDBACK}})
    work_off(redis_server.url, 1, Verdict("completed", reward=0.0, feedback=FEEDBACK))
    for command in ("show", "watch"):
        shown = run(service, "tasks", command, "roman").stdout
        assert "FAILED test_four: AssertionError: IIII != IV" in shown and "line 5" in shown, shown
        assert "line 6\n" not in shown and "… 14 more lines: verbatim " in shown, shown
    events = [json.loads(line) for line in run(service, "tasks", "watch", "roman", "--json").stdout.splitlines()]
    assert events[0]["kind"] == "task.created" and events[-1]["kind"] == "task.ended"


def render(monkeypatch: pytest.MonkeyPatch, feedback: str, **variables: str) -> str:
    monkeypatch.delenv("NO_COLOR", raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    out = StringIO()
    print_feedback(Console(file=out, force_terminal=True, color_system="standard", width=40), "reward", 0.0, feedback)
    return out.getvalue()


def test_feedback_is_in_colour_on_a_terminal_unless_that_is_declined(monkeypatch: pytest.MonkeyPatch) -> None:
    feedback = "FAILED test_a\n4 passed, 0 failed\nnothing"
    shown = render(monkeypatch, feedback)
    assert "\x1b[31m  FAILED test_a" in shown and "\x1b[32m  4 passed, 0 failed" in shown and "\n  nothing\n" in shown
    assert "\x1b[3" not in render(monkeypatch, feedback, NO_COLOR="1")


def test_feedback_that_an_agent_wrote_cannot_steer_the_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    shown = render(monkeypatch, "\x1b[2J\x1b]0;title\x07a\rb\x9b31m[bold]x[/bold]", NO_COLOR="1")
    assert shown.endswith("  ]0;titleab31m[bold]x[/bold]\n") and "\x1b[2J" not in shown
