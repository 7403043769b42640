"""One assistant message put together from pieces: an engine's whole message, or the deltas of its stream."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from proxy.dialects.base import Delta


class Assembly:
    """The reply of one choice so far. `message()` has the fields harnesses know; tool-call ids are still the engine's."""

    def __init__(self, index: int) -> None:
        self.index = index
        self._content: list[str] = []
        self._reasoning: list[str] = []
        self._calls: dict[int, dict[str, Any]] = {}

    def add(self, piece: Mapping[str, Any]) -> Delta:
        """Take in a message or delta; returns it as a harness sees it."""
        content = piece.get("content") or ""
        reasoning = piece.get("reasoning_content") or piece.get("reasoning") or ""
        calls = piece.get("tool_calls") or []
        self._content.append(content)
        self._reasoning.append(reasoning)
        for position, call in enumerate(calls):
            self._add_call(call.get("index", position), call)
        return Delta(self.index, content, reasoning, calls)

    def message(self) -> dict[str, Any]:
        calls = [self._calls[position] for position in sorted(self._calls)]
        content = "".join(self._content)
        message: dict[str, Any] = {"role": "assistant", "content": content if content or not calls else None}
        reasoning = "".join(self._reasoning)
        if reasoning:
            message["reasoning_content"] = reasoning
        if calls:
            message["tool_calls"] = calls
        return message

    def __bool__(self) -> bool:
        """Whether a piece came, if only an empty one: then the engine has begun to say something."""
        return bool(self._content)

    def _add_call(self, position: int, call: Mapping[str, Any]) -> None:
        known = self._calls.setdefault(position, {"id": "", "type": "function", "function": {"name": "", "arguments": ""}})
        function = call.get("function") or {}
        known["id"] = known["id"] or call.get("id") or ""
        known["function"]["name"] += function.get("name") or ""
        known["function"]["arguments"] += function.get("arguments") or ""
