"""HTTP towards an engine: one way to post JSON, read a stream of events, and ask for the version of the weights.

aiohttp carries it: on one core it makes about three times as many calls a second as httpx.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from typing import Any, TypeVar

import aiohttp
import msgspec

from proxy.engine.line import Line
from proxy.engine.pool import EnginePool
from proxy.engine.refusals import refusal
from proxy.engine.replica import Replica
from proxy.errors import EngineFailed, EngineUnavailable, VerbatimError

_encode = msgspec.json.Encoder().encode

T = TypeVar("T")


class Told(msgspec.Struct):
    """What every answer and every event of a stream may carry."""

    error: Any = None


A = TypeVar("A", bound=Told)


class EventDecoder:
    """Server-sent events from bytes split anywhere: feed bytes, get the data of complete events."""

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, data: bytes) -> list[bytes]:
        *lines, self._rest = (self._rest + data).split(b"\n")
        return [line[5:].strip() for line in lines if line.startswith(b"data:")]


class EngineHttp:
    """Requests to replicas over the pool's shared connections; every failure becomes one of our own errors."""

    def __init__(self, pool: EnginePool) -> None:
        self._pool = pool

    async def post(
        self,
        replica: Replica,
        path: str,
        body: Any,
        answer: type[T],
        headers: dict[str, str] | None = None,
        line: Line | None = None,
    ) -> T:
        """The decoded answer. Raises RequestError for the engine's 4xx, EngineFailed or EngineUnavailable for the rest."""
        try:
            data = await self._exchange(replica, path, _encoded(replica, body), _json(headers), line)
        except asyncio.CancelledError:
            if line is None or not line.hung_up:
                raise
            raise line.absorb() from None
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            raise self._broken(replica, error, line) from error
        return _decoded(replica, path, data, answer)

    async def ask(self, replica: Replica, path: str, body: Any, answer: type[T]) -> T:
        """As `post`, for what may be asked twice: a connection that the engine had just closed costs a second try, not the call.
        It samples nothing, so when that one breaks, too, another replica may be asked: EngineUnavailable."""
        data = _encoded(replica, body)
        try:
            try:
                raw = await self._exchange(replica, path, data, _json(None), None)
            except (aiohttp.ServerDisconnectedError, aiohttp.ClientOSError):
                raw = await self._exchange(replica, path, data, _json(None), None)
        except (aiohttp.ServerDisconnectedError, aiohttp.ClientOSError) as error:
            raise EngineUnavailable(self._broken(replica, error).message) from error
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            raise self._broken(replica, error) from error
        return _decoded(replica, path, raw, answer)

    async def _exchange(self, replica: Replica, path: str, data: bytes, headers: dict[str, str], line: Line | None) -> bytes:
        async with self._pool.http.post(replica.url + path, data=data, headers=headers) as response:
            if line is not None:
                line.connected(response)
            answer = await response.read()
            if response.status != 200:
                raise refusal(replica, path, response.status, answer)
            replica.health.call_worked()
            return answer

    async def events(
        self, replica: Replica, path: str, body: Any, line: Line, headers: dict[str, str] | None = None
    ) -> AsyncIterator[bytes]:
        """The data of each event up to [DONE]. Raises as `post`; EngineFailed when the stream ends without [DONE] or the
        line is hung up."""
        decoder, data = EventDecoder(), _encoded(replica, body)
        try:
            async with self._pool.http.post(replica.url + path, data=data, headers=_json(headers)) as response:
                line.connected(response)
                if response.status != 200:
                    raise refusal(replica, path, response.status, await response.read())
                async for chunk in response.content.iter_any():
                    for event in decoder.feed(chunk):
                        if event == b"[DONE]":
                            replica.health.call_worked()
                            return
                        yield event
        except asyncio.CancelledError:
            if not line.hung_up:
                raise
            raise line.absorb() from None
        except (TimeoutError, aiohttp.ClientError, OSError) as error:
            raise self._broken(replica, error, line) from error
        if not line.hung_up:
            self._pool.call_failed(replica, "streams end without their end", refused=False)
        raise EngineFailed(f"engine {replica.name} broke off in the middle of a reply")

    async def answers(
        self,
        replica: Replica,
        path: str,
        body: Any,
        answer: type[A],
        line: Line,
        *,
        stream: bool,
        headers: dict[str, str] | None = None,
    ) -> AsyncIterator[A]:
        """The answer, or each event of it where it is streamed. Raises as `post` and `events`; EngineFailed for an event in which
        the engine says that it failed."""
        if not stream:
            yield _whole(replica, await self.post(replica, path, body, answer, headers, line))
            return
        async for data in self.events(replica, path, body, line, headers):
            try:
                event = msgspec.json.decode(data, type=answer)
            except msgspec.DecodeError as error:
                raise EngineFailed(f"engine {replica.name} streamed something else than expected: {error}") from error
            yield _whole(replica, event)

    async def version(self, replica: Replica) -> int | None:
        """The version of the replica's weights now: asked of engines that take new ones, else the one they started with."""
        if not replica.updatable:
            return replica.weight_version
        try:
            async with self._pool.http.get(replica.url + "/weight_info") as response:
                label = (await response.json()).get("weight_version")
        except (TimeoutError, aiohttp.ClientError, OSError, ValueError):
            return None
        return replica.version_of(label)

    async def version_after(self, replica: Replica, line: Line) -> int | None:
        """`version` once the line's tokens are sampled; None as well where the engine does not say it in time."""
        try:
            async with line.aside():
                return await self.version(replica)
        except EngineFailed:
            return None

    async def label(self, replica: Replica, routes: Sequence[str]) -> str | None:
        """The replica's weight version as the engine writes it, from the first of the routes that it has; None where none tells."""
        for route in routes:
            try:
                async with self._pool.http.get(replica.url + route) as response:
                    if response.status == 200:
                        label = (await response.json(content_type=None)).get("weight_version")
                        return None if label is None else str(label)
            except (TimeoutError, aiohttp.ClientError, OSError, ValueError, AttributeError):
                return None
        return None

    async def order(self, replica: Replica, path: str, body: Any) -> None:
        """As `ask`, where nothing is answered."""
        try:
            await self._exchange(replica, path, _encode(body), _json(None), None)
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            raise self._broken(replica, error) from error

    def _broken(self, replica: Replica, error: Exception, line: Line | None = None) -> VerbatimError:
        refused = isinstance(error, (aiohttp.ClientConnectorError, ConnectionRefusedError))
        if line is None or not line.hung_up:
            what = f"cannot connect: {error}" if refused else f"calls break off: {error or type(error).__name__}"
            self._pool.call_failed(replica, what, refused=refused)
        if refused or isinstance(error, aiohttp.ConnectionTimeoutError):
            return EngineUnavailable(f"engine {replica.name} cannot be reached")
        if isinstance(error, asyncio.TimeoutError):
            return EngineFailed(f"engine {replica.name} did not answer in time")
        return EngineFailed(f"engine {replica.name} broke off: {type(error).__name__}")


def _decoded(replica: Replica, path: str, data: bytes, answer: type[T]) -> T:
    try:
        return msgspec.json.decode(data, type=answer)
    except msgspec.DecodeError as error:
        raise EngineFailed(f"engine {replica.name} answered {path} with something else than expected: {error}") from error


def _encoded(replica: Replica, body: Any) -> bytes:
    """The body as JSON, with the model by the engine's own name, also in a request that it quotes."""
    return _encode(_addressed(replica, body))


def _addressed(replica: Replica, body: Any) -> Any:
    if not replica.policy or not isinstance(body, dict):
        return body
    named = {key: _addressed(replica, value) for key, value in body.items() if isinstance(value, dict) and "model" in value}
    if isinstance(body.get("model"), str):
        named["model"] = replica.served_as(body["model"])
    return {**body, **named}


def _whole(replica: Replica, answer: A) -> A:
    """Raises EngineFailed for an answer in which the engine says that it failed."""
    if answer.error:
        raise EngineFailed(f"engine {replica.name} broke off: {str(answer.error)[:300]}")
    return answer


def _json(headers: dict[str, str] | None) -> dict[str, str]:
    return {"content-type": "application/json", **(headers or {})}
