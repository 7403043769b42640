"""OpenAI's API as its vendors serve it: a key, a list of models, no token ids, rate limits, and 400 for any field that is not known.

server = StrictServer(words=GROQ, refuses={"logprobs"})   # beside every field that OpenAI's chat API does not have
server.busy("2", "0")                                     # the next calls get 429 with these Retry-After headers
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Mapping
from typing import Any, Self

from tests.support.engine.scripted_completions import CompletionCalls
from tests.support.engine.scripted_engine import Exchange, Route, ScriptedEngine

KEY = "sk-strict-0123456789"
CHAT_FIELDS = frozenset(
    {"model", "messages", "stream", "stream_options", "tools", "tool_choice", "parallel_tool_calls", "response_format", "n"}
    | {"temperature", "top_p", "max_tokens", "max_completion_tokens", "stop", "seed", "logprobs", "top_logprobs", "logit_bias"}
    | {"presence_penalty", "frequency_penalty", "reasoning_effort", "user", "store", "metadata"}
)

Words = Callable[[list[str]], tuple[int, Any]]
"""Status and body with which a server refuses these fields."""


def _error(message: str, param: str | None = None, status: int = 400) -> tuple[int, Any]:
    return status, {"error": {"message": message, "type": "invalid_request_error", "param": param, "code": None}}


def _problems(fields: list[str]) -> list[dict[str, Any]]:
    return [
        {"type": "extra_forbidden", "loc": ["body", field], "msg": "Extra inputs are not permitted", "input": True}
        for field in fields
    ]


def _violations(fields: list[str]) -> str:
    return "\n".join(f'Invalid JSON payload received. Unknown name "{field}": Cannot find field.' for field in fields)


WORDS: Mapping[str, Words] = {
    "openai, all": lambda fields: _error(f"Unrecognized request arguments supplied: {', '.join(fields)}"),
    "openai, one": lambda fields: _error(f"Unrecognized request argument supplied: {fields[0]}"),
    "openai, new": lambda fields: _error(f"Unknown parameter: '{fields[0]}'.", fields[0]),
    "openai, model": lambda fields: _error(
        f"Unsupported parameter: '{fields[0]}' is not supported with this model. Use 'max_completion_tokens' instead.",
        fields[0],
    ),
    "openai, kept": lambda fields: _error(f"You are not allowed to request {fields[0]} from this model", status=403),
    "pydantic": lambda fields: (422, {"detail": _problems(fields)}),
    "mistral": lambda fields: (
        422,
        {"object": "error", "message": {"detail": _problems(fields)}, "type": "invalid_request_error", "param": None},
    ),
    "tensorrt": lambda fields: (
        400,
        {"object": "error", "message": str(_problems(fields)), "type": "BadRequestError", "param": None, "code": 400},
    ),
    "gemini": lambda fields: (400, [{"error": {"code": 400, "message": _violations(fields), "status": "INVALID_ARGUMENT"}}]),
    "groq": lambda fields: _error(f"property '{fields[0]}' is unsupported, did you mean 'top_logprobs'?"),
    "serde": lambda fields: (
        422,
        f"Failed to deserialize the JSON body: unknown field `{fields[0]}`, expected one of `logprobs`, `stream_options`",
    ),
    "sglang": lambda fields: (
        400,
        {"object": "error", "message": f"{fields[0]} is not supported with streaming", "type": "BadRequestError", "code": 400},
    ),
}
"""How servers put it."""


class StrictServer(ScriptedEngine):
    """`refuses` and `refuses_streamed`: known fields that it does not take, of any request or of streamed ones. `ids`: it knows
    `return_token_ids`, and returns them."""

    def __init__(
        self,
        *,
        words: str = "openai, all",
        ids: bool = False,
        refuses: Collection[str] = (),
        refuses_streamed: Collection[str] = (),
        key: str = KEY,
        models: Collection[str] = ("policy",),
        lists_models: bool = True,
        base: str = "/v1",
    ) -> None:
        super().__init__(max_model_len=131072)
        self.words, self.not_taken, self.not_streamed = words, frozenset(refuses), frozenset(refuses_streamed)
        self._key, self._names, self._chat = key, models, CompletionCalls(self, ids=ids).chat
        self._known = CHAT_FIELDS | ({"return_token_ids"} if ids else frozenset())
        self._busy: deque[str] = deque()
        self._routes = {("POST", f"{base}/chat/completions"): self._guard(self._answer)}
        if lists_models:
            self._routes["GET", f"{base}/models"] = self._guard(self._list)

    def busy(self, *retry_after: str) -> Self:
        self._busy.extend(retry_after)
        return self

    def bodies(self) -> list[dict[str, Any]]:
        """Those of the calls, refused ones among them."""
        return [request.body for request in self.received if request.path.endswith("/chat/completions") and request.body]

    def _guard(self, route: Route) -> Route:
        async def answer(exchange: Exchange, body: Any) -> None:
            if self._key and exchange.headers.get("authorization") != f"Bearer {self._key}":
                given = exchange.headers.get("authorization", "")
                await exchange.answer(_error(f"Incorrect API key provided: {given}.")[1], 401)
            else:
                await route(exchange, body)

        return answer

    async def _list(self, exchange: Exchange, body: Any) -> None:
        await exchange.answer({"object": "list", "data": [{"id": name, "object": "model"} for name in self._names]})

    async def _answer(self, exchange: Exchange, body: Any) -> None:
        if self.is_aside(exchange.headers):
            return await self._chat(exchange, {**body, "model": self.model})
        if not body:
            return await exchange.answer(_error("you must provide a model parameter")[1], 400)
        if self._busy:
            told = _error("Rate limit reached for requests per min (RPM): Limit 3, Used 3.")[1]
            return await exchange.answer(told, 429, {"retry-after": self._busy.popleft()})
        if body["model"] not in self._names:
            return await exchange.answer(_error(f"The model `{body['model']}` does not exist", "model")[1], 404)
        not_taken = self.not_taken | (self.not_streamed if body.get("stream") else frozenset())
        if unknown := [field for field in body if field not in self._known or field in not_taken]:
            status, refusal = WORDS[self.words](unknown)
            return await exchange.answer(refusal, status)
        return await self._chat(exchange, {**body, "model": self.model})
