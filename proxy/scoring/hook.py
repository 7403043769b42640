"""Scores that are asked for while a session is open: of calls that a grammar masked, by the policy that sampled them."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

from proxy.call.hooks import CallHook
from proxy.call.phases import Admitted
from proxy.errors import StoreUnavailable
from proxy.scoring.plan import is_masked
from proxy.scoring.scorers import Scorer
from reconstruct.records import Call

if TYPE_CHECKING:
    from proxy.scoring.waiting import AwaitedScores
    from proxy.store.states import SessionInfo

log = logging.getLogger(__name__)


class ScoreHook(CallHook):
    """Of sessions that name a scorer. Those `at: call` have a job at once: a later version would give other numbers."""

    of_session = "scores"

    def __init__(self, scorers: Mapping[str, Scorer], scoring: Callable[[], AwaitedScores]) -> None:
        self._scorers = scorers
        self._scoring = scoring
        self._asking: set[asyncio.Task[None]] = set()

    def after_commit(self, call: Admitted, records: Sequence[Call]) -> None:
        info = call.session.info
        names = [name for name in info.scores if name in self._scorers and self._scorers[name].at == "call"]
        if names and any(is_masked(record) for record in records):
            asking = asyncio.create_task(self._ask(info, names))
            self._asking.add(asking)
            asking.add_done_callback(self._asking.discard)

    async def _ask(self, info: SessionInfo, names: Sequence[str]) -> None:
        try:
            for name in names:
                await self._scoring().ask(info, name)
        except StoreUnavailable as error:
            log.warning("session %s: raw logprobs are asked for once it is closed: %s", info.session_id, error.message)
