"""Tool calls that an engine's parser could not read: the model meant to call a tool, and the harness got none, or one it cannot run.

A parser that cannot read a call leaves it in the text, or hands on arguments that are no JSON object. Either is noted with the call, so
that a trainer can filter or punish it. It is a label: what is trained does not depend on it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from proxy.dialects.base import Request
from proxy.dialects.tools import UNPARSED, arguments_object

_OPENERS = (
    *("<tool_call>", "<tool_calls>", "<function=", "<function_calls>", "<minimax:tool_call>", "<|tool_call|>", "<|tool_call>"),
    *("[TOOL_CALLS]", "<|python_tag|>", "<|action_start|>", "functools["),
    *("<|tool_calls_section_begin|>", "<｜tool▁calls▁begin｜>", "<｜tool▁call▁begin｜>"),  # noqa: RUF001
)
"""How the formats that vLLM 0.32 and SGLang have parsers for begin a call (vllm/tool_parsers)."""


def has_unread_call(request: Request, message: Mapping[str, Any], finish_reason: str) -> bool:
    """Whether the reply has a call that could not be read. A reply that was cut has none: it was not whole."""
    if not request.tools or request.forward.get("tool_choice") == "none" or finish_reason not in ("stop", "tool_calls"):
        return False
    calls = message.get("tool_calls") or ()
    if any(UNPARSED in arguments_object(call["function"]["arguments"]) for call in calls):
        return True
    content = message.get("content")
    return isinstance(content, str) and any(opener in content for opener in _OPENERS)
