"""A dialect as another package would bring it: turns of me and you, answered as JSON or as lines of JSON."""

from __future__ import annotations

import json
from typing import Any

from proxy.dialects import fields
from proxy.dialects.base import (
    Choice,
    Delta,
    Dialect,
    Endpoint,
    ErrorAnswer,
    Incoming,
    ParsedMessage,
    Past,
    Reply,
    Request,
    one_by_one,
    retry_headers,
)
from proxy.errors import RequestError, VerbatimError


class ToyDialect(Dialect):
    name = "toy"
    title = "Toy (`/toy/ask`)"
    endpoints = (
        Endpoint("call", "POST", "/toy/ask", "Ask", "Turns in, a turn out.", {"model": "policy", "turns": []}, versions="/toy"),
    )
    paths = "/toy/"
    client = "toy"
    base_url_suffix = "/toy"
    history_field = "turns"
    operation = "toy_talk"

    def parse(self, incoming: Incoming, past: Past) -> Request:
        split = past.split(incoming.body, "turns", one_by_one(read_turn))
        body, (history, _) = split.fields, past.read(split, one_by_one(read_turn))
        if not history:
            raise RequestError("'turns' must not be empty", param="turns")
        return Request(
            dialect=self.name,
            model=fields.model(body),
            history=history,
            sampling=fields.sampling(body, {"most": "max_tokens"}),
            stream=fields.flag(body, "stream"),
            stream_type="application/x-ndjson",
        )

    def render(self, request: Request, reply: Reply) -> bytes:
        return json.dumps({"you": said(reply.choices[0]), "why": reply.choices[0].finish_reason}).encode()

    def open_stream(self, request: Request, reply_id: str, created: int, prompt_tokens: int) -> ToyStream:
        return ToyStream()

    def render_error(self, error: VerbatimError) -> ErrorAnswer:
        return ErrorAnswer(error.status, retry_headers(error), json.dumps({"oops": error.code, "at": error.param}).encode())


class ToyStream:
    def __init__(self) -> None:
        self._said = ""

    def open(self) -> bytes:
        return line(hello=True)

    def write(self, delta: Delta) -> bytes:
        self._said += delta.content
        return line(you=delta.content)

    def keep_alive(self) -> bytes:
        return line(wait=True)

    def close(self, reply: Reply) -> bytes:
        rest = said(reply.choices[0]).removeprefix(self._said)
        return line(you=rest) + line(why=reply.choices[0].finish_reason)

    def fail(self, error: VerbatimError) -> bytes:
        return line(oops=error.code)


def read_turn(raw: bytes, _: Past) -> list[ParsedMessage]:
    turn = fields.decode(raw)
    role = "user" if "me" in turn else "assistant"
    return [ParsedMessage({"role": role, "content": turn["me" if role == "user" else "you"]})]


def said(choice: Choice) -> str:
    text: str = choice.message.get("content") or ""
    return text


def line(**found: Any) -> bytes:
    return json.dumps(found).encode() + b"\n"
