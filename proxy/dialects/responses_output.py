"""The output items of one reply, put together from its pieces, and the events that tell of them.

Pieces are taken in the order they are sampled; each item is finished before the next begins, as clients expect. A whole reply is
taken in the order reasoning, text, tool calls, which is the order of a stream: so both give the same items. Text of white space alone
waits for more and is left out beside other items: templates put it between a thought and a call.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from proxy.dialects.responses_calls import FORMS, Kind, call_item, function_call
from proxy.dialects.responses_tools import Toolbox
from proxy.minting import seal

Event = dict[str, Any]


class _Item(Protocol):
    """An item that is being told: `done` gives its last events, the finished item in the last of them."""

    def opened(self) -> list[Event]: ...

    def done(self, status: str) -> list[Event]: ...


def _event(kind: str, index: int, **fields: Any) -> Event:
    return {"type": f"response.{kind}", "output_index": index, **fields}


class _Message:
    def __init__(self, item_id: str, index: int) -> None:
        self._id, self._index = item_id, index
        self._text: list[str] = []
        self._logprobs: list[dict[str, Any]] = []

    def opened(self) -> list[Event]:
        item = {"type": "message", "id": self._id, "role": "assistant", "status": "in_progress", "content": []}
        return [_event("output_item.added", self._index, item=item), self._told("content_part.added", part=_text_part("", []))]

    def add(self, text: str, logprobs: Sequence[Mapping[str, Any]]) -> list[Event]:
        shaped = [_logprob(entry) for entry in logprobs]
        self._text.append(text)
        self._logprobs += shaped
        return [self._told("output_text.delta", delta=text, logprobs=shaped)]

    def done(self, status: str) -> list[Event]:
        text = "".join(self._text)
        part = _text_part(text, self._logprobs)
        item = {"type": "message", "id": self._id, "role": "assistant", "status": status, "content": [part]}
        return [
            self._told("output_text.done", text=text, logprobs=self._logprobs),
            self._told("content_part.done", part=part),
            _event("output_item.done", self._index, item=item),
        ]

    def _told(self, kind: str, **fields: Any) -> Event:
        return _event(kind, self._index, item_id=self._id, content_index=0, **fields)


class _Reasoning:
    """As a summary where the harness asked for one, else as the text it is."""

    def __init__(self, item_id: str, index: int, call_id: str, *, summary: bool, sealed: bool) -> None:
        self._id, self._index, self._call_id, self._sealed = item_id, index, call_id, sealed
        self._where, self._kind = ("summary", "summary_text") if summary else ("content", "reasoning_text")
        self._events = "reasoning_summary_text" if summary else "reasoning_text"
        self._part = "reasoning_summary_part" if summary else "content_part"
        self._text: list[str] = []

    def opened(self) -> list[Event]:
        added = _event("output_item.added", self._index, item=self._item([], None))
        return [added, self._told(f"{self._part}.added", part={"type": self._kind, "text": ""})]

    def add(self, text: str) -> list[Event]:
        self._text.append(text)
        return [self._told(f"{self._events}.delta", delta=text)]

    def done(self, status: str) -> list[Event]:
        text = "".join(self._text)
        part = {"type": self._kind, "text": text}
        item = self._item([part], seal(self._call_id, text) if self._sealed else None)
        return [
            self._told(f"{self._events}.done", text=text),
            self._told(f"{self._part}.done", part=part),
            _event("output_item.done", self._index, item=item),
        ]

    def _item(self, parts: list[dict[str, Any]], sealed: str | None) -> dict[str, Any]:
        item: dict[str, Any] = {"type": "reasoning", "id": self._id, "summary": [], self._where: parts}
        return {**item, "encrypted_content": sealed} if self._sealed else item

    def _told(self, kind: str, **fields: Any) -> Event:
        part = {"summary_index": 0} if self._where == "summary" else {"content_index": 0}
        return _event(kind, self._index, item_id=self._id, **part, **fields)


class _Call:
    """A tool call. A function's arguments are told as they come; any other kind's once they are whole, since what the item shows
    is read out of them."""

    def __init__(self, toolbox: Toolbox, index: int, call_id: str, position: int, name: str) -> None:
        self._index, self._call_id, self._position, self._name = index, call_id, position, name
        self._kind: Kind = toolbox.kind(name)
        self._live = self._kind.type not in FORMS
        self._arguments: list[str] = []

    def opened(self) -> list[Event]:
        if not self._live:
            return []
        item = function_call(self._kind, self._call_id, self._position, "", "in_progress")
        return [_event("output_item.added", self._index, item=item)]

    def add(self, arguments: str) -> list[Event]:
        self._arguments.append(arguments)
        return [self._told("function_call_arguments.delta", delta=arguments)] if self._live and arguments else []

    def done(self, status: str) -> list[Event]:
        arguments = "".join(self._arguments)
        item = call_item(self._kind, self._call_id, self._position, self._name, arguments, status)
        last = [_event("output_item.done", self._index, item=item)]
        if self._live:
            return [self._told("function_call_arguments.done", arguments=arguments), *last]
        return [*self._whole(item), *last]

    def _whole(self, item: dict[str, Any]) -> list[Event]:
        begun = {**item, "status": "in_progress", **({"input": ""} if "input" in item else {})}
        events = [_event("output_item.added", self._index, item=begun)]
        if "input" in item:
            events.append(self._told("custom_tool_call_input.delta", item["id"], delta=item["input"]))
            events.append(self._told("custom_tool_call_input.done", item["id"], input=item["input"]))
        elif item["type"] == "function_call":
            events[0]["item"] = {**begun, "arguments": ""}
            events.append(self._told("function_call_arguments.delta", delta=item["arguments"]))
            events.append(self._told("function_call_arguments.done", arguments=item["arguments"]))
        return events

    def _told(self, kind: str, item_id: str = "", **fields: Any) -> Event:
        return _event(kind, self._index, item_id=item_id or f"fc_{self._call_id}_{self._position}", **fields)


class Output:
    """Takes the pieces of one reply. Each method gives the events that tell of the piece; `items` are the finished ones."""

    def __init__(self, call_id: str, toolbox: Toolbox, *, summary: bool, sealed: bool) -> None:
        self.items: list[dict[str, Any]] = []
        self._call_id, self._toolbox = call_id, toolbox
        self._summary, self._sealed = summary, sealed
        self._open: _Item | None = None
        self._space = ""
        self._made = {"rs": 0, "msg": 0}
        self._naming: tuple[int, str] | None = None
        self._at = -1

    def reasoning(self, text: str) -> list[Event]:
        if isinstance(self._open, _Reasoning):
            return self._open.add(text)
        item_id = self._named("rs")
        events, index = self._next()
        item = _Reasoning(item_id, index, self._call_id, summary=self._summary, sealed=self._sealed)
        return [*events, *self._begin(item), *item.add(text)]

    def text(self, text: str, logprobs: Sequence[Mapping[str, Any]] = ()) -> list[Event]:
        if isinstance(self._open, _Message):
            return self._open.add(text, logprobs)
        self._space += text
        return self._message(logprobs) if self._space.strip() else []

    def call(self, position: int, name: str, arguments: str) -> list[Event]:
        """A piece of the call at `position`; its name is whole when its arguments begin or another piece follows."""
        events: list[Event] = []
        if position != self._at:
            events, self._at = self._close("completed"), position
            self._naming = (position, "")
        if self._naming is not None:
            self._naming = (position, self._naming[1] + name)
        if arguments:
            events += self._called()
            assert isinstance(self._open, _Call)
            events += self._open.add(arguments)
        return events

    def finish(self, status: str, logprobs: Sequence[Mapping[str, Any]] = ()) -> list[Event]:
        """The end of the reply; a reply that says nothing is an empty message. `status` is the last item's."""
        events = self._called()
        if self._open is None and not self.items:
            events += self._message(logprobs)
        return [*events, *self._close(status)]

    def _message(self, logprobs: Sequence[Mapping[str, Any]]) -> list[Event]:
        item_id = self._named("msg")
        events, index = self._next()
        item = _Message(item_id, index)
        text, self._space = self._space, ""
        return [*events, *self._begin(item), *item.add(text, logprobs)]

    def _called(self) -> list[Event]:
        """The call whose name was being told begins."""
        if self._naming is None:
            return []
        (position, name), self._naming = self._naming, None
        return self._begin(_Call(self._toolbox, len(self.items), self._call_id, position, name))

    def _next(self) -> tuple[list[Event], int]:
        """The end of what is open, and the place of the next item."""
        events = self._close("completed")
        return events, len(self.items)

    def _begin(self, item: _Item) -> list[Event]:
        self._open = item
        return item.opened()

    def _close(self, status: str) -> list[Event]:
        events = self._called()
        if self._open is not None:
            events += self._open.done(status)
            self.items.append(events[-1]["item"])
            self._open = None
        return events

    def _named(self, prefix: str) -> str:
        count, self._made[prefix] = self._made[prefix], self._made[prefix] + 1
        return f"{prefix}_{self._call_id}" + (f"_{count}" if count else "")


def _text_part(text: str, logprobs: list[dict[str, Any]]) -> dict[str, Any]:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": logprobs}


def _logprob(entry: Mapping[str, Any]) -> dict[str, Any]:
    """A chat logprob entry in the shape of this dialect, which has no entry without bytes."""
    top = [_logprob(other) for other in entry.get("top_logprobs") or ()]
    shaped = {"token": entry.get("token") or "", "logprob": entry.get("logprob"), "bytes": entry.get("bytes") or []}
    return {**shaped, "top_logprobs": top} if "top_logprobs" in entry else shaped
