"""A runtime: an isolated place with files and processes, made for one rollout or one evaluation and removed with it.

The contract, which tests/rollout/runtimes/test_contract.py holds every kind to:

- `start` makes the place; then `workdir` and `home` exist, are empty but for what the image brings, and are writable.
- `exec` runs argv as it is, without a shell. Stdout and stderr are kept apart, whole up to a bound, and written to the given log
  files while the command runs. The exit code is the command's own, 128 + number where a signal ended it. When time is up, or when
  the caller is cancelled, everything the command started is ended, SIGTERM first, SIGKILL after `GRACE_SECONDS`.
- `network="proxy"` reaches the address of `Route` (at the URL that `base_url` gives) and nothing else. "full" reaches what the
  node does; a container has a network of its own then, from which it reaches the proxy at that URL, and not the node's loopback device.
- The node's own environment never reaches a command.
- CPU, memory and, where it can, disk are held to the spec. A command that is killed for its memory ends with 137.
- `stop` ends and removes everything, and may be called at any time, repeatedly, and by another process than the one that started it
  (`RuntimeKind.sweep`): a node that was killed leaves nothing for good.

`RuntimeFailed` is everything that is the runtime's own fault and not the command's.
"""

from __future__ import annotations

import errno
import hashlib
import math
import posixpath
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from rollout.task import Network, RuntimeSpec

GRACE_SECONDS = 10.0
KEPT_BYTES = 1 << 20
"""Of stdout, and of stderr, in `Executed`: the last ones. Logs hold more."""


class RuntimeFailed(Exception):
    """The runtime could not do what it was asked. The message names the command or the file, and what the system said."""


class DiskFull(RuntimeFailed):
    """There is no room for what was to be written."""


def no_room(error: OSError) -> bool:
    """Whether the system says that a disk, or somebody's share of it, is full."""
    return error.errno in (errno.ENOSPC, errno.EDQUOT)


class BadRuntime(Exception):
    """A spec that this kind cannot fulfil on any node; for the one who submits it."""


@dataclass(frozen=True, slots=True)
class Executed:
    """`stdout` and `stderr` are at most `KEPT_BYTES` each, the last ones."""

    exit_code: int
    stdout: bytes
    stderr: bytes
    timed_out: bool = False
    seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class Logs:
    """Files that a command's output is appended to, each at most `bound_bytes` long; what passes that is counted in a last line."""

    stdout: Path
    stderr: Path
    bound_bytes: int = 64 << 20


@dataclass(frozen=True, slots=True)
class Route:
    """The one way out of a runtime: `host` and `port` of the proxy as the node reaches it."""

    host: str
    port: int


@dataclass(frozen=True, slots=True)
class Install:
    """`command` is there once every one of `lines` was run by a shell."""

    command: str
    lines: tuple[str, ...]

    @property
    def key(self) -> str:
        """The same for the same lines; they name the version that they install."""
        return hashlib.sha256("\n".join((self.command, *self.lines)).encode()).hexdigest()[:24]


@dataclass(frozen=True, slots=True)
class Installed:
    """`spec` has the install in it, or is as it was. `failure`: why it could not be made for all."""

    spec: RuntimeSpec
    failure: str = ""


class Runtime(Protocol):
    """`workdir` and `home` are absolute paths inside; both are valid after `start`."""

    workdir: str
    home: str

    async def start(self) -> None:
        """Raises `RuntimeFailed`; then nothing is left behind."""

    def base_url(self, url: str) -> str:
        """`url` of the proxy as a command inside must spell it: the same, or with the address under which it is reachable there."""

    async def upload(self, path: str, content: bytes, *, mode: int = 0o644) -> None:
        """Writes a file, with its folders; relative paths are below `workdir`. Raises `RuntimeFailed`, `DiskFull`."""

    async def unpack(self, path: str, archive: bytes) -> None:
        """Unpacks a tar archive (plain or gzip) below the folder `path`. Entries that lead out of it, also through a link that the
        archive brings, are refused (`RuntimeFailed`), and so are devices; a link itself is kept, wherever it leads."""

    async def download(self, paths: Sequence[str], *, bound_bytes: int) -> bytes:
        """A tar archive (gzip) of what is at `paths`, named relative to `workdir` where they are below it; paths that do not exist
        are left out, and files that their owner may not read are made readable. Raises `RuntimeFailed` when it is greater than
        `bound_bytes`."""

    async def exec(
        self,
        argv: Sequence[str],
        *,
        env: Mapping[str, str] | None = None,
        workdir: str | None = None,
        stdin: bytes = b"",
        timeout_seconds: float,
        logs: Logs | None = None,
        network: Network | None = None,
    ) -> Executed:
        """What the command did. Exit codes 126 and 127 say that it could not be started or is not there, as in a shell. `network`
        None: the spec's; "full" is for a step of the task's own that must fetch something. Raises `RuntimeFailed`."""

    async def stop(self) -> None:
        """Ends and removes it. Never raises for what is already gone."""


class RuntimeKind(Protocol):
    """One kind of runtime, as a node has it."""

    name: str

    def check(self, spec: RuntimeSpec) -> None:
        """Raises `BadRuntime`. Asked where tasks are submitted: looks at the spec and at nothing else."""

    async def missing(self) -> str | None:
        """What this machine lacks for it, in one sentence, or None."""

    def limits(self) -> str:
        """How runtimes are held to their limits on this machine, in one sentence; for whoever starts a node."""

    def make(self, spec: RuntimeSpec, name: str, route: Route) -> Runtime:
        """Not started yet. `name` is unique among runtimes, at most 63 characters of [a-z0-9-], and names whose it is: what `sweep`
        finds again."""

    async def installed(self, spec: RuntimeSpec, install: Install, name: str, route: Route, logs: Logs) -> Installed:
        """`spec` with the install in it, which is made once for all runtimes that are alike and kept on this machine: in a runtime of
        that `name`, with the network. `spec` as it is where that has the command already, or where it cannot be kept."""

    async def sweep(self, prefix: str) -> int:
        """Removes what is left of runtimes whose names begin with `prefix`; how many those were."""


# What every kind of runtime checks of a spec.


def check_common(spec: RuntimeSpec) -> None:
    """Raises `BadRuntime` for what no kind takes."""
    if not (math.isfinite(spec.cpus) and spec.cpus >= 0.01):
        raise BadRuntime(f"cpus: {spec.cpus} is not a number of at least 0.01")
    if spec.memory_mb < 16:
        raise BadRuntime(f"memory_mb: {spec.memory_mb} is less than 16")
    if spec.disk_mb is not None and spec.disk_mb < 1:
        raise BadRuntime(f"disk_mb: {spec.disk_mb} is less than 1")
    if spec.network not in ("proxy", "full"):
        raise BadRuntime(f"network cannot be {spec.network!r}: choose proxy or full")


def check_options(spec: RuntimeSpec, known: Iterable[str]) -> None:
    for name in spec.options:
        if name not in known:
            raise BadRuntime(f"options: {spec.kind} has no {name!r} (known: {', '.join(known) or 'none'})")


def check_path(what: str, path: str) -> str:
    """The path, which is absolute, normal and not /."""
    if not path.startswith("/") or posixpath.normpath(path) != path or path in ("/", "//") or "\0" in path:
        raise BadRuntime(f"{what}: {path!r} is not an absolute path other than /, without . or .. in it")
    return path
