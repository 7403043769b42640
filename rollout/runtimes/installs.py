"""An install carried out in a runtime: whether its command is there, and its lines."""

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
from typing import Protocol
from uuid import uuid4

from rollout.runtimes.base import Install, Installed, Logs, Route, Runtime, RuntimeFailed
from rollout.runtimes.settings import RuntimeSettings
from rollout.task import RuntimeSpec

INSTALL_SECONDS, LOOK_SECONDS = 900.0, 60.0
LEAST_MEMORY_MB = 2048
"""What an install gets at least: it is no rollout's."""


async def is_there(runtime: Runtime, install: Install, env: Mapping[str, str] | None = None) -> bool:
    line = f"command -v {shlex.quote(install.command)}"
    return (await runtime.exec(("sh", "-c", line), env=env, timeout_seconds=LOOK_SECONDS)).exit_code == 0


async def carry_out(
    runtime: Runtime, install: Install, logs: Logs, *, first: Sequence[str] = (), env: Mapping[str, str] | None = None
) -> None:
    """Returns when every line was run, those of `first` before them, and the command is there. Raises `RuntimeFailed`."""
    for line in (*first, *install.lines):
        done = await runtime.exec(("sh", "-c", line), env=env, timeout_seconds=INSTALL_SECONDS, logs=logs)
        if done.exit_code:
            said = (done.stderr.strip() or done.stdout.strip()).decode(errors="replace")
            raise RuntimeFailed(f"{line!r} ended with exit code {done.exit_code}: {said[-500:]}")
    if not await is_there(runtime, install, env):
        raise RuntimeFailed(f"there is no {install.command!r} where it was to be, after its installation")


# Harnesses that local runtimes lack, installed once per machine into a folder that every later sandbox sees, read-only, at `PREFIX`.
#
# An install is made in a local runtime of its own, whose workdir stands at `PREFIX`, with the network; then that folder is kept. Programs
# may have the place in them where they were installed, so it is the same in all of them. `npm install -g` puts things there, and so
# does `pip install`, by a virtual environment. What installs itself into the home instead is not kept, and installed by each
# rollout. Without a sandbox nothing is kept: there an install changes the machine itself. So many folders are kept (`uses`).


log = logging.getLogger(__name__)

PREFIX = "/opt/verbatim-harness"
OPTION = "installed"
"""Of a spec: the folder that is kept. Nobody can submit it: `LocalKind.check` knows no such option."""
_VARIABLE = "VERBATIM_LOCAL_DIR"
PIP = re.compile(r"\bpip3?\b")


class LocalInstalls:
    """One per kind. `make` is the kind's own."""

    def __init__(self, make: Callable[[RuntimeSpec, str, Route], Runtime], settings: RuntimeSettings) -> None:
        self._make = make
        self._settings = settings
        self._settled: dict[str, str] = {}
        """Keys of what is not to be installed, and why it could not be; empty: it is there anyway."""
        self._locks: defaultdict[str, asyncio.Lock] = defaultdict(asyncio.Lock)
        self._uses = Uses(self.folder / ".uses", settings.installs_kept, _VARIABLE)

    @property
    def folder(self) -> Path:
        runtimes = self._settings.local_dir
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
        runtime = self._make(replace(spec, network="full", workdir=PREFIX, memory_mb=memory_mb, disk_mb=None), name, route)
        try:
            await runtime.start()
            if not await is_there(runtime, install):
                await self._carry_out(runtime, install, logs)
                await asyncio.to_thread(_keep, self._settings.local_dir / name / "work", kept)
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
        env = {"PATH": _path(self._settings.local_path), "NPM_CONFIG_PREFIX": PREFIX}
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


# Harnesses that an image lacks, installed once per image into a layer over it, which every later container is made of.


REPOSITORY = "localhost/verbatim-harness"
COMMIT_SECONDS = 600.0


class ImageEngine(Protocol):
    """Docker or podman by its command line."""

    async def has_image(self, image: str) -> bool: ...

    async def pull(self, image: str) -> None:
        """Raises `RuntimeFailed`."""

    async def told(self, *words: str, seconds: float = ...) -> str:
        """What the subcommand says on stdout, stripped, within so long. Raises `RuntimeFailed`."""


class ImageInstalls:
    """One per kind. `make` is the kind's own; the name of a runtime is that of its container. Those of the layers that were made from
    here are removed that `uses` says are too many; one of which there is a container the engine itself keeps."""

    def __init__(self, make: Callable[[RuntimeSpec, str, Route], Runtime], uses: Uses) -> None:
        self._make = make
        self._uses = uses
        self._settled: dict[str, str] = {}
        """Layers that are not to be made, and why the command could not be installed; empty: it is there anyway."""
        self._locks: defaultdict[str, asyncio.Lock] = defaultdict(asyncio.Lock)

    async def installed(
        self, engine: ImageEngine, spec: RuntimeSpec, install: Install, name: str, route: Route, logs: Logs
    ) -> Installed:
        """See `RuntimeKind.installed`; the spec's image is then the layer."""
        assert spec.image is not None, "the kind's check asks for one"
        async with self._locks[f"{spec.image} {install.key}"]:
            layer = await _layer(engine, spec.image, install)
            if layer not in self._settled and not await engine.has_image(layer):
                await self._settle(engine, spec, install, name, route, logs, layer)
            if layer in self._settled:
                return Installed(spec, self._settled[layer])
            self._uses.note(_tag(layer))
            return Installed(replace(spec, image=layer))

    async def _settle(
        self, engine: ImageEngine, spec: RuntimeSpec, install: Install, name: str, route: Route, logs: Logs, layer: str
    ) -> None:
        memory_mb = max(spec.memory_mb, LEAST_MEMORY_MB)
        # Whatever user the layer is for: programs are installed by root.
        options = {**spec.options, "user": 0}
        runtime = self._make(replace(spec, network="full", memory_mb=memory_mb, disk_mb=None, options=options), name, route)
        try:
            await runtime.start()
            if await is_there(runtime, install):
                self._settled[layer] = ""
                return
            await carry_out(runtime, install, logs)
            await engine.told("commit", name, layer, seconds=COMMIT_SECONDS)
            self._uses.note(_tag(layer))
            await self._remove_old(engine)
        except RuntimeFailed as error:
            # Each rollout tries it for itself then, and says what went wrong.
            log.warning("%s cannot be installed over the image %s: %s", install.command, spec.image, error)
            self._settled[layer] = str(error)
        finally:
            await runtime.stop()

    async def _remove_old(self, engine: ImageEngine) -> None:
        for tag in self._uses.too_many():
            layer = f"{REPOSITORY}:{tag}"
            try:
                await engine.told("rmi", layer)
            except RuntimeFailed as error:
                log.info("the layer %s is kept: %s", layer, error)
            if not await engine.has_image(layer):
                self._uses.forget(tag)


def _tag(layer: str) -> str:
    return layer.rpartition(":")[2]


async def _layer(engine: ImageEngine, image: str, install: Install) -> str:
    """Its name. An image that is given another content under its name gets another layer."""
    if not await engine.has_image(image):
        await engine.pull(image)
    identity = await engine.told("image", "inspect", "--format", "{{.Id}}", image)
    return f"{REPOSITORY}:{hashlib.sha256(f'{identity} {install.key}'.encode()).hexdigest()[:32]}"


# When what is kept for later runtimes was last used, and what of it may go: all but so many, the longest unused first, none in use.
#
# Of each there is a file in a folder of the machine, whose time of change is the last use and on which who uses it has a lock: the system
# ends that with the process.


YOUNG_SECONDS = 600.0
"""What was used since then may be about to be used again: between the look whether it is there and the lock."""


class Uses:
    """`most` are kept; `variable` names another place for the folder. Raises `OSError`."""

    def __init__(self, folder: Path, most: int, variable: str) -> None:
        self._folder = folder
        self._most = most
        self._variable = variable

    def note(self, name: str) -> None:
        """It is used now. Raises `RuntimeFailed` where the folder is another user's."""
        owned(self._folder, self._variable)
        (self._folder / name).touch(mode=0o600)

    def hold(self, name: str) -> int:
        """A descriptor: until it is closed, by whomever, what it names is in use. Raises `RuntimeFailed` as `note` does."""
        owned(self._folder, self._variable)
        while True:
            descriptor = os.open(self._folder / name, os.O_RDONLY | os.O_CREAT | os.O_CLOEXEC, 0o600)
            fcntl.flock(descriptor, fcntl.LOCK_SH)
            if self._is_at(name, descriptor):
                os.utime(descriptor)
                return descriptor
            # While the lock was waited for it was removed: a lock on a file without a name keeps nothing.
            os.close(descriptor)

    def _is_at(self, name: str, descriptor: int) -> bool:
        with suppress(FileNotFoundError):
            return os.path.samestat((self._folder / name).stat(), os.fstat(descriptor))
        return False

    def too_many(self) -> Iterator[str]:
        """One after the other what is to be removed, as long as there are more than the bound: the longest unused first, none that is
        young. Of those that then are not removed others take the place."""
        used = {}
        for entry in os.scandir(self._folder) if self._folder.is_dir() else ():
            with suppress(FileNotFoundError):
                used[entry.name] = entry.stat().st_mtime
        left = len(used)
        for name in sorted(used, key=lambda name: used[name]):
            if left > self._most and self._old(name):
                yield name
                left -= not (self._folder / name).exists()

    def _old(self, name: str) -> bool:
        with suppress(FileNotFoundError):
            return (self._folder / name).stat().st_mtime < time.time() - YOUNG_SECONDS
        return False

    @contextmanager
    def alone(self, name: str) -> Iterator[bool]:
        """In the block nobody begins to use it; False: somebody does, or has just done so."""
        descriptor = os.open(self._folder / name, os.O_RDONLY | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            yield False
        else:
            yield self._old(name)
        finally:
            os.close(descriptor)

    def forget(self, name: str) -> None:
        """It is gone."""
        (self._folder / name).unlink(missing_ok=True)


# Folders of the node in which runtimes have their files: how they are made and how they go.


_ENTERED = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


def owned(folder: Path, variable: str) -> None:
    """Makes the folder, for the node's user alone. Raises `RuntimeFailed` when it is another user's, or a link of another user's, who
    could then change what runs; `variable` names another place. Raises `OSError`."""
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    if folder.stat().st_uid != os.geteuid() or folder.lstat().st_uid not in (0, os.geteuid()):
        raise RuntimeFailed(f"{folder} belongs to another user; set {variable} to a folder of the node's own")


def deleted(folder: Path) -> None:
    """Removes it with all that is in it, also with folders that their owner may not enter. Nothing of the runtime runs any more.

    An agent may nest folders deeper than a path is long, a stack high or descriptors are many. So each folder below is moved to the top
    before it is looked into. What cannot be removed stays."""
    with suppress(OSError):
        top = os.open(folder, _ENTERED)
        names = (f"{uuid4().hex}-{number}" for number in itertools.count())
        try:
            while _moved_or_removed(top, top, names):
                pass
        finally:
            os.close(top)
        folder.rmdir()


def _moved_or_removed(top: int, place: int, names: Iterator[str]) -> bool:
    """Whether anything was: of the folder open at `place`, its folders to the one open at `top`, with others of these `names`, and all
    else for good. Those that are at the top already are emptied and removed."""
    any_was = False
    with os.scandir(place) as entries:
        for entry in entries:
            with suppress(OSError):
                if not entry.is_dir(follow_symlinks=False):
                    os.unlink(entry.name, dir_fd=place)
                else:
                    # Who may not write into a folder cannot move it either.
                    os.chmod(entry.name, 0o700, dir_fd=place)
                    if place != top:
                        os.rename(entry.name, next(names), src_dir_fd=place, dst_dir_fd=top)
                    else:
                        any_was |= _emptied(top, entry.name, names)
                        os.rmdir(entry.name, dir_fd=top)
                any_was = True
    return any_was


def _emptied(top: int, name: str, names: Iterator[str]) -> bool:
    place = os.open(name, _ENTERED, dir_fd=top)
    try:
        return _moved_or_removed(top, place, names)
    finally:
        os.close(place)
