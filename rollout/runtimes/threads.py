"""A blocking call in a thread of its own, which no other has to wait for, and whose end nothing waits for that has gone on without it."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import TypeVar

T = TypeVar("T")


async def in_thread(call: Callable[[], T]) -> T:
    """What `call` returns, or raises. A caller that is cancelled leaves it running."""
    loop = asyncio.get_running_loop()
    future: asyncio.Future[T] = loop.create_future()

    def told(result: T | None, error: BaseException | None) -> None:
        if future.done():
            return
        if error is not None:
            future.set_exception(error)
        else:
            future.set_result(result)  # type: ignore[arg-type]

    def run() -> None:
        result, failure = None, None
        try:
            result = call()
        except Exception as error:
            failure = error
        # A loop that is closed has nobody left who asks.
        with suppress(RuntimeError):
            loop.call_soon_threadsafe(told, result, failure)

    threading.Thread(target=run, name="verbatim-call", daemon=True).start()
    return await future
