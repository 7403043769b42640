"""Fields of a request body, checked: each function gives the field's value or raises RequestError with its name and rule."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeVar

import msgpack

from proxy.errors import RequestError

N = TypeVar("N", int, float)

NOTED = ("min_p", "presence_penalty", "frequency_penalty", "repetition_penalty", "min_tokens", "logit_bias")
"""Fields of a chat body that bend the distribution; they are kept with the call."""

_MOST_CHOICES = 128


def text(body: Mapping[str, Any], key: str) -> str | None:
    value = body.get(key)
    if value is not None and not isinstance(value, str):
        raise RequestError(f"'{key}' must be a string", param=key)
    return value


def model(body: Mapping[str, Any]) -> str:
    name = body.get("model")
    if not isinstance(name, str) or not name:
        raise RequestError("'model' must be a non-empty string", param="model")
    return name


def number(body: Mapping[str, Any], key: str) -> float | None:
    value = body.get(key)
    if value is not None and not is_number(value):
        raise RequestError(f"'{key}' must be a number", param=key)
    return None if value is None else _bounded(value, key)


def integer(body: Mapping[str, Any], key: str) -> int | None:
    value = body.get(key)
    if value is not None and not is_integer(value):
        raise RequestError(f"'{key}' must be an integer", param=key)
    return None if value is None else _bounded(value, key)


def positive(body: Mapping[str, Any], key: str) -> int | None:
    value = body.get(key)
    if value is None:
        return None
    if not is_integer(value) or value < 1:
        raise RequestError(f"'{key}' must be a positive integer", param=key)
    return _bounded(int(value), key)


def flag(body: Mapping[str, Any], key: str) -> bool:
    value = body.get(key)
    if value is not None and not isinstance(value, bool):
        raise RequestError(f"'{key}' must be true or false", param=key)
    return bool(value)


def mapping(body: Mapping[str, Any], key: str) -> dict[str, Any]:
    value = body.get(key)
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise RequestError(f"'{key}' must be an object", param=key)
    return value


_NEW_TURN = {"continue_final_message": False, "add_generation_prompt": True}
"""Fields of vLLM's chat API that say how a reply begins, and what they are for a turn of its own."""


def template_kwargs(body: Mapping[str, Any]) -> dict[str, Any]:
    """The body's `chat_template_kwargs`. Raises as `refuse_continuation`."""
    refuse_continuation(body)
    return mapping(body, "chat_template_kwargs")


def refuse_continuation(body: Mapping[str, Any]) -> None:
    """Raise RequestError where the body wants the last message continued instead of answered: a reply is a turn of its own here."""
    kwargs = mapping(body, "chat_template_kwargs")
    for name, usual in _NEW_TURN.items():
        for holder, where in ((body, name), (kwargs, f"chat_template_kwargs.{name}")):
            if holder.get(name) not in (None, usual):
                raise RequestError(
                    f"'{where}' can only be {str(usual).lower()}: a reply is a turn of its own; to have a text continued, send it as "
                    "the 'prompt' of /v1/completions",
                    param=where,
                )


def objects(body: Mapping[str, Any], key: str) -> list[dict[str, Any]]:
    value = body.get(key)
    if value is None:
        return []
    if not isinstance(value, list) or not all(isinstance(item, dict) for item in value):
        raise RequestError(f"'{key}' must be a list of objects", param=key)
    return value


def strings(body: Mapping[str, Any], key: str) -> list[str]:
    """One string counts as a list of it."""
    value = body.get(key)
    if value is None:
        return []
    if isinstance(value, str):
        return [value]
    if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
        raise RequestError(f"'{key}' must be a string or a list of strings", param=key)
    return value


def choices(body: Mapping[str, Any], key: str) -> int:
    """How many choices are wanted; 1 when the field is absent."""
    count = positive(body, key) or 1
    if count > _MOST_CHOICES:
        raise RequestError(f"'{key}' must be at most {_MOST_CHOICES}", param=key)
    return count


def sampling(body: Mapping[str, Any], names: Mapping[str, str]) -> dict[str, Any]:
    """The sampling fields that a session may override, under their canonical names; `names`: the dialect's name -> canonical
    name. temperature and top_p are numbers, top_k, seed and max_tokens integers, stop a list of strings."""
    found: dict[str, Any] = {}
    for key, name in names.items():
        if name == "stop":
            value: Any = strings(body, key) or None
        elif name == "max_tokens":
            value = positive(body, key)
        else:
            value = number(body, key) if name in ("temperature", "top_p") else integer(body, key)
        if value is not None:
            found[name] = value
    return found


def check_recordable(forward: Mapping[str, Any]) -> None:
    """Raises RequestError where a field that is kept with the call is more than a record can hold, as an integer of more than 64 bits:
    once the reply is sampled it is too late."""
    for key in NOTED:
        if forward.get(key) is not None:
            try:
                msgpack.packb(forward[key])
            except (OverflowError, ValueError) as error:
                raise RequestError(f"'{key}' cannot be recorded: {error}", param=key) from error


def _bounded(value: N, key: str) -> N:
    if isinstance(value, int) and not -(2**63) <= value < 2**63:
        raise RequestError(f"'{key}' must be an integer of at most 64 bits", param=key)
    return value


def is_integer(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)
