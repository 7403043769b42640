"""Where the contract of runtimes is shown: every kind that can be had here, with a proxy for it to reach."""

from __future__ import annotations

import asyncio
import shutil
import subprocess
import uuid
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any

from contract.tasks import RuntimeSpec
from rollout.runtimes.base import Executed, ProxyAddress, Runtime, RuntimeKind
from rollout.runtimes.container.runtime import ContainerKind
from rollout.runtimes.local.runtime import LocalKind
from rollout.runtimes.local.sandbox import bind_system
from rollout.runtimes.settings import RuntimeSettings
from tests.support.machine import unavailable

NOWHERE = ProxyAddress("192.0.2.9", 9)
"""A proxy that is not there."""
SECONDS = 120.0
"""What a command may take that is to end on its own."""
GRACE_SECONDS = 5.0
"""Between SIGTERM and SIGKILL: enough for what minds being told, also where telling is an exec of its own on a busy machine."""
ANSWER = b"the proxy was here"


@dataclass(frozen=True, slots=True)
class Place:
    """One kind of runtime and the spec that it is tried with."""

    kind: RuntimeKind
    spec: RuntimeSpec
    names: str = field(default_factory=lambda: f"t-{uuid.uuid4().hex[:12]}")
    """What the names of its runtimes begin with."""

    def runtime(self, proxy: ProxyAddress, **changes: Any) -> Runtime:
        return self.kind.make(replace(self.spec, **changes), f"{self.names}-{uuid.uuid4().hex[:8]}", proxy)

    @asynccontextmanager
    async def started(self, proxy: ProxyAddress = NOWHERE, **changes: Any) -> AsyncIterator[Runtime]:
        runtime = self.runtime(proxy, **changes)
        await runtime.start()
        try:
            yield runtime
        finally:
            await runtime.stop()


@cache
def no_sandbox() -> str | None:
    """Why there can be none here."""
    if shutil.which("bwrap") is None:
        return "bubblewrap is not installed"
    probe = ["bwrap", "--unshare-all", "--unshare-user", *bind_system(), "--proc", "/proc", "/bin/true"]
    tried = subprocess.run(probe, capture_output=True, text=True, check=False)
    return f"bubblewrap does not work here: {tried.stderr.strip()}" if tried.returncode else None


def sandboxed(folder: Path, **settings: Any) -> Place:
    if (reason := no_sandbox()) is not None:
        unavailable(reason)
    kind = LocalKind(RuntimeSettings(local_dir=folder, **settings), grace_seconds=GRACE_SECONDS)
    return Place(kind, RuntimeSpec(memory_mb=256))


def unconfined(folder: Path) -> Place:
    kind = LocalKind(RuntimeSettings(local_dir=folder), grace_seconds=GRACE_SECONDS)
    return Place(kind, RuntimeSpec(memory_mb=256, network="full", options={"sandbox": "none"}))


def contained(folder: Path) -> Place:
    from tests.support.runtimes.container_image import ENGINE, FLAGS, RUN_FLAGS, container_image

    image = container_image()
    settings = RuntimeSettings(
        container_command=ENGINE, container_flags=FLAGS, container_run_flags=RUN_FLAGS, container_dir=folder / "containers"
    )
    return Place(ContainerKind(settings, grace_seconds=GRACE_SECONDS), RuntimeSpec(kind="docker", image=image, memory_mb=256))


async def shell(runtime: Runtime, line: str, **options: Any) -> Executed:
    return await runtime.exec(["sh", "-c", line], **{"timeout_seconds": SECONDS, **options})


async def python(runtime: Runtime, program: str, *argv: str, **options: Any) -> Executed:
    return await runtime.exec(["python3", "-c", program, *argv], **{"timeout_seconds": SECONDS, **options})


async def out(runtime: Runtime, line: str, **options: Any) -> str:
    """What a shell line that must succeed printed."""
    done = await shell(runtime, line, **options)
    assert done.exit_code == 0, done
    return done.stdout.decode()


@asynccontextmanager
async def answering(
    answer: bytes = ANSWER, at: Mapping[str, bytes] | None = None, *, host: str = "127.0.0.1"
) -> AsyncIterator[ProxyAddress]:
    """A server that gives every connection one HTTP answer: the one that `at` has for its path, otherwise `answer`. Yields
    its address on the loopback device."""

    async def answered(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        path = (await reader.readuntil(b"\r\n\r\n")).split()[1].decode()
        body = (at or {}).get(path, answer)
        writer.write(b"HTTP/1.1 200 OK\r\nConnection: close\r\nContent-Length: %d\r\n\r\n%s" % (len(body), body))
        await writer.drain()
        writer.close()

    server = await asyncio.start_server(answered, host, 0)
    try:
        yield ProxyAddress("127.0.0.1", server.sockets[0].getsockname()[1])
    finally:
        server.close()
