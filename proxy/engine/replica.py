"""Replica: one engine as the pool knows it, and `contact`, the probe that finds out.

A probe asks for the models and for `/health`; one that meets an engine for the first time also finds out which API it speaks.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, field
from typing import Any

import aiohttp

from proxy.engine.detection import PROBE_TIMEOUT, Api, find_api, find_logprob_mode
from proxy.engine.health import Health
from proxy.engine.membership import EngineSpec, engine_url
from proxy.errors import EngineUnavailable

log = logging.getLogger(__name__)

STARTED_UNDER = "default"
"""What vLLM and SGLang label the weights that they were started with."""


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
