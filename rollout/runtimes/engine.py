"""The command line of a container engine, docker's or podman's: what both know."""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping
from dataclasses import dataclass

from rollout.runtimes.base import DiskFull, RuntimeFailed
from rollout.runtimes.command import Limits, finished, started
from rollout.runtimes.processes import kill_tree
from rollout.runtimes.settings import RuntimeSettings

_COMMANDS = ("docker", "podman")
_SECONDS = 300.0
_PULL_SECONDS = 3600.0
_PROXIES = ("http_proxy", "https_proxy", "ftp_proxy", "no_proxy", "all_proxy")


@dataclass(frozen=True, slots=True)
class Engine:
    """`command` with the flags that go before every subcommand."""

    command: tuple[str, ...]

    def environment(self) -> Mapping[str, str]:
        """What the command line is run with."""
        return os.environ

    async def told(self, *words: str, seconds: float = _SECONDS, env: Mapping[str, str] | None = None) -> str:
        """What a subcommand printed. Raises `RuntimeFailed`, `DiskFull`."""
        async with started([*self.command, *words], env=self.environment() if env is None else env) as process:

            def send(number: int) -> None:
                if process.returncode is None:
                    kill_tree(process.pid)

            done = await finished(process, b"", Limits(seconds), send)
        if done.exit_code == 0 and not done.timed_out:
            return done.stdout.decode(errors="replace").strip()
        reason = f"it took more than {seconds:g} seconds" if done.timed_out else done.stderr.decode(errors="replace").strip()
        refused = DiskFull if "no space left on device" in reason.lower() else RuntimeFailed
        raise refused(f"{self.command[0]} {words[0]}: {reason or f'exit code {done.exit_code}'}")

    async def has_image(self, image: str) -> bool:
        try:
            await self.told("image", "inspect", "--format", "{{.Id}}", image)
        except RuntimeFailed:
            return False
        return True

    async def pull(self, image: str) -> None:
        await self.told("pull", image, seconds=_PULL_SECONDS)

    async def run(self, *words: str) -> None:
        """podman would pass the node's proxies on to the container."""
        env = {name: value for name, value in os.environ.items() if name.lower() not in _PROXIES}
        await self.told("run", *words, env=env)

    async def names(self, label: str) -> list[str]:
        """Of the containers with that label, running or not."""
        listed = await self.told("ps", "--all", "--filter", f"label={label}", "--format", "{{.Names}}")
        return listed.split()

    async def removed(self, name: str) -> None:
        """Raises nothing for a container that is not there."""
        try:
            await self.told("rm", "--force", "--volumes", name)
        except RuntimeFailed as error:
            if "no such container" not in str(error).lower() and "no container with name" not in str(error).lower():
                raise


async def found(settings: RuntimeSettings) -> Engine:
    """The engine of the settings, or the first whose service answers. Raises `RuntimeFailed`."""
    reasons = []
    for name in (settings.container_command,) if settings.container_command else _COMMANDS:
        if shutil.which(name) is None:
            reasons.append(f"{name} is not installed")
            continue
        engine = Engine((name, *settings.container_flags))
        try:
            await engine.told("ps", "--quiet")
        except RuntimeFailed as error:
            reasons.append(str(error))
            continue
        return engine
    raise RuntimeFailed(f"no container engine answers: {'; '.join(reasons)}")
