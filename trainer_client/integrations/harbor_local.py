"""Harbor environments (tested with 0.25.0) without a container: a sandbox of bubblewrap, with the programs of this machine.

    harbor run -p tasks -e trainer_client.integrations.harbor_local:LocalEnvironment --ek show=/opt/agents ...

The system is read-only. The folders that Harbor and its tasks write, /app, /logs, /tests and so on, are the trial's own, as are the home
folder and /tmp; nothing else is visible but what `show` names, folders with colons between them. A task's files beside its Dockerfile are
in /app; the Dockerfile is not built. The network is the machine's.
"""

from __future__ import annotations

import asyncio
import os
import shutil
from pathlib import Path
from typing import Any

from harbor.environments.base import BaseEnvironment, ExecResult
from harbor.environments.capabilities import EnvironmentCapabilities

SYSTEM = ("usr", "bin", "sbin", "lib", "lib32", "lib64", "etc", "opt")
PLACES = ("app", "installed-agent", "logs", "root", "runtime", "solution", "tests", "tmp", "workdir")
LOGS = ("agent", "user-agent", "verifier", "artifacts")
HOME = "/root"
NOT_FILES_OF_THE_TASK = ("Dockerfile", "docker-compose.yaml")


class LocalEnvironment(BaseEnvironment):
    def __init__(self, *args: Any, show: str = "", **kwargs: Any) -> None:
        self._shown = [each for each in show.split(":") if each]
        super().__init__(*args, **kwargs)
        # A separate verifier's environment has a name of its own.
        self._box = Path(self.trial_paths.trial_dir).resolve() / f"box-{self.session_id.rsplit('__', 1)[-1]}"

    @staticmethod
    def type() -> str:
        return "local"

    @property
    def capabilities(self) -> EnvironmentCapabilities:
        return EnvironmentCapabilities()

    @classmethod
    def preflight(cls) -> None:
        if shutil.which("bwrap") is None:
            raise SystemExit("bubblewrap is not installed: the package is called bubblewrap, its command bwrap")

    def _validate_definition(self) -> None:
        """Nothing is built."""

    async def start(self, force_build: bool) -> None:
        for place in (*PLACES, *(f"logs/{each}" for each in LOGS)):
            (self._box / place).mkdir(parents=True, exist_ok=True)
        if self.environment_dir.is_dir():
            await asyncio.to_thread(
                shutil.copytree,
                self.environment_dir,
                self._box / "app",
                ignore=shutil.ignore_patterns(*NOT_FILES_OF_THE_TASK),
                dirs_exist_ok=True,
            )

    async def stop(self, delete: bool) -> None:
        if delete:
            await asyncio.to_thread(shutil.rmtree, self._box, True)

    async def upload_file(self, source_path: Path | str, target_path: str) -> None:
        await asyncio.to_thread(_copy_file, Path(source_path), self._outside(target_path))

    async def upload_dir(self, source_dir: Path | str, target_dir: str) -> None:
        await asyncio.to_thread(shutil.copytree, source_dir, self._outside(target_dir), dirs_exist_ok=True)

    async def download_file(self, source_path: str, target_path: Path | str) -> None:
        await asyncio.to_thread(_copy_file, self._outside(source_path), Path(target_path))

    async def download_dir(self, source_dir: str, target_dir: Path | str) -> None:
        await asyncio.to_thread(shutil.copytree, self._outside(source_dir), target_dir, symlinks=True, dirs_exist_ok=True)

    async def exec(
        self,
        command: str,
        cwd: str | None = None,
        env: dict[str, str] | None = None,
        timeout_sec: int | None = None,
        user: str | int | None = None,
    ) -> ExecResult:
        """Raises RuntimeError after `timeout_sec`, as Harbor's own environments do. There is one user."""
        inside = {"PATH": os.environ["PATH"], "HOME": HOME, "LANG": "C.UTF-8", **(self._merge_env(env) or {})}
        process = await asyncio.create_subprocess_exec(
            *self._wrap(cwd or self.task_env_config.workdir or "/app"),
            *("bash", "-c", command),
            env=inside,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
        )
        try:
            async with asyncio.timeout(timeout_sec):
                out, err = await process.communicate()
        except TimeoutError as error:
            raise RuntimeError(f"Command timed out after {timeout_sec} seconds") from error
        finally:
            if process.returncode is None:
                process.kill()
                await process.wait()
        said = {"stdout": out.decode(errors="replace"), "stderr": err.decode(errors="replace")}
        return ExecResult(**said, return_code=process.returncode or 0)

    def _wrap(self, workdir: str) -> list[str]:
        line = [
            "bwrap",
            "--die-with-parent",
            "--new-session",
            "--unshare-pid",
            "--unshare-ipc",
            "--proc",
            "/proc",
            "--dev",
            "/dev",
        ]
        for name in SYSTEM:
            path = f"/{name}"
            if os.path.islink(path):
                line += ["--symlink", os.readlink(path), path]
            elif os.path.isdir(path):
                line += ["--ro-bind", path, path]
        for place in PLACES:
            line += ["--bind", str(self._box / place), f"/{place}"]
        for shown in self._shown:
            line += ["--ro-bind", shown, shown]
        return [*line, "--chdir", workdir]

    def _outside(self, path: str) -> Path:
        """Where the sandbox's file lies. Raises ValueError for one that is not in a folder of the trial's: a link must not lead out."""
        found = (self._box / path.lstrip("/")).resolve()
        if not found.is_relative_to(self._box):
            raise ValueError(f"{path} is not in a folder of the trial")
        return found


def _copy_file(source: Path, target: Path) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    shutil.copy2(source, target)
