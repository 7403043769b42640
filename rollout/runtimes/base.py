"""The contract of a runtime: an isolated place with files and processes, made for one rollout or one evaluation and removed with it.

tests/rollout/runtimes/test_contract.py holds every kind to these rules:

- `start` makes the place. `workdir` and `home` then exist, are writable, and hold only what the image put there.
- `exec` runs argv as it is, without a shell. Stdout and stderr stay separate, are kept whole up to a bound, and are written to the given
  log files while the command runs. The exit code is the command's own, or 128 + the number of the signal that ended it. On timeout, and
  when the caller is cancelled, everything the command started is ended: SIGTERM first, SIGKILL after `GRACE_SECONDS`.
- `network="proxy"` reaches the `ProxyAddress` (at the URL that `map_url` returns) and nothing else. "full" reaches what the node
  reaches; a container then has its own network, which includes the proxy at that URL but not the node's loopback device.
- The node's own environment never reaches a command.
- No command makes namespaces, mounts, packet sockets or files with the set-user-id or set-group-id bit (`seccomp`).
- CPU, memory and, where possible, disk are limited to the spec. A command killed for its memory exits with 137.
- `stop` ends and removes everything. It may be called at any time and repeatedly, and `RuntimeKind.sweep` does the same from another
  process: a killed node leaves nothing behind for good.

Errors: `RuntimeFailed` is every failure of the runtime itself, as opposed to the command; `DiskFull`, `NoRoom` and `NetworkRefused` are
three of them. `BadRuntime` is an invalid spec.
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

from contract.tasks import Network, RuntimeSpec

GRACE_SECONDS = 10.0
"""Between SIGTERM and SIGKILL."""
KEPT_BYTES = 1 << 20
"""How much of the end of stdout, and of stderr, `Executed` keeps. Logs hold more."""


class RuntimeFailed(Exception):
    """The runtime failed. The message names the command or the file, and the system's reason."""


class DiskFull(RuntimeFailed):
    """There was no room left to write."""


class NoRoom(RuntimeFailed):
    """No further runtime may be made at present, whatever its spec."""


class NetworkRefused(RuntimeFailed):
    """All commands of the runtime share one network, and this one asked for the other."""


def describe_os_error(what: str, error: OSError) -> RuntimeFailed:
    """The exception to raise for `error`: `DiskFull` if a disk or a quota is full."""
    failure = DiskFull if error.errno in (errno.ENOSPC, errno.EDQUOT) else RuntimeFailed
    return failure(f"{what}: {error}")


class BadRuntime(Exception):
    """No node can satisfy the spec. The message is for the user who submits it."""


@dataclass(frozen=True, slots=True)
class Executed:
    """`stdout` and `stderr` are the last `KEPT_BYTES` of each."""

    exit_code: int
    stdout: bytes
    stderr: bytes
    timed_out: bool = False
    seconds: float = 0.0

    def explain_failure(self) -> str:
        """What it wrote to stderr, or its exit code."""
        return self.stderr.decode(errors="replace").strip() or f"exit code {self.exit_code}"

    def read_tail(self, characters: int = 500) -> str:
        """The end of stderr, or of stdout if stderr is empty."""
        return (self.stderr.strip() or self.stdout.strip()).decode(errors="replace")[-characters:] or "no output"


@dataclass(frozen=True, slots=True)
class Logs:
    """Files to append a command's output to, each at most `bound_bytes` long. A last line counts what was cut off."""

    stdout: Path
    stderr: Path
    bound_bytes: int = 64 << 20


@dataclass(frozen=True, slots=True)
class ProxyAddress:
    """The one way out of a runtime: the proxy's `host` and `port` as the node reaches them."""

    host: str
    port: int


@dataclass(frozen=True, slots=True)
class Install:
    """Shell `lines` that together install `command`."""

    command: str
    lines: tuple[str, ...]

    @property
    def key(self) -> str:
        """Equal for equal lines, which name the version they install."""
        return hashlib.sha256("\n".join((self.command, *self.lines)).encode()).hexdigest()[:24]


@dataclass(frozen=True, slots=True)
class Installed:
    """`spec` with the install in it, or unchanged. `failure`: why it could not be installed for all runtimes."""

    spec: RuntimeSpec
    failure: str = ""


class Runtime(Protocol):
    """`workdir` and `home` are absolute paths inside, valid after `start`."""

    workdir: str
    home: str

    async def start(self) -> None:
        """Raises `RuntimeFailed`, and then leaves nothing behind."""

    def map_url(self, url: str) -> str:
        """`url` of the proxy as a command inside must spell it."""

    async def upload(self, path: str, content: bytes, *, mode: int = 0o644) -> None:
        """Writes a file and its parent folders; relative paths are below `workdir`. Raises `RuntimeFailed`, `DiskFull`."""

    async def unpack(self, path: str, archive: bytes) -> None:
        """Unpacks a tar archive (plain or gzip) below the folder `path`. Refuses (`RuntimeFailed`) devices, entries that lead out of
        that folder, and entries below a link that the archive brings; the link itself is kept, wherever it leads."""

    async def download(self, paths: Sequence[str], *, bound_bytes: int) -> bytes:
        """A gzipped tar archive of `paths`, named relative to `workdir` if they are below it. Skips paths that do not exist, and makes
        files readable that their owner may not read. Raises `RuntimeFailed` if it exceeds `bound_bytes`."""

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
        """Exit codes 126 and 127 mean, as in a shell, that the command could not be started or does not exist. `network` None is the
        spec's; "full" is for a step of the task's own that must download something. Raises `RuntimeFailed`, and
        `NetworkRefused` before anything is run."""

    async def stop(self) -> None:
        """Never raises for something already gone."""


class RuntimeKind(Protocol):
    """One kind of runtime on this node."""

    name: str

    def check(self, spec: RuntimeSpec) -> None:
        """Raises `BadRuntime`. Called where tasks are submitted, so it looks at the spec and at nothing else."""

    async def probe(self) -> str | None:
        """What this machine lacks to run this kind, in one sentence; None if it lacks nothing."""

    def describe_limits(self) -> str:
        """How this machine enforces a runtime's limits, in one sentence, for the operator of the node."""

    def make(self, spec: RuntimeSpec, name: str, proxy: ProxyAddress) -> Runtime:
        """A runtime that has not started. `name` is unique among runtimes, at most 63 characters of [a-z0-9-]; its prefix names the owner,
        by which `sweep` finds it."""

    async def install(self, spec: RuntimeSpec, install: Install, name: str, proxy: ProxyAddress, logs: Logs) -> Installed:
        """Installs once for all alike runtimes of this machine, in a runtime `name` that has the network, and keeps the result. Leaves the
        spec unchanged if it has the command already or if this kind cannot keep it."""

    async def sweep(self, prefix: str) -> int:
        """Removes the remains of runtimes whose names begin with `prefix`; returns their number."""


# Checks of a spec that all kinds share


def check_common(spec: RuntimeSpec) -> None:
    """Raises `BadRuntime`."""
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


def check_user(spec: RuntimeSpec) -> None:
    user = spec.options.get("user", 0)
    if type(user) is not int or user < 0:
        raise BadRuntime(f"options.user: {user!r} is not the number of a user")


def check_path(what: str, path: str) -> str:
    """The path if it is absolute, normalized and not /. Raises `BadRuntime`."""
    if not path.startswith("/") or posixpath.normpath(path) != path or path in ("/", "//") or "\0" in path:
        raise BadRuntime(f"{what}: {path!r} is not an absolute path other than /, without . or .. in it")
    return path
