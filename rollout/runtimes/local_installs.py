"""Harnesses that local runtimes lack, installed once per machine into a folder that every later sandbox sees, read-only, at `PREFIX`.

An install is made in a local runtime of its own, whose workdir stands at `PREFIX`, with the network; then that folder is kept. Programs
may have the place in them where they were installed, so it is the same in all of them. `npm install -g` puts things there, and so
does `pip install`, by a virtual environment. What installs itself into the home instead is not kept, and installed by each
rollout. Without a sandbox nothing is kept: there an install changes the machine itself. So many folders are kept (`uses`).
"""

from __future__ import annotations

import asyncio
import logging
import os
import re
import shutil
from collections import defaultdict
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from rollout.runtimes.base import Install, Installed, Logs, Route, Runtime, RuntimeFailed
from rollout.runtimes.folders import owned
from rollout.runtimes.installs import LEAST_MEMORY_MB, carry_out, is_there
from rollout.runtimes.uses import Uses
from rollout.task import RuntimeSpec

if TYPE_CHECKING:
    from rollout.runtimes.local import LocalKind

log = logging.getLogger(__name__)

PREFIX = "/opt/verbatim-harness"
OPTION = "installed"
"""Of a spec: the folder that is kept. Nobody can submit it: `LocalKind.check` knows no such option."""
_VARIABLE = "VERBATIM_LOCAL_DIR"
PIP = re.compile(r"\bpip3?\b")


class LocalInstalls:
    """One per kind."""

    def __init__(self, kind: LocalKind) -> None:
        self._kind = kind
        self._settled: dict[str, str] = {}
        """Keys of what is not to be installed, and why it could not be; empty: it is there anyway."""
        self._locks: defaultdict[str, asyncio.Lock] = defaultdict(asyncio.Lock)
        self._uses = Uses(self.folder / ".uses", kind.settings.installs_kept, _VARIABLE)

    @property
    def folder(self) -> Path:
        runtimes = self._kind.settings.local_dir
        return runtimes.with_name(f"{runtimes.name}-installed")

    async def installed(self, spec: RuntimeSpec, install: Install, name: str, route: Route, logs: Logs) -> Installed:
        """See `RuntimeKind.installed`."""
        if spec.options.get("sandbox", "bwrap") != "bwrap":
            return Installed(spec)
        async with self._locks[install.key]:
            kept = self.folder / install.key
            if not kept.is_dir() and install.key not in self._settled:
                await self._settle(spec, install, name, route, logs, kept)
            if not kept.is_dir():
                return Installed(spec, self._settled.get(install.key, ""))
            owned(self.folder, _VARIABLE)
            self._uses.note(install.key)
        return Installed(replace(spec, options={**spec.options, OPTION: str(kept)}))

    def held(self, spec: RuntimeSpec) -> int | None:
        """A descriptor which, as long as it is open, keeps what the spec has installed. Raises `RuntimeFailed` when that is gone."""
        if OPTION not in spec.options:
            return None
        kept = Path(spec.options[OPTION])
        descriptor = self._uses.hold(kept.name)
        if not kept.is_dir():
            os.close(descriptor)
            raise RuntimeFailed(f"{kept} was removed")
        return descriptor

    async def _remove_old(self) -> None:
        for key in self._uses.too_many():
            await asyncio.to_thread(self._remove, key)

    def _remove(self, key: str) -> None:
        """There whole under its name, or not at all. The lock is the thread's, and a short one: a runtime that begins waits for it
        (`held`) where everything else of the node would wait with it, this coroutine too."""
        going = self.folder / f".gone.{key}.{os.getpid()}"
        with self._uses.alone(key) as unused:
            if not unused:
                return
            with suppress(FileNotFoundError):
                (self.folder / key).rename(going)
            self._uses.forget(key)
        shutil.rmtree(going, ignore_errors=True)

    async def _settle(self, spec: RuntimeSpec, install: Install, name: str, route: Route, logs: Logs, kept: Path) -> None:
        """Afterwards it is kept, or known not to be."""
        memory_mb = max(spec.memory_mb, LEAST_MEMORY_MB)
        runtime = self._kind.make(replace(spec, network="full", workdir=PREFIX, memory_mb=memory_mb, disk_mb=None), name, route)
        try:
            await runtime.start()
            if not await is_there(runtime, install):
                await self._carry_out(runtime, install, logs)
                await asyncio.to_thread(_keep, self._kind.settings.local_dir / name / "work", kept)
                self._uses.note(install.key)
                await self._remove_old()
            else:
                self._settled[install.key] = ""
        except RuntimeFailed as error:
            # Each rollout tries it for itself then, and says what went wrong.
            log.warning("%s cannot be installed for all runtimes of this machine: %s", install.command, error)
            self._settled[install.key] = str(error)
        finally:
            await runtime.stop()

    async def _carry_out(self, runtime: Runtime, install: Install, logs: Logs) -> None:
        """Raises `RuntimeFailed`."""
        env = {"PATH": _path(self._kind.settings.local_path), "NPM_CONFIG_PREFIX": PREFIX}
        with_pip = any(PIP.search(line) for line in install.lines)
        first = [f"python3 -m venv {PREFIX}/venv"] if with_pip else []
        await carry_out(runtime, install, logs, first=first, env=env)


def path_of(spec: RuntimeSpec, path: str) -> str:
    """PATH of a runtime of that spec, where `path` is the machine's."""
    return _path(path) if OPTION in spec.options else path


def readable_of(spec: RuntimeSpec) -> list[tuple[Path, str]]:
    """What its sandbox sees beside all else: paths outside and inside."""
    return [(Path(spec.options[OPTION]), PREFIX)] if OPTION in spec.options else []


def _path(path: str) -> str:
    return f"{PREFIX}/bin:{PREFIX}/venv/bin:{path}"


def _keep(made: Path, kept: Path) -> None:
    """Raises `RuntimeFailed`. There whole under its name, or not at all; another node may have been first."""
    temporary = kept.with_name(f".{kept.name}.{os.getpid()}")
    try:
        owned(kept.parent, _VARIABLE)
        shutil.rmtree(temporary, ignore_errors=True)
        shutil.move(made, temporary)
        # The runtime that made it is still to be removed.
        made.mkdir()
        try:
            temporary.rename(kept)
        except OSError:
            if not kept.is_dir():
                raise
            shutil.rmtree(temporary, ignore_errors=True)
    except OSError as error:
        raise RuntimeFailed(f"{kept} cannot be written: {error}") from error
