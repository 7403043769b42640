"""`verbatim weights` as its users run it, against the real service before scripted engines."""

from __future__ import annotations

import json
import signal
import subprocess
from collections.abc import Iterator
from io import StringIO
from pathlib import Path
from typing import Any

import httpx
import pytest
from rich.console import Console

from cli.engines import replicas_table as engines_table
from cli.weights import replicas_table
from tests.support.engine.scripted_engine import ScriptedEngine
from tests.support.service.forked import ForkedVerbatim
from tests.support.service.running_service import ADMIN, TRAINER, RunningService
from tests.support.service.verbatim_process import environment, verbatim, wait_until


@pytest.fixture
def service(engines: list[ScriptedEngine], redis_url: str) -> Iterator[RunningService]:
    with RunningService([engine.url for engine in engines], redis_url) as running:
        yield running


def weights(service: RunningService, *args: str) -> subprocess.CompletedProcess[str]:
    return verbatim("weights", *args, VERBATIM_URL=service.url, VERBATIM_ADMIN_TOKEN=ADMIN, COLUMNS="160")


def version_folder(tmp_path: Path, version: int) -> str:
    folder = tmp_path / f"version-{version}"
    folder.mkdir()
    return str(folder)


def test_a_push_reports_every_replica_a_rollback_is_new(
    service: RunningService, engines: list[ScriptedEngine], tmp_path: Path
) -> None:
    first, second = version_folder(tmp_path, 1), version_folder(tmp_path, 2)
    done = weights(service, "push", first)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("  done  ") == 2
    assert "version 1 is current" in done.stdout
    assert weights(service, "push", second, "--version", "7", "--mode", "wait").returncode == 0
    shown = weights(service, "status").stdout
    assert "version 7" in shown and second in shown and first in shown
    back = weights(service, "rollback")
    assert back.stdout.startswith(f"version 1 ({first}) becomes version 8\n")
    assert [engine.weights.loaded["path"] for engine in engines] == [first, first]
    assert [engine.weights.label for engine in engines] == ["8", "8"]
    again = weights(service, "rollback", "7")
    assert f"version 7 ({second}) becomes version 9" in again.stdout
    current = service.request("GET", "/weights").json()["current"]
    assert (current["version"], current["path"]) == (9, second)
    assert f"version 1 ({first}) becomes version 10" in weights(service, "rollback", "1").stdout


def test_a_replica_that_fails_is_named(service: RunningService, engines: list[ScriptedEngine], tmp_path: Path) -> None:
    engines[1].weights.refuse_check = "the checkpoint does not fit"
    done = weights(service, "push", version_folder(tmp_path, 1))
    assert done.returncode == 1
    assert "failed  " in done.stdout and "the checkpoint does not fit" in done.stdout
    assert "1 of 2 replicas take no calls until the service has repaired them" in done.stderr
    done = weights(service, "push", "/nowhere")
    assert done.returncode == 1
    assert "no replica serves version 2; nothing has changed" in done.stderr


def test_who_watches_a_push_may_stop_and_the_push_goes_on(
    service: RunningService, engines: list[ScriptedEngine], tmp_path: Path
) -> None:
    """Ctrl-C ended the command without a word, as if the push had ended with it."""
    held = engines[0].weights.hold("update", done=False)
    variables = environment(VERBATIM_URL=service.url, VERBATIM_ADMIN_TOKEN=ADMIN)
    command = ("weights", "push", version_folder(tmp_path, 1))
    pushing = ForkedVerbatim(command, env=variables, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        assert held.reached.wait(60)
        pushing.send_signal(signal.SIGINT)
        _, stderr = pushing.communicate(timeout=60)
    finally:
        held.released.set()
    assert pushing.returncode == 130
    assert stderr == "verbatim: no longer waiting; the push may still go on (verbatim weights status shows the outcome)\n"
    wait_until(lambda: service.request("GET", "/weights").json()["current"]["version"] == 1, 60, "the push ends")


@pytest.mark.parametrize(
    ("args", "says"),
    [
        (("push", "/w", "--version", "1"), "version 1 is not greater than the current 1"),
        (("push", "/w", "--model", "judge"), "there is no model 'judge'"),
        (("rollback",), "the history has no other checkpoint"),
        (("rollback", "5"), "the history has no version 5"),
        (("rollback", "5"), "the history has no version 5"),
    ],
)
def test_what_cannot_be_done_is_refused_with_one_sentence(
    args: tuple[str, ...], says: str, service: RunningService, tmp_path: Path
) -> None:
    folder = version_folder(tmp_path, 1)
    assert weights(service, "push", folder).returncode == 0
    done = weights(service, *(folder if arg == "/w" else arg for arg in args))
    assert done.returncode == 1
    assert says in done.stderr
    assert "Traceback" not in done.stderr


def test_a_push_can_be_watched_line_by_line(service: RunningService, tmp_path: Path) -> None:
    body = {"version": 1, "path": version_folder(tmp_path, 1)}
    lines = watched(service, body)
    assert [line["step"] for line in lines if "step" in line].count("done") == 2
    assert lines[-1]["result"]["applied"]
    assert watched(service, body) == [
        {"error": {"code": "conflict", "message": "version 1 is not greater than the current 1"}, "status": 409}
    ]


def watched(service: RunningService, body: dict[str, Any]) -> list[dict[str, Any]]:
    headers = {"Authorization": f"Bearer {TRAINER}", "Accept": "application/x-ndjson"}
    answer = httpx.post(f"{service.url}/weights", json=body, headers=headers, timeout=120)
    assert answer.status_code == 200
    return [json.loads(line) for line in answer.text.splitlines()]


def test_a_push_needs_a_path_or_a_transfer_and_the_status_names_the_fields_of_the_contract(service: RunningService) -> None:
    answer = service.request("POST", "/weights", json={"version": 1})
    assert answer.status_code == 400
    assert "a push needs a path, or what a trainer sends" in answer.json()["error"]["message"]
    status = service.request("GET", "/weights").json()
    assert set(status) == {"current", "history", "updating", "frozen", "replicas", "models"}
    assert set(status["current"]) == {"version", "path", "kind", "root", "updated_at"}


def test_brackets_in_names_and_reasons_are_no_markup(service: RunningService) -> None:
    """The address was taken for a style and left out; a closing one in an engine's words ended the command with a traceback."""
    assert service.request("POST", "/engines", json={"url": "http://[fd00::1]:9"}).status_code == 201
    for command in (("engines", "list"), ("weights", "status")):
        shown = verbatim(*command, VERBATIM_URL=service.url, VERBATIM_ADMIN_TOKEN=ADMIN, COLUMNS="160")
        assert shown.returncode == 0 and "[fd00::1]:9" in shown.stdout, (command, shown)
    replica = {
        "weight_version": None,
        "healthy": False,
        "reason": "it answered 500: no [/INST]",
        "in_flight": 0,
        "max_calls": 0,
    }
    listed = {**replica, "name": "a:1", "policy": "", "status": "down", "models": ["m"], "source": "api"}
    for table in (engines_table([listed]), replicas_table({"a:1": replica})):
        Console(file=(out := StringIO()), width=160).print(table)
        assert "no [/INST]" in out.getvalue()
