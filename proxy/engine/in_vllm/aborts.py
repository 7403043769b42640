"""Ends requests by id, whichever API server process of this vLLM holds them.

With `--api-server-count` several processes share a port and an engine, and each knows only its own requests: vLLM's `/abort_requests` ends
those of the process that it happens to reach. Here each process listens at a socket of its own, and passes on what it is asked. The sockets
are in a folder that only this user may enter: whoever can write to one can end calls.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import logging
import os
import socket
import stat
import tempfile
from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

log = logging.getLogger("vllm.verbatim")

_MOST_BYTES = 1 << 16
_decode = msgspec.json.Decoder(list[str]).decode


class Aborts:
    """Made in the loop that serves the requests. `engine_client` is vLLM's EngineClient, `args` its command line. Where no private folder
    can be made, each process ends its own requests alone, and the service asks until it reaches the right one."""

    def __init__(self, engine_client: Any, args: Namespace) -> None:
        self._client = engine_client
        self._tasks: set[asyncio.Task[None]] = set()
        self._others: list[str] = []
        parallel = engine_client.vllm_config.parallel_config
        rank, count = parallel._api_process_rank, parallel._api_process_count
        if count < 2:
            return
        try:
            folder = make_private_folder(f"{socket.gethostname()} {args.uds} {args.host} {args.port}")
            self._socket = _listen(folder / str(rank))
        except OSError as error:
            log.warning("API servers of this vLLM cannot pass on what is to be ended: %s", error)
            return
        asyncio.get_running_loop().add_reader(self._socket, self._receive)
        self._others = [str(folder / str(each)) for each in range(count) if each != rank]

    async def abort(self, request_ids: Sequence[str]) -> None:
        """An unknown id is ignored: its request may be over, or not have begun."""
        for path in self._others:
            # That process may be starting, gone or too busy to listen: the service asks again while the call goes on.
            with contextlib.suppress(OSError):
                self._socket.sendto(msgspec.json.encode(list(request_ids)), path)
        await self._client.abort(request_ids)

    def _receive(self) -> None:
        try:
            request_ids = _decode(self._socket.recv(_MOST_BYTES))
        except BlockingIOError:
            return
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            log.warning("a list of requests to end cannot be read: %s", error)
            return
        task = asyncio.create_task(self._client.abort(request_ids))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


def make_private_folder(address: str) -> Path:
    """The folder of the server at `address`, the same for all its processes. Raises OSError where it would not be this user's alone."""
    name = f"verbatim-aborts-{hashlib.sha256(address.encode()).hexdigest()[:16]}"
    folder = _find_base() / name
    folder.mkdir(mode=0o700, exist_ok=True)
    found = folder.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid() or stat.S_IMODE(found.st_mode) & 0o077:
        raise PermissionError(f"{folder} is not a folder of this user's alone")
    return folder


def _find_base() -> Path:
    """Where no other user may make a folder first, if there is such a place; the sockets' names have to be short."""
    for named in (os.environ.get("XDG_RUNTIME_DIR"), os.path.expanduser("~/.cache")):
        if not named or not os.path.isabs(named):
            continue
        with contextlib.suppress(OSError):
            found = os.stat(named)
            private = found.st_uid == os.geteuid() and not stat.S_IMODE(found.st_mode) & 0o022
            if private and len(named) < 70 and os.access(named, os.W_OK | os.X_OK):
                return Path(named)
    return Path(tempfile.gettempdir())


def _listen(path: Path) -> socket.socket:
    # Of a process that has died: nobody else can have put it there.
    path.unlink(missing_ok=True)
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK)
    try:
        listener.bind(str(path))
    except OSError:
        listener.close()
        raise
    return listener
