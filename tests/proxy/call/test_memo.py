"""A session that remembers its last bodies reads every request as one that remembers nothing, in every dialect."""

from __future__ import annotations

import base64
import dataclasses
import io
import json
import random
from collections import Counter
from collections.abc import Callable, Mapping
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from proxy.call.draft import Draft
from proxy.call.session import Session
from proxy.dialects.base import Incoming, Request, one_by_one, seal
from proxy.dialects.catalogue import dialects
from proxy.dialects.chat import _read_message as READ
from proxy.errors import RequestError, UnknownCall
from proxy.store.states import SessionInfo

CALL_IDS = [f"{number:024x}" for number in (1, 2, 3)]
RECORDED = Path(__file__).parents[2] / "harnesses" / "recorded"
ROUNDS = 150


def new_session(*, memo: bool) -> Session:
    return Session(SessionInfo("s", b"", 1.0), memo=memo)


class Items:
    """Items of one dialect's histories: in any order, so also in orders that no harness sends."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)

    def text(self) -> str:
        if self.random.random() < 0.002:
            return "half \ud800"
        return " ".join(self.random.choice(["look", "<|im_end|>", "né", "12", "]"]) for _ in range(self.random.randrange(5)))

    def long(self) -> str:
        return self.text() + " word" * self.random.choice([0, 0, 2, 1500])

    def call(self) -> str:
        return self.random.choice(CALL_IDS)

    def picture(self) -> str:
        file = io.BytesIO()
        Image.new("RGB", (8, 8), (self.random.randrange(3), 0, 0)).save(file, "PNG")
        return base64.b64encode(file.getvalue()).decode()

    def chat(self) -> dict[str, Any]:
        call = f"call_{self.call()}_{self.random.randrange(2)}"
        function = {"name": "f", "arguments": json.dumps({"a": self.text()})}
        url = {"url": f"data:image/png;base64,{self.picture()}"}
        return self.random.choice(
            [
                {"role": "system", "content": self.text()},
                {"role": "developer", "content": self.text()},
                {"role": "user", "content": self.long()},
                {"role": "user", "name": "ann", "content": [{"type": "text", "text": self.text()}]},
                {"role": "user", "content": [{"type": "image_url", "image_url": url}]},
                {"role": "assistant", "content": self.long(), "reasoning": self.text()},
                {"role": "assistant", "content": None, "tool_calls": [{"id": call, "type": "function", "function": function}]},
                {"role": "tool", "tool_call_id": call, "content": self.long()},
                {"role": 5},
            ]
        )

    def messages(self) -> dict[str, Any]:
        call = f"toolu_{self.call()}_{self.random.randrange(2)}"
        source = {"type": "base64", "media_type": "image/png", "data": self.picture()}
        result = {"type": "tool_result", "tool_use_id": call, "content": self.long()}
        thinking = {"type": "thinking", "thinking": self.text(), "signature": seal(self.call(), self.text())}
        return self.random.choice(
            [
                {"role": "system", "content": self.text() or "s"},
                {"role": "user", "content": self.long()},
                {"role": "user", "content": [result, {"type": "text", "text": self.text()}]},
                {"role": "user", "content": [{"type": "image", "source": source}]},
                {"role": "assistant", "content": [thinking, {"type": "text", "text": self.long()}]},
                {"role": "assistant", "content": [{"type": "tool_use", "id": call, "name": "f", "input": {"a": self.text()}}]},
                {"role": "assistant", "content": self.long()},
                {"role": "system", "content": [{"type": "text", "text": self.text()}]},
                {"role": "nobody"},
            ]
        )

    def responses(self) -> dict[str, Any]:
        call, at = self.call(), self.random.randrange(2)
        identity = self.random.choice([{"id": f"fc_{call}_{at}"}, {}])
        url = f"data:image/png;base64,{self.picture()}"
        tool = {"type": "function", "name": self.random.choice("fgh"), "parameters": {"type": "object"}}
        return self.random.choice(
            [
                {"role": "user", "content": self.long()},
                {"role": self.random.choice(["system", "developer"]), "content": self.text()},
                {"type": "message", "role": "user", "content": [{"type": "input_image", "image_url": url}]},
                {"type": "reasoning", "summary": [], "encrypted_content": seal(call, self.text())},
                {"type": "reasoning", "id": f"rs_{call}", "summary": [{"type": "summary_text", "text": self.text()}]},
                {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": self.long()}]},
                {"type": "message", "role": "assistant", "id": f"msg_{call}", "content": self.long()},
                {"type": "function_call", "call_id": f"call_{call}_{at}", "name": "f", "arguments": "{}", **identity},
                {"type": "custom_tool_call", "call_id": f"call_{call}_{at}", "name": "p", "input": self.text()},
                {"type": "function_call_output", "call_id": f"call_{call}_{at}", "output": self.long()},
                {"type": "web_search_call", "id": "ws_1"},
                {"type": "additional_tools", "tools": [tool]},
                {"type": "nothing"},
            ]
        )

    def gemini(self) -> dict[str, Any]:
        identity = self.random.choice([{}, {"id": f"call_{self.call()}_0"}, {"id": "x"}])
        name = self.random.choice("fg")
        call: dict[str, Any] = {"functionCall": {"name": name, "args": {"a": self.text()}, **identity}}
        if self.random.random() < 0.5:
            call["thoughtSignature"] = seal(self.call(), self.text())
        response = {"functionResponse": {"name": name, "response": {"output": self.long()}, **identity}}
        picture = {"inlineData": {"mimeType": "image/png", "data": self.picture()}}
        return self.random.choice(
            [
                {"role": "user", "parts": [{"text": self.long()}]},
                {"parts": [{"text": self.text()}]},
                {"role": "user", "parts": [picture]},
                {"role": "model", "parts": [{"text": self.long()}]},
                {"role": "model", "parts": [{"text": self.text(), "thought": True}, call]},
                {"role": "model", "parts": [call, call]},
                {"role": "user", "parts": [response]},
                {"role": "function", "parts": [response, {"text": self.text()}]},
                {"role": "robot", "parts": [{"text": "t"}]},
            ]
        )


TOOLS: Mapping[str, Any] = {
    "chat": {"type": "function", "function": {"name": "f", "description": "d" * 1200, "parameters": {"type": "object"}}},
    "messages": {"name": "f", "description": "d" * 1200, "input_schema": {"type": "object"}},
    "responses": {"type": "function", "name": "f", "description": "d" * 1200, "parameters": {"type": "object"}},
    "gemini": {"functionDeclarations": [{"name": "f", "description": "d" * 1200, "parameters": {"type": "OBJECT"}}]},
}
SYSTEM: Mapping[str, Callable[[str], dict[str, Any]]] = {
    "chat": lambda text: {"reasoning_effort": text or "low"},
    "messages": lambda text: {"system": [{"type": "text", "text": text}]},
    "responses": lambda text: {"instructions": text},
    "gemini": lambda text: {"systemInstruction": {"parts": [{"text": text}]}},
}
LISTS_OF_PARTS = {"gemini": "parts"}


class Agent:
    """One conversation: what it sends next."""

    def __init__(self, name: str, items: Items) -> None:
        self.name, self.items, self.random = name, items, items.random
        self.history: list[Any] = []
        self.fields: dict[str, Any] = {"tools": [TOOLS[name]]}

    def next(self) -> bytes:
        make: Callable[[], Any] = getattr(self.items, self.name)
        kind = self.random.randrange(12)
        if kind == 0 and self.history:
            del self.history[self.random.randrange(len(self.history)) :]
        elif kind == 1 and self.history:
            self.history[-1] = make()
        elif kind == 2:
            self.fields = {**self.fields, **SYSTEM[self.name](self.items.text())}
        elif kind == 3:
            self.fields = {"tools": [TOOLS[self.name]] * self.random.randrange(1, 3), "model": "policy"}
        valid = [
            item for item in (make() for _ in range(self.random.randrange(4))) if self.random.random() < 0.1 or is_valid(item)
        ]
        self.history = [*self.history, *valid]
        if not self.history or self.history[-1].get("role") in ("assistant", "model"):
            self.history.append({"role": "user", LISTS_OF_PARTS.get(self.name, "content"): self.plain()})
        listed = dialects()[self.name].history_field
        body = {"model": "policy", **self.fields, listed: self.history}
        if self.random.random() < 0.3:
            body = dict(reversed(body.items()))
        return json.dumps(body, ensure_ascii=self.random.random() < 0.9).encode("utf-8", "surrogatepass")

    def plain(self) -> Any:
        return [{"text": self.items.long()}] if self.name == "gemini" else self.items.long()


def is_valid(item: Mapping[str, Any]) -> bool:
    """Whether the item is one of those that a dialect takes."""
    return item.get("role") not in (5, "nobody", "robot") and item.get("type") != "nothing"


def read(session: Session, name: str, body: bytes) -> tuple[Draft, Request | None, Any]:
    """The draft, the request, and all that matters of it or of the refusal."""
    draft = Draft(session)
    incoming = Incoming(body, {"model": "policy", "method": "generateContent"} if name == "gemini" else {})
    try:
        try:
            request = dialects()[name].parse(incoming, draft)
        except UnknownCall:
            draft.refreshed = True
            request = dialects()[name].parse(incoming, draft)
    except RequestError as error:
        return draft, None, (type(error), error.message, error.param)
    shown = {each.name: getattr(request, each.name) for each in dataclasses.fields(request) if each.compare and each.init}
    shown["history"] = [(seen.message, seen.digests, seen.minted, seen.images) for seen in request.history]
    roots = session.roots("", request.tools, request.template_kwargs)
    chained = session.extend_chain(roots[1], request.history)
    session.remember(chained)
    return draft, request, (shown, roots, chained.fingerprints, chained.names)


@pytest.mark.parametrize("name", ["chat", "messages", "responses", "gemini"])
def test_requests_read_with_a_memo_are_those_read_without(name: str) -> None:
    items = Items(1)
    session, agents, short = new_session(memo=True), [Agent(name, items), Agent(name, items)], 0
    for _ in range(ROUNDS):
        agent = items.random.choice(agents)
        body = agent.next()
        draft, request, got = read(session, name, body)
        _, _, wanted = read(new_session(memo=False), name, body)
        assert got == wanted, body
        short += draft.way in ("fast", "medium")
        chance = items.random.random()
        if request is None:
            agent.history = [item for item in agent.history if is_valid(item)]
        elif chance < 0.8:
            draft.keep()
        elif chance < 0.85:
            # Evicted, or another process answers.
            session = new_session(memo=True)
        if len(agent.history) > 30:
            agent.history = []
    assert short > ROUNDS // 3


@pytest.mark.parametrize("path", sorted(RECORDED.glob("*.json")), ids=lambda path: path.stem)
def test_the_turns_of_recorded_agents_are_read_as_without_a_memo(path: Path) -> None:
    recorded, session = json.loads(path.read_text()), new_session(memo=True)
    messages: list[Any] = []
    ways = Counter[str]()
    for turn in recorded["turns"]:
        messages = [*messages[: turn["kept"]], *turn["messages"]]
        body = json.dumps({**recorded["body"], "messages": messages}).encode()
        draft, _, got = read(session, "chat", body)
        assert got == read(new_session(memo=False), "chat", body)[2]
        ways[draft.way] += 1
        draft.keep()
    assert ways["full"] == 1


def chat(*contents: str, **fields: Any) -> bytes:
    messages = [{"role": "user", "content": content} for content in contents]
    return json.dumps({"model": "policy", "messages": messages, **fields}).encode()


def test_what_was_not_recorded_is_not_remembered() -> None:
    session = new_session(memo=True)
    read(session, "chat", chat("a"))
    assert read(session, "chat", chat("a", "b"))[0].way == "full"


def test_what_one_dialect_makes_of_the_same_bytes_is_nothing_to_another() -> None:
    session, body = new_session(memo=True), chat("a", "b")
    for name in ("messages", "chat", "messages"):
        draft, _, got = read(session, name, body)
        draft.keep()
        assert got == read(new_session(memo=False), name, body)[2]
    incoming, draft = Incoming(body, later_system_role="system"), Draft(session)
    dialects()["messages"].parse(incoming, draft)
    assert draft.way == "full"


def test_agents_that_alternate_are_remembered_each() -> None:
    session = new_session(memo=True)
    ways = []
    for turn in range(1, 4):
        for agent in ("a", "b", "c"):
            draft = read(session, "chat", chat(*[agent] * turn))[0]
            ways.append(draft.way)
            draft.keep()
    assert ways == ["full"] * 3 + ["fast"] * 6


def test_what_is_remembered_is_weighed_and_bounded() -> None:
    session = new_session(memo=True)
    sizes = []
    for number in range(8):
        draft = read(session, "chat", chat(str(number), "x" * 4_000_000))[0]
        draft.keep()
        sizes.append(session.memos.size_bytes)
    assert 0 < sizes[0] < sizes[2] and max(sizes) < 2**24 + 10_000 and session.memory_bytes > sizes[-1]


def test_nothing_that_is_shared_with_later_requests_is_changed_by_reading_them() -> None:
    session, tools = new_session(memo=True), [TOOLS["chat"]]
    first = read(session, "chat", chat("a", tools=tools, tool_choice="auto"))
    first[0].keep()
    fields = deepcopy(session.memos.find(one_by_one(READ))[0].raw.fields)
    assert fields["tools"] == tools
    for turn in range(2, 5):
        draft, request, _ = read(session, "chat", chat(*["a"] * turn, tools=tools, tool_choice="auto"))
        assert request is not None and request.tools is first[1].tools
        draft.keep()
    assert session.memos.find(one_by_one(READ))[0].raw.fields == fields


@pytest.mark.parametrize("name", ["chat", "messages", "responses", "gemini"])
def test_tools_that_come_with_every_request_are_converted_once(name: str) -> None:
    session, items = new_session(memo=True), Agent(name, Items(2))
    offered = []
    for turn in range(3):
        items.history = [*items.history, {"role": "user", LISTS_OF_PARTS.get(name, "content"): items.plain()}]
        body = {**(SYSTEM[name](f"other {turn}")), "tools": [TOOLS[name]], "model": "policy"}
        text = json.dumps({**body, dialects()[name].history_field: items.history}).encode()
        draft, request, _ = read(session, name, text)
        assert request is not None
        offered.append(request.tools)
        draft.keep()
    assert offered[0] is offered[1] is offered[2]
