"""An engine that costs next to nothing, so that what is measured is the service: vLLM's token routes and its chat route, no model
behind them.

A message's ids are made of its bytes and remembered, so a history is rendered by joining arrays. Every reply is `--tokens` random
ids and an end of turn, read back as one tool call. The format is ChatML's: a newline follows the end of every turn.

`python -m benchmarks.fast_engine` prints its URL. `GET /seconds` answers with the seconds of CPU it has used.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import random
import socket
import time
import zlib
from collections.abc import Awaitable, Callable
from typing import Any

import msgspec
import numpy as np
from aiohttp import web

START, END, NEWLINE = 1, 2, 3
FIRST_WORD, VOCABULARY = 16, 32_000
ROLES = {"system": 4, "user": 5, "assistant": 6, "tool": 7}
BYTES_PER_TOKEN = 4
WINDOW = 4_000_000

Ids = np.ndarray[Any, np.dtype[np.int32]]


class _Chat(msgspec.Struct):
    messages: list[msgspec.Raw]
    add_generation_prompt: bool = True


class _Role(msgspec.Struct):
    role: str


class _Generate(msgspec.Struct):
    token_ids: list[int]
    request_id: str = ""


class _Choice(msgspec.Struct):
    token_ids: list[int]


class _Response(msgspec.Struct):
    choices: list[_Choice]


class _Derender(msgspec.Struct):
    generate_response: _Response


class FastEngine:
    def __init__(self, tokens: int) -> None:
        self._tokens = tokens
        self._random = random.Random(1)
        self._rendered: dict[bytes, Ids] = {}
        self._numbers = itertools.count()

    def app(self) -> web.Application:
        app = web.Application(client_max_size=2**30)
        app.router.add_get("/v1/models", self._models)
        app.router.add_get("/health", self._health)
        app.router.add_get("/seconds", self._seconds)
        for path, answer in (
            ("/v1/chat/completions", self._chat),
            ("/v1/chat/completions/render", self._render),
            ("/inference/v1/generate", self._generate),
            ("/v1/chat/completions/derender", self._derender),
        ):
            app.router.add_post(path, _posted(answer))
        return app

    async def _models(self, _: web.Request) -> web.Response:
        card = {"id": "policy", "object": "model", "max_model_len": WINDOW}
        return _json({"object": "list", "data": [card]})

    async def _health(self, _: web.Request) -> web.Response:
        return web.Response()

    async def _seconds(self, _: web.Request) -> web.Response:
        return _json(time.process_time())

    def _render(self, body: bytes) -> Any:
        chat = msgspec.json.decode(body, type=_Chat)
        parts = [self._message(bytes(raw)) for raw in chat.messages]
        if chat.add_generation_prompt:
            parts.append(np.array([START, ROLES["assistant"]], dtype=np.int32))
        return {"token_ids": np.concatenate(parts).tolist(), "sampling_params": {"temperature": 1.0}, "model": "policy"}

    def _message(self, raw: bytes) -> Ids:
        ids = self._rendered.get(raw)
        if ids is None:
            role = msgspec.json.decode(raw, type=_Role).role
            words = np.random.default_rng(zlib.crc32(raw)).integers(FIRST_WORD, VOCABULARY, len(raw) // BYTES_PER_TOKEN)
            ids = np.array([START, ROLES[role], *words, END, NEWLINE], dtype=np.int32)
            self._rendered[raw] = ids
        return ids

    def _chat(self, body: bytes) -> Any:
        """What a plain client is told; ids and logprobs as well, which vLLM tells when it is asked for them."""
        prompt = self._render(body)["token_ids"]
        choice = self._sampled()
        told = {name: choice[name] for name in ("index", "token_ids", "stop_reason")}
        entries = [
            {"token": "word", "logprob": entry["logprob"], "top_logprobs": []} for entry in choice["logprobs"]["content"]
        ]
        message = self._message_of(choice["token_ids"])
        usage = {"prompt_tokens": len(prompt), "completion_tokens": len(choice["token_ids"])}
        usage["total_tokens"] = sum(usage.values())
        return {
            "id": "chatcmpl-1",
            "object": "chat.completion",
            "created": 1_700_000_000,
            "model": "policy",
            "choices": [told | {"message": message, "finish_reason": "tool_calls", "logprobs": {"content": entries}}],
            "usage": usage,
            "prompt_token_ids": prompt,
        }

    def _generate(self, body: bytes) -> Any:
        asked = msgspec.json.decode(body, type=_Generate)
        return {"request_id": asked.request_id, "choices": [self._sampled()]}

    def _sampled(self) -> dict[str, Any]:
        ids = [*self._random.choices(range(FIRST_WORD, VOCABULARY), k=self._tokens), END]
        entries = [{"token_id": token_id, "logprob": -token_id / VOCABULARY, "rank": 1, "top_logprobs": []} for token_id in ids]
        return {
            "index": 0,
            "token_ids": ids,
            "finish_reason": "stop",
            "stop_reason": None,
            "logprobs": {"content": entries},
            "weight_versions": [{"version": "0", "start": 0, "end": len(ids)}],
        }

    def _derender(self, body: bytes) -> Any:
        said = msgspec.json.decode(body, type=_Derender).generate_response.choices[0].token_ids
        return {"choices": [{"index": 0, "message": self._message_of(said)}]}

    def _message_of(self, said: list[int]) -> dict[str, Any]:
        text = " ".join(map(str, said[: len(said) // 2]))
        function = {"name": "lookup", "arguments": msgspec.json.encode({"key": text, "number": next(self._numbers)}).decode()}
        call = {"id": "call_0", "type": "function", "function": function}
        return {"role": "assistant", "content": None, "tool_calls": [call]}


def _posted(answer: Callable[[bytes], Any]) -> Callable[[web.Request], Awaitable[web.Response]]:
    async def handle(request: web.Request) -> web.Response:
        body = await request.read()
        try:
            return _json(answer(body))
        except msgspec.DecodeError as error:  # the service asks with {} whether the route is there
            return _json({"error": {"message": str(error), "type": "BadRequestError", "code": 400}}, 400)

    return handle


def _json(answer: Any, status: int = 200) -> web.Response:
    return web.Response(body=msgspec.json.encode(answer), status=status, content_type="application/json")


async def serve(tokens: int) -> None:
    listener = socket.socket()
    listener.bind(("127.0.0.1", 0))
    runner = web.AppRunner(FastEngine(tokens).app(), access_log=None)
    await runner.setup()
    await web.SockSite(runner, listener).start()
    print(f"http://127.0.0.1:{listener.getsockname()[1]}", flush=True)
    await asyncio.Event().wait()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", type=int, default=63, help="ids sampled per reply, without the end of turn")
    asyncio.run(serve(parser.parse_args().tokens))


if __name__ == "__main__":
    main()
