"""Which API an engine speaks, found without letting it sample.

A probe posts `{}` to the routes it asks about: an engine that has the route answers 400 or 422, one that has not answers
404 or 405. So it needs no OpenAPI page and costs the engine nothing. SGLang says what it is on `/model_info`, or in earlier versions
`/get_model_info`; vLLM tells its version on `/version`.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any, Literal

import aiohttp

from proxy.engine import worker_extension
from proxy.errors import EngineUnavailable

Api = Literal["token", "completions", "sglang", "chat"]
"""token: vLLM's token-in token-out endpoints. completions: ids on `/v1/completions`. sglang: its `/generate`. chat: any
OpenAI-compatible server, which renders itself. For the two in the middle this service renders (VERBATIM_RENDERER)."""

# A busy engine may think for a while about a small question; a dead one refuses the connection at once.
PROBE_TIMEOUT = aiohttp.ClientTimeout(total=30.0, sock_connect=5.0)

TOKEN_ROUTES = ("/inference/v1/generate", "/v1/chat/completions/render", "/v1/chat/completions/derender")

_LATER = (429, 502, 503, 504)
"""Answers that say nothing of a route but that it should be asked later."""

_RETURNS_IDS_SINCE = (0, 10, 2)
"""The vLLM version whose `/v1/completions` has `return_token_ids`."""


@dataclass(frozen=True, slots=True)
class Found:
    """`updatable`: the engine has routes that take new weights."""

    api: Api
    updatable: bool

    @property
    def asks_workers(self) -> bool:
        """Whether vLLM's workers can be asked what they are, which goes over the same routes."""
        return self.updatable and self.api != "sglang"


async def find_api(http: aiohttp.ClientSession, url: str, asked: str, *, renders: bool) -> Found:
    """The API to use: `asked` where the engine has it, for "auto" the one that keeps most. `renders`: there is a renderer here, so
    that an engine which takes ids only can be used. Raises EngineUnavailable for an engine that has not what was asked for, and
    what aiohttp raises."""
    probe = _Probe(http, url)
    if asked == "chat":
        return Found("chat", await probe.takes_weights())
    if asked in ("auto", "token"):
        missing = await probe.missing(*TOKEN_ROUTES)
        if not missing:
            return Found("token", await probe.takes_weights())
        if asked == "token":
            raise EngineUnavailable(f"it has no {missing[0]}; start vLLM with --enable-scale-out, or use the chat API")
    if asked == "sglang" or (asked == "auto" and renders):
        if await probe.is_sglang():
            return Found("sglang", True)
        if asked == "sglang":
            raise EngineUnavailable("it is no SGLang: neither /model_info nor /get_model_info tells of a model")
    if asked == "completions" or (asked == "auto" and renders):
        missing = await probe.missing("/v1/completions")
        if not missing and (asked == "completions" or await probe.returns_ids()):
            return Found("completions", await probe.takes_weights())
        if asked == "completions":
            raise EngineUnavailable("it has no /v1/completions")
    return Found("chat", await probe.takes_weights())


async def find_logprob_mode(http: aiohttp.ClientSession, url: str) -> str | None:
    """vLLM's `--logprobs-mode`, from the workers of an engine that has this project's extension; None where they do not say, or not
    the same, and where it is known that they cannot. Raises what aiohttp raises."""

    async def told(route: str) -> dict[str, Any]:
        async with http.get(f"{url}{route}", timeout=PROBE_TIMEOUT) as response:
            try:
                answer = await response.json(content_type=None) if response.status == 200 else None
            except ValueError:
                answer = None
            return answer if isinstance(answer, dict) else {}

    if await worker_extension.is_missing(told):
        return None
    question = {"method": "verbatim_weights"}
    async with http.post(f"{url}/collective_rpc", json=question, timeout=PROBE_TIMEOUT) as response:
        if response.status != 200:
            return None
        try:
            answers = (await response.json(content_type=None))["results"]
            modes = {answer.get("logprob_mode") for answer in answers}
        except (ValueError, KeyError, TypeError, AttributeError):
            return None
    mode = modes.pop() if len(modes) == 1 else None
    return mode if isinstance(mode, str) else None


class _Probe:
    def __init__(self, http: aiohttp.ClientSession, url: str) -> None:
        self._http = http
        self._url = url

    async def takes_weights(self) -> bool:
        return await self._status("GET", "/weight_info") == 200

    async def missing(self, *routes: str) -> list[str]:
        statuses = [await self._status("POST", route) for route in routes]
        return [route for route, status in zip(routes, statuses, strict=True) if status not in (400, 422)]

    async def is_sglang(self) -> bool:
        for route in ("/model_info", "/get_model_info"):
            if "is_generation" in await self._object(route):
                return not await self.missing("/generate")
        return False

    async def returns_ids(self) -> bool:
        """Whether it is a vLLM new enough; others have the route, too, and are not known to take ids."""
        version = re.match(r"(\d+)\.(\d+)\.(\d+)", str((await self._object("/version")).get("version") or ""))
        return version is not None and tuple(map(int, version.groups())) >= _RETURNS_IDS_SINCE

    async def _object(self, route: str) -> dict[str, Any]:
        async with self._http.get(self._url + route, timeout=PROBE_TIMEOUT) as response:
            if response.status != 200:
                return {}
            try:
                answer = await response.json(content_type=None)
            except ValueError:
                return {}
        return answer if isinstance(answer, dict) else {}

    async def _status(self, method: str, route: str) -> int:
        body: dict[str, str] | None = {} if method == "POST" else None
        async with self._http.request(method, self._url + route, json=body, timeout=PROBE_TIMEOUT) as response:
            if response.status in _LATER:
                raise EngineUnavailable(f"{route} answered HTTP {response.status}: what it can do is not known yet")
            return response.status
