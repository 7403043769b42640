"""Harnesses that a runtime lacks, installed once per machine and kept for later runtimes: in a folder that local sandboxes see, or in an
image layer. `Uses` bounds what is kept; below it are the folders of the node themselves, how they are made and removed."""

from __future__ import annotations

import asyncio
import fcntl
import hashlib
import itertools
import logging
import os
import re
import shlex
import shutil
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from uuid import uuid4

from contract.tasks import RuntimeSpec
from rollout.runtimes.base import Install, Installed, Logs, ProxyAddress, Runtime, RuntimeFailed
from rollout.runtimes.container.engine import Engine
from rollout.runtimes.settings import RuntimeSettings

log = logging.getLogger(__name__)

INSTALL_SECONDS, LOOK_SECONDS, COMMIT_SECONDS = 900.0, 60.0, 600.0
LEAST_MEMORY_MB = 2048
"""The least that an install gets: it does not run under a rollout's limits."""
MakeRuntime = Callable[[RuntimeSpec, str, ProxyAddress], Runtime]


async def has_command(runtime: Runtime, install: Install, env: Mapping[str, str] | None = None) -> bool:
    line = f"command -v {shlex.quote(install.command)}"
    return (await runtime.exec(("sh", "-c", line), env=env, timeout_seconds=LOOK_SECONDS)).exit_code == 0


async def run_install(
    runtime: Runtime, install: Install, logs: Logs, *, first: Sequence[str] = (), env: Mapping[str, str] | None = None
) -> None:
    """Runs the `first` lines, then the install's. Raises `RuntimeFailed` if one fails or the command does not exist afterwards."""
    for line in (*first, *install.lines):
        done = await runtime.exec(("sh", "-c", line), env=env, timeout_seconds=INSTALL_SECONDS, logs=logs)
        if done.exit_code:
            raise RuntimeFailed(f"{line!r} ended with exit code {done.exit_code}: {done.read_tail()}")
    if not await has_command(runtime, install, env):
        raise RuntimeFailed(f"{install.command!r} does not exist after its installation")


# Local runtimes: a folder that every later sandbox sees, read-only, at `PREFIX`
#
# The install runs in a separate local runtime with the network, whose workdir is at `PREFIX`; that folder is then kept. The path is the
# same in all sandboxes because programs may embed the path they were installed under. `npm install -g` installs there, and so does
# `pip install`, through a virtual environment. What installs itself into the home is not kept, and each rollout installs it. Without a
# sandbox nothing is kept: an install there changes the machine itself.


PREFIX = "/opt/verbatim-harness"
OPTION = "installed"
"""An option of a spec: the kept folder. It cannot be submitted: `LocalKind.check` rejects it."""
PIP = re.compile(r"\bpip3?\b")
_VARIABLE = "VERBATIM_LOCAL_DIR"


class LocalInstalls:
    def __init__(self, make: MakeRuntime, settings: RuntimeSettings) -> None:
        self._make = make
        self._settings = settings
        self._settled: dict[str, str] = {}
        """Keys of installs not to be made, and why they failed; empty if the command is there anyway."""
        self._locks: defaultdict[str, asyncio.Lock] = defaultdict(asyncio.Lock)
        self._uses = Uses(self.folder / ".uses", settings.installs_kept, _VARIABLE)

    @property
    def folder(self) -> Path:
        runtimes = self._settings.local_dir
        return runtimes.with_name(f"{runtimes.name}-installed")

    async def install(self, spec: RuntimeSpec, install: Install, name: str, proxy: ProxyAddress, logs: Logs) -> Installed:
        """See `RuntimeKind.install`."""
        if spec.options.get("sandbox", "bwrap") != "bwrap":
            return Installed(spec)
        async with self._locks[install.key]:
            kept = self.folder / install.key
            if not kept.is_dir() and install.key not in self._settled:
                await self._settle(spec, install, name, proxy, logs, kept)
            if not kept.is_dir():
                return Installed(spec, self._settled.get(install.key, ""))
            claim_folder(self.folder, _VARIABLE)
            self._uses.note(install.key)
        return Installed(replace(spec, options={**spec.options, OPTION: str(kept)}))

    def hold(self, spec: RuntimeSpec) -> int | None:
        """A descriptor that keeps what the spec has installed as long as it is open. Raises `RuntimeFailed` if that is gone."""
        if OPTION not in spec.options:
            return None
        kept = Path(spec.options[OPTION])
        descriptor = self._uses.hold(kept.name)
        if not kept.is_dir():
            os.close(descriptor)
            raise RuntimeFailed(f"{kept} was removed")
        return descriptor

    async def _settle(
        self, spec: RuntimeSpec, install: Install, name: str, proxy: ProxyAddress, logs: Logs, kept: Path
    ) -> None:
        """Afterwards the install is kept, or known not to be."""
        memory_mb = max(spec.memory_mb, LEAST_MEMORY_MB)
        runtime = self._make(replace(spec, network="full", workdir=PREFIX, memory_mb=memory_mb, disk_mb=None), name, proxy)
        try:
            await runtime.start()
            if await has_command(runtime, install):
                self._settled[install.key] = ""
                return
            with_pip = any(PIP.search(line) for line in install.lines)
            env = {"PATH": _prepend_prefix(self._settings.local_path), "NPM_CONFIG_PREFIX": PREFIX}
            await run_install(runtime, install, logs, first=[f"python3 -m venv {PREFIX}/venv"] if with_pip else [], env=env)
            await asyncio.to_thread(_keep, self._settings.local_dir / name / "work", kept)
            self._uses.note(install.key)
            await self._remove_excess()
        except RuntimeFailed as error:
            # Each rollout then installs it for itself, and reports what goes wrong.
            log.warning("%s cannot be installed for all runtimes of this machine: %s", install.command, error)
            self._settled[install.key] = str(error)
        finally:
            await runtime.stop()

    async def _remove_excess(self) -> None:
        for key in self._uses.list_excess():
            await asyncio.to_thread(self._remove, key)

    def _remove(self, key: str) -> None:
        """The folder exists whole under its name, or not at all. The lock is taken in a thread and held briefly: a starting runtime waits
        for it (`hold`) and blocks the event loop meanwhile."""
        going = self.folder / f".gone.{key}.{os.getpid()}"
        with self._uses.lock(key) as unused:
            if not unused:
                return
            with suppress(FileNotFoundError):
                (self.folder / key).rename(going)
            self._uses.forget(key)
        shutil.rmtree(going, ignore_errors=True)


def extend_path(spec: RuntimeSpec, path: str) -> str:
    """PATH of a runtime of that spec; `path` is the machine's."""
    return _prepend_prefix(path) if OPTION in spec.options else path


def list_readable(spec: RuntimeSpec) -> list[tuple[Path, str]]:
    """What its sandbox sees in addition: paths outside and inside."""
    return [(Path(spec.options[OPTION]), PREFIX)] if OPTION in spec.options else []


def _prepend_prefix(path: str) -> str:
    return f"{PREFIX}/bin:{PREFIX}/venv/bin:{path}"


def _keep(made: Path, kept: Path) -> None:
    """Moves the folder to its name, whole or not at all; another node may have been first. Raises `RuntimeFailed`."""
    temporary = kept.with_name(f".{kept.name}.{os.getpid()}")
    try:
        claim_folder(kept.parent, _VARIABLE)
        shutil.rmtree(temporary, ignore_errors=True)
        shutil.move(made, temporary)
        # The runtime that made it has yet to be removed.
        made.mkdir()
        try:
            temporary.rename(kept)
        except OSError:
            if not kept.is_dir():
                raise
            shutil.rmtree(temporary, ignore_errors=True)
    except OSError as error:
        raise RuntimeFailed(f"{kept} cannot be written: {error}") from error


# Containers: a layer over the image, which every later container is made from


REPOSITORY = "localhost/verbatim-harness"


class ImageInstalls:
    """The name of a runtime must be that of its container. Removes the layers made here that exceed `uses`; the engine itself keeps a layer
    that has a container."""

    def __init__(self, make: MakeRuntime, uses: Uses) -> None:
        self._make = make
        self._uses = uses
        self._settled: dict[str, str] = {}
        """Layers not to be made, and why the install failed; empty if the command is there anyway."""
        self._locks: defaultdict[str, asyncio.Lock] = defaultdict(asyncio.Lock)

    async def install(
        self, engine: Engine, spec: RuntimeSpec, install: Install, name: str, proxy: ProxyAddress, logs: Logs
    ) -> Installed:
        """See `RuntimeKind.install`; the image of the returned spec is the layer."""
        image = spec.image or ""
        async with self._locks[f"{image} {install.key}"]:
            layer = await _name_layer(engine, image, install)
            if layer not in self._settled and not await engine.has_image(layer):
                await self._settle(engine, spec, install, name, proxy, logs, layer)
            if layer in self._settled:
                return Installed(spec, self._settled[layer])
            self._uses.note(_find_tag(layer))
            return Installed(replace(spec, image=layer))

    async def _settle(
        self, engine: Engine, spec: RuntimeSpec, install: Install, name: str, proxy: ProxyAddress, logs: Logs, layer: str
    ) -> None:
        memory_mb = max(spec.memory_mb, LEAST_MEMORY_MB)
        # Root installs, whatever user the layer is for.
        options = {**spec.options, "user": 0}
        runtime = self._make(replace(spec, network="full", memory_mb=memory_mb, disk_mb=None, options=options), name, proxy)
        try:
            await runtime.start()
            if await has_command(runtime, install):
                self._settled[layer] = ""
                return
            await run_install(runtime, install, logs)
            await engine.call("commit", name, layer, seconds=COMMIT_SECONDS)
            self._uses.note(_find_tag(layer))
            await self._remove_excess(engine)
        except RuntimeFailed as error:
            # Each rollout then installs it for itself, and reports what goes wrong.
            log.warning("%s cannot be installed over the image %s: %s", install.command, spec.image, error)
            self._settled[layer] = str(error)
        finally:
            await runtime.stop()

    async def _remove_excess(self, engine: Engine) -> None:
        for tag in self._uses.list_excess():
            layer = f"{REPOSITORY}:{tag}"
            try:
                await engine.call("rmi", layer)
            except RuntimeFailed as error:
                log.info("the layer %s is kept: %s", layer, error)
            if not await engine.has_image(layer):
                self._uses.forget(tag)


def _find_tag(layer: str) -> str:
    return layer.rpartition(":")[2]


async def _name_layer(engine: Engine, image: str, install: Install) -> str:
    """The layer's name. It depends on the image's content: the same name may later stand for another."""
    if not await engine.has_image(image):
        await engine.pull(image)
    identity = await engine.call("image", "inspect", "--format", "{{.Id}}", image)
    return f"{REPOSITORY}:{hashlib.sha256(f'{identity} {install.key}'.encode()).hexdigest()[:32]}"


# How much is kept: the most recently used, and whatever is in use


YOUNG_SECONDS = 600.0
"""What was used this recently may be about to be used again: between the check that it exists and the lock."""


class Uses:
    """Of each kept thing a file in a folder of the machine: its modification time is the last use, and a user holds a lock on it, which the
    system releases with the process. `most` are kept; the error message names `variable`, which moves the folder. Raises `OSError`."""

    def __init__(self, folder: Path, most: int, variable: str) -> None:
        self._folder = folder
        self._most = most
        self._variable = variable

    def note(self, name: str) -> None:
        """Records a use now. Raises `RuntimeFailed` if the folder belongs to another user."""
        claim_folder(self._folder, self._variable)
        (self._folder / name).touch(mode=0o600)

    def hold(self, name: str) -> int:
        """A descriptor: `name` is in use until every such descriptor is closed. Raises `RuntimeFailed` as `note` does."""
        claim_folder(self._folder, self._variable)
        while True:
            descriptor = os.open(self._folder / name, os.O_RDONLY | os.O_CREAT | os.O_CLOEXEC, 0o600)
            fcntl.flock(descriptor, fcntl.LOCK_SH)
            if self._is_current(name, descriptor):
                os.utime(descriptor)
                return descriptor
            # The file was removed while we waited for the lock: a lock on a file without a name protects nothing.
            os.close(descriptor)

    def _is_current(self, name: str, descriptor: int) -> bool:
        with suppress(FileNotFoundError):
            return os.path.samestat((self._folder / name).stat(), os.fstat(descriptor))
        return False

    def list_excess(self) -> Iterator[str]:
        """What to remove, one at a time, while there is more than the bound: least recently used first, nothing young. If the caller leaves
        one in place, the next takes its turn."""
        used = {}
        for entry in os.scandir(self._folder) if self._folder.is_dir() else ():
            with suppress(FileNotFoundError):
                used[entry.name] = entry.stat().st_mtime
        left = len(used)
        for name in sorted(used, key=lambda name: used[name]):
            if left > self._most and self._is_old(name):
                yield name
                left -= not (self._folder / name).exists()

    def _is_old(self, name: str) -> bool:
        with suppress(FileNotFoundError):
            return (self._folder / name).stat().st_mtime < time.time() - YOUNG_SECONDS
        return False

    @contextmanager
    def lock(self, name: str) -> Iterator[bool]:
        """No use of `name` starts inside the block. False: it is in use, or has just been."""
        descriptor = os.open(self._folder / name, os.O_RDONLY | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            yield False
        else:
            yield self._is_old(name)
        finally:
            os.close(descriptor)

    def forget(self, name: str) -> None:
        (self._folder / name).unlink(missing_ok=True)


# Folders of the node


_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


def claim_folder(folder: Path, variable: str) -> None:
    """Makes the folder, for the node's user alone. Raises `RuntimeFailed` if it, or a link to it, belongs to another user, who could then
    change what runs; the message names `variable`, which moves the folder. Raises `OSError`."""
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    if folder.stat().st_uid != os.geteuid() or folder.lstat().st_uid not in (0, os.geteuid()):
        raise RuntimeFailed(f"{folder} belongs to another user; set {variable} to a folder of the node's own")


def delete_folder(folder: Path) -> None:
    """Removes the folder and everything in it, even folders that their owner may not enter. Nothing of the runtime runs any more.

    An agent may nest folders deeper than a path is long, the stack is high or descriptors are many, so each folder is moved to the top
    before it is emptied. What cannot be removed stays."""
    with suppress(OSError):
        top = os.open(folder, _DIRECTORY)
        names = (f"{uuid4().hex}-{number}" for number in itertools.count())
        try:
            while _flatten(top, top, names):
                pass
        finally:
            os.close(top)
        folder.rmdir()


def _flatten(top: int, place: int, names: Iterator[str]) -> bool:
    """Removes the files of the folder open at `place` and moves its folders to `top`, under one of the `names`; folders at the top already
    are emptied and removed. Returns whether anything changed."""
    changed = False
    with os.scandir(place) as entries:
        for entry in entries:
            with suppress(OSError):
                if not entry.is_dir(follow_symlinks=False):
                    os.unlink(entry.name, dir_fd=place)
                else:
                    # A folder must be writable to be moved.
                    os.chmod(entry.name, 0o700, dir_fd=place)
                    if place != top:
                        os.rename(entry.name, next(names), src_dir_fd=place, dst_dir_fd=top)
                    else:
                        changed |= _empty(top, entry.name, names)
                        os.rmdir(entry.name, dir_fd=top)
                changed = True
    return changed


def _empty(top: int, name: str, names: Iterator[str]) -> bool:
    place = os.open(name, _DIRECTORY, dir_fd=top)
    try:
        return _flatten(top, place, names)
    finally:
        os.close(place)
