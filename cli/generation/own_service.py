"""A service of a command's own: an embedded Redis, `verbatim serve` and, to run rollouts, `verbatim node`, which end with it."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import TracebackType
from typing import IO, Self

import httpx

from cli.refusal import Refusal
from proxy.auth import mint_token
from proxy.store.embedded import EmbeddedRedis, StoreStartError

READY_SECONDS = 300.0
"""What the service has for starting, and its engines for being there."""
STOP_SECONDS = 60.0
POLL_SECONDS = 0.1
OTHERS = re.compile(
    r"VERBATIM_(REDIS|URL|OPEN|HOST|PORT|PUBLIC_URL|ENGINE|DATA_DIR|TLS_.*|(ADMIN|TRAINER)_TOKENS?(_FILE)?|NODE_.*)\Z"
)
"""Variables that are about a service of the user's, not about this one."""

# Runs in the child before the command takes its place: Linux is told to end it when the parent dies, however that dies. The parent
# may have died before that, hence the second look at it.
LAUNCH = """
import ctypes, os, signal, sys
if sys.platform == "linux":
    ctypes.CDLL(None).prctl(1, signal.SIGTERM)
if os.getppid() != int(sys.argv[1]):
    sys.exit("the generation ended")
os.execv(sys.executable, [sys.executable, "-m", "cli.main", *sys.argv[2:]])
"""


class OwnService:
    """In its `with` block calls are served, and `run` rollouts at once are run: 0 is none, and no node. Raises `Refusal` when it cannot
    start.

    `waits` is asked again and again while it starts; once it says so, the start is broken off. `says` is told what it waits for."""

    def __init__(
        self,
        engines: Sequence[str],
        data: Path,
        logs: Path,
        run: int,
        runtimes: Sequence[str],
        waits: Callable[[float], bool],
        says: Callable[[str], object],
    ) -> None:
        self.token = mint_token()
        self.url = ""
        self._engines = engines
        self._data = data
        self._logs = logs
        self._run = run
        self._runtimes = runtimes
        self._waits = waits
        self._says = says
        self._lacks = ""
        self._redis = EmbeddedRedis(data)
        self._children: dict[str, subprocess.Popen[bytes]] = {}

    def __enter__(self) -> Self:
        try:
            self._start()
        except BaseException:
            self._end()
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._end()

    def check(self) -> None:
        """Raises `Refusal` when a part of it has ended by itself."""
        for name, child in self._children.items():
            if (code := child.poll()) is not None:
                raise Refusal(f"verbatim {name} ended with exit code {code}: {self._last_line(name)} (see {self._log(name)})")

    def _start(self) -> None:
        self._data.mkdir(parents=True, exist_ok=True)
        self._logs.mkdir(parents=True, exist_ok=True)
        try:
            redis = self._redis.start()
        except StoreStartError as error:
            raise Refusal(error.message) from error
        engines = [word for engine in self._engines for word in ("--engine", engine)]
        self._begin("serve", *engines, "--redis", redis, "--host", "127.0.0.1", "--port", "0")
        self._await(self._says_where, "verbatim serve did not start")
        self._await(self._is_ready, f"no engine answers at {', '.join(self._engines)} (start it, or correct --engine)")
        if not self._run:
            return
        kinds = [word for kind in self._runtimes for word in ("--runtime", kind)]
        slots = ["--run", str(self._run), "--ready", "1", "--evaluate", str(self._run)]
        place = ["--redis", redis, "--url", self.url, "--data-dir", str(self._data / "node"), "--name", "generate"]
        self._begin("node", *place, *slots, *kinds, "--drain-seconds", "0")

    def _begin(self, name: str, *args: str) -> None:
        kept = {variable: value for variable, value in os.environ.items() if not OTHERS.match(variable)}
        with self._log(name).open("ab") as log, self._out(name) as out:
            self._children[name] = subprocess.Popen(
                [sys.executable, "-c", LAUNCH, str(os.getpid()), name, *args],
                env={**kept, "VERBATIM_ADMIN_TOKEN": self.token, "VERBATIM_TRAINER_TOKEN": mint_token()},
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=log,
                # Ctrl-C reaches the generation alone, which ends them in order.
                start_new_session=True,
            )

    def _await(self, happened: Callable[[], bool], otherwise: str) -> None:
        deadline = time.monotonic() + READY_SECONDS
        while not happened():
            self.check()
            if self._waits(POLL_SECONDS):
                raise Refusal("stopped before anything was begun")
            if time.monotonic() > deadline:
                lacks = f": {self._lacks}" if self._lacks else ""
                raise Refusal(f"{otherwise} within {READY_SECONDS:g} s{lacks}; see {self._log('serve')}")

    def _says_where(self) -> bool:
        found = re.search(r"^base URL: (\S+)$", (self._data / "serve.out").read_text(), re.MULTILINE)
        self.url = found[1] if found else ""
        return bool(found)

    def _is_ready(self) -> bool:
        try:
            answer = httpx.get(f"{self.url}/readyz", timeout=30)
            if answer.status_code == httpx.codes.OK:
                return True
            lacks = str(answer.json()["reason"])
        except (httpx.HTTPError, ValueError, KeyError, TypeError):
            return False
        if lacks != self._lacks:
            self._lacks = lacks
            self._says(f"waiting, for {READY_SECONDS:g} s at most: {lacks}")
        return False

    def _end(self) -> None:
        for name in ("node", "serve"):
            if (child := self._children.get(name)) is not None:
                _stop(child)
        self._redis.stop()

    def _out(self, name: str) -> IO[bytes]:
        """Where its stdout goes: what the service says there once is looked for, and not in what it said another time."""
        return self._log(name).open("ab") if name != "serve" else (self._data / "serve.out").open("wb")

    def _log(self, name: str) -> Path:
        return self._logs / f"{name}.log"

    def _last_line(self, name: str) -> str:
        lines = self._log(name).read_text(errors="replace").strip().splitlines()
        return lines[-1] if lines else "it said nothing"


def _stop(child: subprocess.Popen[bytes]) -> None:
    if child.poll() is None:
        child.send_signal(signal.SIGTERM)
    try:
        child.wait(STOP_SECONDS)
    except subprocess.TimeoutExpired:
        os.killpg(child.pid, signal.SIGKILL)
        child.wait()
