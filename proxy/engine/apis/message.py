"""The assistant message of one choice: put together from pieces, cut to what the harness sees, checked for unread tool calls."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from proxy.dialects.base import Delta, Request
from proxy.dialects.fields import UNPARSED, arguments_object


class Assembly:
    """The message of one choice so far, from an engine's whole message or the deltas of its stream.

    `message()` has the fields harnesses know; tool-call ids are still the engine's."""

    def __init__(self, index: int) -> None:
        self.index = index
        self._content: list[str] = []
        self._reasoning: list[str] = []
        self._calls: dict[int, dict[str, Any]] = {}

    def add(self, piece: Mapping[str, Any]) -> Delta:
        """Append a message or delta; returns it as the harness sees it."""
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
        if reasoning := "".join(self._reasoning):
            message["reasoning_content"] = reasoning
        if calls:
            message["tool_calls"] = calls
        return message

    def __bool__(self) -> bool:
        """Whether any piece came, even an empty one: the engine has begun to reply."""
        return bool(self._content)

    def _add_call(self, position: int, call: Mapping[str, Any]) -> None:
        known = self._calls.setdefault(position, {"id": "", "type": "function", "function": {"name": "", "arguments": ""}})
        function = call.get("function") or {}
        known["id"] = known["id"] or call.get("id") or ""
        known["function"]["name"] += function.get("name") or ""
        known["function"]["arguments"] += function.get("arguments") or ""


class CertainText:
    """One choice's text while it is sampled, as far as it is certain.

    The final message is the engine's parse of the whole reply, which the streaming parsers do not always agree with: they drop white
    space before a tool call, rewrite arguments, and turn earlier calls into text if the limit cuts one. So only reasoning and text before
    the first sign of a tool call go out early, without trailing white space; `take_rest` gives what is left."""

    def __init__(self, index: int) -> None:
        self._assembly = Assembly(index)
        self._index = index
        self._content = ""
        self._reasoning = ""

    def add_delta(self, delta: Mapping[str, Any]) -> dict[str, Any]:
        """Add what the streaming parsers say; returns the message so far."""
        self._assembly.add(delta)
        return self._assembly.message()

    def is_prefix_of(self, message: Mapping[str, Any]) -> bool:
        """Whether `message` begins with what was sent."""
        content, reasoning = message.get("content") or "", message.get("reasoning_content") or ""
        return content.startswith(self._content) and reasoning.startswith(self._reasoning)

    def take_certain(self) -> Delta | None:
        """The text that is certain and was not sent; None if there is none."""
        message = self._assembly.message()
        if message.get("tool_calls"):
            return None
        return self._take(message | {"content": (message.get("content") or "").rstrip()})

    def take_rest(self, message: Mapping[str, Any]) -> Delta | None:
        """What of the whole `message`, which must begin with what was sent, was not sent; None if nothing."""
        assert self.is_prefix_of(message), "text that was sent cannot be taken back"
        delta = self._take(message) or Delta(self._index)
        delta.tool_calls = [{"index": position, **call} for position, call in enumerate(message.get("tool_calls") or ())]
        return delta if delta.content or delta.reasoning or delta.tool_calls else None

    def _take(self, message: Mapping[str, Any]) -> Delta | None:
        content, reasoning = message.get("content") or "", message.get("reasoning_content") or ""
        delta = Delta(self._index, content[len(self._content) :], reasoning[len(self._reasoning) :])
        self._content, self._reasoning = content, reasoning
        return delta if delta.content or delta.reasoning else None


def plain_message(message: Mapping[str, Any]) -> dict[str, Any]:
    """An engine's assistant message reduced to the fields harnesses know: content, reasoning_content, tool_calls."""
    plain: dict[str, Any] = {"role": "assistant", "content": message.get("content")}
    if reasoning := message.get("reasoning_content") or message.get("reasoning"):
        plain["reasoning_content"] = reasoning
    calls = message.get("tool_calls")
    if calls:
        plain["tool_calls"] = [_plain_call(call) for call in calls]
    if plain["content"] is None and not calls:
        plain["content"] = ""
    return plain


def _plain_call(call: Mapping[str, Any]) -> dict[str, Any]:
    function = call.get("function") or {}
    named = {"name": function.get("name") or "", "arguments": function.get("arguments") or ""}
    return {"id": call.get("id") or "", "type": "function", "function": named}


def visible_ids(token_ids: list[int], finish_reason: str | None, stop_reason: str | int | None) -> list[int]:
    """The ids that show in the text: all but the stop token that ended it. The ids of a stop string are text."""
    return token_ids[:-1] if finish_reason == "stop" and not isinstance(stop_reason, str) else token_ids


def cut_at_stop(message: dict[str, Any], stop: str, *, keep: bool = False) -> None:
    """Remove the stop string and what follows it from the text that holds it; `keep` leaves the stop string itself.

    Only the harness's text is cut: the recorded ids keep all of it."""
    for field in ("content", "reasoning_content"):
        text = message.get(field)
        if text and stop in text:
            message[field] = text[: text.rindex(stop) + (len(stop) if keep else 0)]
            return


def keep_one_call(message: dict[str, Any], request: Request) -> None:
    """Drop all tool calls but the first when the harness forbids parallel ones."""
    if request.forward.get("parallel_tool_calls") is False and message.get("tool_calls"):
        message["tool_calls"] = message["tool_calls"][:1]


_OPENERS = (
    *("<tool_call>", "<tool_calls>", "<function=", "<function_calls>", "<minimax:tool_call>", "<|tool_call|>", "<|tool_call>"),
    *("[TOOL_CALLS]", "<|python_tag|>", "<|action_start|>", "functools["),
    *("<|tool_calls_section_begin|>", "<｜tool▁calls▁begin｜>", "<｜tool▁call▁begin｜>"),  # noqa: RUF001
)
"""How a tool call begins in the formats that vLLM 0.32 and SGLang parse (vllm/tool_parsers)."""


def has_unread_call(request: Request, message: Mapping[str, Any], finish_reason: str) -> bool:
    """Whether the model meant to call a tool and the engine's parser could not read it.

    The parser then leaves the call in the text, or returns arguments that are not a JSON object. The record carries this as a label
    that a trainer can filter on; it does not change which tokens are trained. A truncated reply has no unread call."""
    if not request.tools or request.forward.get("tool_choice") == "none" or finish_reason not in ("stop", "tool_calls"):
        return False
    calls = message.get("tool_calls") or ()
    if any(UNPARSED in arguments_object(call["function"]["arguments"]) for call in calls):
        return True
    content = message.get("content")
    return isinstance(content, str) and any(opener in content for opener in _OPENERS)
