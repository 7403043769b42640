"""Conversation: a session's calls in the order in which a person reads them, and their messages cut into blocks.

A *thread* is a path down the session tree. From each call it continues at the child with the most calls below it. Every other child
starts a thread of its own (a *fork*), shown after the call it forks from. Conversations without a parent follow one another; one that
starts while another is under way, or that is not the agent's own work (a sub-agent, a title, a compaction), is a fork of that other's
last call before it.
"""

from __future__ import annotations

import base64
import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from proxy.errors import NotFound
from proxy.images import SCHEME
from proxy.transcripts import messages_of
from reconstruct.messages import reasoning_of
from reconstruct.records import Call, Forest
from reconstruct.values import Value

_decode = msgspec.json.decode


@dataclass(frozen=True, slots=True)
class CallSummary:
    """What is shown of a call besides its messages. `number` counts from 1 in canonical order; `quarantine_reason` is "" for a trained
    call; `preview` is the beginning of its reply, `tools` the names of the tools that it calls."""

    number: int
    call_id: str
    parent_id: str | None
    branch_reason: str
    role: str
    role_source: str
    agent: str
    status: str
    finish_reason: str
    prompt_tokens: int
    sampled_tokens: int
    versions: Sequence[int]
    mean_logprob: float | None
    started_at: float
    engine_seconds: float
    delivered: bool
    quarantine_reason: str
    preview: str
    tools: Sequence[str]
    in_tree: bool
    replayed_from: str = ""
    """The session that sampled it, if that is another one."""
    value: Value | None = None
    """What its forks say it is worth; None: it was never a pivot, or no fork of it has a reward."""


@dataclass(frozen=True, slots=True)
class Thread:
    """Calls of which each continues the one before. `fork_of` is the call after which a fork is shown."""

    calls: Sequence[CallSummary]
    fork_of: CallSummary | None = None

    @property
    def first(self) -> CallSummary:
        return self.calls[0]

    @property
    def title(self) -> str:
        first, above = self.first, self.fork_of
        if first.role != "main" and (above is None or first.role != above.role):
            return {"subagent": "Sub-agent", "compaction": "Compaction", "side": "Side call"}.get(first.role, first.role)
        if above is not None and first.parent_id == above.call_id:
            return "Branch" if first.branch_reason else "Another continuation"
        return "Conversation" if above is None else "Parallel conversation"

    @property
    def quarantine_reasons(self) -> Sequence[str]:
        return sorted({call.quarantine_reason for call in self.calls if call.quarantine_reason})


@dataclass(frozen=True, slots=True)
class Conversation:
    """`threads` are read one after another; `forks` by the id of the call after which they are shown; `thread_of` by call id."""

    threads: Sequence[Thread]
    forks: Mapping[str, Sequence[Thread]]
    thread_of: Mapping[str, Thread]

    @property
    def main_line(self) -> list[CallSummary]:
        """The calls of `threads`, without forks."""
        return [call for thread in self.threads for call in thread.calls]

    def walk(self) -> Iterator[tuple[str, Any]]:
        """The whole conversation as ("turn", call), and around the calls of a fork ("begin", thread) and ("end", thread)."""
        left: list[tuple[str, Any]] = [("turn", call) for call in reversed(self.main_line)]
        while left:
            kind, item = left.pop()
            yield kind, item
            if kind == "turn":
                for fork in reversed(self.forks.get(item.call_id, ())):
                    turns = [("turn", call) for call in reversed(fork.calls)]
                    left += [("end", fork), *turns, ("begin", fork)]


def arrange(calls: Sequence[CallSummary]) -> Conversation:
    """The conversation of a session's calls, given in canonical order."""
    known = {call.call_id: call for call in calls}
    children: dict[str, list[CallSummary]] = {}
    roots: list[CallSummary] = []
    for call in calls:
        if call.parent_id in known and call.parent_id is not None:
            children.setdefault(call.parent_id, []).append(call)
        else:
            roots.append(call)
    sizes = _count_below(roots, children)
    threads: list[Thread] = []
    forks: dict[str, list[Thread]] = {}
    thread_of: dict[str, Thread] = {}
    left = list(_place_roots([_follow(root, children, sizes) for root in roots]))[::-1]
    while left:
        path, above = left.pop()
        thread = Thread(path, above)
        (threads if above is None else forks.setdefault(above.call_id, [])).append(thread)
        thread_of.update((call.call_id, thread) for call in path)
        on_path = {call.call_id for call in path}
        left += [
            (_follow(child, children, sizes), call)
            for call in path
            for child in children.get(call.call_id, ())
            if child.call_id not in on_path
        ]
    for each in forks.values():
        each.sort(key=lambda thread: thread.first.number)
    return Conversation(threads, forks, thread_of)


def _place_roots(paths: Sequence[Sequence[CallSummary]]) -> Iterator[tuple[Sequence[CallSummary], CallSummary | None]]:
    """The path from each root, with the call that it is shown after; None: it is read in its turn."""
    open_paths: list[Sequence[CallSummary]] = []
    last_main: Sequence[CallSummary] = ()
    for path in paths:
        number = path[0].number
        open_paths = [each for each in open_paths if each[-1].number > number]
        beside = open_paths[-1] if open_paths else () if path[0].role == "main" else last_main
        above = max((call for call in beside if call.number < number), key=lambda call: call.number, default=None)
        yield path, above
        if above is None and path[0].role == "main":
            open_paths.append(path)
            last_main = path


def _follow(first: CallSummary, children: Mapping[str, Sequence[CallSummary]], sizes: Mapping[str, int]) -> list[CallSummary]:
    path = [first]
    while below := [child for child in children.get(path[-1].call_id, ()) if child.role == first.role]:
        path.append(
            min(
                below,
                key=lambda call: (-sizes[call.call_id], bool(call.quarantine_reason), bool(call.branch_reason), call.number),
            )
        )
    return path


def _count_below(roots: Sequence[CallSummary], children: Mapping[str, Sequence[CallSummary]]) -> dict[str, int]:
    """The number of calls below each call, itself included."""
    order = list(roots)
    for call in order:
        order.extend(children.get(call.call_id, ()))
    sizes: dict[str, int] = {}
    for call in reversed(order):
        sizes[call.call_id] = 1 + sum(sizes[child.call_id] for child in children.get(call.call_id, ()))
    return sizes


# Messages, cut into blocks of plain text.


SHOWN_CHARACTERS = 12_000
"""Longer texts are shown up to here, with a link to the whole message."""
UNCUT = 2**62
IMAGE = re.compile(r"data:(image/(?:png|jpeg|gif|webp));base64,([A-Za-z0-9+/=\s]+)")


@dataclass(frozen=True, slots=True)
class Block:
    """`kind`: text, reasoning, tool_call, tool_result, image or other. `name` is the tool's, `tool_call_id` the id of its call. `image` is
    a data URL, or `sha256:` and the digest of one that the store keeps. `length` counts the characters of the whole text, of which `text`
    may be the beginning."""

    kind: str
    text: str
    name: str = ""
    tool_call_id: str = ""
    image: str = ""
    length: int = 0

    @property
    def cut(self) -> bool:
        return self.length > len(self.text)

    @property
    def digest(self) -> str:
        return self.image.removeprefix(SCHEME) if self.image.startswith(SCHEME) else ""


@dataclass(frozen=True, slots=True)
class ShownMessage:
    """`index` counts the messages of the request from 0; the reply comes after the last."""

    index: int
    role: str
    blocks: Sequence[Block]
    is_reply: bool = False

    @property
    def is_prompt(self) -> bool:
        return self.role in ("system", "developer")

    @property
    def length(self) -> int:
        return sum(block.length for block in self.blocks)


@dataclass(frozen=True, slots=True)
class Tool:
    name: str
    description: str
    parameters: str


@dataclass(frozen=True, slots=True)
class ShownCall:
    """A call with the messages that are new in its request, and its reply. `tools` are those offered, shown at the first call of a
    conversation; `forks` are shown after it."""

    call: CallSummary
    messages: Sequence[ShownMessage]
    reply: ShownMessage
    tools: Sequence[Tool]
    forks: Sequence[Thread] = ()


def build_turn(
    call: Call, summary: CallSummary, forest: Forest, forks: Sequence[Thread] = (), *, limit: int = SHOWN_CHARACTERS
) -> ShownCall:
    """`limit` characters of each text are shown."""
    parent = forest.calls.get(call.node.parent_id or "")
    tool_names = name_tool_calls(reply_of(parent)) if parent else {}
    messages = [
        show_message(call.messages_from + at, message, tool_names=tool_names, limit=limit)
        for at, message in enumerate(_decode(call.messages))
    ]
    reply = show_message(call.message_count, reply_of(call), is_reply=True, limit=limit)
    return ShownCall(summary, messages, reply, _read_tools(call) if not summary.parent_id else (), forks)


def reply_of(call: Call) -> dict[str, Any]:
    reply: dict[str, Any] = _decode(call.reply)
    return reply


def list_messages(call: Call, forest: Forest) -> list[Any]:
    """All messages of the call's request, and its reply."""
    return [*messages_of(call, forest), reply_of(call)]


def find_message(call: Call, index: int) -> Any:
    """One of the messages that the call's record has: its new ones and its reply. Raises NotFound."""
    own = _decode(call.messages)
    if index == call.message_count:
        return reply_of(call)
    if not 0 <= index - call.messages_from < len(own):
        raise NotFound(f"call {call.call_id} has no message {index} of its own")
    return own[index - call.messages_from]


def show_message(
    index: int,
    message: Any,
    *,
    is_reply: bool = False,
    tool_names: Mapping[str, str] | None = None,
    limit: int = SHOWN_CHARACTERS,
) -> ShownMessage:
    if not isinstance(message, Mapping):
        message = {"role": "?", "content": [message]}
    blocks = [_cut(block, limit) for block in _blocks(message, tool_names or {})]
    return ShownMessage(index, str(message.get("role") or "?"), blocks, is_reply)


def find_image(message: Any, number: int) -> str:
    """An image of the message, counted from 0, as `Block.image`. Raises NotFound."""
    images = [block.image for block in show_message(0, message).blocks if block.image]
    if number >= len(images):
        raise NotFound(f"there is no image {number} in this message")
    return images[number]


def read_image(message: Any, number: int) -> tuple[str, bytes]:
    """The media type and bytes of an image that the message has as a data URL. Raises NotFound."""
    found = IMAGE.fullmatch(find_image(message, number))
    if found is None:
        raise NotFound(f"there is no image {number} in this message")
    try:
        return found[1], base64.b64decode(found[2])
    except ValueError as error:
        raise NotFound(f"image {number} is not valid base64") from error


def whole_text(message: Any) -> str:
    """All of a message as plain text; blocks that are not text alone each under what they are."""
    shown = show_message(0, message, limit=UNCUT)
    if all(block.kind == "text" for block in shown.blocks):
        return "\n\n".join(block.text for block in shown.blocks)
    return "\n\n".join(f"[{block.kind} {block.name}]".replace(" ]", "]") + "\n" + block.text for block in shown.blocks)


def pretty(value: Any) -> str:
    """`value` as indented JSON; only its type if it is nested too deeply."""
    try:
        return json.dumps(value, indent=2, ensure_ascii=False)
    except RecursionError:
        return str(type(value))


def name_tool_calls(message: Any) -> dict[str, str]:
    """The names of the tools that the message calls, by the id of the call."""
    called = message.get("tool_calls") or () if isinstance(message, Mapping) else ()
    return {
        str(each.get("id")): str((each.get("function") or {}).get("name") or "") for each in called if isinstance(each, Mapping)
    }


def _read_tools(root: Call) -> list[Tool]:
    offered = _decode(root.preamble).get("tools") if root.preamble else None
    return [_read_tool(each) for each in offered or () if isinstance(each, Mapping)]


def _read_tool(offered: Mapping[str, Any]) -> Tool:
    nested = offered.get("function")
    function = nested if isinstance(nested, Mapping) else offered
    name, description = str(function.get("name") or offered.get("type") or "?"), str(function.get("description") or "")
    return Tool(name, description[:SHOWN_CHARACTERS], pretty(function.get("parameters"))[:SHOWN_CHARACTERS])


def _cut(block: Block, limit: int) -> Block:
    return Block(block.kind, block.text[:limit], block.name, block.tool_call_id, block.image, len(block.text))


def _blocks(message: Mapping[str, Any], tool_names: Mapping[str, str]) -> Iterable[Block]:
    """Everything in the message, in the order in which it was generated."""
    if reasoning := reasoning_of(message):
        yield Block("reasoning", reasoning)
    answered = str(message.get("tool_call_id") or "")
    kind = "tool_result" if message.get("role") == "tool" else "text"
    content = message.get("content")
    for part in [content] if isinstance(content, str) else content or ():
        block = _part(part)
        if block.text or block.image:
            kind_of_block = kind if block.kind == "text" else block.kind
            yield Block(kind_of_block, block.text, tool_names.get(answered, ""), answered, block.image)
    for call in message.get("tool_calls") or ():
        function = (call.get("function") or {}) if isinstance(call, Mapping) else {}
        name, tool_call_id = str(function.get("name") or "?"), str(call.get("id") or "") if isinstance(call, Mapping) else ""
        yield Block("tool_call", _arguments(function.get("arguments")), name, tool_call_id)


def _part(part: Any) -> Block:
    if isinstance(part, str):
        return Block("text", part)
    if isinstance(part, Mapping):
        if isinstance(part.get("text"), str):
            return Block("text", part["text"])
        if part.get("type") == "image" and isinstance(part.get("digest"), str):
            return Block("image", "", image=SCHEME + part["digest"])
        image = part.get("image_url")
        url = image.get("url") if isinstance(image, Mapping) else image
        if isinstance(url, str) and IMAGE.fullmatch(url):
            return Block("image", "", image=url)
    return Block("other", pretty(part))


def _arguments(arguments: Any) -> str:
    """One `name: value` per argument, with strings as they are; what the model wrote if that is no JSON object."""
    try:
        parsed = json.loads(arguments) if isinstance(arguments, str) else arguments
    except (ValueError, RecursionError):
        return str(arguments)
    if not isinstance(parsed, dict):
        return pretty(parsed)
    return "\n".join(f"{name}: {value if isinstance(value, str) else pretty(value)}" for name, value in parsed.items())
