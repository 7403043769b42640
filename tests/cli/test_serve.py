"""`verbatim serve` from start to stop, as processes: what it prints, what it survives, and what it leaves behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests import ROOT
from tests.support.engine.scripted_engine import Say, ScriptedEngine
from tests.support.service.redis_server import free_port, running_redis
from tests.support.service.scripted_service import ScriptedService, json_answer, serving
from tests.support.service.verbatim_process import ADMIN, TRAINER, Serving, processes_using, runs, verbatim, wait_until

OUTLASTING = 100.0
"""Seconds that an engine takes in the tests that do not let it finish."""
SHORT_DRAIN = 0.3
LONG_DRAIN: dict[str, Any] = {"VERBATIM_DRAIN_SECONDS": "100"}
AT_ONCE = 60.0
"""Seconds in which even a busy machine ends what waits for no drain; a long one takes more."""
LONGEST = 8000
"""Tokens of a reply that takes minutes."""
NOWHERE = ("--engine", "http://127.0.0.1:9")
REPLY = {
    "id": "x",
    "object": "chat.completion",
    "created": 1,
    "model": "policy",
    "choices": [{"index": 0, "message": {"role": "assistant", "content": "late"}, "finish_reason": "stop"}],
    "usage": {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2},
}


@pytest.fixture
def data(tmp_path: Path) -> Path:
    return tmp_path / "data"


@pytest.fixture(scope="module")
def nowhere(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serving]:
    """A service whose engine is not there."""
    with Serving(*NOWHERE, data_dir=tmp_path_factory.mktemp("nowhere") / "data") as service:
        yield service


@pytest.fixture
def engine() -> Iterator[ScriptedService]:
    """A plain server that knows /v1/chat/completions and takes its time."""
    with serving(ScriptedService()) as service:
        service.script("GET /v1/models", json_answer({"object": "list", "data": [{"id": "policy", "object": "model"}]}))
        service.script("POST /v1/chat/completions", json_answer(REPLY))
        yield service


def answer_after(engine: ScriptedService, seconds: float) -> None:
    slow = json_answer(REPLY)
    engine.script("POST /v1/chat/completions", type(slow)(slow.status, slow.content, slow.headers, delay_seconds=seconds))


class Call:
    """A call by a harness that knows nothing but its base URL and key, made in the background."""

    def __init__(self, service: Serving, session_id: str, **body: Any) -> None:
        session = service.request("POST", "/sessions", json={"session_id": session_id}).json()
        self.answer: httpx.Response | None = None
        self.error: httpx.HTTPError | None = None
        self.heard = b""
        """The body of the answer, as far as it has come."""
        self._url = session["base_urls"]["openai"] + "/chat/completions"
        self._key = session["api_key"]
        self._body = {"model": "policy", "messages": [{"role": "user", "content": "hello"}], **body}
        self._thread = threading.Thread(target=self._make)
        self._thread.start()

    def _make(self) -> None:
        try:
            headers = {"Authorization": f"Bearer {self._key}"}
            with httpx.stream("POST", self._url, json=self._body, headers=headers, timeout=120) as answer:
                for piece in answer.iter_bytes():
                    self.heard += piece
            self.answer = httpx.Response(answer.status_code, content=self.heard)
        except httpx.HTTPError as error:
            self.error = error

    def end(self) -> httpx.Response | None:
        self._thread.join(120)
        return self.answer


def test_port_0_takes_a_free_port_and_prints_it(nowhere: Serving) -> None:
    assert nowhere.url.startswith("http://127.0.0.1:") and not nowhere.url.endswith(":0")
    assert nowhere.request("GET", "/healthz").status_code == 200
    assert f"data: {nowhere.data_dir}" in nowhere.stdout and NOWHERE[1] in nowhere.stdout


def test_tokens_that_were_not_set_are_generated_and_printed_once(data: Path) -> None:
    with Serving(*NOWHERE, data_dir=data, VERBATIM_ADMIN_TOKEN="", VERBATIM_TRAINER_TOKEN="") as service:
        lines = dict(line.split(": ", 1) for line in service.stdout.splitlines() if ": " in line)
        admin, trainer = lines["admin token"], lines["trainer token"]
        assert len(admin) > 20 and len(trainer) > 20 and admin != trainer
        assert service.request("GET", "/sessions", token=admin).status_code == 200
        assert service.request("GET", "/sessions", token=trainer).status_code == 403
        assert service.request("GET", "/weights", token=trainer).status_code == 200
        assert trainer not in service.stderr and admin not in service.stderr


def test_tokens_from_the_environment_work_and_are_never_printed(nowhere: Serving) -> None:
    assert nowhere.request("GET", "/sessions").status_code == 200
    assert ADMIN not in nowhere.stdout + nowhere.stderr and TRAINER not in nowhere.stdout + nowhere.stderr


def test_an_unreachable_engine_is_no_obstacle_to_starting_and_readyz_names_it(nowhere: Serving) -> None:
    ready = nowhere.request("GET", "/readyz")
    assert ready.status_code == 503
    assert "127.0.0.1:9" in ready.json()["reason"]
    refused = Call(nowhere, "s").end()
    assert refused is not None and refused.status_code == 503
    assert "127.0.0.1:9" in refused.json()["error"]["message"]


def test_an_engine_that_comes_later_is_found(data: Path, engine: ScriptedService) -> None:
    answer_after(engine, 0)
    with Serving("--engine", engine.url, "--engine-api", "chat", data_dir=data) as service:
        wait_until(lambda: service.request("GET", "/readyz").status_code == 200, 120, "ready")
        answered = Call(service, "s").end()
        assert answered is not None and answered.json()["choices"][0]["message"]["content"] == "late"


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_stop_signal_ends_everything_within_seconds_and_leaves_no_redis(data: Path, number: int) -> None:
    with Serving(*NOWHERE, data_dir=data, **LONG_DRAIN) as service:
        assert processes_using(data)
        service.send_group(number)
        assert service.exit_code(AT_ONCE) == 0
        assert "stopping" in service.stderr and "stopped" in service.stderr
        assert processes_using(data) == []
        assert "Traceback" not in service.stderr


@pytest.mark.parametrize(
    ("begun", "after_seconds", "number"),
    [
        ("", 0.0, signal.SIGTERM),
        ("redis.sock", 0.0, signal.SIGINT),
        ("redis.sock", 0.05, signal.SIGTERM),
        ("redis.sock", 0.2, signal.SIGINT),
    ],
)
def test_a_stop_signal_during_the_start_leaves_nothing(data: Path, begun: str, after_seconds: float, number: int) -> None:
    """First there is the data directory, then a redis-server; the application follows, and the panel."""
    with Serving(*NOWHERE, data_dir=data, ready=False) as service:
        wait_until((data / begun).exists, 60, "it has begun")
        time.sleep(after_seconds)
        service.send_group(number)
        assert service.exit_code(within_seconds=60) == 0, service.stderr
        assert processes_using(data) == []
        assert "Traceback" not in service.stderr


TOLD_IN_VAIN = """
import signal
from cli import main, service

class Cleared:
    def __del__(self):
        signal.raise_signal(signal.SIGTERM)

def told(*_):
    Cleared()

service.load_certificate = told
main.main()
"""


def test_a_stop_signal_whose_exception_was_dropped_ends_the_service_once_it_serves(data: Path) -> None:
    """Its handler ran in a finalizer, whose exceptions Python drops, and the service went on: two of 150 starts under load."""
    argv = [sys.executable, "-c", TOLD_IN_VAIN, "serve", "--port", "0", "--data-dir", str(data), *NOWHERE]
    ended = subprocess.run(argv, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert ended.returncode == 0 and "Exception ignored" in ended.stderr, ended.stderr
    assert processes_using(data) == []


def test_sessions_survive_a_restart(data: Path) -> None:
    with Serving(*NOWHERE, data_dir=data) as service:
        created = service.request("POST", "/sessions", json={"session_id": "kept", "metadata": {"seed": 7}})
        assert created.status_code == 201
        assert service.stop() == 0
    with Serving(*NOWHERE, data_dir=data) as service:
        session = service.request("GET", "/sessions/kept").json()
        assert session["status"] == "open" and session["metadata"] == {"seed": 7}


def test_sessions_survive_kill_9_of_the_service_and_its_redis_goes_with_it(data: Path) -> None:
    with Serving(*NOWHERE, data_dir=data) as service:
        assert service.request("POST", "/sessions", json={"session_id": "kept"}).status_code == 201
        service.stop(signal.SIGKILL)
        wait_until(lambda: processes_using(data) == [], 120, "the embedded Redis has ended")
    with Serving(*NOWHERE, data_dir=data) as service:
        assert service.request("GET", "/sessions/kept").json()["status"] == "open"


def test_services_on_one_given_redis_serve_the_same_sessions_and_leave_it_running(tmp_path: Path, redis_url: str) -> None:
    with (
        Serving(*NOWHERE, "--redis", redis_url, data_dir=tmp_path / "a") as one,
        Serving(*NOWHERE, "--redis", redis_url, data_dir=tmp_path / "b") as other,
    ):
        assert one.request("POST", "/sessions", json={"session_id": "shared"}).status_code == 201
        assert other.request("GET", "/sessions/shared").json()["status"] == "open"
        assert one.stop() == 0
        assert other.request("GET", "/sessions/shared").json()["status"] == "open"
        assert other.stop() == 0
    assert not (tmp_path / "a").exists() and not (tmp_path / "b").exists()


def test_a_service_that_starts_before_its_redis_waits_for_it(tmp_path: Path) -> None:
    port = free_port()
    with Serving(*NOWHERE, "--redis", f"redis://127.0.0.1:{port}", data_dir=tmp_path, ready=False) as service:
        wait_until(lambda: "waiting up to" in service.stderr, 60, "it found no Redis")
        with running_redis(port=port):
            wait_until(lambda: bool(service.url) or service.ended, 60, "it serves")
            assert service.request("POST", "/sessions", json={"session_id": "s"}).status_code == 201
            assert service.stop() == 0


@pytest.mark.parametrize("flags", [(), ("--control-port", "0")], ids=["one port", "two ports"])
def test_a_call_in_flight_finishes_after_a_stop_signal(data: Path, engine: ScriptedService, flags: tuple[str, ...]) -> None:
    answer_after(engine, OUTLASTING)
    with Serving("--engine", engine.url, "--engine-api", "chat", *flags, data_dir=data) as service:
        call = Call(service, "s")
        engine.wait_for(lambda: "/v1/chat/completions" in engine.paths())
        service.send(signal.SIGTERM)
        wait_until(lambda: "calls in flight: 1, which have up to 20 s to end" in service.stderr, 60, "it waits for the call")
        engine.ended = True
        answered = call.end()
        assert answered is not None and answered.status_code == 200, (call.error, service.stderr)
        assert answered.json()["choices"][0]["message"]["content"] == "late"
        assert service.exit_code(AT_ONCE) == 0
    with Serving("--engine", engine.url, "--engine-api", "chat", data_dir=data) as service:
        assert len(service.request("GET", "/sessions/s/calls").json()["calls"]) == 1


def test_a_call_that_outlasts_the_drain_is_cut_with_an_answer(data: Path, engine: ScriptedService) -> None:
    answer_after(engine, OUTLASTING)
    with Serving(
        "--engine", engine.url, "--engine-api", "chat", data_dir=data, VERBATIM_DRAIN_SECONDS=str(SHORT_DRAIN)
    ) as service:
        call = Call(service, "s")
        engine.wait_for(lambda: "/v1/chat/completions" in engine.paths())
        began = time.monotonic()
        service.send(signal.SIGTERM)
        answered = call.end()
        assert time.monotonic() - began >= SHORT_DRAIN
        assert answered is not None and answered.status_code == 503, (call.error, service.stderr)
        error = answered.json()["error"]
        assert error["code"] == "service_stopping" and "the service is stopping" in error["message"]
        assert service.exit_code(AT_ONCE) == 0
        before, cut, _ = service.stderr.partition("the call was cut")
        assert cut and "graceful shutdown exceeded" not in before, "the service cuts it, the server breaks nothing off"
        assert "Traceback" not in service.stderr and "BrokenOff" not in service.stderr
    with Serving("--engine", engine.url, "--engine-api", "chat", data_dir=data) as service:
        unserved = service.request("GET", "/sessions/s").json()["unserved"]
        assert unserved["code"] == "service_stopping" and unserved["message"] == error["message"]


def test_a_stream_that_outlasts_the_drain_is_recorded_as_aborted(data: Path) -> None:
    with ScriptedEngine("qwen3", max_model_len=2 * LONGEST) as speaking:
        word = speaking.family.id_of("fish")
        speaking.script = lambda generation, index: Say(token_ids=[word] * LONGEST, seconds_per_token=0.02)
        with Serving("--engine", speaking.url, data_dir=data, VERBATIM_DRAIN_SECONDS=str(SHORT_DRAIN)) as service:
            wait_until(lambda: service.request("GET", "/readyz").status_code == 200, 60, "ready")
            call = Call(service, "s", stream=True)
            wait_until(lambda: call.heard.count(b"data:") > 2, 60, "it has begun to speak")
            service.send(signal.SIGTERM)
            answered = call.end()
            assert answered is not None, (call.error, service.stderr)
            assert answered.text.strip().endswith("data: [DONE]")
            assert service.exit_code(within_seconds=60) == 0
    with Serving("--engine", speaking.url, data_dir=data) as service:
        (recorded,) = service.request("GET", "/sessions/s/calls").json()["calls"]
        assert recorded["finish_reason"] == "abort"
        assert 0 < len(recorded["completion_ids"]) < LONGEST


def workers_of(service: Serving) -> list[int]:
    """The children that serve, or will: the others are Redis and what Python keeps beside its processes."""
    found = []
    for pid in service.children:
        # One that has just ended is a child still.
        with suppress(OSError):
            program = Path(f"/proc/{pid}/cmdline").read_bytes()
            found += [pid] if b"spawn_main" in program or b"service.forked" in program else []
    return found


def test_several_workers_share_the_port_and_the_store_and_one_that_is_killed_is_replaced(data: Path) -> None:
    """Also one that is killed before it serves. Here alone Python is started anew for each of them, as it is for a user's."""
    with Serving(*NOWHERE, "--workers", "2", data_dir=data, TESTS_START_WORKERS="1", **LONG_DRAIN) as service:
        first = workers_of(service)
        assert len(first) == 2
        for number in range(20):
            assert service.request("POST", "/sessions", json={"session_id": f"s{number}"}).status_code == 201
        seen = {len(service.request("GET", "/sessions").json()["sessions"]) for _ in range(20)}
        assert seen == {20}
        assert {service.request("GET", "/tasks").status_code for _ in range(20)} == {200}, "not every worker takes tasks"
        os.kill(first[0], signal.SIGKILL)
        wait_until(lambda: len(set(workers_of(service)) - set(first)) == 1, 60, "another worker")
        (starting,) = set(workers_of(service)) - set(first)
        os.kill(starting, signal.SIGKILL)
        wait_until(lambda: len(set(workers_of(service)) - {*first, starting}) == 1, 60, "and in that one's place")
        assert service.request("POST", "/sessions", json={}).status_code == 201
        service.send_group(signal.SIGINT)
        assert service.exit_code(AT_ONCE) == 0
        assert processes_using(data) == []
        assert "Traceback" not in service.stderr
        for killed in (first[0], starting):
            assert f"worker {killed} died" in service.stderr


HARNESS_ROUTES = (("POST", "/v1/chat/completions"), ("GET", "/v1/models"), ("POST", "/v1beta/models/policy:generateContent"))
CONTROL_ROUTES = (
    *(("POST", path) for path in ("/sessions", "/batches/lease", "/weights", "/tasks", "/engines")),
    *(("GET", path) for path in ("/sessions", "/weights", "/nodes", "/engines", "/metrics", "/ui", "/openapi.json")),
)


@pytest.mark.parametrize("flags", [(), ("--workers", "2"), ("--log-calls",)], ids=["one", "two", "logged"])
def test_each_side_is_served_at_its_own_port_alone(data: Path, engine: ScriptedService, flags: tuple[str, ...]) -> None:
    with Serving("--engine", engine.url, "--engine-api", "chat", "--control-port", "0", *flags, data_dir=data) as service:
        assert service.url != service.control_url
        wait_until(lambda: service.request("GET", "/readyz").status_code == 200, 60, "ready")
        made = service.request("POST", "/sessions", json={"session_id": "s"}).json()
        assert made["base_urls"]["openai"] == f"{service.url}/s/s/v1"
        admin, own = {"Authorization": f"Bearer {ADMIN}"}, {"Authorization": f"Bearer {made['api_key']}"}
        for method, path in CONTROL_ROUTES:
            refused = httpx.request(method, service.url + path, headers=admin, json={} if method == "POST" else None)
            assert refused.status_code == 404, (method, path, refused.text)
            assert refused.json()["error"]["code"] == "not_found"
            assert "a port of its own" in refused.json()["error"]["message"]
            assert service.request(method, path, json={} if method == "POST" else None).status_code != 404, (method, path)
        for method, path in HARNESS_ROUTES:
            body = {"model": "policy", "messages": [{"role": "user", "content": "hello"}]} if method == "POST" else None
            refused = httpx.request(method, f"{service.control_url}/s/s{path}", headers=own, json=body)
            assert refused.status_code == 404, (method, path, refused.text)
        for path in ("/healthz", "/readyz"):
            assert [httpx.get(url + path).status_code for url in (service.url, service.control_url)] == [200, 200]
        # The Host header is the client's to choose; the socket is not.
        host = {"Host": service.control_url.removeprefix("http://")}
        assert httpx.get(service.url + "/sessions", headers={**admin, **host}).status_code == 404
        answer_after(engine, 0)
        call = Call(service, "t")
        answer = call.end()
        assert answer is not None and answer.status_code == 200, call.error
        assert len(service.request("GET", "/sessions/t/calls").json()["calls"]) == 1
        assert len(service.request("GET", "/sessions/s/calls").json()["calls"]) == 0


def test_a_control_port_that_is_taken_or_the_harness_sides_is_refused(data: Path, nowhere: Serving) -> None:
    taken = nowhere.url.rpartition(":")[2]
    done = verbatim("serve", *NOWHERE, "--port", "0", "--control-port", taken, "--data-dir", str(data))
    assert done.returncode == 1 and "choose another with --control-port" in done.stderr
    done = verbatim("serve", *NOWHERE, "--port", "8700", "--control-port", "8700", "--data-dir", str(data))
    assert done.returncode == 2 and "--control-port (or VERBATIM_CONTROL_PORT) '8700' is invalid" in done.stderr
    assert not data.exists()


def test_workers_end_when_their_parent_is_killed(data: Path) -> None:
    with Serving(*NOWHERE, "--workers", "2", data_dir=data) as service:
        workers = workers_of(service)
        assert len(workers) == 2
        service.stop(signal.SIGKILL)
        wait_until(lambda: not any(runs(pid) for pid in workers), 120, "the workers have ended")
        wait_until(lambda: processes_using(data) == [], 120, "the embedded Redis has ended")


@pytest.mark.parametrize("workers", [1, 2])
def test_a_second_ctrl_c_exits_at_once(data: Path, engine: ScriptedService, workers: int) -> None:
    answer_after(engine, OUTLASTING)
    flags = ("--workers", "2") if workers == 2 else ()
    with Serving("--engine", engine.url, "--engine-api", "chat", *flags, data_dir=data, **LONG_DRAIN) as service:
        call = Call(service, "s")
        engine.wait_for(lambda: "/v1/chat/completions" in engine.paths())
        children = workers_of(service)
        assert len(children) == len(flags)
        service.send_group(signal.SIGINT)
        wait_until(lambda: "stopping" in service.stderr, 120, "the first is heard")
        assert not service.ended
        service.send_group(signal.SIGINT)
        assert service.exit_code(AT_ONCE) == 130
        assert call.end() is None
        assert not any(runs(pid) for pid in children)
        assert processes_using(data) == []
