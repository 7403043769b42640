"""`verbatim` as its users run it: a process of its own, with its output kept, and looked at from outside."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import httpx

from tests import ROOT
from tests.support.service import plain_http
from tests.support.service.forked import ForkedVerbatim

if TYPE_CHECKING:
    from tests.support.service.running_service import Session

COMMAND = [sys.executable, "-m", "cli.main"]
ADMIN, TRAINER, NODE = "admin-of-the-test", "trainer-of-the-test", "node-of-the-test"


def environment(**variables: str) -> dict[str, str]:
    """The test's environment without any VERBATIM_ variable of the person who runs it, with `variables` added."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("VERBATIM_")}
    return {**kept, "PYTHONPATH": str(ROOT), "COLUMNS": "100", **variables}


def verbatim(*args: str, timeout_seconds: float = 120.0, **variables: str) -> subprocess.CompletedProcess[str]:
    """The finished command with its output and exit code."""
    return ForkedVerbatim.run(args, env=environment(**variables), timeout_seconds=timeout_seconds)


def wait_until(happened: Callable[[], object], seconds: float, what: str) -> None:
    deadline = time.monotonic() + seconds
    while not happened():
        assert time.monotonic() < deadline, f"not within {seconds} s: {what}"
        time.sleep(0.01)


class Serving:
    """`verbatim serve` on a free port, `inside` what a command makes of the system; use it in a `with` block, which kills what is left
    of it."""

    def __init__(
        self, *args: str, data_dir: Path, port: int = 0, ready: bool = True, inside: Sequence[str] = (), **variables: str
    ) -> None:
        kept = {"VERBATIM_ADMIN_TOKEN": ADMIN, "VERBATIM_TRAINER_TOKEN": TRAINER, "VERBATIM_NODE_TOKEN": NODE}
        # It serves once it has met its engines, and after a while also without them: on a slow machine too early for a test.
        kept["VERBATIM_ENGINE_CONNECT_SECONDS"] = "60"
        self.data_dir = data_dir
        self.stdout, self.stderr = "", ""
        self._sessions: list[Session] = []
        self._wants_ready = ready
        command = ["serve", "--port", str(port), "--data-dir", str(data_dir), *args]
        streams: dict[str, Any] = {
            "stdin": subprocess.DEVNULL,
            "stdout": subprocess.PIPE,
            "stderr": subprocess.PIPE,
            "text": True,
        }
        about = {"env": environment(**{**kept, **variables}), "start_new_session": True, **streams}
        self._process: subprocess.Popen[str] = (
            subprocess.Popen([*inside, *COMMAND, *command], **about) if inside else ForkedVerbatim(command, **about)
        )
        self._readers = [threading.Thread(target=self._read, args=(name,)) for name in ("stdout", "stderr")]
        for reader in self._readers:
            reader.start()

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def url(self) -> str:
        found = re.search(r"^base URL: (\S+)$", self.stdout, re.MULTILINE)
        return found[1] if found else ""

    @property
    def control_url(self) -> str:
        """Where the control side is: with the harness side, where it has no port of its own."""
        found = re.search(r"^control URL: (\S+)$", self.stdout, re.MULTILINE)
        return found[1] if found else self.url

    @property
    def children(self) -> list[int]:
        """Process ids of the direct children."""
        return [int(pid) for pid in Path(f"/proc/{self.pid}/task/{self.pid}/children").read_text().split()]

    def __enter__(self) -> Serving:
        try:
            if self._wants_ready:
                # The last line of what it prints at its start.
                wait_until(lambda: "application/json" in self.stdout or self.ended, 180, f"serving; {self.stderr}")
                assert not self.ended, self.stderr
        except BaseException:
            self._end()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._end()

    def send(self, number: int) -> None:
        self._process.send_signal(number)

    def send_group(self, number: int) -> None:
        """As a terminal does at Ctrl-C: to the service and whatever it started in the same process group."""
        os.killpg(self.pid, number)

    @property
    def ended(self) -> bool:
        return self._process.poll() is not None

    def exit_code(self, within_seconds: float) -> int:
        code = self._process.wait(within_seconds)
        for reader in self._readers:
            reader.join(120)
        return code

    def session(self, **fields: Any) -> Session:
        from tests.support.service.running_service import Session

        self._sessions.append(Session(cast(Any, self), 0, fields))
        return self._sessions[-1]

    def await_ready(self, seconds: float = 120) -> None:
        wait_until(lambda: self.request("GET", "/readyz").status_code == 200, seconds, "ready")

    def stop(self, number: int = signal.SIGTERM, within_seconds: float = 60.0) -> int:
        self.send(number)
        return self.exit_code(within_seconds)

    def request(self, method: str, path: str, token: str = ADMIN, **more: Any) -> httpx.Response:
        return plain_http.request(method, self.control_url + path, headers={"Authorization": f"Bearer {token}"}, **more)

    def _read(self, name: str) -> None:
        for line in getattr(self._process, name):
            setattr(self, name, getattr(self, name) + line)

    def _end(self) -> None:
        for session in self._sessions:
            session.client.close()
        if not self.ended:
            self._process.kill()
            self._process.wait()
        for reader in self._readers:
            reader.join(120)
        for stream in (self._process.stdout, self._process.stderr):
            if stream is not None:
                stream.close()


def processes_using(folder: Path) -> list[int]:
    """Ids of the processes that hold a file below `folder` open: a redis-server holds its append-only file."""
    found = []
    for descriptors in Path("/proc").glob("[0-9]*/fd"):
        try:
            targets = [os.readlink(descriptor) for descriptor in descriptors.iterdir()]
        except OSError:
            continue
        if any(target.startswith(f"{folder}/") for target in targets):
            found.append(int(descriptors.parent.name))
    return found


def runs(pid: int) -> bool:
    """Whether the process exists and is no zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False
