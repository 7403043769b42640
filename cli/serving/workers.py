"""Several serving processes on the same listening sockets and one Redis, supervised by their parent.

A worker that dies is replaced; all state is in the store. A worker that exits before it serves ends the whole service, because its
replacement would fail the same way. Workers stop when their parent dies.
"""

from __future__ import annotations

import logging
import math
import multiprocessing
import os
import signal
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection, wait
from multiprocessing.context import SpawnProcess
from types import FrameType
from typing import TYPE_CHECKING

from cli.refusal import CommandError
from cli.serving import logs

if TYPE_CHECKING:
    from proxy.settings import Settings

log = logging.getLogger(__name__)

POLL_SECONDS = 0.2
STOP_SECONDS = 30
"""The time after the drain for a worker to record what it cut and exit."""

_spawn = multiprocessing.get_context("spawn")


@dataclass(slots=True)
class Worker:
    process: SpawnProcess
    status: Connection
    ready: bool = False

    def check_ready(self) -> bool:
        """Whether it serves."""
        if not self.ready and self.status.poll():
            try:
                self.ready = self.status.recv() == "ready"
            except EOFError:
                self.process.join(POLL_SECONDS)
        return self.ready


class Workers:
    """`run` returns after a stop signal once all workers have drained."""

    def __init__(self, settings: Settings, listeners: list[socket.socket], count: int, log_level: str) -> None:
        self._settings = settings
        self._listeners = listeners
        self._count = count
        self._log_level = log_level
        self._workers: list[Worker] = []
        self._stopping = False
        self._on_force: Callable[[], None] = lambda: None

    def run(self, on_ready: Callable[[], None], on_force: Callable[[], None]) -> None:
        """Raises `CommandError` if a worker cannot start. A second Ctrl-C kills the workers, calls `on_force` and exits."""
        self._on_force = on_force
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, self._handle_stop)
        try:
            for _ in range(self._count):
                self._workers.append(self._start())
            self._watch(on_ready)
        finally:
            self._drain()

    def _start(self) -> Worker:
        ours, theirs = _spawn.Pipe(duplex=False)
        process = _spawn.Process(target=work, args=(self._settings, self._listeners, theirs, self._log_level))
        # Ctrl-C in a terminal reaches the whole process group, but only the parent may act on it, and must not miss it: blocked meanwhile,
        # it reaches the handler afterwards. The child inherits the mask until `work`. The tracker's start would unblock it.
        resource_tracker.ensure_running()
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        try:
            process.start()
        finally:
            signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
        theirs.close()
        return Worker(process, ours)

    def _watch(self, on_ready: Callable[[], None]) -> None:
        announced = False
        while not self._stopping:
            wait([worker.process.sentinel for worker in self._workers], timeout=POLL_SECONDS)
            if not announced and all(worker.check_ready() for worker in self._workers):
                on_ready()
                announced = True
            if not self._stopping:
                self._replace_dead_workers()

    def _replace_dead_workers(self) -> None:
        for place, worker in enumerate(self._workers):
            if worker.process.is_alive():
                continue
            # SIGKILL comes from outside, for example from the kernel's OOM killer: a replacement may work.
            if not worker.check_ready() and worker.process.exitcode != -signal.SIGKILL:
                raise CommandError("a worker process could not start; the log above says why")
            log.error("worker %s died (exit code %s): starting another", worker.process.pid, worker.process.exitcode)
            worker.status.close()
            self._workers[place] = self._start()

    def _drain(self) -> None:
        deadline = time.monotonic() + math.ceil(self._settings.drain_seconds) + STOP_SECONDS
        for worker in self._workers:
            worker.process.terminate()
        for worker in self._workers:
            worker.process.join(max(0.0, deadline - time.monotonic()))
            if worker.process.is_alive():
                log.error("worker %s did not stop in time: killed", worker.process.pid)
                worker.process.kill()
                worker.process.join()

    def _handle_stop(self, number: int, frame: FrameType | None) -> None:
        if self._stopping and number == signal.SIGINT:
            from cli.serving.server import exit_at_once

            for worker in self._workers:
                worker.process.kill()
            for worker in self._workers:
                worker.process.join()
            self._on_force()
            exit_at_once()
        self._stopping = True


def work(settings: Settings, listeners: list[socket.socket], status: Connection, log_level: str) -> None:
    """The main function of a worker process."""
    from cli.serving.server import run_server

    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
    logs.configure(log_level, settings.log_format)
    threading.Thread(target=_follow_parent, daemon=True).start()
    try:
        run_server(settings, listeners, on_ready=lambda: status.send("ready"), on_force=lambda: None)
    except CommandError as refusal:
        log.error("%s", refusal)
        raise SystemExit(refusal.exit_code) from refusal


def _follow_parent() -> None:
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os.kill(os.getpid(), signal.SIGTERM)
