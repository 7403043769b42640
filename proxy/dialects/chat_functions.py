"""The first form of tools in Chat Completions: `functions` and `function_call` of a request, `function_call` of a reply, results under
the role `function`. OpenAI deprecated it at the end of 2023; older clients still speak it.

A function's call has no id, and a reply makes one at most. Inside it is a tool call under an id that says its place in the turn, as
any dialect without ids has them, so that a call without an id and its result belong together wherever they stand in a history.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from proxy.dialects import fields
from proxy.dialects.tools import made_up_id, tool_call
from proxy.errors import RequestError

_ONLY_CALL = made_up_id(0)


def offered_functions(body: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The body's `functions` as chat tools; none where it offers none in this form. Raises RequestError."""
    functions = fields.objects(body, "functions")
    for old, new in (("functions", "tools"), ("function_call", "tool_choice")):
        if body.get(old) is not None and body.get(new) is not None:
            raise RequestError(f"'{old}' is an older form of '{new}': send one of the two", param=old)
    if body.get("function_call") is not None and not functions:
        raise RequestError(
            "'function_call' needs 'functions' to choose from; with 'tools' send 'tool_choice'", param="function_call"
        )
    for function in functions:
        if not isinstance(function.get("name"), str) or not function["name"]:
            raise RequestError("each of 'functions' must have a 'name'", param="functions")
    return [{"type": "function", "function": function} for function in functions]


def choice_of_functions(body: Mapping[str, Any], tools: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """`tool_choice` and `parallel_tool_calls` of a body that offers these in the older form. Raises RequestError."""
    # The reply has room for one call: what follows it in the sampled text is not told, as an engine does with such a request.
    chosen: dict[str, Any] = {"parallel_tool_calls": False}
    choice = body.get("function_call")
    if isinstance(choice, dict):
        if choice.get("name") not in [tool["function"]["name"] for tool in tools]:
            raise RequestError("'function_call' must name one of 'functions'", param="function_call")
        chosen["tool_choice"] = {"type": "function", "function": {"name": choice["name"]}}
    elif choice in ("auto", "none"):
        chosen["tool_choice"] = choice
    elif choice is not None:
        raise RequestError("'function_call' must be 'auto', 'none' or an object with a 'name'", param="function_call")
    return chosen


def read_functions(message: dict[str, Any]) -> None:
    """Put a message of a history that tells of a function into the words of tools. Raises RequestError."""
    called = message.pop("function_call", None)
    if called is not None:
        if message.get("role") != "assistant" or message.get("tool_calls"):
            raise RequestError("'function_call' belongs to an assistant's message without 'tool_calls'", param="messages")
        if not isinstance(called, dict) or not all(isinstance(called.get(name), str) for name in ("name", "arguments")):
            raise RequestError(
                "a message's 'function_call' must be an object with 'name' and 'arguments', two strings", param="messages"
            )
        message["tool_calls"] = [tool_call(_ONLY_CALL, called["name"], called["arguments"])]
    if message.get("role") == "function":
        if not isinstance(message.get("name"), str):
            raise RequestError("a message of the role 'function' must have a 'name'", param="messages")
        message |= {"role": "tool", "tool_call_id": _ONLY_CALL}


def as_function_call(told: dict[str, Any]) -> dict[str, Any]:
    """A reply's message, or a piece of one, with its first tool call as a `function_call`."""
    calls = told.pop("tool_calls", None) or ()
    # A whole message's calls have no index, a stream's have.
    first = next((call for at, call in enumerate(calls) if call.get("index", at) == 0), None)
    return told if first is None else {**told, "function_call": first["function"]}
