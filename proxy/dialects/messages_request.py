"""Content blocks of the Messages dialect as chat messages, and the blocks of a reply.

One message may become several: results of tools are messages of their own in chat. Ids that the service minted are read back: a
tool call's id is `toolu_<call id>_<position>` on this wire and `call_<call id>_<position>` inside, a thinking block's signature is
the seal of its call.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from proxy.dialects import fields
from proxy.dialects.base import Choice, Heard, seal, unseal
from proxy.dialects.fields import arguments_object, arguments_text, decode, function_tool, tool_call
from proxy.errors import RequestError

SYSTEM_ROLES = ("system", "developer")
_WIRE_ID = re.compile(r"toolu_([0-9a-f]{24}_\d+)\Z")
_MINTED_ID = re.compile(r"call_(?P<rest>(?P<call>[0-9a-f]{24})_(?P<position>\d+))\Z")


def wire_id(call_id: str) -> str:
    """A minted tool-call id as this dialect writes it."""
    return _MINTED_ID.sub(r"toolu_\g<rest>", call_id)


def inner_id(tool_use_id: str) -> str:
    """The id of a tool call as the session tree knows it; another service's id stays as it is."""
    return _WIRE_ID.sub(r"call_\1", tool_use_id)


def read_message(raw: bytes, later_system_role: str) -> list[Heard]:
    """The chat messages of one message that is not at the head of the history. Raises RequestError."""
    message = decode(raw)
    if not isinstance(message, dict):
        raise RequestError("'messages' must be a list of objects", param="messages")
    role, content = message.get("role"), message.get("content")
    if role == "assistant":
        return [_assistant(blocks(content))]
    if role == "user":
        return _user(blocks(content))
    if role in SYSTEM_ROLES:
        text = "\n".join(texts(content))
        return [Heard({"role": later_system_role, "content": text})] if text else []
    raise RequestError("a message's 'role' must be user, assistant or system", param="messages")


def texts(content: Any) -> list[str]:
    """The texts of a system prompt, a string or text blocks; empty ones are left out. Raises RequestError for a tool that is
    defined among them: it would be missing from the tools that are offered."""
    found = []
    for block in blocks(content):
        tool = block.get("tool")
        if isinstance(tool, dict) and tool.get("type") == "tool_definition":
            raise RequestError("tools must be defined in 'tools', not inside messages", param="messages")
        found.append(_text(block, "text") if block.get("type") == "text" else "")
    return [text for text in found if text]


def blocks(content: Any) -> list[dict[str, Any]]:
    """Content as blocks; a string is one text block. Raises RequestError."""
    if isinstance(content, str):
        return [{"type": "text", "text": content}]
    if not isinstance(content, list) or not all(isinstance(item, dict) for item in content):
        raise RequestError("'content' must be a string or a list of content blocks", param="messages")
    return content


def _text(block: Mapping[str, Any], key: str) -> str:
    """A field of a block. Raises RequestError when it is not a string."""
    value = block.get(key)
    if not isinstance(value, str):
        raise RequestError(f"a block of type '{str(block.get('type'))[:40]}' needs a string as its '{key}'", param="messages")
    return value


def _user(content: list[dict[str, Any]]) -> list[Heard]:
    results = [_result(block) for block in content if block.get("type") == "tool_result"]
    heard = [Heard(result) for result in _in_order(results)]
    parts = [part for block in content if block.get("type") != "tool_result" for part in _parts(block)]
    if parts or not heard:
        heard.append(Heard({"role": "user", "content": _plain(parts)}))
    return heard


def _in_order(results: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The results of one reply's calls in the order of those calls: clients write them down as they come in, and many templates
    show no id by which the model could tell them apart."""
    named = [_MINTED_ID.match(result["tool_call_id"]) for result in results]
    if len({match["call"] if match else None for match in named}) != 1 or None in named:
        return results
    return sorted(results, key=lambda result: int(result["tool_call_id"].rpartition("_")[2]))


def _plain(parts: list[dict[str, Any]]) -> Any:
    """A string where one text is all there is."""
    if not parts:
        return ""
    return parts[0]["text"] if len(parts) == 1 and parts[0]["type"] == "text" else parts


def _result(block: Mapping[str, Any]) -> dict[str, Any]:
    content = block.get("content")
    parts = [part for item in blocks(content if content is not None else "") for part in _parts(item)]
    said: Any = parts
    if all(part["type"] == "text" for part in parts):
        said = "\n".join(part["text"] for part in parts)
    if not said and block.get("is_error"):
        said = "Error"
    return {"role": "tool", "tool_call_id": inner_id(_text(block, "tool_use_id")), "content": said}


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
        text = "\n".join([_text(block, "title"), _text(block, "source"), *texts(block.get("content"))])
    elif kind == "tool_reference":
        text = _text(block, "tool_name")
    else:
        text = _held_text(block)
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
    body = [_text(source, "data")] if kind == "text" else texts(source.get("content"))
    about = [block[key] for key in ("title", "context") if isinstance(block.get(key), str) and block[key]]
    return "\n".join([*about, *body])


def _held_text(block: Mapping[str, Any]) -> str | None:
    """The text of a block of another kind (a server tool's result, a summary); None when it holds none."""
    content = block.get("text") if block.get("text") is not None else block.get("content")
    if isinstance(content, list):
        found = [item["text"] for item in content if isinstance(item, dict) and isinstance(item.get("text"), str)]
        return "\n".join(found) if found else None
    return content if isinstance(content, str) else None


def _assistant(content: list[dict[str, Any]]) -> Heard:
    text: list[str] = []
    reasoning: list[str] = []
    calls: list[dict[str, Any]] = []
    minted = ""
    for block in content:
        kind = block.get("type")
        if kind in ("thinking", "redacted_thinking"):
            call_id, thought = _thought(block)
            minted = call_id or minted
            reasoning.append(thought)
        elif kind == "tool_use":
            name, arguments = _text(block, "name"), arguments_text(block.get("input"))
            calls.append(tool_call(inner_id(_text(block, "id")), name, arguments))
        else:
            text.append(_text(block, "text") if kind == "text" else _held_text(block) or "")
    return Heard(assistant_message("".join(text), "".join(reasoning), calls), minted)


def assistant_message(text: str, reasoning: str, calls: list[dict[str, Any]]) -> dict[str, Any]:
    message: dict[str, Any] = {"role": "assistant", "content": text if text or not calls else None}
    if reasoning:
        message["reasoning_content"] = reasoning
    if calls:
        message["tool_calls"] = calls
    return message


def _thought(block: Mapping[str, Any]) -> tuple[str, str]:
    """(the call a thinking block was minted for, its reasoning); "" for what it does not say."""
    redacted = block.get("type") == "redacted_thinking"
    call_id, sealed = unseal(block.get("data" if redacted else "signature")) or ("", "")
    return call_id, sealed if redacted else _text(block, "thinking") or sealed


def reply_blocks(choice: Choice, thinking: str) -> list[dict[str, Any]]:
    """A finished choice as content blocks. `thinking`: shown, omitted (a block without its text) or none."""
    message = choice.message
    made: list[dict[str, Any]] = []
    reasoning = message.get("reasoning_content")
    if reasoning and thinking != "none":
        text = reasoning if thinking == "shown" else ""
        made.append({"type": "thinking", "thinking": text, "signature": seal(choice.call_id)})
    if message.get("content"):
        made.append({"type": "text", "text": message["content"]})
    for call in message.get("tool_calls") or ():
        function = call["function"]
        given = arguments_object(function["arguments"])
        made.append({"type": "tool_use", "id": wire_id(call["id"]), "name": function["name"], "input": given})
    return made


# Tools of the Messages dialect: which are offered as functions, and which only Anthropic's own servers could run.


_DATED = re.compile(r"(?P<kind>.+?)_(?P<date>\d{8})\Z")
_SERVER_KINDS = (
    *("web_search", "web_fetch", "code_execution", "tool_search", "mcp_toolset", "advisor"),
    *("browser_toolset", "computer_toolset"),
)
"""What no function can stand for: the vendor's servers run them, or one type stands for a whole set of tools."""


def offered(body: Mapping[str, Any]) -> tuple[list[dict[str, Any]], list[str]]:
    """The body's tools as chat functions, and the kinds of what else it asks for and cannot have.

    Raises RequestError for a tool without a name or with a schema that is no object."""
    functions: list[dict[str, Any]] = []
    dropped: list[str] = []
    for tool in fields.objects(body, "tools"):
        function = _function(tool)
        if function is None:
            dropped.append(_server_kind(str(tool.get("type"))))
        else:
            functions.append(function)
    if body.get("mcp_servers"):
        dropped.append("mcp_servers")
    if _edits_context(body):
        dropped.append("context_management")
    return functions, dropped


def _function(tool: dict[str, Any]) -> dict[str, Any] | None:
    kind = tool.get("type") or "custom"
    if not isinstance(kind, str):
        raise RequestError("a tool's 'type' must be a string", param="tools")
    if kind == "custom":
        return _custom(tool)
    dated = _DATED.match(kind)
    if dated is None or not isinstance(tool.get("name"), str):
        return None
    return client_tool(dated["kind"], dated["date"], tool)


def _custom(tool: dict[str, Any]) -> dict[str, Any]:
    name, schema = tool.get("name"), tool.get("input_schema")
    if not isinstance(name, str) or not name:
        raise RequestError("tools: a tool's 'name' must be a non-empty string", param="tools")
    if schema is not None and not isinstance(schema, dict):
        raise RequestError(f"tools: the 'input_schema' of '{name}' must be an object", param="tools")
    return function_tool(name, fields.text(tool, "description"), schema)


def _server_kind(kind: str) -> str:
    """The kind as a word of this list, whatever the harness wrote: it labels a counter."""
    return next((known for known in _SERVER_KINDS if kind.startswith(known)), "other")


def _edits_context(body: Mapping[str, Any]) -> bool:
    """Whether the vendor would cut the history: everything but keeping all thinking, which is what happens here anyway."""
    edits = fields.objects(fields.mapping(body, "context_management"), "edits")
    return any(not str(edit.get("type")).startswith("clear_thinking") or not _keeps_all(edit) for edit in edits)


def _keeps_all(edit: Mapping[str, Any]) -> bool:
    keep = edit.get("keep")
    return keep == "all" or (isinstance(keep, dict) and keep.get("type") == "all")


def choice_of_tools(body: Mapping[str, Any], functions: list[dict[str, Any]]) -> dict[str, Any]:
    """`tool_choice` and `parallel_tool_calls` of the chat body. Raises RequestError for a choice that cannot be made."""
    choice = fields.mapping(body, "tool_choice")
    kind = choice.get("type")
    if not choice or (not functions and kind in ("auto", "none")):
        return {}
    if kind not in ("auto", "any", "tool", "none"):
        raise RequestError("tool_choice: 'type' must be auto, any, tool or none", param="tool_choice")
    names = [function["function"]["name"] for function in functions]
    if (kind == "any" and not names) or (kind == "tool" and choice.get("name") not in names):
        raise RequestError("tool_choice: there is no such tool among those that can be offered", param="tool_choice")
    named = {"type": "function", "function": {"name": choice.get("name")}}
    chosen: dict[str, Any] = {"tool_choice": {"auto": "auto", "any": "required", "tool": named, "none": "none"}[kind]}
    if fields.flag(choice, "disable_parallel_tool_use"):
        chosen["parallel_tool_calls"] = False
    return chosen


# Anthropic's tools that the client runs, spelt out as functions: the vendor's own models know them by their type alone.
#
# Names, commands and parameters are those of Anthropic's documentation of each tool.


_TEXT = {"type": "string"}
_COUNT = {"type": "integer"}
_POINT = {"type": "array", "items": _COUNT, "minItems": 2, "maxItems": 2}


def client_tool(kind: str, date: str, tool: Mapping[str, Any]) -> dict[str, Any] | None:
    """The chat function for a tool of type `<kind>_<date>`; None when the kind is not one that a client runs."""
    name = tool["name"]
    if kind == "bash":
        return function_tool(name, "Run commands in a bash shell that keeps its state between calls.", _BASH)
    if kind == "text_editor":
        return function_tool(name, "View, create and edit text files.", _editor(date))
    if kind == "memory":
        return function_tool(name, "Keep notes in files under /memories that outlive this conversation.", _memory())
    if kind == "computer":
        size = f"{tool.get('display_width_px')} by {tool.get('display_height_px')} pixels"
        return function_tool(name, f"Use the mouse, keyboard and screen of a computer. The display is {size}.", _computer(date))
    return None


def _schema(required: Sequence[str], properties: Mapping[str, Any]) -> dict[str, Any]:
    return {"type": "object", "properties": dict(properties), "required": list(required)}


def _one_of(*values: str) -> dict[str, Any]:
    return {"type": "string", "enum": list(values)}


def _said(schema: Mapping[str, Any], description: str) -> dict[str, Any]:
    return {**schema, "description": description}


_BASH = {
    "type": "object",
    "properties": {
        "command": _said(_TEXT, "The command to run. Needed unless the shell is restarted."),
        "restart": {"type": "boolean", "description": "True restarts the shell."},
    },
}


def _file_edits() -> dict[str, Any]:
    """The parameters that editing a file and editing a memory share."""
    return {
        "view_range": _said(
            _POINT, "view: first and last line to show, counted from 1; -1 as the last is the end of the file."
        ),
        "file_text": _said(_TEXT, "create: the content of the new file."),
        "old_str": _said(_TEXT, "str_replace: the text to replace, exactly as it stands in the file, once."),
        "new_str": _said(_TEXT, "str_replace: the text to put in its place."),
        "insert_line": _said(_COUNT, "insert: the line after which to insert, 0 for the beginning of the file."),
    }


def _editor(date: str) -> dict[str, Any]:
    edits = _file_edits()
    commands = ["view", "create", "str_replace", "insert"]
    if date <= "20250124":
        # The first versions insert `new_str` and can undo; later ones have a parameter for it and no way back.
        commands.append("undo_edit")
        edits["new_str"] = _said(_TEXT, "str_replace: the text to put in its place; insert: the text to insert.")
    else:
        edits["insert_text"] = _said(_TEXT, "insert: the text to insert.")
    path = _said(_TEXT, "Absolute path of the file or directory.")
    return _schema(("command", "path"), {"command": _one_of(*commands), "path": path, **edits})


def _memory() -> dict[str, Any]:
    commands = _one_of("view", "create", "str_replace", "insert", "delete", "rename")
    moves = {"old_path": _said(_TEXT, "rename: the path now."), "new_path": _said(_TEXT, "rename: the path afterwards.")}
    path = _said(_TEXT, "Path under /memories; all commands but rename need it.")
    inserted = {"insert_text": _said(_TEXT, "insert: the text to insert.")}
    return _schema(("command",), {"command": commands, "path": path, **_file_edits(), **inserted, **moves})


_ACTIONS_2024 = (
    *("key", "type", "mouse_move", "left_click", "left_click_drag", "right_click", "middle_click", "double_click"),
    *("screenshot", "cursor_position"),
)
_ACTIONS_2025 = ("left_mouse_down", "left_mouse_up", "scroll", "hold_key", "wait", "triple_click")


def _computer(date: str) -> dict[str, Any]:
    actions = list(_ACTIONS_2024)
    parameters = {
        "coordinate": _said(_POINT, "(x, y) in pixels from the upper left corner; where a drag ends."),
        "text": _said(_TEXT, "type: the text; key and hold_key: the keys, as ctrl+s; clicks: keys held meanwhile."),
    }
    if date >= "20250124":
        actions += _ACTIONS_2025
        parameters |= {
            "start_coordinate": _said(_POINT, "left_click_drag: where it begins."),
            "scroll_direction": _one_of("up", "down", "left", "right"),
            "scroll_amount": _said(_COUNT, "scroll: how many clicks of the wheel."),
            "duration": {"type": "number", "description": "wait and hold_key: seconds."},
        }
    if date >= "20251124":
        actions.append("zoom")
        corners = {"type": "array", "items": _COUNT, "minItems": 4, "maxItems": 4}
        parameters["region"] = _said(corners, "zoom: (x0, y0, x1, y1) of what to show enlarged.")
    return _schema(("action",), {"action": _one_of(*actions), **parameters})
