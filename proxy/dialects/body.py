"""A request body, decoded only as far as it is new.

A harness sends its whole history with every call. `split` takes the body apart without decoding the items of that history:
each item's raw bytes are looked up among those the session has seen, and decoded and digested only the first time.
"""

from __future__ import annotations

import json
from collections.abc import Sized
from typing import Any

import msgspec

from proxy.errors import RequestError
from proxy.structure import MAX_FIELD_VALUES, MAX_MESSAGES, MAX_TOOLS, MAX_VALUES, check_depth, check_values

_OBJECT = msgspec.json.Decoder(dict[str, msgspec.Raw])
_LIST = msgspec.json.Decoder(list[msgspec.Raw])


def split(body: bytes, listed: str) -> tuple[dict[str, Any], list[bytes]]:
    """The body's fields decoded, except `listed`, whose items come as raw JSON. An absent list is empty.

    A lone surrogate, which JSON can write and UTF-8 cannot, becomes the replacement character. Raises RequestError when the body is
    no JSON object, `listed` is no list, or there are more values, items or tools than one request may have.
    """
    check_values(body, MAX_VALUES, "the body")
    try:
        return _split(body, listed)
    except RequestError:
        raise
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        return _split(_without_surrogates(body, error), listed)


def _split(body: bytes, listed: str) -> tuple[dict[str, Any], list[bytes]]:
    try:
        raw = _OBJECT.decode(body)
    except msgspec.ValidationError as error:
        raise RequestError("the body must be a JSON object") from error
    history = raw.pop(listed, None)
    fields = {name: _field(name, bytes(value)) for name, value in raw.items()}
    if history is None or bytes(history) == b"null":
        return fields, []
    try:
        items = [bytes(item) for item in _LIST.decode(history)]
    except msgspec.ValidationError as error:
        raise RequestError(f"'{listed}' must be a list", param=listed) from error
    if len(items) > MAX_MESSAGES:
        # Without a parameter: with one it says what the field must be, which some vendors let be several things.
        raise RequestError(f"'{listed}' holds {len(items)} items, of at most {MAX_MESSAGES}")
    return fields, items


def _field(name: str, raw: bytes) -> Any:
    check_values(raw, MAX_FIELD_VALUES, f"'{name}'", name)
    value = decode(raw)
    if name == "tools" and isinstance(value, list):
        check_tools(value)
    return value


def check_tools(tools: Sized) -> None:
    """Raise RequestError when there are more than one request may offer."""
    if len(tools) > MAX_TOOLS:
        raise RequestError(f"'tools' holds {len(tools)} tools, of at most {MAX_TOOLS}", param="tools")


def decode(raw: bytes) -> Any:
    """One JSON value, lone surrogates replaced. Raises RequestError when it is no JSON, or is nested too deeply."""
    check_depth(raw)
    try:
        return msgspec.json.decode(raw)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        return msgspec.json.decode(_without_surrogates(raw, error))


def _without_surrogates(raw: bytes, error: Exception) -> bytes:
    """The same JSON with replacement characters for lone surrogates; RequestError for `error` when that is not what is wrong."""
    try:
        text = json.dumps(json.loads(raw), ensure_ascii=False, allow_nan=False)
        clean = text.encode("utf-16", "surrogatepass").decode("utf-16", "replace").encode()
        msgspec.json.decode(clean)
        return clean
    except (ValueError, RecursionError, msgspec.DecodeError):
        raise RequestError(f"the body is not valid JSON: {error}") from error
