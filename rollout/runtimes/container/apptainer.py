"""An instance of apptainer, or singularity, as a runtime (kind `apptainer`), through its command line.

An instance is a container of another engine, so most of `container.runtime` applies. The image is a SIF file, a folder, or an address such
as docker://debian:12.

Every instance is in a user namespace (--userns), and its commands run as the node's own user. For root that is hardly a barrier: apptainer
leaves an instance all of root's privileges and /proc/sys, so a node that runs as root refuses this kind unless
`VERBATIM_APPTAINER_ROOT` is allowed. An instance sees nothing of the machine (--containall) but its own folder of the node: home, workdir,
/tmp and, unless `VERBATIM_APPTAINER_WRITABLE` is tmpfs, everything it writes elsewhere. All its commands share one network.
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

from contract.tasks import Network, RuntimeSpec
from rollout.runtimes.base import Install, Installed, Logs, NetworkRefused, ProxyAddress, RuntimeFailed, describe_os_error
from rollout.runtimes.command import find_failure
from rollout.runtimes.container.engine import PULL_SECONDS, Engine
from rollout.runtimes.container.runtime import INSIDE, ContainerKind, ContainerRuntime
from rollout.runtimes.local.resources import PIDS
from rollout.runtimes.passage import render_hosts
from rollout.runtimes.processes import ContainerProcesses, has_filter
from rollout.runtimes.seccomp import render_profile

HOME = "/home/agent"
WRITABLE = ("overlay", "tmpfs")
_OWN = ("APPTAINER", "SINGULARITY")
_PASSED_ON = ("_CACHEDIR", "_TMPDIR", "_CONFIGDIR", "_DOCKER_USERNAME", "_DOCKER_PASSWORD", "_AUTH_FILE", "_AUTHFILE")
"""Its variables about where images come from. Others are flags, some of which open an instance to the machine."""
_FILTER_LOOKS = 250
_GROUPS = Path("/sys/fs/cgroup")
_PROBE = """
import ctypes, os, sys
libc = ctypes.CDLL(None, use_errno=True)
if libc.unshare(0x10000000) != 0:
    sys.exit(os.strerror(ctypes.get_errno()))
"""
"""Makes a user namespace for itself alone (CLONE_NEWUSER)."""
_UNSET = ("APPNAME", "BIND", "COMMAND", "CONTAINER", "ENVIRONMENT", "INSTANCE", "NAME")
"""Endings of variables that it sets in every instance, some of which name files of the node. LD_LIBRARY_PATH stays: images bring their own,
and the machine's drivers come with it."""
_PROMPT = ("PS1", "PROMPT_COMMAND")


@dataclass(frozen=True, slots=True)
class Apptainer(Engine):
    """Its command line."""

    def get_environment(self) -> Mapping[str, str]:
        passed_on = {f"{own}{end}" for own in _OWN for end in _PASSED_ON}
        return {name: value for name, value in os.environ.items() if not name.startswith(_OWN) or name in passed_on}

    async def _list_instances(self) -> dict[str, int]:
        """Name -> first process. Raises `RuntimeFailed`."""
        text = await self.call("instance", "list", "--json")
        try:
            return {each["instance"]: each["pid"] for each in json.loads(text).get("instances") or ()}
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise RuntimeFailed(f"{self.command[0]} instance list printed no list of instances: {text[:200]}") from error

    async def find_first_process(self, name: str) -> int:
        return (await self._list_instances()).get(name, 0)

    async def list_names(self, label: str) -> list[str]:
        """The names of all instances: they have no labels."""
        return [*await self._list_instances()]

    async def list_networks(self, label: str) -> list[str]:
        return []

    async def remove(self, name: str) -> None:
        if name in await self._list_instances():
            await self.call("instance", "stop", "--force", name)


async def probe_user_namespace() -> str | None:
    """Why this user cannot make one: some systems allow it to root alone, or not at all."""
    failure = await find_failure([sys.executable, "-I", "-S", "-c", _PROBE])
    return None if failure is None else f"instances need user namespaces, and none can be made here: {failure}"


_FORBID = """
import ctypes, os, sys
libc = ctypes.CDLL(None, use_errno=True)
if libc.setns(os.open(f"/proc/{sys.argv[1]}/ns/user", os.O_RDONLY), 0x10000000) != 0:
    sys.exit(os.strerror(ctypes.get_errno()))
for name in os.listdir("/proc/sys/user"):
    if name.endswith("_namespaces"):
        with open(f"/proc/sys/user/{name}", "w") as file:
            file.write("0")
"""
"""Enters the user namespace of a process and sets its limits of further namespaces, of every kind, to none."""


async def _forbid_namespaces(first: int) -> None:
    """Keeps the instance of that first process from making namespaces, which its filter cannot: apptainer answers EPERM where a rule says
    ENOSYS, so `clone3` is allowed. Raises `RuntimeFailed`."""
    failure = await find_failure([sys.executable, "-I", "-S", "-c", _FORBID, str(first)])
    if failure is not None:
        raise RuntimeFailed(f"further namespaces cannot be forbidden in the instance: {failure}")


async def _wait_for_filter(first: int) -> None:
    """Apptainer may report a process before it has set its filter: on a busy machine it has none for a moment."""
    for _ in range(_FILTER_LOOKS):
        if has_filter(first):
            break
        await asyncio.sleep(0.02)


def probe_limits(user: int, groups: Path = _GROUPS) -> str | None:
    """Why apptainer could not limit an instance of that user."""
    if user == 0 or (groups / "cgroup.controllers").exists():
        return None
    return f"apptainer limits instances for root alone where {groups} is not cgroup version 2: no instance would start"


class ApptainerKind(ContainerKind):
    name = "apptainer"
    folder_variable = "VERBATIM_APPTAINER_DIR"

    @property
    def folder(self) -> Path:
        return self.settings.apptainer_dir

    async def find_engine(self) -> Engine:
        command = self.settings.apptainer_command
        if shutil.which(command) is None:
            raise RuntimeFailed(f"{command} is not installed")
        return Apptainer((command, "--silent"))

    async def probe(self) -> str | None:
        if os.geteuid() == 0 and self.settings.apptainer_root != "allowed":
            return (
                "instances need a node that does not run as root: apptainer keeps root in them from little of the machine "
                "(set VERBATIM_APPTAINER_ROOT=allowed to accept that)"
            )
        if self.settings.apptainer_writable not in WRITABLE:
            return f"VERBATIM_APPTAINER_WRITABLE cannot be {self.settings.apptainer_writable!r}: choose {' or '.join(WRITABLE)}"
        try:
            await (await self.find_engine()).call("instance", "list", "--json")
        except RuntimeFailed as error:
            return str(error)
        return await probe_user_namespace() or probe_limits(os.geteuid())

    def describe_limits(self) -> str:
        return f"memory, CPUs and {PIDS} processes are limited by apptainer's control groups"

    def make(self, spec: RuntimeSpec, name: str, proxy: ProxyAddress) -> ApptainerRuntime:
        return ApptainerRuntime(self, spec, name, proxy)

    async def install(self, spec: RuntimeSpec, install: Install, name: str, proxy: ProxyAddress, logs: Logs) -> Installed:
        """Leaves the spec unchanged: images here are files that belong to others."""
        return Installed(spec)


class ApptainerRuntime(ContainerRuntime):
    """One instance, which lives from `start` to `stop`."""

    def __init__(self, kind: ApptainerKind, spec: RuntimeSpec, name: str, proxy: ProxyAddress) -> None:
        super().__init__(kind, spec, name, proxy)
        self._user = 0
        self.home = HOME

    async def _begin(self, engine: Engine) -> int:
        if await engine.find_first_process(self.name):
            self._claimed = False
            self._folder.rmdir()
            raise RuntimeFailed(f"an instance {self.name} exists already")
        try:
            for name in ("inside", "home", "work", "scratch", "overlay"):
                (self._folder / name).mkdir()
            self._profile.write_text(render_profile(clone3=True))
            (self._folder / "hosts").write_text(render_hosts(self._proxy))
        except OSError as error:
            raise describe_os_error(f"{self._folder} cannot be filled", error) from error
        words = (*self._make_flags("none"), self._spec.image or "", self.name)
        await engine.call("instance", "start", *words, seconds=PULL_SECONDS)
        first = await engine.find_first_process(self.name)
        if first:
            await _forbid_namespaces(first)
            await _wait_for_filter(first)
        return first

    def _make_flags(self, network: str) -> list[str]:
        spec, folder, settings = self._spec, self._folder, self._kind.settings
        memory = str(spec.memory_mb << 20)
        words = ["--userns", "--containall", "--cleanenv", "--no-mount", "bind-paths", "--security", f"seccomp:{self._profile}"]
        words += ["--home", f"{folder}/home:{HOME}", "--workdir", f"{folder}/scratch", "--bind", f"{self._passed}:{INSIDE}"]
        words += ["--writable-tmpfs"] if settings.apptainer_writable == "tmpfs" else ["--overlay", f"{folder}/overlay"]
        words += ["--cpus", f"{spec.cpus:g}", "--memory", memory, "--memory-swap", memory, "--pids-limit", str(PIDS)]
        if spec.workdir is None:
            # The default workdir belongs to no image; one that the spec names may be a folder of the image, which must keep its content.
            words += ["--bind", f"{folder}/work:{self.workdir}"]
        if spec.network == "proxy":
            words += ["--net", "--network", "none", "--bind", f"{folder}/hosts:/etc/hosts:ro"]
        else:
            words += ["--bind", "/etc/hosts:/etc/hosts:ro", "--bind", "/etc/resolv.conf:/etc/resolv.conf:ro"]
        return [*words, *settings.apptainer_flags]

    @property
    def _is_proxied(self) -> bool:
        return self._spec.network == "proxy"

    async def _check_workdir(self) -> None:
        if not await self._can_write_workdir():
            raise RuntimeFailed(
                f"the node's user cannot write {self.workdir} of the image {self._spec.image}: with --fakeroot in "
                "VERBATIM_APPTAINER_FLAGS commands are root among its files"
            )

    def _get_first_lines(self) -> Sequence[str]:
        # In blocks of 512 bytes. Only the limit on files belongs to each command; the instance has the others.
        size = [f"ulimit -f {self._spec.disk_mb << 11}"] if self._spec.disk_mb is not None else []
        return [*size, " ".join(("unset", *_PROMPT, *(f"{own}_{end}" for own in _OWN for end in _UNSET)))]

    async def _make_client(self, engine: Engine, within: ContainerProcesses, mark: str, network: Network) -> list[str]:
        if network != self._spec.network:
            raise NetworkRefused(f"an instance has one network, here {self._spec.network}: a command cannot have {network}")
        return [*engine.command, "exec", "--cleanenv", "--pwd", "/", "--env", mark, f"instance://{self.name}"]
