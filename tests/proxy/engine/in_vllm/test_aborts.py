"""An abort reaches every API server process of one vLLM, and no other vLLM."""

from __future__ import annotations

import asyncio
from argparse import Namespace
from collections.abc import AsyncIterator, Callable
from types import SimpleNamespace

import pytest

from proxy.engine.in_vllm.aborts import Aborts


class Process:
    """An API server process as the plugin sees it; `aborted` are the ids that its engine client was asked to abort."""

    def __init__(self, rank: int, count: int, port: int = 1) -> None:
        self.vllm_config = SimpleNamespace(parallel_config=SimpleNamespace(_api_process_rank=rank, _api_process_count=count))
        self.aborted: asyncio.Queue[list[str]] = asyncio.Queue()
        self.aborts = Aborts(self, Namespace(uds=None, host="127.0.0.1", port=port))

    async def abort(self, request_ids: list[str]) -> None:
        self.aborted.put_nowait(request_ids)

    def end(self) -> None:
        if self.aborts._others:
            asyncio.get_running_loop().remove_reader(self.aborts._socket)
            self.aborts._socket.close()


@pytest.fixture
async def started() -> AsyncIterator[Callable[..., Process]]:
    processes: list[Process] = []

    def start(rank: int, count: int, port: int = 1) -> Process:
        processes.append(Process(rank, count, port))
        return processes[-1]

    yield start
    for process in processes:
        process.end()


async def test_an_abort_reaches_all_processes_of_its_server_and_no_other_server(started: Callable[..., Process]) -> None:
    ours, theirs = ([started(rank, 3, port) for rank in range(3)] for port in (1, 2))
    await ours[1].aborts.abort(["a", "b"])
    assert [await process.aborted.get() for process in ours] == [["a", "b"]] * 3
    assert all(process.aborted.empty() for process in theirs)


async def test_a_process_that_is_not_there_keeps_no_other_from_aborting(started: Callable[..., Process]) -> None:
    first, third = started(0, 3), started(2, 3)
    await first.aborts.abort(["a"])
    assert [await process.aborted.get() for process in (first, third)] == [["a"]] * 2


async def test_the_only_process_needs_no_name(started: Callable[..., Process]) -> None:
    first, second = started(0, 1), started(0, 1)
    await first.aborts.abort(["a"])
    assert (first.aborted.get_nowait(), second.aborted.empty()) == (["a"], True)
