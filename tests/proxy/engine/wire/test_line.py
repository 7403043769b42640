"""A line to an engine that someone else may hang up on, whatever its task does at that moment."""

from __future__ import annotations

import asyncio
from typing import cast

import aiohttp
import pytest

from proxy.engine.wire.http import Line
from proxy.errors import EngineFailed


async def test_a_request_that_is_made_again_can_be_hung_up_on() -> None:
    class Response:
        def close(self) -> None:
            raise AssertionError("the response that was refused is over")

    line = Line()
    line.attach(cast(aiohttp.ClientResponse, Response()))
    line.redial()
    asyncio.get_running_loop().call_soon(line.hang_up)
    with pytest.raises(asyncio.CancelledError):
        await asyncio.sleep(30)
    assert isinstance(line.absorb(), EngineFailed)
    with pytest.raises(EngineFailed):
        line.redial()


async def test_a_hang_up_after_the_request_is_over_ends_nothing_else() -> None:
    line = Line()
    line.detach()
    line.hang_up()
    await asyncio.sleep(0)
    assert line.hung_up
