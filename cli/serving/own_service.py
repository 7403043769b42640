"""A service that a command starts for itself: an embedded Redis, `verbatim serve` and, to run rollouts, `verbatim node`."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Self

import httpx

from cli.engine_access import hide_key
from cli.refusal import CommandError
from proxy.auth import mint_token
from proxy.store.embedded import EmbeddedRedis, StoreStartError

READY_SECONDS = 300.0
"""How long the service may take to start, and then its engines to answer."""
STOP_SECONDS = 60.0
POLL_SECONDS = 0.1
NODE_NAME = "generate"
INHERITED_VARIABLES = re.compile(
    r"""
    (?!VERBATIM_) .*
    | VERBATIM_(
        # engines, and what is recorded and trained of their calls
        ENGINE_\w+ | RENDERER(_OPTIONS)? | (POLICY|STRICT|FROZEN)_MODELS | QUEUE_SECONDS | TRAIN_\w+ | KEEP | BUILDER
        # requests and replies
        | THINKING | ECHO_POLICY | VOLATILE_LINES | LATER_SYSTEM_ROLE | ROLE_RULES
        | (KEEPALIVE|CLOSE_WAIT)_SECONDS | CALL_LIMITS | MAX_(BODY|SESSION)\w+ | SESSION_CACHE_BYTES | OUTBOUND_ALLOW
        # this machine's harnesses, evaluators and runtimes
        | HARNESSES | EVALUATOR_\w+ | (LOCAL|CONTAINER|APPTAINER|KUBERNETES)_\w+ | CGROUP | INSTALLS_KEPT
        | LOG_(CALLS|FORMAT)
    )""",
    re.VERBOSE | re.DOTALL,
)
"""Variables that mean the same to this service as to any other. The rest are about a service of the user's: its store and addresses, the
trainers that take its groups, how long it keeps sessions."""

# Runs in the child before the command replaces it: on Linux the child is signalled when its parent dies, however it dies. The second
# check covers a parent that died before that.
LAUNCH = """
import ctypes, os, signal, sys
if sys.platform == "linux":
    ctypes.CDLL(None).prctl(1, signal.SIGTERM)
if os.getppid() != int(sys.argv[1]):
    sys.exit("the parent process ended")
os.execv(sys.executable, [sys.executable, "-m", "cli.main", *sys.argv[2:]])
"""


class OwnService:
    """Runs inside its `with` block, with a node of `run` harnesses at once unless `run` is 0. By `identity` the node finds the runtimes
    that an earlier one left: the service's URL is another at every start.

    While it starts, `wait` is called to sleep; once that returns True the start is abandoned. `say` receives what it waits for.
    Raises `CommandError` if it cannot start."""

    def __init__(
        self,
        engines: Sequence[str],
        folder: Path,
        logs: Path,
        wait: Callable[[float], bool],
        say: Callable[[str], object],
        run: int = 0,
        runtimes: Sequence[str] = (),
        identity: str = "",
    ) -> None:
        self.token = mint_token()
        self.url = ""
        self._engines = engines
        self._folder = folder
        self._logs = logs
        self._sleep = wait
        self._say = say
        self._run = run
        self._runtimes = runtimes
        self._identity = identity
        self._lacks = ""
        self._children: dict[str, subprocess.Popen[bytes]] = {}
        self._started = ExitStack()

    def __enter__(self) -> Self:
        with ExitStack() as stack:
            self._start(stack)
            self._started = stack.pop_all()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._started.close()

    def wait(self, seconds: float) -> bool:
        """Sleep for so many seconds, or less; whether to stop. Raises `CommandError` if one of its processes has ended."""
        for name, child in self._children.items():
            if (code := child.poll()) is not None:
                log = self._logs / f"{name}.log"
                lines = log.read_text(errors="replace").strip().splitlines() or ["it logged nothing"]
                raise CommandError(f"verbatim {name} ended with exit code {code}: {lines[-1]} (see {log})")
        return self._sleep(seconds)

    def _start(self, stack: ExitStack) -> None:
        self._folder.mkdir(parents=True, exist_ok=True)
        self._logs.mkdir(parents=True, exist_ok=True)
        redis = EmbeddedRedis(self._folder)
        stack.callback(redis.stop)
        try:
            redis_url = redis.start()
        except StoreStartError as error:
            raise CommandError(error.message) from error
        engines = [word for engine in self._engines for word in ("--engine", engine)]
        # A file of this start alone: the URL is read from it.
        output = self._folder / "serve.out"
        output.unlink(missing_ok=True)
        self._launch(stack, output, "serve", *engines, "--redis", redis_url, "--host", "127.0.0.1", "--port", "0")
        self._await(lambda: self._read_url(output), "verbatim serve did not start")
        self._await(self._is_ready, f"no engine answers at {', '.join(self._engines)} (start it, or correct --engine)")
        if self._run:
            place = ["--url", self.url, "--data-dir", str(self._folder / "node")]
            place += ["--name", NODE_NAME, "--service", self._identity]
            slots = ["--run", str(self._run), "--ready", "1", "--evaluate", str(self._run), "--drain-seconds", "0"]
            kinds = [word for kind in self._runtimes for word in ("--runtime", kind)]
            self._launch(stack, self._logs / "node.log", "node", *place, *slots, *kinds)

    def _launch(self, stack: ExitStack, output: Path, name: str, *args: str) -> None:
        kept = {variable: value for variable, value in os.environ.items() if INHERITED_VARIABLES.fullmatch(variable)}
        if name != "serve":
            # A node calls no engine, and its agents should find no key.
            kept = hide_key(kept)
        with (self._logs / f"{name}.log").open("ab") as log, output.open("ab") as stdout:
            child = subprocess.Popen(
                [sys.executable, "-c", LAUNCH, str(os.getpid()), name, *args],
                env={**kept, "VERBATIM_ADMIN_TOKEN": self.token, "VERBATIM_TRAINER_TOKEN": mint_token()},
                stdin=subprocess.DEVNULL,
                stdout=stdout,
                stderr=log,
                # Ctrl-C reaches only the parent, which stops its children in order.
                start_new_session=True,
            )
        self._children[name] = child
        stack.callback(_stop, child)

    def _await(self, has_happened: Callable[[], bool], otherwise: str) -> None:
        deadline = time.monotonic() + READY_SECONDS
        while not has_happened():
            if self.wait(POLL_SECONDS):
                raise CommandError("stopped before anything started")
            if time.monotonic() > deadline:
                lacks = f": {self._lacks}" if self._lacks else ""
                raise CommandError(f"{otherwise} within {READY_SECONDS:g} s{lacks}; see {self._logs / 'serve.log'}")

    def _read_url(self, output: Path) -> bool:
        found = re.search(r"^base URL: (\S+)$", output.read_text(), re.MULTILINE)
        self.url = found[1] if found else ""
        return bool(found)

    def _is_ready(self) -> bool:
        try:
            answer = httpx.get(f"{self.url}/readyz", timeout=30)
            lacks = "" if answer.status_code == httpx.codes.OK else str(answer.json()["reason"])
        except (httpx.HTTPError, ValueError, KeyError, TypeError):
            return False
        if lacks and lacks != self._lacks:
            self._lacks = lacks
            self._say(f"waiting up to {READY_SECONDS:g} s: {lacks}")
        return not lacks


def _stop(child: subprocess.Popen[bytes]) -> None:
    if child.poll() is None:
        child.send_signal(signal.SIGTERM)
    try:
        child.wait(STOP_SECONDS)
    except subprocess.TimeoutExpired:
        os.killpg(child.pid, signal.SIGKILL)
        child.wait()
