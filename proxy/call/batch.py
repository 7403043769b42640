"""Several calls that one request asks for, as an array of prompts does: each is a call of its own, and their answers become one.

An `ArrayMember` is what one of these calls takes for its client. What it writes goes out at once where it is streamed, with its choices
renumbered; a whole answer waits for the others. A member that fails ends the request: the others are cut, and nothing counts as delivered.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import msgspec

from proxy.call.http import JSON, Client, Headers

_DONE = b"data: [DONE]\n\n"
_decode, _encode = msgspec.json.decode, msgspec.json.Encoder().encode


class PromptArray:
    """The answer to a request for `count` calls, to `client`."""

    def __init__(self, client: Client, count: int) -> None:
        self.client = client
        self.parts = [ArrayMember(self, number) for number in range(count)]
        self.ended = asyncio.Event()
        """Set once there is nothing more to send."""
        self.delivered: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        self.is_cut = self.failed = False
        self.reply_id = ""
        self._usage: dict[str, Any] | None = None
        self._begun = False
        client.on_leave(self.cut)

    def cut(self) -> None:
        """End the calls that still run, and those that begin later."""
        self.is_cut = True
        for part in self.parts:
            if part.leave is not None:
                part.leave()

    def begin_stream(self, status: int, headers: Headers) -> None:
        if not self._begun and not self.ended.is_set():
            self._begun = True
            self.client.start(status, headers)

    def write(self, part: ArrayMember, body: bytes) -> None:
        """Pass on the events of a part's stream."""
        for event in filter(None, body.split(b"\n\n")):
            said = event.removeprefix(b"data: ")
            if self.failed or said == b"[DONE]":
                continue
            chunk = _decode(said)
            if "error" in chunk:
                self.fail(200, [], said)
            elif not chunk["choices"]:
                self._add_usage(chunk)
            else:
                self.client.write(b"data: %b\n\n" % _encode(self._renumber(part, chunk)))

    def fail(self, status: int, headers: Headers, body: bytes) -> None:
        """Answer with the error of a part."""
        if self.failed:
            return
        self.failed = True
        self.cut()
        if self._begun:
            self.client.write(b"data: %b\n\n" % body, last=True)
        else:
            self.client.send_whole(status, headers, body)
        self.ended.set()

    def end_part(self) -> None:
        """A part has said all it has to say; after the last one, so has the request."""
        if self.failed or not all(part.ended for part in self.parts):
            return
        if self._begun:
            usage = b"data: %b\n\n" % _encode(self._usage) if self._usage is not None else b""
            self.client.write(usage + _DONE, last=True)
        else:
            answers = [_decode(part.whole) for part in self.parts]
            for answer in answers:
                self._add_usage(answer)
            pairs = zip(self.parts, answers, strict=True)
            choices = [choice for part, answer in pairs for choice in self._renumber(part, answer)["choices"]]
            self.client.send_whole(200, JSON, _encode({**(self._usage or {}), "choices": choices}))
        self.ended.set()

    def _renumber(self, part: ArrayMember, answer: dict[str, Any]) -> dict[str, Any]:
        """OpenAI's order: all choices of the first prompt, then those of the second. All have one id: it is one answer."""
        first = part.number * part.choices
        choices = [{**choice, "index": first + choice["index"]} for choice in answer["choices"]]
        return {**answer, "id": f"cmpl-{self.reply_id}", "choices": choices}

    def _add_usage(self, answer: dict[str, Any]) -> None:
        """The sum of what the parts used, in the first one's frame."""
        if self._usage is None:
            self._usage = {**answer, "id": f"cmpl-{self.reply_id}"}
            return
        said, more = self._usage["usage"], answer["usage"]
        details = {name: value + more["prompt_tokens_details"][name] for name, value in said["prompt_tokens_details"].items()}
        counts = {name: said[name] + more[name] for name in ("prompt_tokens", "completion_tokens", "total_tokens")}
        self._usage["usage"] = {**counts, "prompt_tokens_details": details}


class ArrayMember(Client):
    """The client of one of the calls."""

    def __init__(self, batch: PromptArray, number: int) -> None:
        self.status = None
        self.receive = batch.client.receive
        self.number, self.choices = number, 1
        self.leave: Callable[[], None] | None = None
        self.whole = b""
        self.ended = False
        self._batch = batch

    def take_turn(self, reply_id: str, choices: int) -> None:
        """The call begins, whose reply has that many choices."""
        self._batch.reply_id = self._batch.reply_id or reply_id
        self.choices = choices

    def start(self, status: int, headers: Headers) -> None:
        self.status = status
        self._batch.begin_stream(status, headers)

    def write(self, body: bytes, *, last: bool = False) -> None:
        self._batch.write(self, body)
        if last:
            self.ended = True
            self._batch.end_part()

    def send_whole(self, status: int, headers: Headers, body: bytes) -> None:
        self.status = status
        if status != 200:
            self._batch.fail(status, headers, body)
            return
        self.whole, self.ended = body, True
        self._batch.end_part()

    def on_leave(self, leave: Callable[[], None]) -> None:
        self.leave = leave
        if self._batch.is_cut:
            leave()

    async def flushed(self) -> bool:
        """Whether the whole answer to the request went out; waits until that is known."""
        return await asyncio.shield(self._batch.delivered)

    async def close(self) -> None:
        """Nothing: the request's client is closed by itself."""
