"""Ends requests by id, whichever API server process of this vLLM holds them.

With `--api-server-count` several processes share a port and an engine, and each knows only its own requests: vLLM's `/abort_requests` ends
those of the process that it happens to reach. Here each process listens at a socket of its own, and passes on what it is asked.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import socket
from argparse import Namespace
from collections.abc import Sequence
from typing import Any

_MOST_BYTES = 1 << 16


class Aborts:
    """Made in the loop that serves the requests. `engine_client` is vLLM's EngineClient, `args` its command line."""

    def __init__(self, engine_client: Any, args: Namespace) -> None:
        self._client = engine_client
        self._tasks: set[asyncio.Task[None]] = set()
        parallel = engine_client.vllm_config.parallel_config
        rank, count = parallel._api_process_rank, parallel._api_process_count
        # Abstract names, which leave no file behind. They belong to a network namespace, where no two servers have the same address.
        address = hashlib.sha256(f"{args.uds} {args.host} {args.port}".encode()).hexdigest()[:16]
        names = [f"\0verbatim-{address}-{each}" for each in range(count)]
        self._others = [name for each, name in enumerate(names) if each != rank]
        if self._others:
            self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK)
            self._socket.bind(names[rank])
            asyncio.get_running_loop().add_reader(self._socket, self._receive)

    async def abort(self, request_ids: Sequence[str]) -> None:
        """An unknown id is ignored: its request may be over, or not have begun."""
        for name in self._others:
            # That process may be starting, gone or too busy to listen: the service asks again while the call goes on.
            with contextlib.suppress(OSError):
                self._socket.sendto(json.dumps(list(request_ids)).encode(), name)
        await self._client.abort(request_ids)

    def _receive(self) -> None:
        with contextlib.suppress(BlockingIOError):
            task = asyncio.create_task(self._client.abort(json.loads(self._socket.recv(_MOST_BYTES))))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
