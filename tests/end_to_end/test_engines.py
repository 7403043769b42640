"""Two real engines: one stands still for a while, and then a trainer pushes version after version and one of them dies and comes back.

Afterwards every trained token of every row is recomputed by transformers under the weights of the version it carries.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from itertools import count
from pathlib import Path
from typing import Any

import httpx
import pytest
from openai import APIError

from examples.vllm_server import VllmServer, free_port, vllm_command
from proxy.engine.pool.membership import replica_at
from proxy.engine.pool.seats import rank_replicas
from tests.support.engine.forked_vllm import ForkedVllmServer
from tests.support.engine.real_engine import read_metric
from tests.support.service.running_service import TRAINER, RunningService, Session, wait_until
from trainer_client import TrainerClient
from trainer_client.client import Mode
from trainer_client.publish import ReplicaFailed, WeightPush

pytestmark = pytest.mark.engine

AGENTS = 5
PUSHES = 7
"""At least."""
KILLED_AT, BACK_AT = 3, 5
MODES: tuple[Mode, ...] = ("keep", "wait", "abort")
TOLERANCE = 1e-4
PLAIN = {"ignore_eos": True, "chat_template_kwargs": {"enable_thinking": False}}
PATIENCE = 1200.0
"""Seconds that any one thing may take on however busy a machine."""


class Agents:
    """Harnesses that talk while they are let, each in one session after the other."""

    def __init__(self, service: RunningService, number: int) -> None:
        self.sessions: list[Session] = []
        self.failures: list[str] = []
        self._service = service
        self._change = threading.Condition()
        self._talking = self._over = False
        self._asking = self._answered = 0
        self._threads = [threading.Thread(target=self._run, args=(index,)) for index in range(number)]

    def __enter__(self) -> Agents:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        with self._change:
            self._over = True
            self._change.notify_all()
        for thread in self._threads:
            thread.join()

    @contextmanager
    def talking(self) -> Iterator[None]:
        """Inside the block they ask one call after the other; after it all are answered, and they stand still."""
        self._let(True)
        yield
        self._let(False)
        self._until(lambda: not self._asking)

    def more(self, calls: int) -> None:
        """Return when so many more calls were answered."""
        wanted = self._answered + calls
        self._until(lambda: self._answered >= wanted)

    def _let(self, talking: bool) -> None:
        with self._change:
            self._talking = talking
            self._change.notify_all()

    def _until(self, happened: Callable[[], bool]) -> None:
        with self._change:
            done = self._change.wait_for(lambda: happened() or bool(self.failures), PATIENCE)
        assert self.failures == []
        assert done, f"{self._answered} calls are answered, {self._asking} are not"

    def _run(self, index: int) -> None:
        try:
            while self._talk(index):
                pass
        except (APIError, AssertionError) as error:
            with self._change:
                self.failures.append(repr(error))
                self._change.notify_all()

    def _talk(self, index: int) -> bool:
        """A session of four turns; whether there may be another."""
        session, messages = None, [{"role": "user", "content": f"agent {index}"}]
        for turn in range(4):
            if not self._may_call():
                return False
            session = session or self._opened()
            reply = session.ask(messages, max_tokens=32 + 16 * turn, extra_body=PLAIN, timeout=PATIENCE).choices[0].message
            messages += [reply.model_dump(exclude_none=True), {"role": "user", "content": f"and {turn}?"}]
            self._called()
        return True

    def calls(self) -> list[dict[str, Any]]:
        return [call for session in self.sessions for call in session.calls]

    def _opened(self) -> Session:
        self.sessions.append(self._service.session(max_retries=8))
        return self.sessions[-1]

    def _may_call(self) -> bool:
        with self._change:
            self._change.wait_for(lambda: self._talking or self._over)
            self._asking += not self._over
            return not self._over

    def _called(self) -> None:
        with self._change:
            self._asking, self._answered = self._asking - 1, self._answered + 1
            self._change.notify_all()


@pytest.fixture(scope="module")
def engines(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Sequence[VllmServer]]:
    """Two, started at once. After a push they keep its weights."""
    folder = tmp_path_factory.mktemp("engines")
    with ExitStack() as stack:
        engines = [_engine(tiny_model, free_port(), folder) for _ in range(2)]
        for engine in engines:
            stack.callback(engine.stop)
            engine.start()
        for engine in engines:
            engine.wait_until_ready()
        yield engines


def _engine(model: Path, port: int, folder: Path) -> VllmServer:
    argv, env = vllm_command(model, port, reasoning_parser="qwen3")
    return ForkedVllmServer(argv, env, f"http://127.0.0.1:{port}", folder / f"vllm-{port}.log", deadline_seconds=PATIENCE)


def states(model_dir: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """Versions from 1 on, each a step away from the one before."""
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32)
    torch.manual_seed(0)
    for version in count(1):
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(0.01 * torch.randn_like(parameter))
        yield version, model.state_dict()


def pushed(trainer: TrainerClient, state: dict[str, Any], version: int, folder: Path) -> WeightPush:
    """The push, which the engines that are there have taken."""
    try:
        push = trainer.publish(state, version, directory=folder, mode=MODES[version % len(MODES)])
    except ReplicaFailed as failed:
        push = failed.push
    assert push.applied
    return push


def until_serving(service: RunningService, replicas: int) -> None:
    def serving() -> int:
        standing = service.request("GET", "/weights").json()["replicas"].values()
        return sum(replica["healthy"] for replica in standing)

    wait_until(lambda: serving() == replicas, PATIENCE, f"{replicas} engines serve")


STALL_SECONDS = 5.0
LONG = {"max_tokens": 600, "extra_body": PLAIN, "timeout": PATIENCE}


@pytest.mark.timeout(3600)
def test_an_engine_whose_core_stands_still_gets_no_calls_and_when_it_goes_on_all_are_exact(
    engines: Sequence[VllmServer], tiny_model: Path, tmp_path: Path, redis_url: str
) -> None:
    """Its server answers meanwhile. A stream that has begun waits, and a whole reply, of which nothing was heard, comes from the other
    engine. Before the pushes, since both have the weights that they were started with."""
    first, other = engines
    with ExitStack() as stack:
        urls = [engine.url for engine in engines]
        service = stack.enter_context(RunningService(urls, redis_url, engine_stall_seconds=STALL_SECONDS))
        until_serving(service, 2)
        waiting, moved, late = sessions = sessions_of(service, urls, first.url, 3)
        pool = stack.enter_context(ThreadPoolExecutor())
        answer = pool.submit(moved.ask, "and you?", **LONG)
        wait_until(lambda: read_metric(first, "num_requests_running") == 1, PATIENCE, "the whole reply is sampled")
        stream = iter(waiting.ask("count", stream=True, **LONG))
        chunks = [next(stream)]
        with standing_still(first):
            wait_until(lambda: status_of(service, first.url) == "stalled", PATIENCE, "it is found stalled")
            assert httpx.get(f"{first.url}/health", verify=False).status_code == 200
            assert answer.result(PATIENCE).choices[0].finish_reason == "length"
            late.ask("hello", max_tokens=5, extra_body=PLAIN)
            assert status_of(service, first.url) == "stalled" and waiting.calls[0]["status"] == "in_flight"
        chunks += stream
        wait_until(lambda: status_of(service, first.url) == "serving", PATIENCE, "it serves again")
        late.ask("and now?", max_tokens=5, extra_body=PLAIN)
        calls = [call for session in sessions for call in session.calls]
        rows = [row for session in sessions for row in session.trajectories()[0]]
    assert [call["replica"] for call in calls] == [replica_at(each.url).name for each in (first, other, other, first)]
    assert [(call["status"], len(call["completion_ids"])) for call in calls] == [("finished", n) for n in (600, 600, 5, 5)]
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == calls[0]["reply"]["content"]
    assert recompute(rows, tiny_model, tmp_path) < TOLERANCE
    assert sum(sum(row["loss_mask"]) for row in rows) == 2 * 600 + 2 * 5


def sessions_of(service: RunningService, urls: Sequence[str], url: str, number: int) -> list[Session]:
    """Whose calls go to `url` first."""
    members, name = [replica_at(each) for each in urls], replica_at(url).name
    ids = (f"s{index}" for index in count() if rank_replicas(f"s{index}", members)[0].name == name)
    return [service.session(session_id=next(ids)) for _ in range(number)]


@contextmanager
def standing_still(engine: VllmServer) -> Iterator[None]:
    """The process that samples is stopped inside the block, the one that serves goes on."""
    cores = [pid for pid in group_of(engine) if pid != engine.pid]
    assert cores, engine.log_tail()
    for pid in cores:
        os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        for pid in cores:
            os.kill(pid, signal.SIGCONT)


def group_of(engine: VllmServer) -> list[int]:
    """The engine's own processes."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            about, command = (folder / "stat").read_text(), (folder / "cmdline").read_bytes()
            # After the name, in brackets: state, parent, group.
            if int(about.rpartition(")")[2].split()[2]) == engine.pid and b"resource_tracker" not in command:
                found.append(int(folder.name))
    return found


def status_of(service: RunningService, url: str) -> str:
    replicas = service.request("GET", "/engines").json()["replicas"]
    return str(next(replica["status"] for replica in replicas if replica["url"] == url))


@pytest.mark.timeout(3600)
def test_every_token_is_of_the_weights_it_names_though_versions_come_fast_and_an_engine_dies(
    engines: Sequence[VllmServer], tiny_model: Path, tmp_path: Path, redis_url: str
) -> None:
    with ExitStack() as stack:
        service = stack.enter_context(RunningService([engine.url for engine in engines], redis_url))
        trainer = stack.enter_context(TrainerClient(service.url, TRAINER))
        until_serving(service, 2)
        agents = stack.enter_context(Agents(service, AGENTS))
        for version, state in states(tiny_model):
            if version == BACK_AT:
                # Nobody talks meanwhile: an engine that starts beside a busy one takes long on two cores.
                engines[1].start()
                engines[1].wait_until_ready()
                until_serving(service, 2)
            with agents.talking():
                agents.more(AGENTS)
                if version == KILLED_AT:
                    engines[1].kill()
                    until_serving(service, 1)
                push = pushed(trainer, state, version, tmp_path)
                assert len(push.failed) == (KILLED_AT <= version < BACK_AT)
                # Of these at least as many as there are agents were asked after the push.
                agents.more(2 * AGENTS)
            calls = agents.calls()
            # Where the machine is busy every reply may lie between two pushes.
            if version >= PUSHES and any(len(call["weight_versions"]) > 1 for call in calls):
                break
        rows = [row for session in agents.sessions for row in session.trajectories()[0]]
    assert_true(rows, tiny_model, tmp_path)
    assert {each for row in rows for each, _, _ in row["weight_versions"]} == set(range(version + 1))
    told = [(call["replica"], call["weight_versions"][0][0]) for call in calls if call["weight_versions"]]
    assert len({replica for replica, version in told if KILLED_AT <= version < BACK_AT - 1}) == 1
    assert len({replica for replica, version in told if version >= BACK_AT}) == 2, "the engine that came back serves again"


def assert_true(rows: Sequence[dict[str, Any]], model_dir: Path, weights_dir: Path) -> None:
    assert recompute(rows, model_dir, weights_dir) < TOLERANCE
    # The tokens of one version are not those of the next: a span that names the wrong one would be seen.
    wrong = [
        row | {"weight_versions": [[(span[0] + 1) % PUSHES, *span[1:]] for span in row["weight_versions"]]} for row in rows
    ]
    assert recompute(wrong[:AGENTS], model_dir, weights_dir) > TOLERANCE


def recompute(rows: Sequence[dict[str, Any]], model_dir: Path, weights_dir: Path) -> float:
    """The largest difference, in nats, over all trained tokens of all rows."""
    import torch

    from examples.demo.recompute import largest_difference

    largest, tokens = largest_difference(rows, str(model_dir), weights_dir, dtype=torch.float32)
    assert tokens == sum(sum(row["loss_mask"]) for row in rows) > 0
    return largest
