"""Requests of a given size, and vLLM 0.32's answers to them, made once: random ids, a text of as many words, their logprobs.

`Size.body` is a chat request whose messages have about a thousand tokens each; `answers` are what vLLM's chat route, its three token
routes and the plugin inside it say, whole and as a stream of one token per event.
"""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np

from benchmarks.load import Body
from proxy.engine.in_vllm.frames import PROTOCOL, About, DoneFrame, EndFrame, PieceFrame, PlanFrame, to_bytes, write_frame
from proxy.engine.wire.channels import WholeResponse
from reconstruct.records import pack_ids

MODEL = "policy"
MARK = "@"
WINDOW = 10_000_000
_VOCABULARY = 150_000
WORD = "word "
_BYTES_PER_TOKEN = 4
_TOKENS_PER_MESSAGE = 1_000


@dataclass(frozen=True, slots=True)
class Size:
    """A call of `prompt` tokens after which `sampled` are sampled."""

    name: str
    prompt: int
    sampled: int

    @property
    def label(self) -> str:
        return f"{self.name} ({self.prompt // 1000}k/{self.sampled if self.sampled < 1000 else f'{self.sampled // 1000}k'})"

    def messages(self) -> list[dict[str, str]]:
        """A history of user and assistant in turn, the user at both ends; it begins with MARK, where the call's number will stand."""
        count = self.prompt // _TOKENS_PER_MESSAGE | 1
        text = ("lorem ipsum dolor sit amet " * 1000)[: self.prompt // count * _BYTES_PER_TOKEN]
        roles = ["assistant" if place % 2 else "user" for place in range(count)]
        said = [{"role": role, "content": f"{place}: {text}"} for place, role in enumerate(roles)]
        said[0]["content"] = MARK + said[0]["content"]
        return said

    def body(self, stream: bool, **more: Any) -> Body:
        """For the chat dialect."""
        asked = {"model": MODEL, "messages": self.messages(), "max_tokens": self.sampled, "temperature": 1.0} | more
        return numbered_at_mark(asked | ({"stream": True} if stream else {}))


def numbered_at_mark(asked: dict[str, Any]) -> Body:
    """The request with the place of its number where MARK stands."""
    before, _, after = json.dumps(asked).partition(MARK)
    return Body(before, after)


SMALL, LARGE, VERY_LARGE = Size("small", 1_000, 128), Size("large", 32_000, 1_000), Size("very large", 128_000, 4_000)
SIZES = {size.name: size for size in (SMALL, LARGE, VERY_LARGE)}


def answers(size: Size, stream: bool) -> dict[str, bytes]:
    """The answer to each route, by the name of a file; those of `.sse` are streams."""
    made = _Answers(size)
    if stream:
        chat, generate = {"chat.sse": b"".join(made.chat_events())}, {"generate.sse": b"".join(made.generate_events())}
    else:
        chat, generate = {"chat.json": _json(made.chat())}, {"generate.json": _json(made.generate())}
    shared = {"models.json": _json(made.models()), "render.json": _json(made.render()), "derender.json": _json(made.derender())}
    plugin = {
        "about.json": msgspec.json.encode(About(PROTOCOL, "0.32", "static")),
        "sample.frames": b"".join(made.frames(stream)),
    }
    return shared | chat | generate | plugin


def parser_answer(body: bytes) -> WholeResponse:
    """What vLLM's parsers make of a reply's ids, as the answer to a request of that body: a word for each."""
    asked = json.loads(body)
    if "generate_chunk" in asked:
        new = len(asked["generate_chunk"]["choices"][0]["token_ids"])
        parsed: Any = {"chunk": {"choices": [{"delta": {"content": WORD * new}}]}, "stream_state": {}}
    else:
        count = len(asked["generate_response"]["choices"][0]["token_ids"])
        parsed = {"choices": [{"message": {"role": "assistant", "content": WORD * count}}]}
    answer = WholeResponse(asyncio.get_running_loop().create_future())
    answer.set_status(200, {})
    answer.finish(msgspec.json.encode(parsed))
    return answer


def plugin_steps(size: Size) -> list[bytes]:
    """What the plugin streams of a reply, by token."""
    return _Answers(size).frames(stream=True)


def chat_events(size: Size, *, legacy: bool = False) -> list[bytes]:
    """What vLLM's chat route streams of a reply, by event; `legacy`: its completions route."""
    return _Answers(size).chat_events(legacy=legacy)


def generate_events(size: Size) -> list[bytes]:
    """The same of its generate route."""
    return _Answers(size).generate_events()


class _Answers:
    def __init__(self, size: Size) -> None:
        dice = random.Random(size.prompt)
        self._size = size
        self._prompt = dice.choices(range(_VOCABULARY), k=size.prompt)
        self._sampled = dice.choices(range(_VOCABULARY), k=size.sampled)
        self._logprobs = [-round(dice.expovariate(2.0), 7) for _ in self._sampled]

    def models(self) -> Any:
        return {"object": "list", "data": [{"id": MODEL, "object": "model", "owned_by": "vllm", "max_model_len": WINDOW}]}

    def chat(self) -> Any:
        choice = {
            "index": 0,
            "message": self._message(),
            "logprobs": {"content": [self._entry(place) for place in range(self._size.sampled)]},
            "finish_reason": "stop",
            "stop_reason": None,
            "token_ids": self._sampled,
        }
        whole = {"prompt_logprobs": None, "prompt_token_ids": self._prompt, "kv_transfer_params": None}
        return self._head("chat.completion") | {"choices": [choice], "usage": self._usage(), **whole}

    def chat_events(self, *, legacy: bool = False) -> list[bytes]:
        head = self._head("chat.completion.chunk")
        first = {"index": 0, "delta": {"role": "assistant", "content": ""}, "logprobs": None, "finish_reason": None}
        events: list[Any] = [head | {"choices": [first], "prompt_token_ids": self._prompt}]
        for place, token in enumerate(self._sampled):
            last = place == self._size.sampled - 1
            choice = {
                "index": 0,
                "delta": {"content": WORD},
                "logprobs": {"content": [self._entry(place)]},
                "finish_reason": "stop" if last else None,
                "token_ids": [token],
            }
            if legacy:
                del choice["delta"]
                choice |= {"text": WORD, "logprobs": {"tokens": [WORD], "token_logprobs": [self._logprobs[place]]}}
            events.append(head | {"choices": [choice]})
        events.append(head | {"choices": [], "usage": self._usage()})
        return _events(events)

    def render(self) -> Any:
        sampling = {"temperature": 1.0, "max_tokens": self._size.sampled}
        return {
            "request_id": "chatcmpl-1",
            "token_ids": self._prompt,
            "sampling_params": sampling,
            "model": MODEL,
            "priority": 0,
        }

    def generate(self) -> Any:
        entries = [self._short_entry(place) for place in range(self._size.sampled)]
        choice = self._piece(self._sampled, entries) | self._end()
        return {"request_id": "generate-tokens-1", "choices": [choice], "prompt_logprobs": None, "kv_transfer_params": None}

    def generate_events(self) -> list[bytes]:
        events: list[Any] = []
        for place, token in enumerate(self._sampled):
            piece = self._piece([token], [self._short_entry(place)])
            events.append({"request_id": "generate-tokens-1", "choices": [piece]})
        events[-1]["choices"][0] |= self._end()
        events.append({"request_id": "generate-tokens-1", "choices": [], "usage": self._usage()})
        return _events(events)

    def frames(self, stream: bool) -> list[bytes]:
        """The plugin's, by token; all in one where nothing is streamed."""
        prompt = to_bytes(pack_ids(self._prompt))
        defaults = {"temperature": 1.0, "max_tokens": self._size.sampled}
        plan = PlanFrame(0, prompt, self._size.prompt, b"", None, None, False, self._size.sampled, 0, defaults)
        ids, logprobs = to_bytes(pack_ids(self._sampled)), np.array(self._logprobs, "<f4").tobytes()
        if stream:
            delta = {"content": WORD}
            pieces = [PieceFrame(0, ids[at : at + 4], logprobs[at : at + 4], delta) for at in range(0, len(ids), 4)]
        else:
            pieces = [PieceFrame(0, ids, logprobs)]
        end = EndFrame(0, "stop", None, self._message(), None, [("0", 0, self._size.sampled)], None, None)
        steps = [write_frame(piece) for piece in pieces]
        steps[0] = write_frame(plan) + steps[0]
        steps[-1] += write_frame(end) + write_frame(DoneFrame(0, None))
        return steps

    def derender(self) -> Any:
        """The whole message, and beside it what a step of a stream is answered with: nothing certain yet."""
        whole = {"choices": [{"index": 0, "message": self._message(), "finish_reason": "stop"}]}
        return self._head("chat.completion") | whole | {"chunk": {"choices": [{"index": 0, "delta": {}}]}, "stream_state": {}}

    def _head(self, kind: str) -> dict[str, Any]:
        return {"id": "chatcmpl-1", "object": kind, "created": 1_700_000_000, "model": MODEL}

    def _message(self) -> dict[str, Any]:
        return {"role": "assistant", "content": WORD * self._size.sampled, "reasoning": None, "tool_calls": []}

    def _usage(self) -> dict[str, Any]:
        prompt, sampled = self._size.prompt, self._size.sampled
        return {"prompt_tokens": prompt, "completion_tokens": sampled, "total_tokens": prompt + sampled}

    def _entry(self, place: int) -> Mapping[str, Any]:
        return {"token": WORD, "logprob": self._logprobs[place], "bytes": list(WORD.encode()), "top_logprobs": []}

    def _short_entry(self, place: int) -> Mapping[str, Any]:
        return {"token_id": self._sampled[place], "logprob": self._logprobs[place], "rank": 1, "top_logprobs": []}

    def _piece(self, ids: list[int], entries: list[Mapping[str, Any]]) -> dict[str, Any]:
        return {"index": 0, "token_ids": ids, "finish_reason": None, "stop_reason": None, "logprobs": {"content": entries}}

    def _end(self) -> dict[str, Any]:
        versions = [{"version": "0", "start": 0, "end": self._size.sampled}]
        return {"finish_reason": "stop", "weight_versions": versions}


def _json(answer: Any) -> bytes:
    return json.dumps(answer, separators=(",", ":")).encode()


def _events(events: list[Any]) -> list[bytes]:
    return [*(b"data: %s\n\n" % _json(event) for event in events), b"data: [DONE]\n\n"]
