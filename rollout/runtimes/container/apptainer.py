"""An instance of apptainer, or singularity, as a runtime (kind `apptainer`), by its command line.

An instance is a container of another engine: what is said in `container` holds here too. The image is a SIF file, a folder, or an address
such as docker://debian:12.

Every instance is in a user namespace (--userns), and its commands are the node's own user. As root's that would be little of a wall:
apptainer leaves all of root's privileges and /proc/sys to an instance, so that a node that runs as root does not take the kind unless
`VERBATIM_APPTAINER_ROOT` says allowed. An instance sees nothing of the machine (--containall) but its own folder of the node: home,
workdir, /tmp, and, unless `VERBATIM_APPTAINER_WRITABLE` says tmpfs, all that it writes elsewhere. It has one network for all its
commands.
"""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from rollout.runtimes.base import DiskFull, Install, Installed, Logs, Route, RuntimeFailed, no_room
from rollout.runtimes.command import Limits
from rollout.runtimes.container.runtime import INSIDE, START_SECONDS, ContainerKind, ContainerRuntime, Engine
from rollout.runtimes.local.resources import PIDS
from rollout.runtimes.route import hosts
from rollout.task import Network, RuntimeSpec

HOME = "/home/agent"
WRITABLE = ("overlay", "tmpfs")
_PULL_SECONDS = 3600.0
_OWN = ("APPTAINER", "SINGULARITY")
_PASSED_ON = ("_CACHEDIR", "_TMPDIR", "_CONFIGDIR", "_DOCKER_USERNAME", "_DOCKER_PASSWORD", "_AUTH_FILE", "_AUTHFILE")
"""Of its variables those about where images come from. Others are flags, of which some open an instance to the machine."""
_GROUPS = Path("/sys/fs/cgroup")
_PROBE = """
import ctypes, os, sys
libc = ctypes.CDLL(None, use_errno=True)
if libc.unshare(0x10000000) != 0:
    sys.exit(os.strerror(ctypes.get_errno()))
"""
"""Makes a user namespace for itself alone (CLONE_NEWUSER)."""
_TOLD = ("APPNAME", "BIND", "COMMAND", "CONTAINER", "ENVIRONMENT", "INSTANCE", "NAME")
"""Ends of variables that it sets in every instance, of which some name files of the node. LD_LIBRARY_PATH stays: images have their own, and
drivers of the machine come with it."""
_PROMPT = ("PS1", "PROMPT_COMMAND")


@dataclass(frozen=True, slots=True)
class Apptainer(Engine):
    """Its command line."""

    def environment(self) -> Mapping[str, str]:
        passed_on = {f"{own}{end}" for own in _OWN for end in _PASSED_ON}
        return {name: value for name, value in os.environ.items() if not name.startswith(_OWN) or name in passed_on}

    async def instances(self) -> dict[str, int]:
        """Name -> first process, as the machine counts it. Raises `RuntimeFailed`."""
        told = await self.told("instance", "list", "--json")
        try:
            return {each["instance"]: each["pid"] for each in json.loads(told).get("instances") or ()}
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise RuntimeFailed(f"{self.command[0]} instance list says nothing of instances: {told[:200]}") from error

    async def names(self, label: str) -> list[str]:
        """Of all its instances: they have no labels."""
        return [*await self.instances()]

    async def removed(self, name: str) -> None:
        if name in await self.instances():
            await self.told("instance", "stop", "--force", name)


async def no_user_namespace() -> str | None:
    """Why this user can make none here: some systems allow it to root alone, or to nobody."""
    process = await asyncio.create_subprocess_exec(sys.executable, "-I", "-S", "-c", _PROBE, stderr=asyncio.subprocess.PIPE)
    _, told = await process.communicate()
    return f"instances need user namespaces, and none can be made here: {told.decode().strip()}" if process.returncode else None


def no_limits(user: int, groups: Path = _GROUPS) -> str | None:
    """Why apptainer could hold no instance of that user to limits."""
    if user == 0 or (groups / "cgroup.controllers").exists():
        return None
    return f"apptainer holds limits for root alone where {groups} is not version 2 of control groups: no instance would start"


class ApptainerKind(ContainerKind):
    name = "apptainer"
    folder_variable = "VERBATIM_APPTAINER_DIR"

    @property
    def folder(self) -> Path:
        return self.settings.apptainer_dir

    async def engine(self) -> Engine:
        command = self.settings.apptainer_command
        if shutil.which(command) is None:
            raise RuntimeFailed(f"{command} is not installed")
        return Apptainer((command, "--silent"))

    async def missing(self) -> str | None:
        if (reason := self._refused()) is not None:
            return reason
        try:
            await (await self.engine()).told("instance", "list", "--json")
        except RuntimeFailed as error:
            return str(error)
        return await no_user_namespace() or no_limits(os.geteuid())

    def _refused(self) -> str | None:
        """What in the settings keeps instances from this node."""
        if os.geteuid() == 0 and self.settings.apptainer_root != "allowed":
            return (
                "instances need a node that does not run as root: apptainer keeps root in them from little of the machine "
                "(VERBATIM_APPTAINER_ROOT=allowed takes them all the same)"
            )
        if self.settings.apptainer_writable not in WRITABLE:
            return f"VERBATIM_APPTAINER_WRITABLE cannot be {self.settings.apptainer_writable!r}: choose {' or '.join(WRITABLE)}"
        return None

    def limits(self) -> str:
        return f"memory, CPUs and {PIDS} processes are held by apptainer's control groups"

    def make(self, spec: RuntimeSpec, name: str, route: Route) -> ApptainerRuntime:
        return ApptainerRuntime(self, spec, name, route)

    async def installed(self, spec: RuntimeSpec, install: Install, name: str, route: Route, logs: Logs) -> Installed:
        """Images are files of others here: the spec as it is."""
        return Installed(spec)


class ApptainerRuntime(ContainerRuntime):
    """One instance, which lives from `start` to `stop`."""

    def __init__(self, kind: ApptainerKind, spec: RuntimeSpec, name: str, route: Route) -> None:
        super().__init__(kind, spec, name, route)
        self._user = 0
        self.home = HOME

    async def _begun(self, engine: Engine) -> int:
        assert isinstance(engine, Apptainer) and self._spec.image is not None
        if self.name in await engine.instances():
            self._claimed = False
            self._folder.rmdir()
            raise RuntimeFailed(f"there is an instance {self.name} already")
        self._prepare()
        await engine.told("instance", "start", *self._flags(), self._spec.image, self.name, seconds=_PULL_SECONDS)
        return (await engine.instances()).get(self.name, 0)

    def _prepare(self) -> None:
        try:
            for name in ("inside", "home", "work", "scratch", "overlay"):
                (self._folder / name).mkdir()
            (self._folder / "hosts").write_text(hosts(self._route))
        except OSError as error:
            raise (DiskFull if no_room(error) else RuntimeFailed)(f"{self._folder} cannot be filled: {error}") from error

    async def _make(self, engine: Engine) -> None:
        await super()._make(engine)
        done = await self._run(["test", "-w", self.workdir], b"", Limits(START_SECONDS), None, "/")
        if done.exit_code != 0:
            raise RuntimeFailed(
                f"the node's user cannot write {self.workdir} of the image {self._spec.image}: with --fakeroot in "
                "VERBATIM_APPTAINER_FLAGS commands are root among its files"
            )

    def _flags(self) -> list[str]:
        spec, folder, settings = self._spec, self._folder, self._kind.settings
        memory = str(spec.memory_mb << 20)
        words = ["--userns", "--containall", "--cleanenv", "--no-mount", "bind-paths"]
        words += ["--home", f"{folder}/home:{HOME}", "--workdir", f"{folder}/scratch", "--bind", f"{self._passed}:{INSIDE}"]
        words += ["--writable-tmpfs"] if settings.apptainer_writable == "tmpfs" else ["--overlay", f"{folder}/overlay"]
        words += ["--cpus", f"{spec.cpus:g}", "--memory", memory, "--memory-swap", memory, "--pids-limit", str(PIDS)]
        if spec.workdir is None:
            # A folder that is in the image stays what it is; this one is nobody's.
            words += ["--bind", f"{folder}/work:{self.workdir}"]
        if spec.network == "proxy":
            words += ["--net", "--network", "none", "--bind", f"{folder}/hosts:/etc/hosts:ro"]
        else:
            words += ["--bind", "/etc/hosts:/etc/hosts:ro", "--bind", "/etc/resolv.conf:/etc/resolv.conf:ro"]
        return [*words, *settings.apptainer_flags]

    @property
    def _passes_on(self) -> bool:
        return self._spec.network == "proxy"

    async def _check_workdir(self) -> None:
        """`_make` has."""

    def _first_lines(self) -> Sequence[str]:
        # In blocks of 512 bytes. The limit of files is the only one that is a command's and not the instance's.
        size = [f"ulimit -f {self._spec.disk_mb << 11}"] if self._spec.disk_mb is not None else []
        return [*size, " ".join(("unset", *_PROMPT, *(f"{own}_{end}" for own in _OWN for end in _TOLD)))]

    async def _client(self, engine: Engine, mark: str, network: Network) -> list[str]:
        if network != self._spec.network:
            raise RuntimeFailed(
                f"an instance has one network, here {self._spec.network}: a command in it cannot have {network}"
            )
        return [*engine.command, "exec", "--cleanenv", "--pwd", "/", "--env", mark, f"instance://{self.name}"]
