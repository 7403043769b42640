"""A copy of the tree in which one fault at a time is planted, and the tests run there."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests import ROOT
from tests.mutants.fault import PACKAGES, Fault, sources

_NOT_COPIED = shutil.ignore_patterns(".*", "__pycache__", "node_modules", "build", "dist", "demo-out*", "shared")
_TEST_SECONDS = 100
"""After this a test fails that waits forever because of a fault."""
_RUN_SECONDS = 300.0
_END_SECONDS = 10.0
_FAILED = re.compile(r"^(?:FAILED|ERROR) (\S.*?)(?: - .*)?$", re.MULTILINE)
_LOOK = "import {packages}; print(*(m.__path__[0] for m in ({packages},)), sep='\\n')"


class Stopped(Exception):
    """The run was ended from outside."""


@dataclass(frozen=True, slots=True)
class Run:
    """`code` is the exit code of pytest, `failed` the names of the tests that failed."""

    code: int
    seconds: float
    failed: tuple[str, ...]
    output: str

    @property
    def whole(self) -> bool:
        """Whether pytest ran to its end: the tests passed or failed, and nothing else went wrong."""
        return self.code == 0 if not self.failed else self.code == 1


class Workshop:
    """One copy of the tree, and a process that runs tests in it (`runner`); use it in a `with` block. `test` and `planted` belong to one
    thread; any thread may call `stop`."""

    _moments = itertools.count(10**9)
    """Modification times, each used once: they tell Python that compiled bytecode is out of date."""

    def __init__(self, folder: Path, tests: Sequence[str]) -> None:
        """`tests`: the files that it will be asked to run."""
        self.root = folder
        self._tests = tests
        self._output = folder.with_name(folder.name + ".output")
        self._running: int | None = None
        self._stopped = threading.Event()
        shutil.copytree(ROOT, folder, ignore=_NOT_COPIED, symlinks=True)
        self._sources = sources(folder)
        # Processes that a test starts must import the copy too, not an installed checkout. Without CI missing programs are no error.
        self._env = {**os.environ, "PYTHONPATH": str(folder), "CI": ""}

    def __enter__(self) -> Workshop:
        """Raises RuntimeError unless the packages imported are those of the copy."""
        look = [sys.executable, "-c", _LOOK.format(packages=", ".join(PACKAGES))]
        found = subprocess.run(look, cwd=self.root, env=self._env, capture_output=True, text=True, check=False)
        if found.stdout.split() != [str(self.root / package) for package in PACKAGES]:
            raise RuntimeError(
                f"in the copy {self.root} other packages are imported than its own: {found.stdout}{found.stderr}"
            )
        self._runner = subprocess.Popen(
            [sys.executable, "-m", "tests.mutants.runner", *self._tests],
            cwd=self.root,
            env=self._env,
            text=True,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            start_new_session=True,
        )
        self._read_answer()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()
        self._runner.kill()
        self._runner.communicate()

    def test(self, arguments: Sequence[str], *, limited: bool) -> Run:
        """Run pytest. `limited`: end it after a while, since a fault may make it wait forever. Raises Stopped."""
        options = ["-q", "-rfE", "--tb=short", "--assert=plain", "-p", "no:cacheprovider"]
        options += ["--timeout", str(_TEST_SECONDS)] if limited else []
        if self._stopped.is_set():
            raise Stopped
        begun = time.monotonic()
        assert self._runner.stdin is not None
        self._runner.stdin.write(json.dumps({"arguments": [*options, *arguments], "output": str(self._output)}) + "\n")
        self._runner.stdin.flush()
        self._running = self._read_answer()["pid"]
        limit = threading.Timer(_RUN_SECONDS, self._end)
        if limited:
            limit.start()
        try:
            code = self._read_answer()["code"]
        finally:
            self._running = None
            limit.cancel()
        if self._stopped.is_set():
            raise Stopped
        output = self._output.read_text(errors="replace")
        return Run(code, time.monotonic() - begun, tuple(_FAILED.findall(output)), output)

    @contextmanager
    def planted(self, fault: Fault) -> Iterator[None]:
        """The fault is in the copy while the block runs. Raises NotPlaced."""
        path = fault.place(self._sources)
        text = self._sources[path]
        self._write(path, text.replace(fault.old, fault.new))
        try:
            yield
        finally:
            self._write(path, text)

    def stop(self) -> None:
        """End the run in progress; `test` raises Stopped."""
        self._stopped.set()
        self._end()

    def _read_answer(self) -> dict[str, Any]:
        assert self._runner.stdout is not None
        line = self._runner.stdout.readline()
        if not line:
            raise Stopped if self._stopped.is_set() else RuntimeError("the process that runs the tests has ended")
        answer: dict[str, Any] = json.loads(line)
        return answer

    def _end(self) -> None:
        """Interrupt the pytest in progress, and kill it if it does not end."""
        pid, deadline = self._running, time.monotonic() + _END_SECONDS
        if pid is None:
            return
        with contextlib.suppress(ProcessLookupError):
            os.killpg(pid, signal.SIGINT)
            while self._running == pid and time.monotonic() < deadline:
                time.sleep(0.1)
            if self._running == pid:
                os.killpg(pid, signal.SIGKILL)

    def _write(self, path: Path, text: str) -> None:
        whole, moment = self.root / path, next(self._moments)
        whole.write_text(text)
        os.utime(whole, (moment, moment))
