"""What a node makes sure of, since it would spoil rollouts or wait for ever: that the service knows its token, and reads its Redis."""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING

import httpx

from cli.refusal import Refusal

if TYPE_CHECKING:
    from cli.control import Control

log = logging.getLogger(__name__)

LOOK_SECONDS = 1.0
PASSING = (httpx.NetworkError, httpx.TimeoutException, httpx.RemoteProtocolError)
"""What stands between the node and a service that is not there yet, or no more."""
UNSEEN_SECONDS = 20.0
"""After which a node that the service does not list says so."""


async def let_in(control: Control) -> None:
    """Returns once the service has answered with this token; one that is away is waited for. Raises `Refusal` when it answers
    otherwise: every rollout that the node took would fail, until its attempts are used up."""
    told = ""
    while True:
        try:
            await asyncio.to_thread(control.get, "/nodes")
            return
        except Refusal as refusal:
            if not _may_pass(refusal):
                raise
            if str(refusal) != told:
                told = str(refusal)
                log.warning("nothing is taken yet: %s", told)
        await asyncio.sleep(LOOK_SECONDS)


async def seen(control: Control, name: str, patience_seconds: float = UNSEEN_SECONDS) -> None:
    """Returns once the service lists the node. Until then tasks that are submitted there do not come to it, which is logged, once."""
    loop = asyncio.get_running_loop()
    until, told = loop.time() + patience_seconds, False
    while True:
        try:
            if any(node["name"] == name for node in (await asyncio.to_thread(control.get, "/nodes"))["nodes"]):
                return
        except Refusal:
            # Who needs the service says so.
            until = loop.time() + patience_seconds
        if not told and loop.time() > until:
            told = True
            log.warning("%s does not see this node, so none of its tasks comes here: is --redis the one it uses?", control.url)
        await asyncio.sleep(LOOK_SECONDS)


def _may_pass(refusal: Refusal) -> bool:
    from cli.control import Declined, HeldBack

    if isinstance(refusal, Declined):
        return refusal.status >= httpx.codes.INTERNAL_SERVER_ERROR
    return isinstance(refusal, HeldBack) or isinstance(refusal.__cause__, PASSING)
