"""What every kind of runtime shares that can run a command: `exec`, files, and the end of running commands.

Files are written and read by commands inside the runtime, so a path or a link never leads outside. For that the runtime needs `sh`,
`mkdir`, `rm`, `cat` and `chmod`, and for archives `tar` (GNU's or busybox's) with `gzip`.
"""

from __future__ import annotations

import asyncio
import posixpath
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Any

from contract.tasks import Network, RuntimeSpec
from rollout.runtimes.base import DiskFull, Executed, Logs, ProxyAddress, RuntimeFailed
from rollout.runtimes.command import CannotPass, ExecLimits
from rollout.runtimes.disk import FILE_TOO_LARGE
from rollout.runtimes.files import GZIP, GzipSink, check_archive, is_disk_full_message

TIMEOUT_SECONDS = 600.0
"""For one file or archive."""
_FILE_ENVIRONMENT = {"LC_ALL": "C"}
_UPLOAD = 'mkdir -p "$1" && rm -f "$2" && (umask 077; cat > "$2") && chmod "$3" "$2"'
_UNPACK = 'mkdir -p "$1" && exec tar "$2" - -C "$1"'
_DOWNLOAD = """
cd "$1" || exit 2
shift
for path in "$@"; do
    shift
    if [ -e "$path" ] || [ -L "$path" ]; then set -- "$@" "$path"; fi
done
[ $# = 0 ] || { chmod -R u+rX,ug-s -- "$@" 2> /dev/null; exec tar -cf - -- "$@"; }
"""
"""One file that its owner may not read would make the whole archive fail: such files are made readable first. No command unpacks files with
the set-user-id or set-group-id bit, so they lose it here."""


@dataclass(frozen=True, slots=True)
class RuntimeCommand:
    """`workdir` is absolute. `network` None: the command uses no network, so whatever is cheapest will do."""

    argv: Sequence[str]
    env: Mapping[str, str]
    workdir: str
    stdin: bytes
    limits: ExecLimits
    network: Network | None


class CommandRuntime(ABC):
    """A kind implements `_make`, `_run_command`, `_remove` and `map_url`. `_make` sets `_claimed` once the name is its own: only then does
    `stop` remove anything."""

    home: str
    workdir: str

    def __init__(self, spec: RuntimeSpec, name: str, proxy: ProxyAddress, grace_seconds: float) -> None:
        self.name = name
        self._spec = spec
        self._proxy = proxy
        self._grace_seconds = grace_seconds
        self._claimed = False
        self._running: set[asyncio.Task[Any] | None] = set()

    @abstractmethod
    async def _make(self) -> None:
        """Raises `RuntimeFailed`."""

    @abstractmethod
    async def _run_command(self, command: RuntimeCommand) -> Executed:
        """Raises `RuntimeFailed`, `CannotPass`."""

    @abstractmethod
    async def _remove(self) -> None:
        """No command runs any more."""

    async def start(self) -> None:
        try:
            await self._make()
        except BaseException:
            await self.stop()
            raise

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
        place = posixpath.join(self.workdir, workdir) if workdir else self.workdir
        variables = {"HOME": self.home, "LANG": "C.UTF-8", "PWD": place, **(env or {})}
        limits = ExecLimits(timeout_seconds, logs, self._grace_seconds)
        return await self._run(RuntimeCommand(argv, variables, place, stdin, limits, network or self._spec.network))

    async def stop(self) -> None:
        running = [task for task in self._running - {asyncio.current_task()} if task]
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)
        if self._claimed:
            await self._remove()

    async def _run(self, command: RuntimeCommand) -> Executed:
        task = asyncio.current_task()
        self._running.add(task)
        try:
            return await self._run_command(command)
        except CannotPass as error:
            return error.to_executed()
        finally:
            self._running.discard(task)

    async def _run_bare(self, argv: Sequence[str], stdin: bytes = b"", limits: ExecLimits | None = None) -> Executed:
        """Runs argv in /, with nothing of the task's own."""
        return await self._run(RuntimeCommand(argv, _FILE_ENVIRONMENT, "/", stdin, limits or ExecLimits(TIMEOUT_SECONDS), None))

    async def upload(self, path: str, content: bytes, *, mode: int = 0o644) -> None:
        target = self._resolve(path)
        argv = ("sh", "-c", _UPLOAD, "upload", posixpath.dirname(target), target, f"{mode:o}")
        _check(f"{path} cannot be written", await self._run_bare(argv, content))

    async def unpack(self, path: str, archive: bytes) -> None:
        await asyncio.to_thread(check_archive, archive)
        flags = "-xzof" if archive.startswith(GZIP) else "-xof"
        argv = ("sh", "-c", _UNPACK, "unpack", self._resolve(path), flags)
        _check(f"the archive cannot be unpacked at {path}", await self._run_bare(argv, archive))

    async def download(self, paths: Sequence[str], *, bound_bytes: int) -> bytes:
        names = [self._relativize(path) for path in paths]
        sink = GzipSink(bound_bytes)
        argv = ("sh", "-c", _DOWNLOAD, "download", self.workdir, *names)
        done = await self._run_bare(argv, limits=ExecLimits(TIMEOUT_SECONDS, stdout=sink))
        # tar exits with 1 if a file changed while it was read.
        if done.exit_code != 1:
            _check(f"{', '.join(paths)} cannot be read", done)
        return sink.finish()

    def _resolve(self, path: str) -> str:
        if "\0" in path or not path:
            raise RuntimeFailed(f"{path!r} is not a path")
        return posixpath.normpath(posixpath.join(self.workdir, path))

    def _relativize(self, path: str) -> str:
        """The name that tar gets: relative if it is below the workdir."""
        absolute = PurePosixPath(self._resolve(path))
        return str(absolute.relative_to(self.workdir) if absolute.is_relative_to(self.workdir) else absolute)


def _check(what: str, done: Executed) -> None:
    if done.exit_code == 0:
        return
    reason = f"it took more than {TIMEOUT_SECONDS:g} seconds" if done.timed_out else done.explain_failure()
    full = done.exit_code == FILE_TOO_LARGE or is_disk_full_message(done.stderr)
    raise (DiskFull if full else RuntimeFailed)(f"{what}: {reason}")
