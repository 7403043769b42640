"""An abort reaches every API server process of one vLLM, and no other vLLM."""

from __future__ import annotations

import asyncio
import json
import socket
import stat
import tempfile
from argparse import Namespace
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from proxy.engine.in_vllm.aborts import Aborts, make_private_folder


class Process:
    """An API server process as the plugin sees it; `aborted` are the ids that its engine client was asked to abort."""

    def __init__(self, rank: int, count: int, port: int = 1) -> None:
        self.vllm_config = SimpleNamespace(parallel_config=SimpleNamespace(_api_process_rank=rank, _api_process_count=count))
        self.aborted: asyncio.Queue[list[str]] = asyncio.Queue()
        self.aborts = Aborts(self, Namespace(uds=None, host="127.0.0.1", port=port))

    async def abort(self, request_ids: list[str]) -> None:
        self.aborted.put_nowait(request_ids)

    def end(self) -> None:
        if self.aborts._others and self.aborts._socket.fileno() >= 0:
            asyncio.get_running_loop().remove_reader(self.aborts._socket)
            self.aborts._socket.close()


@pytest.fixture
def base(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The user's folder for sockets, whose names have to be short."""
    with tempfile.TemporaryDirectory() as folder:
        monkeypatch.setenv("XDG_RUNTIME_DIR", folder)
        yield Path(folder)


@pytest.fixture
async def started(base: Path) -> AsyncIterator[Callable[..., Process]]:
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


def sockets_in(base: Path) -> list[Path]:
    return sorted(base.glob("*/*"))


async def test_nobody_else_may_enter_the_folder_of_the_sockets(started: Callable[..., Process], base: Path) -> None:
    """They had abstract names: any user could send to them, or take them first and keep vLLM from starting."""
    started(0, 2), started(1, 2)
    first, second = sockets_in(base)
    assert first.parent == second.parent and stat.S_IMODE(first.parent.stat().st_mode) == 0o700


async def test_a_socket_that_a_dead_process_left_is_taken_over(started: Callable[..., Process], base: Path) -> None:
    started(0, 2).end()
    assert len(sockets_in(base)) == 1
    first, second = started(0, 2), started(1, 2)
    await second.aborts.abort(["a"])
    assert [await process.aborted.get() for process in (first, second)] == [["a"]] * 2


@pytest.mark.parametrize("squat", ["open to all", "a link", "a file"])
async def test_a_folder_that_somebody_else_made_first_is_not_used_and_vllm_starts(
    started: Callable[..., Process], base: Path, squat: str
) -> None:
    folder = make_private_folder(f"{socket.gethostname()} None 127.0.0.1 1")
    folder.rmdir()
    if squat == "open to all":
        folder.mkdir()
        folder.chmod(0o777)
    elif squat == "a link":
        (base / "theirs").mkdir(mode=0o700)
        folder.symlink_to(base / "theirs")
    else:
        folder.write_text("")
    first, second = started(0, 2), started(1, 2)
    await first.aborts.abort(["a"])
    assert (first.aborted.get_nowait(), second.aborted.empty()) == (["a"], True)
    assert sockets_in(base) == []


@pytest.mark.parametrize("sent", [b"", b"{", b"\xff", b"7", b'"a"', b'{"a": 1}', b"[1]", b"[null]", b"[[]]"])
async def test_what_is_no_list_of_ids_ends_nothing(started: Callable[..., Process], base: Path, sent: bytes) -> None:
    first, second = started(0, 2), started(1, 2)
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sender:
        for path in sockets_in(base):
            sender.sendto(sent, str(path))
            sender.sendto(json.dumps(["b"]).encode(), str(path))
    # Datagrams arrive in their order.
    assert [await process.aborted.get() for process in (first, second)] == [["b"]] * 2
    assert first.aborted.empty() and second.aborted.empty()
