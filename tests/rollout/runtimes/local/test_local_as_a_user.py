"""Sandboxes of a node that is not root, as in a container: bubblewrap makes them out of two user namespaces, one in the other."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from tests import ROOT

PROGRAM = """
import asyncio, os
from rollout.runtimes.base import ProxyAddress
from rollout.runtimes.local.runtime import LocalKind
from contract.tasks import RuntimeSpec

async def said(reader, writer):
    writer.write(b"the proxy heard " + await reader.readline())
    writer.close()

async def main():
    assert os.geteuid() != 0
    kind = LocalKind()
    assert await kind.probe() is None
    async with await asyncio.start_server(said, "127.0.0.1", 0) as server:
        runtime = kind.make(RuntimeSpec(), "user-test", ProxyAddress("127.0.0.1", server.sockets[0].getsockname()[1]))
        await runtime.start()
        try:
            asking = "exec 3<>/dev/tcp/127.0.0.1/8700; id -un >&3; cat <&3"
            done = await runtime.exec(["bash", "-c", asking], timeout_seconds=60)
        finally:
            await runtime.stop()
    print(done.exit_code, done.stdout.decode(), done.stderr.decode())

asyncio.run(main())
"""


def test_a_command_reaches_the_proxy_from_the_sandbox_of_a_node_that_is_not_root(tmp_path: Path) -> None:
    # As root the test becomes another user by a namespace of its own, in which it still may read the project's files.
    other = [] if os.geteuid() else ["unshare", "--user", "--map-user=1000", "--map-group=1000"]
    done = subprocess.run(
        [*other, sys.executable, "-c", PROGRAM],
        env={"PATH": os.environ["PATH"], "PYTHONPATH": str(ROOT), "VERBATIM_LOCAL_DIR": str(tmp_path / "runtimes")},
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert done.stdout.strip() == "0 the proxy heard agent", done.stderr
