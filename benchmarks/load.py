"""Load from wrk, a load generator in C: closed loop, so many connections, each asking again as soon as it is answered."""

from __future__ import annotations

import itertools
import json
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.cores import pinned

SCRIPT = Path(__file__).with_name("load.lua")
TIMEOUT_SECONDS = 300
"""Of one call: a saturated peer is slow, not wrong."""
_STEP = 10_000_000
"""Numbers of one run: no two runs send the same body."""
_TRIES = 2
_LEAST_CALLS = 2
"""A run with fewer says nothing."""

_firsts = itertools.count(step=_STEP)


@dataclass(frozen=True, slots=True)
class Target:
    """Where calls go: a path that names the session, and the session's key."""

    path: str
    key: str


@dataclass(frozen=True, slots=True)
class Body:
    """A request body, to be sent with a number between its halves."""

    before: str
    after: str

    def numbered(self, number: int) -> bytes:
        return f"{self.before}{number}{self.after}".encode()


@dataclass(frozen=True, slots=True)
class Loaded:
    """What wrk saw in one run. `refused`: answers that were not 2xx."""

    calls: int
    seconds: float
    p50_ms: float
    p90_ms: float
    p99_ms: float
    bytes: int
    refused: int
    broken: int
    timeouts: int

    @property
    def calls_per_second(self) -> float:
        return self.calls / self.seconds


class CallsFailed(Exception):
    """Answers were not 2xx, or broke off: the run says nothing about what a call costs."""


def wrk_binary() -> str:
    """Raises SystemExit with what to do when wrk is not installed."""
    found = shutil.which("wrk")
    if found is None:
        raise SystemExit("wrk is missing: `make bench` installs it (Debian package wrk)")
    return found


def load(url: str, targets: Sequence[Target], body: Body, connections: int, seconds: float, *, refused: bool = False) -> Loaded:
    """Calls over `connections` for `seconds`, over the targets in turn; for longer, up to `_TRIES` times, where that is too short for
    the slow. Raises CallsFailed when an answer was not one, unless calls are meant to be `refused`."""
    with tempfile.TemporaryDirectory(prefix="verbatim-load-") as name:
        folder = Path(name)
        (folder / "targets").write_text("".join(f"{target.path}\t{target.key}\n" for target in targets))
        (folder / "before").write_text(body.before)
        (folder / "after").write_text(body.after)
        files = [str(folder / part) for part in ("targets", "before", "after")]
        for attempt in range(_TRIES):
            flags = ["-t", "1", "-c", str(connections), "-d", f"{max(1, round(seconds * 2**attempt))}s"]
            script = ["--timeout", f"{TIMEOUT_SECONDS}s", "-s", str(SCRIPT), url, "--", *files, str(next(_firsts))]
            argv = pinned([wrk_binary(), *flags, *script], "load")
            loaded = _read(subprocess.run(argv, capture_output=True, text=True, check=False))
            if not refused and (loaded.refused or loaded.broken):
                raise CallsFailed(f"{loaded.refused} of {loaded.calls} answers were not 2xx, {loaded.broken} connections broke")
            if loaded.calls >= _LEAST_CALLS:
                break
    return loaded


def _read(ran: subprocess.CompletedProcess[str]) -> Loaded:
    for line in ran.stdout.splitlines():
        if line.startswith("RESULT "):
            return Loaded(**json.loads(line.removeprefix("RESULT ")))
    raise SystemExit(f"wrk failed: {ran.stdout}{ran.stderr}")
