"""Asks `/v1/responses` through the openai SDK and holds what comes back against the SDK's own types, strictly."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from openai.types.responses import Response, ResponseStreamEvent
from pydantic import TypeAdapter

from tests.support.service.running_service import Session

RESPONSE: TypeAdapter[Any] = TypeAdapter(Response)
EVENT: TypeAdapter[Any] = TypeAdapter(ResponseStreamEvent)


def ask(session: Session, stream: bool = False, **fields: Any) -> dict[str, Any]:
    """The response object; a streamed one's events are checked on the way."""
    return ask_stream(session, **fields)[0] if stream else ask_whole(session, **fields)


def ask_whole(session: Session, **fields: Any) -> dict[str, Any]:
    raw = session.client.responses.with_raw_response.create(model="policy", **fields)
    RESPONSE.validate_json(raw.content, strict=True)
    response: dict[str, Any] = json.loads(raw.content)
    return response


def ask_stream(
    session: Session, *, on_line: Callable[[str], None] = lambda line: None, **fields: Any
) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """(the last event's response object, all events). `on_line` is given each line as soon as it comes."""

    def noticed(lines: Iterable[str]) -> Iterator[str]:
        for line in lines:
            on_line(line)
            yield line

    with session.client.responses.with_streaming_response.create(model="policy", stream=True, **fields) as raw:
        events = read_events(noticed(raw.iter_lines()))
    for event in events:
        EVENT.validate_json(json.dumps(event), strict=True)
    check_order(events)
    assert events[-1]["type"] == f"response.{events[-1]['response']['status']}"
    return events[-1]["response"], events


def read_events(lines: Iterable[str]) -> list[dict[str, Any]]:
    """The events of a stream, each named before its data."""
    events: list[dict[str, Any]] = []
    name = ""
    for line in lines:
        if line.startswith("event: "):
            name = line.removeprefix("event: ")
        elif line:
            events.append(json.loads(line.removeprefix("data: ")))
            assert events[-1]["type"] == name
    return events


def check_order(events: list[dict[str, Any]]) -> None:
    """One item after the other, deltas that make up what the finished item says, and the same items in the end."""
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    assert [event["type"] for event in events[:2]] == ["response.created", "response.in_progress"]
    done: list[dict[str, Any]] = []
    begun, told = None, ""
    for event in events:
        kind = event["type"]
        if kind == "response.output_item.added":
            assert begun is None and event["output_index"] == len(done)
            begun, told = event["item"], ""
        elif kind == "response.output_item.done":
            assert begun is not None and begun["id"] == event["item"]["id"] and event["output_index"] == len(done)
            assert told in ("", said(event["item"]))
            done.append(event["item"])
            begun = None
        elif "output_index" in event:
            assert begun is not None and event["item_id"] == begun["id"] and event["output_index"] == len(done)
            told += event.get("delta", "")
    assert begun is None
    assert events[-1]["response"]["output"] == done


def said(item: dict[str, Any]) -> str:
    """The text that an item's deltas tell."""
    parts = [*(item.get("summary") or ()), *(item.get("content") or ())]
    return "".join(part["text"] for part in parts) + str(item.get("arguments", "")) + str(item.get("input", ""))
