"""The output items of one reply, assembled from its pieces, and the events that carry them.

Pieces are taken in the order they are sampled; each item is finished before the next begins, as clients expect. A whole reply is fed in
the order reasoning, text, tool calls, which is the order of a stream, so both give the same items. Text of white space alone waits for
more and is dropped beside other items: templates put it between a thought and a call.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from proxy.dialects.base import seal
from proxy.dialects.responses_items import FORMS, ToolKind, call_item, function_item
from proxy.dialects.responses_tools import Toolbox

Event = dict[str, Any]


class ItemWriter:
    """Takes the pieces of one reply. Each method returns the events that carry the piece; `items` are the finished ones."""

    def __init__(self, call_id: str, toolbox: Toolbox, *, summary: bool, sealed: bool) -> None:
        self.items: list[dict[str, Any]] = []
        self._call_id, self._toolbox = call_id, toolbox
        self._summary, self._sealed = summary, sealed
        self._open: _Item | None = None
        self.prose: _Message | _Reasoning | None = None
        """The message or reasoning in progress, where that is what is open."""
        self._space = ""
        self._counts = {"rs": 0, "msg": 0}
        self._pending: tuple[int, str] | None = None
        """Position and name, so far, of the call whose name is still coming."""
        self._position = -1

    def add_reasoning(self, text: str) -> list[Event]:
        if isinstance(self._open, _Reasoning):
            return self._open.add(text)
        item_id = self._next_id("rs")
        events = self._close("completed")
        item = self.prose = _Reasoning(item_id, len(self.items), self._call_id, summary=self._summary, sealed=self._sealed)
        return [*events, *self._begin(item), *item.add(text)]

    def add_text(self, text: str, logprobs: Sequence[Mapping[str, Any]] = ()) -> list[Event]:
        if isinstance(self._open, _Message):
            return self._open.add(text, logprobs)
        self._space += text
        return self._begin_message(logprobs) if self._space.strip() else []

    def add_call(self, position: int, name: str, arguments: str) -> list[Event]:
        """A piece of the call at `position`, whose name is complete when its arguments begin or another piece follows."""
        events: list[Event] = []
        if position != self._position:
            events, self._position = self._close("completed"), position
            self._pending = (position, "")
        if self._pending is not None:
            self._pending = (position, self._pending[1] + name)
        if arguments:
            events += self._begin_call()
            assert isinstance(self._open, _Call)
            events += self._open.add(arguments)
        return events

    def finish(self, status: str, logprobs: Sequence[Mapping[str, Any]] = ()) -> list[Event]:
        """End the reply; an empty reply is an empty message. `status` is the last item's."""
        events = self._begin_call()
        if self._open is None and not self.items:
            events += self._begin_message(logprobs)
        return [*events, *self._close(status)]

    def _begin_message(self, logprobs: Sequence[Mapping[str, Any]]) -> list[Event]:
        item_id = self._next_id("msg")
        events = self._close("completed")
        item = self.prose = _Message(item_id, len(self.items))
        text, self._space = self._space, ""
        return [*events, *self._begin(item), *item.add(text, logprobs)]

    def _begin_call(self) -> list[Event]:
        """Begin the pending call, whose name is complete."""
        if self._pending is None:
            return []
        (position, name), self._pending = self._pending, None
        return self._begin(_Call(self._toolbox.kind(name), len(self.items), self._call_id, position, name))

    def _begin(self, item: _Item) -> list[Event]:
        self._open = item
        return item.open()

    def _close(self, status: str) -> list[Event]:
        events = self._begin_call()
        if self._open is not None:
            events += self._open.close(status)
            self.items.append(events[-1]["item"])
            self._open = self.prose = None
        return events

    def _next_id(self, prefix: str) -> str:
        count, self._counts[prefix] = self._counts[prefix], self._counts[prefix] + 1
        return f"{prefix}_{self._call_id}" + (f"_{count}" if count else "")


class _Item(Protocol):
    """An item in progress. `close` returns its last events, of which the last holds the finished item."""

    def open(self) -> list[Event]: ...

    def close(self, status: str) -> list[Event]: ...


def _event(kind: str, index: int, **fields: Any) -> Event:
    return {"type": f"response.{kind}", "output_index": index, **fields}


class _Message:
    is_reasoning = False

    def __init__(self, item_id: str, index: int) -> None:
        self._id, self._index = item_id, index
        self.text: list[str] = []
        """The pieces so far."""
        self._logprobs: list[dict[str, Any]] = []

    def open(self) -> list[Event]:
        added = _event("output_item.added", self._index, item=self._item("in_progress", []))
        return [added, self._event("content_part.added", part=_text_part("", []))]

    def carry(self, text: str) -> Event:
        """The event that carries text without logprobs."""
        return self._event("output_text.delta", delta=text, logprobs=[])

    def add(self, text: str, logprobs: Sequence[Mapping[str, Any]]) -> list[Event]:
        converted = [_logprob(entry) for entry in logprobs]
        self.text.append(text)
        self._logprobs += converted
        return [self._event("output_text.delta", delta=text, logprobs=converted)]

    def close(self, status: str) -> list[Event]:
        text = "".join(self.text)
        part = _text_part(text, self._logprobs)
        return [
            self._event("output_text.done", text=text, logprobs=self._logprobs),
            self._event("content_part.done", part=part),
            _event("output_item.done", self._index, item=self._item(status, [part])),
        ]

    def _item(self, status: str, content: list[dict[str, Any]]) -> dict[str, Any]:
        return {"type": "message", "id": self._id, "role": "assistant", "status": status, "content": content}

    def _event(self, kind: str, **fields: Any) -> Event:
        return _event(kind, self._index, item_id=self._id, content_index=0, **fields)


class _Reasoning:
    """Rendered as a summary if the harness requested one, else as its text."""

    is_reasoning = True

    def __init__(self, item_id: str, index: int, call_id: str, *, summary: bool, sealed: bool) -> None:
        self._id, self._index, self._call_id, self._sealed = item_id, index, call_id, sealed
        self._where, self._kind = ("summary", "summary_text") if summary else ("content", "reasoning_text")
        self._events = "reasoning_summary_text" if summary else "reasoning_text"
        self._part = "reasoning_summary_part" if summary else "content_part"
        self.text: list[str] = []
        """The pieces so far."""

    def open(self) -> list[Event]:
        added = _event("output_item.added", self._index, item=self._item([], None))
        return [added, self._event(f"{self._part}.added", part={"type": self._kind, "text": ""})]

    def carry(self, text: str) -> Event:
        """The event that carries a piece."""
        return self._event(f"{self._events}.delta", delta=text)

    def add(self, text: str) -> list[Event]:
        self.text.append(text)
        return [self.carry(text)]

    def close(self, status: str) -> list[Event]:
        text = "".join(self.text)
        part = {"type": self._kind, "text": text}
        item = self._item([part], seal(self._call_id, text) if self._sealed else None)
        return [
            self._event(f"{self._events}.done", text=text),
            self._event(f"{self._part}.done", part=part),
            _event("output_item.done", self._index, item=item),
        ]

    def _item(self, parts: list[dict[str, Any]], sealed: str | None) -> dict[str, Any]:
        item: dict[str, Any] = {"type": "reasoning", "id": self._id, "summary": [], self._where: parts}
        return {**item, "encrypted_content": sealed} if self._sealed else item

    def _event(self, kind: str, **fields: Any) -> Event:
        part = {"summary_index": 0} if self._where == "summary" else {"content_index": 0}
        return _event(kind, self._index, item_id=self._id, **part, **fields)


class _Call:
    """A tool call. A function's arguments are sent as they come; those of any other kind once complete, since the item's fields are read
    out of them."""

    def __init__(self, kind: ToolKind, index: int, call_id: str, position: int, name: str) -> None:
        self._kind, self._index, self._call_id, self._position, self._name = kind, index, call_id, position, name
        self._live = kind.type not in FORMS
        self._arguments: list[str] = []

    def open(self) -> list[Event]:
        if not self._live:
            return []
        item = function_item(self._kind, self._call_id, self._position, "", "in_progress")
        return [_event("output_item.added", self._index, item=item)]

    def add(self, arguments: str) -> list[Event]:
        self._arguments.append(arguments)
        return [self._event("function_call_arguments.delta", delta=arguments)] if self._live and arguments else []

    def close(self, status: str) -> list[Event]:
        arguments = "".join(self._arguments)
        item = call_item(self._kind, self._call_id, self._position, self._name, arguments, status)
        done = _event("output_item.done", self._index, item=item)
        if self._live:
            return [self._event("function_call_arguments.done", arguments=arguments), done]
        return [*self._complete(item), done]

    def _complete(self, item: dict[str, Any]) -> list[Event]:
        begun = {**item, "status": "in_progress", **({"input": ""} if "input" in item else {})}
        events = [_event("output_item.added", self._index, item=begun)]
        if "input" in item:
            events.append(self._event("custom_tool_call_input.delta", item["id"], delta=item["input"]))
            events.append(self._event("custom_tool_call_input.done", item["id"], input=item["input"]))
        elif item["type"] == "function_call":
            events[0]["item"] = {**begun, "arguments": ""}
            events.append(self._event("function_call_arguments.delta", delta=item["arguments"]))
            events.append(self._event("function_call_arguments.done", arguments=item["arguments"]))
        return events

    def _event(self, kind: str, item_id: str = "", **fields: Any) -> Event:
        return _event(kind, self._index, item_id=item_id or f"fc_{self._call_id}_{self._position}", **fields)


def _text_part(text: str, logprobs: list[dict[str, Any]]) -> dict[str, Any]:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": logprobs}


def _logprob(entry: Mapping[str, Any]) -> dict[str, Any]:
    """A chat logprob entry in this dialect's shape, which requires bytes."""
    top = [_logprob(other) for other in entry.get("top_logprobs") or ()]
    converted = {"token": entry.get("token") or "", "logprob": entry.get("logprob"), "bytes": entry.get("bytes") or []}
    return {**converted, "top_logprobs": top} if "top_logprobs" in entry else converted
