"""Messages of the Messages dialect as chat messages.

One message may become several: in chat, tool results are messages of their own. Ids that the service minted are read back: a tool
call's id is `toolu_<call id>_<position>` on this wire and `call_<call id>_<position>` inside, a thinking block's signature is the seal
of its call.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from proxy.dialects.base import ParsedMessage, Past, Seals
from proxy.dialects.fields import arguments_text, decode, tool_call
from proxy.errors import RequestError

SYSTEM_ROLES = ("system", "developer")
_WIRE_ID = re.compile(r"toolu_([0-9a-f]{24}_\d+)\Z")
_MINTED_ID = re.compile(r"call_(?P<rest>(?P<call>[0-9a-f]{24})_(?P<position>\d+))\Z")


def wire_id(call_id: str) -> str:
    """A minted tool-call id as this dialect writes it."""
    return _MINTED_ID.sub(r"toolu_\g<rest>", call_id)


def read_message(raw: bytes, past: Past, later_system_role: str) -> list[ParsedMessage]:
    """The chat messages of one message that is not at the head of the history. Raises RequestError."""
    message = decode(raw)
    if not isinstance(message, dict):
        raise RequestError("'messages' must be a list of objects", param="messages")
    role, content = message.get("role"), message.get("content")
    if role == "assistant":
        return [_read_assistant(_blocks(content), past.seals)]
    if role == "user":
        return _read_user(_blocks(content))
    if role in SYSTEM_ROLES:
        text = "\n".join(read_texts(content))
        return [ParsedMessage({"role": later_system_role, "content": text})] if text else []
    raise RequestError("a message's 'role' must be user, assistant or system", param="messages")


def read_texts(content: Any) -> list[str]:
    """The non-empty texts of a system prompt, a string or text blocks. Raises RequestError for a tool defined among them, since it would
    be missing from the offered tools."""
    texts = []
    for block in _blocks(content):
        tool = block.get("tool")
        if isinstance(tool, dict) and tool.get("type") == "tool_definition":
            raise RequestError("tools must be defined in 'tools', not inside messages", param="messages")
        texts.append(_text(block, "text") if block.get("type") == "text" else "")
    return [text for text in texts if text]


def _read_assistant(content: list[dict[str, Any]], seals: Seals) -> ParsedMessage:
    text: list[str] = []
    reasoning: list[str] = []
    calls: list[dict[str, Any]] = []
    minted = ""
    for block in content:
        kind = block.get("type")
        if kind in ("thinking", "redacted_thinking"):
            call_id, thought = _read_thinking(block, seals)
            minted = call_id or minted
            reasoning.append(thought)
        elif kind == "tool_use":
            name, arguments = _text(block, "name"), arguments_text(block.get("input"))
            calls.append(tool_call(_canonical_id(_text(block, "id")), name, arguments))
        else:
            text.append(_text(block, "text") if kind == "text" else _any_text(block) or "")
    message: dict[str, Any] = {"role": "assistant", "content": "".join(text)}
    if not message["content"] and calls:
        message["content"] = None
    if thoughts := "".join(reasoning):
        message["reasoning_content"] = thoughts
    if calls:
        message["tool_calls"] = calls
    return ParsedMessage(message, minted)


def _read_thinking(block: Mapping[str, Any], seals: Seals) -> tuple[str, str]:
    """(the call that a thinking block was minted for, its reasoning); "" for what it does not say."""
    redacted = block.get("type") == "redacted_thinking"
    call_id, sealed = seals.open(block.get("data" if redacted else "signature")) or ("", "")
    return call_id, sealed if redacted else _text(block, "thinking") or sealed


def _read_user(content: list[dict[str, Any]]) -> list[ParsedMessage]:
    results = [_read_result(block) for block in content if block.get("type") == "tool_result"]
    messages = [ParsedMessage(result) for result in _sort_results(results)]
    parts = [part for block in content if block.get("type") != "tool_result" for part in _parts(block)]
    if parts or not messages:
        plain: Any = parts
        if not parts:
            plain = ""
        elif len(parts) == 1 and parts[0]["type"] == "text":
            plain = parts[0]["text"]
        messages.append(ParsedMessage({"role": "user", "content": plain}))
    return messages


def _sort_results(results: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The results of one reply's calls in the order of those calls. Clients list them as they finish, and many templates render no id by
    which the model could match them."""
    minted = [_MINTED_ID.match(result["tool_call_id"]) for result in results]
    if len({match["call"] if match else None for match in minted}) != 1 or None in minted:
        return results
    return sorted(results, key=lambda result: int(result["tool_call_id"].rpartition("_")[2]))


def _read_result(block: Mapping[str, Any]) -> dict[str, Any]:
    raw = block.get("content")
    parts = [part for item in _blocks(raw if raw is not None else "") for part in _parts(item)]
    content: Any = parts
    if all(part["type"] == "text" for part in parts):
        content = "\n".join(part["text"] for part in parts)
    if not content and block.get("is_error"):
        content = "Error"
    return {"role": "tool", "tool_call_id": _canonical_id(_text(block, "tool_use_id")), "content": content}


def _canonical_id(tool_use_id: str) -> str:
    """A tool call's id as the session tree knows it; another service's id is unchanged."""
    return _WIRE_ID.sub(r"call_\1", tool_use_id)


def _blocks(content: Any) -> list[dict[str, Any]]:
    """Content as blocks; a string is one text block. Raises RequestError."""
    if isinstance(content, str):
        return [{"type": "text", "text": content}]
    if not isinstance(content, list) or not all(isinstance(item, dict) for item in content):
        raise RequestError("'content' must be a string or a list of content blocks", param="messages")
    return content


def _text(block: Mapping[str, Any], key: str) -> str:
    """A field of a block. Raises RequestError if it is not a string."""
    value = block.get(key)
    if not isinstance(value, str):
        raise RequestError(f"a block of type '{str(block.get('type'))[:40]}' needs a string as its '{key}'", param="messages")
    return value


def _parts(block: dict[str, Any]) -> list[dict[str, Any]]:
    """The block as chat parts, none for an empty text. Raises RequestError for what no chat engine takes."""
    kind = block.get("type")
    if kind == "image":
        return [{"type": "image_url", "image_url": {"url": _image_url(block)}}]
    if kind == "text":
        text: str | None = _text(block, "text")
    elif kind == "document":
        text = _document(block)
    elif kind == "search_result":
        text = "\n".join([_text(block, "title"), _text(block, "source"), *read_texts(block.get("content"))])
    elif kind == "tool_reference":
        text = _text(block, "tool_name")
    else:
        text = _any_text(block)
    if text is None:
        raise RequestError(f"content blocks of type '{str(kind)[:40]}' cannot be taken here", param="messages")
    return [{"type": "text", "text": text}] if text else []


def _image_url(block: Mapping[str, Any]) -> str:
    source = block.get("source")
    if isinstance(source, dict) and source.get("type") == "url":
        return _text(source, "url")
    if isinstance(source, dict) and source.get("type") == "base64":
        return f"data:{_text(source, 'media_type')};base64,{_text(source, 'data')}"
    raise RequestError("an image must be given as base64 data or by its URL", param="messages")


def _document(block: Mapping[str, Any]) -> str:
    source = block.get("source")
    kind = source.get("type") if isinstance(source, dict) else None
    if not isinstance(source, dict) or kind not in ("text", "content"):
        raise RequestError("only text documents can be taken here: no PDFs, URLs or uploaded files", param="messages")
    body = [_text(source, "data")] if kind == "text" else read_texts(source.get("content"))
    head = [block[key] for key in ("title", "context") if isinstance(block.get(key), str) and block[key]]
    return "\n".join([*head, *body])


def _any_text(block: Mapping[str, Any]) -> str | None:
    """The text of a block of any other kind (a server tool's result, a summary); None if it holds none."""
    content = block.get("text") if block.get("text") is not None else block.get("content")
    if isinstance(content, list):
        texts = [item["text"] for item in content if isinstance(item, dict) and isinstance(item.get("text"), str)]
        return "\n".join(texts) if texts else None
    return content if isinstance(content, str) else None
