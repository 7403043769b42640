"""The processes that the crash tests kill and start again: a redis-server, services, a trainer. Each keeps its port and its files."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from typing import Protocol

import httpx

from proxy.store.programs import choose_program
from tests.support.service.redis_server import RedisServer, free_port, wait_until_it_answers
from tests.support.service.verbatim_process import ADMIN, TRAINER, Serving, environment, processes_using, wait_until

CLOSE_WAIT_SECONDS = "2"
"""The calls of a killed process never end; a close must not wait for them as long as it usually may."""
GROUP = '{"max_deliveries": 100000}'
"""Trainers die so often here that no group may be given up for it."""


class Victim(Protocol):
    """`start` does not wait until it serves, `await_ready` does; `kill` is kill -9, and nothing when it is dead already."""

    name: str

    def start(self) -> None: ...

    def await_ready(self) -> None: ...

    def kill(self) -> None: ...


class RedisVictim:
    """`fsync` always: what was answered is in the file. With everysec a write may wait for the sync before it, in memory."""

    name = "redis"

    def __init__(self, folder: Path, fsync: str = "always") -> None:
        folder.mkdir()
        where = ["--port", str(free_port()), "--bind", "127.0.0.1", "--dir", str(folder)]
        durable = ["--appendonly", "yes", "--appendfsync", fsync, "--save", ""]
        self.port = int(where[1])
        self._command = [str(choose_program().path), *where, *durable]
        self.server: RedisServer | None = None

    @property
    def url(self) -> str:
        return f"redis://127.0.0.1:{self.port}/0"

    def start(self) -> None:
        self.server = RedisServer(self.port, subprocess.Popen(self._command, stdout=subprocess.DEVNULL))

    def await_ready(self) -> None:
        assert self.server is not None
        wait_until_it_answers(self.server)

    def kill(self) -> None:
        if self.server is not None:
            self.server.kill()


class ServiceVictim:
    """`verbatim serve`. `written` is what its lives so far have written to stderr."""

    def __init__(self, name: str, folder: Path, *flags: str) -> None:
        self.name = name
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.folder = folder
        self._flags = (*flags, "--engine-api", "token", "--log-level", "warning")
        self._serving: Serving | None = None
        self._before = ""

    @property
    def written(self) -> str:
        return self._before + (self._serving.stderr if self._serving else "")

    def start(self) -> None:
        limits = {"VERBATIM_CLOSE_WAIT_SECONDS": CLOSE_WAIT_SECONDS, "VERBATIM_GROUP": GROUP}
        self._serving = Serving(*self._flags, data_dir=self.folder, port=self.port, ready=False, **limits)

    def await_ready(self) -> None:
        wait_until(self._answers, 60, f"{self.name} is ready; {self.written[-2000:]}")

    def kill(self) -> None:
        if self._serving is not None:
            self._serving.send(signal.SIGKILL)
            self._serving.__exit__()
            self._before, self._serving = self.written, None

    def _answers(self) -> bool:
        assert self._serving is not None
        assert not self._serving.ended, f"{self.name} ended by itself: {self.written[-2000:]}"
        try:
            return httpx.get(f"{self.url}/readyz", headers={"Authorization": f"Bearer {ADMIN}"}, timeout=5).status_code == 200
        except httpx.HTTPError:
            return False


class EmbeddedRedisVictim:
    """The redis-server that a service has started for itself, and starts again when it ends."""

    name = "redis"

    def __init__(self, service: ServiceVictim) -> None:
        self._service = service

    def start(self) -> None:
        """Nothing: the service does."""

    def await_ready(self) -> None:
        self._service.await_ready()

    def kill(self) -> None:
        for pid in processes_using(self._service.folder):
            # It may have ended since.
            with suppress(OSError):
                if Path(f"/proc/{pid}/comm").read_text().startswith("redis"):
                    os.kill(pid, signal.SIGKILL)


class TrainerVictim:
    """trainer.py, which writes down in `journal` what it leased and what became of it."""

    name = "trainer"

    def __init__(self, journal: Path, urls: list[str], dice: random.Random) -> None:
        self._program = Path(__file__).with_name("trainer.py")
        self._journal = journal
        self._urls = urls
        self._dice = dice
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        command = [sys.executable, str(self._program), str(self._journal), str(self._dice.getrandbits(32)), *self._urls]
        self._process = subprocess.Popen(command, env=environment(VERBATIM_TRAINER_TOKEN=TRAINER))

    def await_ready(self) -> None:
        """It serves nobody; that it works shows in its journal."""

    def kill(self) -> None:
        if self._process is not None:
            assert self._process.poll() in (None, -signal.SIGKILL), "the trainer ended by itself"
            self._process.kill()
            self._process.wait()
