"""Text while it is sampled, on the token path: the engine's own streaming parsers, asked in steps.

vLLM's derender endpoint parses a stream statelessly: each step sends the state back and replays what came before, so a step costs
as much as the reply is long. Steps are therefore as frequent as they are cheap: the first at once, later ones when the pause since
the last is at least `_PATIENCE` times what that one took.

The reply is in the end what the engine makes of the whole. vLLM's streaming parsers do not always agree with that: white space
before a tool call goes, arguments are written anew, and a call that the limit cuts turns the calls before it into text. So what is
told on the way is reasoning and text up to the first sign of a tool call, outer white space held back; `rest` tells what is left.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from proxy.dialects.base import Delta
from proxy.engine.assembly import Assembly
from proxy.engine.replica import Replica
from proxy.engine.wire import EngineHttp

DERENDER = "/v1/chat/completions/derender"

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
        self._assembly = Assembly(index)
        self._index = index
        self._content = ""
        self._reasoning = ""
        self._pending: list[int] = []
        self._state: msgspec.Raw | None = None
        self._next_at = 0.0

    def take(self, token_ids: Sequence[int]) -> None:
        self._pending.extend(token_ids)

    @property
    def due(self) -> bool:
        return bool(self._pending) and time.perf_counter() >= self._next_at

    async def step(
        self, http: EngineHttp, replica: Replica, prompt_ids: msgspec.Raw, chat_request: dict[str, Any]
    ) -> Delta | None:
        """What the pending ids make certain, None when nothing. Raises VerbatimError when the engine cannot parse its own reply."""
        await self._parse(http, replica, prompt_ids, chat_request, None)
        return self._told(self._certain())

    async def finish(
        self, http: EngineHttp, replica: Replica, prompt_ids: msgspec.Raw, chat_request: dict[str, Any], finish_reason: str
    ) -> dict[str, Any]:
        """The whole message as the streaming parsers have it; nothing of it is told by that. Raises as `step`."""
        await self._parse(http, replica, prompt_ids, chat_request, finish_reason)
        return self._assembly.message()

    async def _parse(
        self,
        http: EngineHttp,
        replica: Replica,
        prompt_ids: msgspec.Raw,
        chat_request: dict[str, Any],
        finish_reason: str | None,
    ) -> None:
        """Let the parsers take in the pending ids. With a `finish_reason` they give out all they hold."""
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
        step = await http.ask(replica, DERENDER, body, _Step)
        self._state, self._pending = step.stream_state, []
        now = time.perf_counter()
        self._next_at = now + max(_SHORTEST_PAUSE_SECONDS, _PATIENCE * (now - started))
        self._assembly.add(step.chunk.choices[0].delta if step.chunk.choices else {})

    def extends_to(self, message: Mapping[str, Any]) -> bool:
        """Whether what was told is the beginning of `message`."""
        content, reasoning = message.get("content") or "", message.get("reasoning_content") or ""
        return content.startswith(self._content) and reasoning.startswith(self._reasoning)

    def rest(self, message: Mapping[str, Any]) -> Delta | None:
        """What of the whole `message`, which must begin with what was told, was not told yet; None when nothing."""
        assert self.extends_to(message), "told text cannot be taken back"
        delta = self._told(message) or Delta(self._index)
        delta.tool_calls = [{"index": position, **call} for position, call in enumerate(message.get("tool_calls") or ())]
        return delta if delta.content or delta.reasoning or delta.tool_calls else None

    def _certain(self) -> dict[str, Any]:
        told = self._assembly.message()
        if told.get("tool_calls"):
            return {"content": self._content, "reasoning_content": self._reasoning}
        return {"content": (told.get("content") or "").rstrip(), "reasoning_content": told.get("reasoning_content") or ""}

    def _told(self, message: Mapping[str, Any]) -> Delta | None:
        """The text of `message` beyond what was told, which from now on is told."""
        content, reasoning = message.get("content") or "", message.get("reasoning_content") or ""
        delta = Delta(self._index, content[len(self._content) :], reasoning[len(self._reasoning) :])
        self._content, self._reasoning = content, reasoning
        return delta if delta.content or delta.reasoning else None
