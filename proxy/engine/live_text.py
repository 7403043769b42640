"""Text while it is sampled, on the token path: the engine's own streaming parsers, asked in steps.

vLLM's derender endpoint parses a stream statelessly: each step sends the state back and replays what came before, so a step costs
as much as the reply is long. Steps are therefore as frequent as they are cheap: the first at once, later ones when the pause since
the last is at least `_PATIENCE` times what that one took. Text is certain once such a step has given it out.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import msgspec

from proxy.dialects.base import Delta
from proxy.engine.assembly import Assembly
from proxy.engine.replica import Replica
from proxy.engine.wire import EngineHttp

_PATIENCE = 8.0
_SHORTEST_PAUSE_SECONDS = 0.03


class _Choice(msgspec.Struct):
    delta: dict[str, Any] = {}


class _Chunk(msgspec.Struct):
    choices: list[_Choice] = []


class _Step(msgspec.Struct):
    chunk: _Chunk
    stream_state: msgspec.Raw


class LiveText:
    """One choice's reply, told as its ids come in."""

    def __init__(self, index: int) -> None:
        self.assembly = Assembly(index)
        self._pending: list[int] = []
        self._state: msgspec.Raw | None = None
        self._next_at = 0.0

    def take(self, token_ids: Sequence[int]) -> None:
        self._pending.extend(token_ids)

    @property
    def due(self) -> bool:
        return bool(self._pending) and time.perf_counter() >= self._next_at

    async def step(
        self,
        http: EngineHttp,
        replica: Replica,
        prompt_ids: msgspec.Raw,
        chat_request: dict[str, Any],
        finish_reason: str | None,
    ) -> Delta | None:
        """What the pending ids make certain, None when nothing. With a `finish_reason` the parsers give out all they hold.

        Raises VerbatimError when the engine cannot parse its own reply.
        """
        started = time.perf_counter()
        choice = {"index": 0, "token_ids": self._pending, "finish_reason": finish_reason}
        body = {
            "stream": True,
            "model": chat_request["model"],
            "generate_chunk": {"choices": [choice]},
            "stream_state": self._state,
            "prompt_token_ids": prompt_ids,
            "chat_request": chat_request,
        }
        step = await http.ask(replica, "/v1/chat/completions/derender", body, _Step)
        self._state, self._pending = step.stream_state, []
        now = time.perf_counter()
        self._next_at = now + max(_SHORTEST_PAUSE_SECONDS, _PATIENCE * (now - started))
        delta = self.assembly.add(step.chunk.choices[0].delta if step.chunk.choices else {})
        return delta if delta.content or delta.reasoning or delta.tool_calls else None
