"""Replica: one engine as the pool knows it, and `contact`, the probe that finds out.

A probe asks for the models and for `/health`; one that meets an engine for the first time also finds out which API it speaks.
"""

from __future__ import annotations

import logging
import re
import time
from collections import deque
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any, Literal

import aiohttp

from proxy.engine.pool.membership import EngineSpec, engine_url
from proxy.errors import EngineUnavailable

log = logging.getLogger(__name__)

STARTED_UNDER = "default"
"""What vLLM and SGLang label the weights that they were started with."""

# Which API an engine speaks, found without letting it sample.
#
# A probe posts `{}` to the routes it asks about: an engine that has the route answers 400 or 422, one that has not answers
# 404 or 405. So it needs no OpenAPI page and costs the engine nothing. SGLang says what it is on `/model_info`, or in earlier versions
# `/get_model_info`; vLLM tells its version on `/version`.


Api = Literal["token", "completions", "sglang", "chat"]
"""token: vLLM's token-in token-out endpoints. completions: ids on `/v1/completions`. sglang: its `/generate`. chat: any
OpenAI-compatible server, which renders itself. For the two in the middle this service renders (VERBATIM_RENDERER)."""

# Health: when failures take a replica out, and how many good probes bring it back.
#
# One refused connection is proof; a call that broke or a probe that timed out may be chance, so only some in a row count. A replica
# that comes and goes has to show more than one good probe before it is trusted again.


@dataclass(frozen=True, slots=True)
class HealthRule:
    """`failures` in a row, of calls or of probes, take a replica out. After two ejections within `flap_seconds` it needs
    `return_probes` good probes in a row to return, otherwise one."""

    failures: int = 3
    return_probes: int = 3
    flap_seconds: float = 60.0


class Health:
    """One replica's recent past. It counts; `standing` takes out and brings back."""

    def __init__(self, rule: HealthRule = HealthRule(), clock: Callable[[], float] = time.monotonic) -> None:
        self._rule = rule
        self._clock = clock
        self._failed_calls = 0
        self._failed_probes = 0
        self._good_probes = 0
        self._needed = 1
        self._ejections: deque[float] = deque(maxlen=2)

    @property
    def recovered(self) -> bool:
        """Whether it has answered as many probes in a row as it must to serve."""
        return self._good_probes >= self._needed

    @property
    def missing_probes(self) -> int:
        return max(0, self._needed - self._good_probes)

    @property
    def doubtful(self) -> bool:
        """Whether its last call or probe failed: worth another look soon."""
        return self._failed_calls > 0 or self._failed_probes > 0

    def call_failed(self) -> bool:
        """Whether that makes too many in a row."""
        self._failed_calls += 1
        return self._failed_calls >= self._rule.failures

    def call_worked(self) -> None:
        self._failed_calls = 0

    def probe_failed(self) -> bool:
        """Whether that makes too many in a row."""
        self._good_probes = 0
        self._failed_probes += 1
        return self._failed_probes >= self._rule.failures

    def probe_worked(self) -> None:
        self._failed_probes = 0
        self._good_probes += 1

    def ejected(self) -> None:
        """It was just taken out: what it must show to return."""
        now = self._clock()
        self._ejections.append(now)
        flaps = sum(1 for at in self._ejections if now - at <= self._rule.flap_seconds)
        self._needed = self._rule.return_probes if flaps > 1 else 1
        self._good_probes = self._failed_calls = self._failed_probes = 0


@dataclass(slots=True, eq=False)
class Replica:
    """An engine. `api` is how calls reach it; `models` the base models it serves, empty when it does not say.

    `adapter` is the LoRA adapter that stands before the base model, if the engine was started with one. `updatable`: it has
    the routes that take new weights. `weight_version` is that of its weights, None while unknown; 0 is whatever the engine
    was started with, before any push. `policy` names the model whose pool and version line it belongs to; "" is the default one.
    `names` are all models it answers to, adapters included. `source` says where it comes from: settings, api or a watched name.
    `logprob_mode` is that of its logprobs, None while it does not say. `draining`: it left the pool and only ends its calls.
    `in_flight` are this process's calls there, at most `max_calls` (0: any number).
    """

    name: str
    url: str
    policy: str = ""
    api: Api | None = None
    healthy: bool = False
    reason: str = "it was not reached yet"
    alive: bool = False
    models: tuple[str, ...] = ()
    adapter: str | None = None
    max_model_len: int | None = None
    updatable: bool = False
    weight_version: int | None = None
    names: tuple[str, ...] = ()
    source: str = "settings"
    logprob_mode: str | None = None
    draining: bool = False
    in_flight: int = 0
    max_calls: int = 0
    health: Health = field(default_factory=Health)
    unordered_label: str | None = None
    """The last label of its weights that was no version."""

    @property
    def met(self) -> bool:
        """Whether it was ever reached, and has said what it serves if it says that at all."""
        return self.api is not None or bool(self.names)

    @property
    def has_room(self) -> bool:
        """Whether it may take another call."""
        return not self.max_calls or self.in_flight < self.max_calls

    def model_for(self, asked: str) -> str:
        """What to send as "model" when the harness asked for `asked`: the adapter in the place of its base model, which is not
        what the replica's weight version speaks of."""
        name = self.served_as(asked)
        return self.adapter if self.adapter and name in self.models else name

    def served_as(self, asked: str) -> str:
        """The engine's own name for `asked`: one that it does not know means the first model it serves. Where it does not say what it
        serves the name stays, for the engine to take or refuse."""
        if not asked or asked in self.names or not self.models:
            return asked
        return self.models[0]

    def version_of(self, label: str | None) -> int | None:
        """The weight version that an engine's label on a span means, or None: such tokens must not reach a trainer.

        An engine that cannot take weights keeps the ones it started with, so no label, or the one that engines start under, means
        the replica's version. Any other label is a number: what else an engine is told to call its weights, by whoever changes
        them there, has no place in the order of versions.
        """
        if label is not None and label.isdecimal():
            return int(label)
        if self.updatable or label not in (None, STARTED_UNDER):
            self._warn_of(label)
            return None
        return self.weight_version

    def _warn_of(self, label: str | None) -> None:
        """Once for each label that comes up."""
        if label not in (self.unordered_label, STARTED_UNDER, None):
            log.warning(
                "engine %s labels its weights %r, which is no version number: what it samples is not trained", self.name, label
            )
        self.unordered_label = label


class NotListening(EngineUnavailable):
    """No connection could be made: nothing answers at the engine's address."""


def replica_at(url: str) -> Replica:
    """A replica not yet contacted. `url` may carry a trailing slash or /v1; the name is its host, port and path."""
    base = engine_url(url)
    return Replica(name=EngineSpec(base).name or base, url=base)


async def contact(http: aiohttp.ClientSession, replica: Replica, engine_api: str, *, renders: bool = False) -> None:
    """Learn what the engine is: models, api (see `find_api`), routes for weights. Raises EngineUnavailable with the reason it
    cannot serve, NotListening when no connection could be made."""
    try:
        await _list_models(http, replica)
        await _check_health(http, replica)
        if not replica.alive or replica.api is None:
            found = await find_api(http, replica.url, engine_api, renders=renders)
            replica.api, replica.updatable = found.api, found.updatable
            replica.logprob_mode = await find_logprob_mode(http, replica.url) if found.asks_workers else None
    except TimeoutError as error:
        raise EngineUnavailable(f"no answer within {PROBE_TIMEOUT.total:g} seconds") from error
    except aiohttp.ClientConnectorError as error:
        raise NotListening(f"cannot connect: {error.strerror or error.os_error}") from error
    except (aiohttp.ClientError, OSError, ValueError) as error:
        raise EngineUnavailable(str(error) or type(error).__name__) from error


async def _list_models(http: aiohttp.ClientSession, replica: Replica) -> None:
    async with http.get(f"{replica.url}/v1/models", timeout=PROBE_TIMEOUT) as response:
        if response.status in (401, 403):
            raise EngineUnavailable(f"it refuses the engine API key (HTTP {response.status})")
        if response.status >= 500:
            raise EngineUnavailable(f"GET /v1/models answered HTTP {response.status}")
        if response.status != 200 and replica.names:
            raise EngineUnavailable(f"GET /v1/models answered HTTP {response.status}, and told its models before")
        # A plain server may know only /v1/chat/completions: then any answer is a sign of life.
        answer = await response.json(content_type=None) if response.status == 200 else {}
    try:
        _read_cards(replica, answer.get("data", []))
    except (AttributeError, KeyError, TypeError) as error:
        raise ValueError("GET /v1/models answered something else than a list of models") from error


async def _check_health(http: aiohttp.ClientSession, replica: Replica) -> None:
    # vLLM's answers 503 when the engine behind the server is dead. A server without the route says nothing by it.
    async with http.get(f"{replica.url}/health", timeout=PROBE_TIMEOUT) as response:
        if response.status >= 500:
            raise EngineUnavailable(f"GET /health answered HTTP {response.status}")


def _read_cards(replica: Replica, cards: list[dict[str, Any]]) -> None:
    base = [card for card in cards if not card.get("parent")]
    adapters = [str(card["id"]) for card in cards if card.get("parent")]
    lengths = [int(card["max_model_len"]) for card in base if card.get("max_model_len")]
    replica.models = tuple(str(card["id"]) for card in base)
    replica.names = tuple(str(card["id"]) for card in cards)
    replica.adapter = adapters[0] if adapters else None
    replica.max_model_len = min(lengths) if lengths else None


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

    if await is_missing(told):
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


# Whether an engine's workers lack the methods of `vllm_backend.VerbatimWorker`, found out without asking them.
#
# A method that is not there fails in every worker. Of several vLLM takes the first one's answer and leaves the others' in their queues,
# where they are taken for the answers to what is asked next, on `/update_weights` or `/pause` for example, until the engine restarts
# (vLLM 0.32, `v1/executor/multiproc_executor.py`). So the server is asked instead, which knows how its workers were started.


EXTENSION = "VerbatimWorker"

Ask = Callable[[str], Awaitable[dict[str, Any]]]
"""GET a route of the engine, {} or an error of its own where there is none."""


async def is_missing(ask: Ask) -> bool:
    """Whether it is known that they are not there; False for an engine of one worker, whose error is just that, and where the
    server does not say. Raises what `ask` raises."""
    if int((await ask("/get_world_size")).get("world_size", 1)) <= 1:
        return False
    config = (await ask("/server_info?config_format=json")).get("vllm_config")
    parallel = config.get("parallel_config") if isinstance(config, dict) else None
    if not isinstance(parallel, dict) or "worker_extension_cls" not in parallel:
        return False
    return not str(parallel["worker_extension_cls"]).endswith(EXTENSION)
