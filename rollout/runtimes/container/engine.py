"""The command line of a container engine, as far as docker and podman agree."""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping
from dataclasses import dataclass

from rollout.runtimes.base import DiskFull, RuntimeFailed
from rollout.runtimes.command import ExecLimits, finish_process, start_process
from rollout.runtimes.processes import kill_tree
from rollout.runtimes.settings import RuntimeSettings

PULL_SECONDS = 3600.0
_COMMANDS = ("docker", "podman")
_SECONDS = 300.0
_PROXIES = ("http_proxy", "https_proxy", "ftp_proxy", "no_proxy", "all_proxy")


async def find_engine(settings: RuntimeSettings) -> Engine:
    """The engine of the settings, or the first whose service answers. Raises `RuntimeFailed`."""
    reasons = []
    for name in (settings.container_command,) if settings.container_command else _COMMANDS:
        if shutil.which(name) is None:
            reasons.append(f"{name} is not installed")
            continue
        engine = Engine((name, *settings.container_flags))
        try:
            await engine.call("ps", "--quiet")
        except RuntimeFailed as error:
            reasons.append(str(error))
            continue
        return engine
    raise RuntimeFailed(f"no container engine answers: {'; '.join(reasons)}")


@dataclass(frozen=True, slots=True)
class Engine:
    """`command` includes the flags that go before every subcommand."""

    command: tuple[str, ...]

    def get_environment(self) -> Mapping[str, str]:
        """The variables that the command line runs with."""
        return os.environ

    async def call(self, *words: str, seconds: float = _SECONDS, env: Mapping[str, str] | None = None) -> str:
        """What the subcommand printed, stripped. Raises `RuntimeFailed`, `DiskFull`."""
        async with start_process([*self.command, *words], env=self.get_environment() if env is None else env) as process:

            def send(number: int) -> None:
                if process.returncode is None:
                    kill_tree(process.pid)

            done = await finish_process(process, b"", ExecLimits(seconds), send)
        if done.exit_code == 0 and not done.timed_out:
            return done.stdout.decode(errors="replace").strip()
        reason = f"it took more than {seconds:g} seconds" if done.timed_out else done.explain_failure()
        failure = DiskFull if "no space left on device" in reason.lower() else RuntimeFailed
        raise failure(f"{self.command[0]} {words[0]}: {reason}")

    async def has_image(self, image: str) -> bool:
        try:
            await self.call("image", "inspect", "--format", "{{.Id}}", image)
        except RuntimeFailed:
            return False
        return True

    async def pull(self, image: str) -> None:
        await self.call("pull", image, seconds=PULL_SECONDS)

    async def run(self, *words: str) -> None:
        """Without the node's proxy variables, which podman would pass on to the container."""
        env = {name: value for name, value in os.environ.items() if name.lower() not in _PROXIES}
        await self.call("run", *words, env=env)

    async def find_first_process(self, name: str) -> int:
        """The container's first process, as the machine numbers it; 0 if there is none."""
        pid = await self.call("inspect", "--format", "{{.State.Pid}}", name)
        return int(pid) if pid.isdigit() else 0

    async def list_names(self, label: str) -> list[str]:
        """The names of containers with this label, running or not."""
        return (await self.call("ps", "--all", "--filter", f"label={label}", "--format", "{{.Names}}")).split()

    async def create_network(self, name: str, label: str) -> None:
        """A network that other networks of this kind do not reach. Docker keeps all of its own apart; podman does so only if asked."""
        is_podman = "podman" in (await self.call("--version")).lower()
        apart = ("--disable-dns", "--opt", "isolate=true") if is_podman else ()
        await self.call("network", "create", "--label", f"{label}={name}", *apart, name)

    async def list_networks(self, label: str) -> list[str]:
        return (await self.call("network", "ls", "--filter", f"label={label}", "--format", "{{.Name}}")).split()

    async def remove_network(self, name: str) -> None:
        """Raises nothing for a network that does not exist."""
        try:
            await self.call("network", "rm", name)
        except RuntimeFailed as error:
            if "not found" not in str(error).lower() and "no such network" not in str(error).lower():
                raise

    async def remove(self, name: str) -> None:
        """Raises nothing for a container that does not exist."""
        try:
            await self.call("rm", "--force", "--volumes", name)
        except RuntimeFailed as error:
            if "no such container" not in str(error).lower() and "no container with name" not in str(error).lower():
                raise
