"""A runtime that isolates nothing: a folder, and child processes in it. For tests of what works in runtimes."""

from __future__ import annotations

import asyncio
import io
import os
import re
import signal
import tarfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from contract.tasks import Network
from rollout.runtimes import command
from rollout.runtimes.base import KEPT_BYTES, Executed, Logs, RuntimeFailed


class PlainRuntime:
    """Below `root`, which must exist. Absolute paths are those of this machine, but for `stand_ins`: folders that only a container
    would have. They are replaced by ones below `root`, in paths, in commands and in the text of what is put here."""

    def __init__(self, root: Path, stand_ins: Sequence[str] = (), workdir: str = "") -> None:
        self._stand_ins = {folder: str(root / "stand_ins" / folder.strip("/")) for folder in stand_ins}
        self.home = str(root / "home")
        self.workdir = self._stand_ins.get(workdir, str(root / "work"))
        self.commands: list[Sequence[str]] = []

    async def start(self) -> None:
        for folder in (self.workdir, self.home):
            self._path(folder).mkdir(parents=True, exist_ok=True)

    def map_url(self, url: str) -> str:
        return url

    async def upload(self, path: str, content: bytes, *, mode: int = 0o644) -> None:
        target = self._path(path)
        try:
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(self._replaced(content))
            target.chmod(mode)
        except OSError as error:
            raise RuntimeFailed(f"{path}: {error}") from error

    async def unpack(self, path: str, archive: bytes) -> None:
        try:
            with tarfile.open(fileobj=io.BytesIO(archive)) as tar:
                for member in tar:
                    if member.isfile() and (found := tar.extractfile(member)):
                        await self.upload(os.path.join(path, member.name), found.read(), mode=member.mode)
                    else:
                        tar.extract(member, self._path(path), filter="data")
        except (OSError, tarfile.TarError) as error:
            raise RuntimeFailed(f"{path}: {error}") from error

    async def download(self, paths: Sequence[str], *, bound_bytes: int) -> bytes:
        archive = self._archive(paths)
        if len(archive) > bound_bytes:
            raise RuntimeFailed(f"{', '.join(paths)}: greater than {bound_bytes} bytes")
        return archive

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
        self.commands.append(argv)
        started = time.monotonic()
        whole = {"PATH": os.environ["PATH"], "HOME": self.home, **(env or {})}
        # Cancelled while it starts a process, asyncio would wait until all have ended that hold its pipes.
        async with command.start_process(self._words(argv), cwd=self._path(workdir or "."), env=whole) as process:
            told = asyncio.ensure_future(process.communicate(stdin))
            try:
                done, _ = await asyncio.wait({told}, timeout=timeout_seconds)
            finally:
                if process.returncode is None or not told.done():
                    os.killpg(process.pid, signal.SIGKILL)
                stdout, stderr = await told
        if logs is not None:
            for path, written in ((logs.stdout, stdout), (logs.stderr, stderr)):
                with path.open("ab") as file:
                    file.write(written)
        code = process.returncode or 0
        seconds = time.monotonic() - started
        return Executed(code if code >= 0 else 128 - code, stdout[-KEPT_BYTES:], stderr[-KEPT_BYTES:], not done, seconds)

    async def stop(self) -> None:
        pass

    def _archive(self, paths: Sequence[str]) -> bytes:
        held = io.BytesIO()
        with tarfile.open(fileobj=held, mode="w:gz") as tar:
            for path in paths:
                whole = os.path.normpath(os.path.join(self.workdir, path))
                name = os.path.relpath(whole, self.workdir) if Path(whole).is_relative_to(self.workdir) else whole
                if os.path.lexists(self._path(path)):
                    tar.add(self._path(path), arcname=name)
        return held.getvalue()

    def _path(self, path: str) -> Path:
        """Where `path` is on this machine."""
        whole = os.path.normpath(os.path.join(self.workdir, path))
        for folder, stand_in in self._stand_ins.items():
            if Path(whole).is_relative_to(folder):
                return Path(stand_in) / Path(whole).relative_to(folder)
        return Path(whole)

    def _replaced(self, content: bytes) -> bytes:
        for folder, stand_in in self._stand_ins.items():
            whole = rb"(?<![\w./-])" + re.escape(folder.encode()) + rb"(?![\w.-])"
            content = re.sub(whole, stand_in.encode().replace(b"\\", rb"\\"), content)
        return content

    def _words(self, argv: Sequence[str]) -> list[str]:
        return [self._replaced(word.encode()).decode() for word in argv]
