"""AlteredEngine: the scripted engine with every answer and event to a model call changed on its way out.

engine.alter = lambda answer: ...     # a whole answer or the data of one event, to be changed in place or replaced
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from tests.support.engine.scripted_engine import Exchange, Route, ScriptedEngine

SAMPLING = ("/inference/v1/generate", "/v1/chat/completions", "/v1/completions")

Alter = Callable[[dict[str, Any]], dict[str, Any] | None]


class AlteredEngine(ScriptedEngine):
    """`alter` gets what the engine would send, and returns what it sends; None: the argument, which it has changed. `also`: paths
    beside those that sample."""

    def __init__(self, *args: Any, alter: Alter | None = None, also: tuple[str, ...] = (), **fields: Any) -> None:
        super().__init__(*args, **fields)
        self.alter = alter
        for path in (*SAMPLING, *also):
            route = self._routes.get(("POST", path))
            if route is not None:
                self._routes["POST", path] = self._altered(route)

    def reset(self) -> AlteredEngine:
        self.alter = None
        super().reset()
        return self

    def _altered(self, route: Route) -> Route:
        async def answer(exchange: Exchange, body: Any) -> None:
            whole, event = exchange.answer, exchange.event

            async def answer_altered(told: Any, status: int = 200, headers: Mapping[str, str] | None = None) -> None:
                await whole(self._changed(told), status, headers)

            async def send_altered(data: Any) -> None:
                await event(self._changed(data))

            exchange.answer, exchange.event = answer_altered, send_altered  # type: ignore[assignment, method-assign]
            await route(exchange, body)

        async def answer_calls(exchange: Exchange, body: Any) -> None:
            await (route if self.is_aside(exchange.headers) else answer)(exchange, body)

        return answer_calls

    def _changed(self, told: Any) -> Any:
        if self.alter is None or not isinstance(told, dict):
            return told
        changed = self.alter(told)
        return told if changed is None else changed
