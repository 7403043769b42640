"""Kind `http`: a service of the user's own as the one that gives rewards."""

from __future__ import annotations

import base64
import io
import json
import tarfile
import threading
from collections.abc import Iterator
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, ClassVar

import pytest

from rollout.evaluators.base import BadReward, EvaluationFailed, Score
from tests.support.runtimes.evaluations import RUN, evaluated


class Rewards(ThreadingHTTPServer):
    """Gives `answers` one after the other, the last one for ever; None breaks the connection. Keeps what it was asked."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.url = f"http://127.0.0.1:{self.server_address[1]}/reward"
        self.answers: list[tuple[int, bytes] | None] = []
        self.asked: list[tuple[dict[str, str], dict[str, Any]]] = []

    def handle_error(self, request: Any, client_address: Any) -> None:
        pass


class _Handler(BaseHTTPRequestHandler):
    server: Rewards

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        self.server.asked.append((dict(self.headers), json.loads(body)))
        answers = self.server.answers
        answer = answers.pop(0) if len(answers) > 1 else answers[0]
        if answer is None:
            self.connection.close()
            return
        self.send_response(answer[0])
        self.send_header("Content-Length", str(len(answer[1])))
        self.end_headers()
        self.wfile.write(answer[1])

    def log_message(self, format: str, *args: Any) -> None:
        pass


class Seen(dict[str, Any]):
    """Notes in which thread it was looked through."""

    threads: ClassVar[list[threading.Thread]] = []

    def items(self) -> Any:
        self.threads.append(threading.current_thread())
        return super().items()


@pytest.fixture
def rewards() -> Iterator[Rewards]:
    with Rewards() as server:
        thread = threading.Thread(target=server.serve_forever, name="rewards", kwargs={"poll_interval": 0.02})
        thread.start()
        yield server
        server.shutdown()
        thread.join()


def said(**fields: Any) -> tuple[int, bytes]:
    return 200, json.dumps(fields).encode()


async def test_the_answer_is_the_score(rewards: Rewards, tmp_path: Path) -> None:
    rewards.answers = [said(reward=0.5, per_call={"c1": 1}, feedback="half", model="grader")]
    score = await evaluated("http", {"url": rewards.url, "headers": {"X-Team": "a"}}, tmp_path)
    assert score == Score(0.5, {"c1": 1.0}, feedback="half", metadata={"model": "grader"})
    ((headers, body),) = rewards.asked
    assert headers["X-Team"] == "a"
    assert body == {
        "task": {
            "task_id": "t1",
            "instruction": "Make the tests pass.",
            "model": None,
            "harness": "pi",
            "metadata": {"source": "tests"},
        },
        "session_id": "t1.0.1",
        "run": {"exit_code": 0, "timed_out": False, "stdout": "Done.\n", "stderr": "", "calls": []},
    }


async def test_collected_files_go_along_as_an_archive(rewards: Rewards, tmp_path: Path) -> None:
    rewards.answers = [said(reward=1)]
    await evaluated("http", {"url": rewards.url, "files": ["src"]}, tmp_path, {"src/a.py": "a = 1", "b.py": "b = 2"})
    archive = base64.b64decode(rewards.asked[0][1]["files"])
    with tarfile.open(fileobj=io.BytesIO(archive)) as tar:
        assert [name for name in tar.getnames() if name.endswith(".py")] == ["src/a.py"]


@pytest.mark.parametrize(
    ("calls", "told"),
    [
        ("none", None),
        ("outline", [{"call_id": "c", "parent_id": None, "role": "main", "status": "finished", "finish_reason": "stop"}]),
        ("all", [{"call_id": "c", "role": "main", "status": "finished", "finish_reason": "stop", "reply": {"content": "x"}}]),
    ],
)
async def test_as_much_of_the_calls_goes_along_as_is_wanted(calls: str, told: Any, rewards: Rewards, tmp_path: Path) -> None:
    call = {"call_id": "c", "role": "main", "status": "finished", "finish_reason": "stop", "reply": {"content": "x"}}
    rewards.answers = [said(reward=1)]
    await evaluated("http", {"url": rewards.url, "calls": calls}, tmp_path, run=replace(RUN, calls=[call]))
    assert rewards.asked[0][1]["run"].get("calls") == told


async def test_a_service_in_trouble_is_asked_again(rewards: Rewards, tmp_path: Path) -> None:
    rewards.answers = [None, (503, b"busy"), (429, b""), (500, b"oh"), said(reward=1)]
    options = {"url": rewards.url, "backoff_seconds": 0.001}
    assert (await evaluated("http", options, tmp_path)).reward == 1.0
    assert len(rewards.asked) == 5


async def test_a_service_that_stays_in_trouble_gives_no_reward(rewards: Rewards, tmp_path: Path) -> None:
    rewards.answers = [(503, b"busy")]
    options = {"url": rewards.url, "backoff_seconds": 0.001, "retries": 2}
    with pytest.raises(EvaluationFailed, match="answered 503: 'busy', 3 times"):
        await evaluated("http", options, tmp_path)
    assert len(rewards.asked) == 3


@pytest.mark.parametrize("answer", [(404, b"who?"), (302, b""), (400, b"bad")])
async def test_a_refusal_is_not_asked_again(answer: tuple[int, bytes], rewards: Rewards, tmp_path: Path) -> None:
    rewards.answers = [answer]
    with pytest.raises(EvaluationFailed, match=f"answered {answer[0]}"):
        await evaluated("http", {"url": rewards.url}, tmp_path)
    assert len(rewards.asked) == 1


@pytest.mark.parametrize("answer", [b"", b"<html>", b"{}", b'{"reward": NaN}', b'{"reward": "1"}', b'{"score": 1}', b"\xff"])
async def test_an_answer_without_a_reward_is_no_reward(answer: bytes, rewards: Rewards, tmp_path: Path) -> None:
    rewards.answers = [(200, answer)]
    with pytest.raises(BadReward):
        await evaluated("http", {"url": rewards.url}, tmp_path)


async def test_the_token_is_of_the_nodes_environment(rewards: Rewards, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rewards.answers = [said(reward=1)]
    options = {"url": rewards.url, "token_variable": "VERBATIM_EVALUATOR_TOKEN"}
    with pytest.raises(EvaluationFailed, match="this node has no variable VERBATIM_EVALUATOR_TOKEN"):
        await evaluated("http", options, tmp_path)
    monkeypatch.setenv("VERBATIM_EVALUATOR_TOKEN", "s3cret")
    await evaluated("http", options, tmp_path)
    assert rewards.asked[0][0]["Authorization"] == "Bearer s3cret"


async def test_a_great_body_is_encoded_while_the_node_goes_on(rewards: Rewards, tmp_path: Path) -> None:
    rewards.answers = [(200, b'{"reward": 1}')]
    Seen.threads.clear()
    run = replace(RUN, calls=[Seen(call_id="c", note="\ud800")])
    assert (await evaluated("http", {"url": rewards.url, "calls": "all"}, tmp_path, run=run)).reward == 1.0
    assert Seen.threads and threading.main_thread() not in Seen.threads
    headers, body = rewards.asked[0]
    assert (headers["Content-Type"], body["run"]["calls"]) == ("application/json", [{"call_id": "c", "note": "\ud800"}])
