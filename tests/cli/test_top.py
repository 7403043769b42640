"""`verbatim top` as an operator runs it: once, as JSON, live in a real terminal, and against what is no service."""

from __future__ import annotations

import json
import os
import pty
import signal
import subprocess
import threading
from collections.abc import Iterator
from functools import partial

import pytest

from cli.rollout_service import add_rollouts
from cli.top import Exposition
from tests.support.engine.scripted_engine import ScriptedEngine
from tests.support.service.forked import ForkedVerbatim
from tests.support.service.redis_server import RedisServer
from tests.support.service.rollout_service import KNOWN
from tests.support.service.running_service import ADMIN, RunningService, wait_until
from tests.support.service.scripted_service import Answer, ScriptedService, json_answer
from tests.support.service.verbatim_process import environment, verbatim


@pytest.fixture(scope="module")
def service(redis_server: RedisServer) -> Iterator[RunningService]:
    """One group that is ready, and an open session that has said something."""
    redis_server.flushall()
    adding = [partial(add_rollouts, KNOWN)]
    with ScriptedEngine() as engine, RunningService(engine.url, redis_server.url, adding=adding, engine_api="token") as running:
        ended = running.session(session_id="ended", group_id="g")
        ended.ask("hello")
        ended.close(reward=1.0)
        running.session(session_id="still-open").ask("hello")
        yield running


def test_json_has_what_the_service_has(service: RunningService) -> None:
    done = verbatim("top", "--json", VERBATIM_URL=service.url, VERBATIM_ADMIN_TOKEN=ADMIN)
    assert (done.returncode, done.stderr) == (0, "")
    told = json.loads(done.stdout)
    (engine,) = told["engines"]
    assert (engine["status"], engine["weight_version"], told["waiting"]) == ("serving", 0, {"": 0})
    assert (told["calls"]["recorded"], told["calls"]["in_flight"], told["groups"]["ready"]) == (2, 0, 1)
    assert ([session["session_id"] for session in told["sessions"]], told["more"]) == (["still-open"], False)
    sampled = sum(len(call["completion_ids"]) for name in ("ended", "still-open") for call in calls_of(service, name))
    assert told["calls"]["sampled_tokens"] == sampled


def calls_of(service: RunningService, session_id: str) -> list[dict[str, list[int]]]:
    listed: list[dict[str, list[int]]] = service.request("GET", f"/sessions/{session_id}/calls").json()["calls"]
    return listed


def test_once_prints_every_part(service: RunningService) -> None:
    done = verbatim("top", "--once", VERBATIM_URL=service.url, VERBATIM_ADMIN_TOKEN=ADMIN, COLUMNS="160")
    assert done.returncode == 0, done.stderr
    for part in (
        service.url,
        "2 calls",
        "serving",
        "no call is waiting for an engine",
        "leased",
        "1 open sessions",
        "still-open",
    ):
        assert part in done.stdout


def test_live_it_follows_the_service_and_leaves_the_terminal_as_it_was(service: RunningService) -> None:
    ours, theirs = pty.openpty()
    variables = environment(VERBATIM_URL=service.url, VERBATIM_ADMIN_TOKEN=ADMIN, COLUMNS="160", LINES="60", TERM="xterm")
    process = ForkedVerbatim(("top", "--every", "0.2"), env=variables, stdin=theirs, stdout=theirs, stderr=subprocess.PIPE)
    os.close(theirs)
    seen = bytearray()
    reader = threading.Thread(target=_read, args=(ours, seen))
    reader.start()
    try:
        wait_until(lambda: b"still-open" in seen, 60, "the first screen")
        service.session(session_id="came-later")
        wait_until(lambda: b"came-later" in seen, 60, "what came later")
        wait_until(lambda: b"calls/s" in seen, 60, "rates")
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=60)
    finally:
        process.kill()
        process.wait()
        reader.join(120)
        os.close(ours)
    assert (process.returncode, errors) == (0, b"")
    # The screen of its own is left, and the cursor is back.
    assert b"\x1b[?1049h" in seen and seen.rindex(b"\x1b[?1049l") > seen.rindex(b"\x1b[?1049h")
    assert seen.rindex(b"\x1b[?25h") > seen.rindex(b"\x1b[?25l")


def _read(terminal: int, seen: bytearray) -> None:
    try:
        while data := os.read(terminal, 65536):
            seen += data
    except OSError:
        # How a terminal says that nobody writes to it any more.
        pass


def test_what_is_no_service_is_said_in_one_sentence(service: RunningService, scripted_server: ScriptedService) -> None:
    page = Answer(200, b"<html></html>", {"content-type": "text/html"})
    other = scripted_server.reset()
    wrong = [("http://127.0.0.1:1", ADMIN, "no service at http://127.0.0.1:1"), (service.url, "not-the-token", "token")]
    for url, token, sentence in wrong:
        done = verbatim("top", "--once", VERBATIM_URL=url, VERBATIM_ADMIN_TOKEN=token)
        assert (done.returncode, done.stdout, len(done.stderr.splitlines())) == (1, "", 1)
        assert sentence in done.stderr
    # An engine, asked by mistake: vLLM's own way of saying that it has no such path.
    absent = json_answer({"error": {"message": "Not Found", "type": "NotFoundError", "param": None, "code": 404}}, 404)
    for answers in ([page, page], [json_answer({}), page], [absent, absent]):
        other.script("GET /engines", answers[0])
        other.script("GET /metrics", answers[1])
        done = verbatim("top", VERBATIM_URL=other.url, VERBATIM_ADMIN_TOKEN=ADMIN)
        assert (done.returncode, done.stdout) == (1, "")
        assert "is no Verbatim service" in done.stderr


def test_a_page_of_metrics_is_read_with_every_kind_of_label() -> None:
    page = Exposition('# HELP a b\na_total{x="1",y="q\\"}\\n\\\\"} 2.0\na_total{x="1",y="z"} 1e3\nb 4 1700000000\n')
    assert page.total("a_total", x="1") == 1002.0 and page.total("b") == 4.0 and page.total("c") == 0
    assert page.by("a_total", "y") == {'q"}\n\\': 2.0, "z": 1000.0}
