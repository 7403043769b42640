"""Two real engines under load while a trainer pushes version after version, and one of them dies and comes back.

Afterwards every sampled token is recomputed by transformers under the weights of the version it carries.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest
from openai import APIError
from running_service import TRAINER, RunningService, Session
from vllm_server import running_vllm
from weight_fixtures import Judge, Said

from proxy.engine.vllm_launch import VllmServer

pytestmark = pytest.mark.engine

AGENTS = 12
PUSHES = 12
KILLED_AT, BACK_AT = 4, 8
MODES = ("keep", "wait", "abort")
TOLERANCE = 1e-4
PLAIN = {"ignore_eos": True, "chat_template_kwargs": {"enable_thinking": False}}


class Agents:
    """Harnesses that talk and talk, each in one session after the other. `failures` is what any of them could not get over."""

    def __init__(self, service: RunningService, number: int) -> None:
        self.sessions: list[Session] = []
        self.failures: list[str] = []
        self.calls = 0
        self._service = service
        self._stopping = threading.Event()
        self._threads = [threading.Thread(target=self._run, args=(index,)) for index in range(number)]

    def __enter__(self) -> Agents:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stopping.set()
        for thread in self._threads:
            thread.join()

    def more(self, calls: int) -> None:
        """Return when so many more calls were answered."""
        wanted, deadline = self.calls + calls, time.monotonic() + 240
        while self.calls < wanted:
            assert not self.failures, self.failures
            assert time.monotonic() < deadline, f"{self.calls} of {wanted} calls"
            time.sleep(0.02)

    def _run(self, index: int) -> None:
        while not self._stopping.is_set() and not self.failures:
            session = self._service.session(max_retries=8)
            self.sessions.append(session)
            try:
                self._talk(session, index)
            except APIError as error:
                self.failures.append(repr(error))

    def _talk(self, session: Session, index: int) -> None:
        messages: list[Any] = [{"role": "user", "content": f"agent {index}"}]
        for turn in range(4):
            reply = session.ask(messages, max_tokens=16 + 8 * turn, extra_body=PLAIN, timeout=120).choices[0].message
            messages += [reply.model_dump(exclude_none=True), {"role": "user", "content": f"and {turn}?"}]
            self.calls += 1


@contextmanager
def two_engines(model: Path, folder: Path) -> Iterator[Sequence[VllmServer]]:
    with ExitStack() as stack:
        yield [stack.enter_context(running_vllm(model, folder)) for _ in range(2)]


def push(service: RunningService, version: int, path: Path, mode: str) -> dict[str, Any]:
    body = {"version": version, "path": str(path), "mode": mode}
    answer = service.request("POST", "/weights", TRAINER, json=body, timeout=240)
    assert answer.status_code == 200, answer.text
    result: dict[str, Any] = answer.json()
    assert result["applied"], result
    return result


def until_serving(service: RunningService, replicas: int) -> None:
    deadline = time.monotonic() + 120
    while True:
        standing = service.request("GET", "/weights").json()["replicas"].values()
        if sum(replica["healthy"] for replica in standing) == replicas:
            return
        assert time.monotonic() < deadline, standing
        time.sleep(0.1)


@pytest.mark.timeout(900)
def test_every_token_is_of_the_weights_it_names_though_versions_come_fast_and_an_engine_dies(
    tiny_model: Path, tmp_path: Path, redis_url: str
) -> None:
    from examples.demo.tiny_model import make_tiny_model

    made = [tiny_model, *(make_tiny_model(tmp_path / f"seed{seed}", seed=seed) for seed in (1, 2))]
    with two_engines(tiny_model, tmp_path) as engines, RunningService([engine.url for engine in engines], redis_url) as service:
        until_serving(service, 2)
        with Agents(service, AGENTS) as agents:
            agents.more(AGENTS)
            for version in range(1, PUSHES + 1):
                if version == KILLED_AT:
                    engines[1].kill()
                    until_serving(service, 1)
                if version == BACK_AT:
                    engines[1].start()
                    engines[1].wait_until_ready()
                    until_serving(service, 2)
                push(service, version, made[version % 3], MODES[version % 3])
                agents.more(AGENTS)
        assert agents.failures == []
        calls = [call for session in agents.sessions for call in session.calls]
    judge, seen = Judge(), set()
    for call in calls:
        spans = [(str(span[0]), span[1], span[2]) for span in call["weight_versions"]]
        said = Said(call["prompt_ids"], call["completion_ids"], call["logprobs"], spans, call["finish_reason"])
        for label, start, end in spans:
            seen.add(int(label))
            assert judge.largest_error(made[int(label) % 3], said, start, end) < TOLERANCE
        assert sum(end - start for _, start, end in spans) == len(said.ids)
    assert seen == set(range(PUSHES + 1))
    assert any(len(call["weight_versions"]) > 1 for call in calls), "a reply went on across a push"
    returned = {call["replica"] for call in calls if min(span[0] for span in call["weight_versions"]) >= BACK_AT}
    assert len(returned) == 2, "the engine that came back serves again"
