"""One part of a Google content, read: what kind it is, and what chat messages call it."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from proxy.dialects import fields
from proxy.dialects.gemini_json import many, one, shallow
from proxy.errors import RequestError
from proxy.minting import unseal

Part = dict[str, Any]

_KINDS = frozenset(
    {"text", "functionCall", "functionResponse", "inlineData", "fileData", "executableCode", "codeExecutionResult"}
)

_BESIDE = frozenset({"thought", "thoughtSignature", "videoMetadata", "mediaResolution", "partMetadata"})
"""Fields of a part that say something about what it holds."""

_URL_SAFE = str.maketrans("-_", "+/")

_MINTED_ID = re.compile(r"(?:.*__)?(call_[0-9a-f]{24}_[0-9]+)", re.DOTALL)
"""A function-call id of this service; some clients put the function's name before ids."""


def parts_of(content: Mapping[str, Any]) -> list[Part]:
    """The content's parts with their field names in camel case. Raises RequestError for a part of an unknown kind."""
    parts = many(content, "parts")
    for part in parts:
        kinds = part.keys() - _BESIDE
        if len(kinds) > 1 or not kinds <= _KINDS:
            raise RequestError(f"contents: a part holds one of {', '.join(sorted(_KINDS))}", param="contents")
    return parts


def text_of(part: Part) -> str | None:
    """The text of a part that is one, code and its output included; None for any other."""
    if "text" in part:
        return fields.text(part, "text")
    if "executableCode" in part:
        code = one(part, "executableCode")
        return f"```{(fields.text(code, 'language') or '').lower()}\n{fields.text(code, 'code') or ''}\n```\n"
    if "codeExecutionResult" in part:
        return f"```\n{fields.text(one(part, 'codeExecutionResult'), 'output') or ''}\n```\n"
    return None


def media_part(part: Part) -> dict[str, Any]:
    """An image as a chat content part. Raises RequestError for other media, and for files that Google would hold."""
    if "fileData" in part:
        raise RequestError("contents: fileData names a file that is not here; send it as inlineData", param="contents")
    data = one(part, "inlineData")
    kind, content = fields.text(data, "mimeType") or "", fields.text(data, "data") or ""
    if not kind.startswith("image/"):
        raise RequestError(f"contents: inlineData of type '{kind}' is not taken, only images are", param="contents")
    url = f"data:{kind};base64,{content.translate(_URL_SAFE)}"
    return {"type": "image_url", "image_url": {"url": url}}


def called(part: Part) -> tuple[str, str, dict[str, Any]]:
    """(id, name, arguments) of a function call; the id is "" where there is none."""
    call = one(part, "functionCall")
    return _id(call), _name(call, "functionCall"), shallow(fields.mapping(call, "args"), "args")


def answered(part: Part) -> tuple[str, str, Any]:
    """(id, name, content of a tool message) of a function response; the id is "" where there is none."""
    response = one(part, "functionResponse")
    text = response_text(shallow(fields.mapping(response, "response"), "response"))
    media = [media_part(item) for item in many(response, "parts")]
    content: Any = [{"type": "text", "text": text}, *media] if media else text
    return _id(response), _name(response, "functionResponse"), content


def response_text(response: Mapping[str, Any]) -> str:
    """What the model reads of a function's response: the text alone where `output` or `result` holds nothing else, as SDKs wrap
    it, otherwise the JSON of the object."""
    if len(response) == 1:
        ((name, value),) = response.items()
        if name in ("output", "result") and isinstance(value, str):
            return value
    return json.dumps(response, ensure_ascii=False)


def _id(holder: Mapping[str, Any]) -> str:
    identifier = fields.text(holder, "id") or ""
    minted = _MINTED_ID.fullmatch(identifier)
    return minted[1] if minted else identifier


def _name(holder: Mapping[str, Any], where: str) -> str:
    name = fields.text(holder, "name")
    if not name:
        raise RequestError(f"contents: a {where} must have a 'name'", param="contents")
    return name


def sealed(part: Part) -> tuple[str, str] | None:
    """(call id, reasoning) of a signature that this service minted into the part; see proxy.minting.unseal."""
    signature = part.get("thoughtSignature")
    if not isinstance(signature, str):
        return None
    # Python's SDK writes bytes in the URL's alphabet, whatever it read.
    plain = signature.translate(_URL_SAFE).rstrip("=")
    return unseal(plain + "=" * (-len(plain) % 4))
