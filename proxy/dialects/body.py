"""A request body, decoded only as far as it is new.

A harness sends its whole history with every call. `split` takes the body apart without decoding the items of that history:
each item's raw bytes are looked up among those the session has seen, and decoded and digested only the first time.
"""

from __future__ import annotations

import json
from typing import Any

import msgspec

from proxy.errors import RequestError

_OBJECT = msgspec.json.Decoder(dict[str, msgspec.Raw])
_LIST = msgspec.json.Decoder(list[msgspec.Raw])


def split(body: bytes, listed: str) -> tuple[dict[str, Any], list[bytes]]:
    """The body's fields decoded, except `listed`, whose items come as raw JSON. An absent list is empty.

    Raises RequestError when the body is no JSON object or `listed` is no list.
    """
    try:
        raw = _OBJECT.decode(body)
    except msgspec.ValidationError as error:
        raise RequestError("the body must be a JSON object") from error
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise RequestError(f"the body is not valid JSON: {error}") from error
    history = raw.pop(listed, None)
    fields = {name: decode(bytes(value)) for name, value in raw.items()}
    if history is None or bytes(history) == b"null":
        return fields, []
    try:
        return fields, [bytes(item) for item in _LIST.decode(history)]
    except msgspec.DecodeError as error:
        raise RequestError(f"'{listed}' must be a list", param=listed) from error


def decode(raw: bytes) -> Any:
    """One JSON value. A lone surrogate, which JSON can write and UTF-8 cannot, becomes the replacement character.

    Raises RequestError when it is no JSON.
    """
    try:
        return msgspec.json.decode(raw)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        return _decode_surrogates(raw, error)


def _decode_surrogates(raw: bytes, error: Exception) -> Any:
    try:
        text = json.dumps(json.loads(raw), ensure_ascii=False)
        return json.loads(text.encode("utf-16", "surrogatepass").decode("utf-16", "replace"))
    except (ValueError, RecursionError):
        raise RequestError(f"the body is not valid JSON: {error}") from error
