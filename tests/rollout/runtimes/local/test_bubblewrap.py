"""What bubblewrap is given and reports goes over descriptors, and each is closed once."""

from __future__ import annotations

import asyncio
import gc
import os
import shutil
from collections.abc import Callable
from typing import Any

import pytest

from rollout.runtimes.local.sandbox import start_sandboxed


async def test_a_caller_who_leaves_while_the_report_is_opened_closes_nothing_of_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """The report's descriptor was closed here and by the file that was made of it: by then the number was another file's."""

    loop = asyncio.get_running_loop()
    connect = loop.connect_read_pipe

    async def cancelled(protocol: Callable[[], asyncio.BaseProtocol], pipe: Any) -> Any:
        if "_Status" in protocol.__qualname__:
            raise asyncio.CancelledError
        return await connect(protocol, pipe)

    monkeypatch.setattr(loop, "connect_read_pipe", cancelled)
    program = shutil.which("true")
    assert program is not None
    with pytest.raises(asyncio.CancelledError):
        async with start_sandboxed(program, [], b"", ["true"], {}, {}):
            pytest.fail("there is no sandbox")
    others = [os.open(os.devnull, os.O_RDONLY) for _ in range(20)]
    gc.collect()
    for other in others:
        os.close(other)
