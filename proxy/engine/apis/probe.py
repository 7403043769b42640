"""Probe: asks an engine what it is, without letting it sample (that is `proxy.engine.apis.first_sample`).

To find out whether an engine has an endpoint the probe posts `{}` to it: an engine that has it answers 400 or 422, otherwise 404 or
405. This needs no OpenAPI page and costs the engine nothing.
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import aiohttp

from proxy.engine.replica import Replica
from proxy.errors import EngineUnavailable

# A busy engine may take long over a small question; a dead one refuses the connection at once.
PROBE_TIMEOUT = aiohttp.ClientTimeout(total=30.0, sock_connect=5.0)

_RETRY_LATER = (429, 502, 503, 504)
"""Answers that say nothing about an endpoint."""

V1 = "/v1"
"""Where the OpenAI routes of most servers stand."""

SGLANG_INFO = ("/server_info", "/get_server_info")
"""Where an SGLang describes itself: since 0.5, and before."""

_SHOWN = 64
"""Characters of a version, and of what stands in its place."""


class NotListening(EngineUnavailable):
    """No connection could be made: nothing listens at the engine's address."""


class Unreadable(EngineUnavailable):
    """The engine answers, and what it samples cannot be read: no call would work."""


class Probe:
    """Every method raises what aiohttp raises. `owner` is whom the engine's models belong to by its list, such as vllm or llamacpp."""

    def __init__(self, http: aiohttp.ClientSession, url: str) -> None:
        self._http = http
        self._url = url
        self._requests = 0
        self._connections: list[str] = []
        self.owner = ""

    @property
    def reconnected(self) -> bool:
        """Whether the connection kept from an earlier probe was gone, as it is when another engine answers now. Never for a server that
        keeps none."""
        return 0 < len(self._connections) < self._requests

    async def status(self, method: str, route: str) -> int:
        """The HTTP status. Raises EngineUnavailable for an engine too busy to answer."""
        body: dict[str, str] | None = {} if method == "POST" else None
        async with self._ask(method, route, body) as response:
            if response.status in _RETRY_LATER:
                raise EngineUnavailable(f"{route} answered HTTP {response.status}: what it can do is not known yet")
            return response.status

    async def read(self, route: str) -> dict[str, Any]:
        """The JSON object at the route, {} if there is none."""
        async with self._ask("GET", route) as response:
            try:
                answer = await response.json(content_type=None) if response.status == 200 else None
            except ValueError:
                answer = None
        return answer if isinstance(answer, dict) else {}

    async def find_missing(self, *routes: str) -> list[str]:
        statuses = [await self.status("POST", route) for route in routes]
        return [route for route, status in zip(routes, statuses, strict=True) if status not in (400, 422)]

    async def read_version(self, route: str, field: str) -> tuple[str, str]:
        """The version at the route and, where one cannot be read, what stands there; both "" if the engine does not have the route."""
        async with self._ask("GET", route) as response:
            if response.status != 200:
                return "", ""
            text = await response.text(errors="replace")
        try:
            answer = json.loads(text)
        except ValueError:
            return "", repr(text[:_SHOWN])
        version = answer.get(field) if isinstance(answer, dict) else None
        if isinstance(version, str) and version.isprintable() and 0 < len(version) <= _SHOWN:
            return version, ""
        return "", repr(text[:_SHOWN])

    async def find_logprob_mode(self) -> str | None:
        """vLLM's `--logprobs-mode` from workers with this project's extension; None if they do not say or disagree."""
        if await lacks_extension(self.read):
            return None
        question = {"method": "verbatim_weights"}
        async with self._ask("POST", "/collective_rpc", question) as response:
            if response.status != 200:
                return None
            try:
                modes = {answer.get("logprob_mode") for answer in (await response.json(content_type=None))["results"]}
            except (ValueError, KeyError, TypeError, AttributeError):
                return None
        mode = modes.pop() if len(modes) == 1 else None
        return mode if isinstance(mode, str) else None

    async def read_models(self, replica: Replica, *, fresh: bool = False) -> None:
        """Store on the replica which models it serves and, if it is met now (`fresh`), where its OpenAI routes stand. Raises
        EngineUnavailable if it refuses, ValueError for a malformed list."""
        path = V1 if fresh else replica.api_path
        status, text = await self._list_models(path)
        if fresh and not _lists_models(status, text):
            path, (status, text) = await self._find_api_path(status, text)
        replica.api_path, route = path, f"{path}/models"
        if status in (401, 403):
            raise EngineUnavailable(f"it refuses the engine API key (HTTP {status})")
        if status >= 500:
            raise EngineUnavailable(f"GET {route} answered HTTP {status}")
        if status != 200 and replica.names:
            raise EngineUnavailable(f"GET {route} answered HTTP {status}, but listed its models before")
        try:
            # A plain server may have only chat/completions: then any answer is a sign of life.
            cards = json.loads(text).get("data", []) if status == 200 else []
            _read_cards(replica, cards)
            self.owner = str(cards[0].get("owned_by") or "") if cards else ""
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise ValueError(f"GET {route} did not answer with a list of models") from error

    async def _find_api_path(self, status: int, text: str) -> tuple[str, tuple[int, str]]:
        """The path of the OpenAI routes, and the answer to GET models there, of a server whose answer to GET /v1/models is no list.

        The path is "" only if chat/completions is there: what else lists models may be no API."""
        under_v1 = V1, (status, text)
        if status >= 500 or await self._lacks("/chat/completions"):
            return under_v1
        answer = await self._list_models("")
        if _lists_models(*answer) or await self._lacks(f"{V1}/chat/completions"):
            return "", answer
        return under_v1

    async def _list_models(self, path: str) -> tuple[int, str]:
        """HTTP status and body."""
        async with self._ask("GET", f"{path}/models") as response:
            return response.status, await response.text(errors="replace")

    async def _lacks(self, route: str) -> bool:
        return await self.status("POST", route) in (404, 405)

    async def check_health(self) -> None:
        """vLLM answers 503 when the engine behind its server is dead. A server without the route is not judged by it."""
        async with self._ask("GET", "/health") as response:
            if response.status >= 500:
                raise EngineUnavailable(f"GET /health answered HTTP {response.status}")

    @asynccontextmanager
    async def _ask(self, method: str, route: str, body: Any = None) -> AsyncIterator[aiohttp.ClientResponse]:
        """The answer, which is read to its end: the connection is kept only then."""
        self._requests += 1
        asked = self._http.request(
            method, self._url + route, json=body, timeout=PROBE_TIMEOUT, trace_request_ctx=self._connections
        )
        async with asked as response:
            await response.read()
            yield response


def trace_connections() -> aiohttp.TraceConfig:
    """For a session whose probes are to know that they had to connect again."""

    async def count(session: aiohttp.ClientSession, context: Any, params: aiohttp.TraceConnectionCreateEndParams) -> None:
        if context.trace_request_ctx is not None:
            context.trace_request_ctx.append("connected")

    trace = aiohttp.TraceConfig()
    trace.on_connection_create_end.append(count)
    return trace


UNKNOWN = "unknown"
"""The one model that sglang-router lists of engines other than SGLang's, and that none of them serves."""


def _lists_models(status: int, text: str) -> bool:
    try:
        answer = json.loads(text) if status == 200 else None
    except ValueError:
        return False
    return isinstance(answer, dict) and isinstance(answer.get("data"), list)


def _read_cards(replica: Replica, cards: list[dict[str, Any]]) -> None:
    cards = [card for card in cards if card.get("id") != UNKNOWN]
    base = [card for card in cards if not card.get("parent")]
    lengths = [int(card["max_model_len"]) for card in base if card.get("max_model_len")]
    replica.models = tuple(str(card["id"]) for card in base)
    replica.names = replica.models
    replica.cards = {str(card["id"]): str(card.get("root") or "") for card in cards if card.get("parent")}
    replica.max_model_len = min(lengths) if lengths else None


async def lacks_extension(read: Callable[[str], Awaitable[dict[str, Any]]]) -> bool:
    """Whether vLLM's workers are known to lack `VerbatimWorker`; `read` gets a route of the engine. False if the server does not say.

    Its workers must not be called: a missing method fails in every worker, and of several vLLM reads only the first one's answer. The
    others stay in their queues and are taken for answers to later requests, on `/update_weights` or `/pause` for example, until the
    engine restarts (vLLM 0.32, `v1/executor/multiproc_executor.py`). A single worker's error is just that error."""
    if int((await read("/get_world_size")).get("world_size", 1)) <= 1:
        return False
    config = (await read("/server_info?config_format=json")).get("vllm_config")
    parallel = config.get("parallel_config") if isinstance(config, dict) else None
    if not isinstance(parallel, dict) or "worker_extension_cls" not in parallel:
        return False
    return not str(parallel["worker_extension_cls"]).endswith("VerbatimWorker")
