"""One serving process: uvicorn on uvloop over open sockets, with a drain on SIGTERM and the first Ctrl-C."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import gc
import logging
import math
import os
import resource
import signal
import socket
import sys
from collections.abc import Callable, Coroutine, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from types import FrameType
from typing import TYPE_CHECKING, Any, ClassVar, cast

import uvicorn

from cli.refusal import CommandError
from cli.rollout_service import KNOWN, add_rollouts
from cli.serving.connection import HttpConnection, HttpTimeouts
from cli.serving.tls import Certificate, load_certificate
from proxy.app import create_app

if TYPE_CHECKING:
    from proxy.settings import Settings


log = logging.getLogger(__name__)

IDLE_CONNECTION_SECONDS = 75
CUT_SECONDS = 10
"""The time after the drain to end and record the calls that were cut. Then uvicorn cancels the rest."""
FORCED_EXIT = 130
COLLECTED_AFTER = 10_000
"""Containers allocated and not freed until the garbage collector looks among them."""
ALL_SEARCHED_SECONDS = 3600.0
"""Between two searches among all objects. With a full cache of sessions one takes 300 ms, in which every call waits."""
COMPUTING_THREADS = 2
"""Beside the event loop. Python computes in one thread at a time; where one of these waits for a disk, the other works on."""
SWITCH_SECONDS = 0.0005
"""How long a thread computes until it lets another one have its turn."""


class Server(uvicorn.Server):
    """`on_ready` runs when calls are served, `on_force` at a second Ctrl-C during the drain.

    uvicorn re-raises the captured signal after a clean stop, which would end the process before its Redis stops and with an exit
    code other than 0. Here a signal only starts the drain.
    """

    told_to_stop: ClassVar[bool] = False
    """Whether a stop signal came before there was a server. The SystemExit of its handler may be lost: Python drops what is raised in a
    finalizer."""

    def __init__(
        self,
        config: uvicorn.Config,
        drain: Callable[[], Coroutine[Any, Any, None]],
        on_ready: Callable[[], None],
        on_force: Callable[[], None],
        certificate: Certificate | None,
    ) -> None:
        super().__init__(config)
        self._certificate = certificate
        self._drain = drain
        self._on_ready = on_ready
        self._on_force = on_force

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        if self._certificate is not None:
            self.config.ssl = self._certificate.context
            self._following = asyncio.create_task(self._certificate.follow())
        _favour_loop()
        await super().startup(sockets)
        if self.started:
            _relieve_collector()
            self._on_ready()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        # In parallel with uvicorn's wait for open connections: the application ends a cut reply as its dialect requires, uvicorn
        # would only break the connection.
        if self._certificate is not None:
            self._following.cancel()
        log.info("stopping: no more calls are taken")
        drain = asyncio.create_task(self._drain())
        await super().shutdown(sockets)
        await drain
        log.info("stopped")

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        before = {number: signal.signal(number, self.handle_exit) for number in (signal.SIGINT, signal.SIGTERM)}
        if self.told_to_stop:
            self.should_exit = True
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        if self.should_exit and sig == signal.SIGINT:
            self._on_force()
            exit_at_once()
        self.should_exit = True


def _favour_loop() -> None:
    """Few threads beside the loop, and short turns for them. Whenever the loop has read or written, it waits for Python's lock until the
    threads before it have had their turns: with six threads, at Python's own 5 ms, that was 56 ms in the median and 400 at most."""
    asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(COMPUTING_THREADS, "beside-the-loop"))
    sys.setswitchinterval(SWITCH_SECONDS)


def _relieve_collector() -> None:
    """Look for cycles rarely, and never among long-lived objects, where a search would stall every call: for 280 ms once the cache of
    sessions is full.

    A call allocates hundreds of containers and leaves no cycle (tests/proxy/call/test_garbage.py), so searches at Python's own thresholds
    take a twentieth of its time and find nothing. What has survived two searches is looked at once an hour: without a cycle it goes when
    it is let go."""
    gc.set_threshold(COLLECTED_AFTER, 0, 10)
    gc.callbacks.append(_spare_survivors)
    _search_all()


def _search_all() -> None:
    """Also among what has survived, and from then on regularly: a library may leave a cycle of what has lived long, as of a connection."""
    gc.unfreeze()
    gc.collect()
    gc.freeze()
    asyncio.get_running_loop().call_later(ALL_SEARCHED_SECONDS, _search_all)


def _spare_survivors(phase: str, search: dict[str, int]) -> None:
    if phase == "stop" and search["generation"] > 0:
        gc.freeze()


def exit_at_once() -> None:
    """Exit without unwinding: open calls stay in the store as intents without a result."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(FORCED_EXIT)


def run_server(
    settings: Settings, listeners: list[socket.socket], on_ready: Callable[[], None], on_force: Callable[[], None]
) -> None:
    """Serve until a stop signal; calls in flight may finish for `drain_seconds`, then they are cut and recorded.

    Raises `CommandError` if the application cannot start.
    """
    app = create_app(settings, partial(add_rollouts, KNOWN))
    config = uvicorn.Config(
        app,
        loop="uvloop",
        # uvicorn calls it like the class.
        http=cast(Any, partial(HttpConnection, patience=HttpTimeouts())),
        ws="none",
        lifespan="on",
        log_config=None,
        access_log=False,
        server_header=False,
        backlog=BACKLOG,
        timeout_keep_alive=IDLE_CONNECTION_SECONDS,
        timeout_graceful_shutdown=math.ceil(settings.drain_seconds) + CUT_SECONDS,
    )
    server = Server(config, partial(app.drain, settings.drain_seconds), on_ready, on_force, load_certificate(settings))
    _run_until_stopped(server, listeners)
    if not (server.started or server.should_exit):
        raise CommandError("the service could not start; the log above says why")


def _run_until_stopped(server: Server, listeners: list[socket.socket]) -> None:
    try:
        server.run(sockets=listeners)
    except SystemExit as stopped:
        # uvicorn exits if the lifespan fails, but the caller still has a Redis to stop.
        if stopped.code != uvicorn.config.STARTUP_FAILURE:
            raise


def raise_on_stop_signals() -> None:
    """Until a server takes over, let a stop signal unwind the stack, so that everything started so far is stopped."""

    def leave(number: int, frame: Any) -> None:
        Server.told_to_stop = True
        raise SystemExit(0)

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, leave)


# The listening socket, opened first: a taken port is reported early and port 0 is resolved


BACKLOG = 2048


def listen(host: str, port: int, flag: str = "--port") -> socket.socket:
    """A listening TCP socket on `host`:`port`, which `flag` set. Raises `CommandError` if the address is not available."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    except (OSError, OverflowError) as error:
        raise CommandError(f"cannot listen on {host}:{port}: {error}") from error
    listener = socket.socket(family, kind, protocol)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        # With SO_REUSEADDR two sockets can bind one port, but only one can listen.
        listener.listen(BACKLOG)
    except (OSError, OverflowError) as error:
        listener.close()
        raise CommandError(_explain(host, port, flag, error)) from error
    listener.set_inheritable(False)
    return listener


def _explain(host: str, port: int, flag: str, error: Exception) -> str:
    match getattr(error, "errno", None):
        case errno.EADDRINUSE:
            return f"port {port} on {host} is taken by another process: choose another with {flag}, or {flag} 0 for a free one"
        case errno.EACCES:
            return f"port {port} needs more rights than this user has: choose one above 1023 with {flag}"
        case errno.EADDRNOTAVAIL:
            return f"{host} is not an address of this machine: choose another with --host"
        case _:
            return f"cannot listen on {host}:{port}: {error}"


def make_url(listener: socket.socket, *, tls: bool = False) -> str:
    """The listener's URL as seen from this machine, with the loopback address for a wildcard one."""
    host, port = listener.getsockname()[:2]
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
    place = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
    return f"https://{place}" if tls else f"http://{place}"


def raise_descriptor_limit() -> None:
    """Raise the limit of open files to the hard limit: every stream holds two connections, so the usual 1024 allow only 500 streams."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    # macOS reports a hard limit that it then refuses.
    with contextlib.suppress(ValueError, OSError):
        if soft != hard:
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
