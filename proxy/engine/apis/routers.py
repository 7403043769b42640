"""Routers: whether several engines answer at one URL.

A router, a balancer or a Kubernetes Service gives each request to one of its engines: of a weight push one would be paused and another
updated. Evidence is what only one engine can say: the name that the plugin or the worker extension gave it at random when it started,
when its server started, the seed that an SGLang drew. Two such answers come of two engines if they are heard at once, or if one returns
after another: an engine that starts again never says the old one any more. All API servers of one vLLM say the same. Some routers list
their engines themselves.

Each question goes over a connection of its own and for another session, with several under way at once: so engines in turn, by
connections, by load and by session are all reached.
"""

from __future__ import annotations

import asyncio
import random
import re
from collections.abc import Sequence

from proxy.engine.apis.evidence import Source, parse_object
from proxy.engine.replica import Replica
from proxy.engine.wire.http import EngineHttp

TOPIC = "router"
"""The topic of the note about it."""
QUESTIONS = 8
"""How often each question is asked when a replica is met, and before a push. Of two at random both are heard 127 times in 128."""
_AGAIN = 2
"""At every visit afterwards."""
_SESSIONS = tuple(f"verbatim-{number}" for number in range(16))
"""Few, since routers count sessions per engine."""
_RANDOM = random.Random()
_REMEMBERED = 64
_LIST = "list"
_LISTED = 8
"""How many engines of a router the note names."""


async def look_behind(http: EngineHttp, replica: Replica, sources: Sequence[Source], *, fresh: bool, thorough: bool) -> None:
    """Note it if several engines answer at the replica's URL: then it takes no weights, and its plugin is not used. Not `thorough`: only
    what it has answered before is asked again. `fresh`: nothing is known of it."""
    if fresh:
        replica.router = False
        replica.sightings.clear()
        replica.note(TOPIC, "")
    if not replica.router:
        evidence = await _find_engines(http, replica, sources, thorough=thorough)
        if evidence:
            replica.router = True
            replica.note(TOPIC, evidence)
    if replica.router:
        replica.updatable = replica.plugin = False


async def _find_engines(http: EngineHttp, replica: Replica, sources: Sequence[Source], *, thorough: bool) -> str:
    """The sentence about the router; empty if one engine seems to answer."""
    known = replica.sightings
    listed = await _list_engines(http, replica) if thorough or known else []
    if listed:
        known[_LIST] = listed
    if len(listed) > 1:
        named = " ".join(f"--engine {url}" for url in listed[:_LISTED])
        return _describe(f"it lists {len(listed)}", f"name them instead of it ({named}{' …' if len(listed) > _LISTED else ''})")
    for source in sources:
        if not thorough and (source.name not in known or source.body is not None):
            continue
        if source.body is not None and known.keys() - {_LIST, source.name}:
            continue
        if await _hear_several(http, replica, source, QUESTIONS if thorough else _AGAIN):
            return _describe(f"their answers differ ({source.name})", "name each instead of it (--engine URL)")
    return ""


def _describe(evidence: str, names: str) -> str:
    return (
        f"is a router, several engines answer there: {evidence}. It gets no weight pushes, whose steps would go to different engines, and "
        f"the plugin is not used. {names[0].upper()}{names[1:]}, or all by a DNS name (--engine dns://NAME:PORT)"
    )


async def _list_engines(http: EngineHttp, replica: Replica) -> list[str]:
    """The URLs of the engines that the routers of vLLM and SGLang list, each once."""
    workers = parse_object(await http.ask_aside(replica, "/workers", _SESSIONS[0]) or b"").get("workers")
    urls = [worker.get("url") for worker in workers if isinstance(worker, dict)] if isinstance(workers, list) else []
    # One engine of several data-parallel ranks may be listed once for each: URL@RANK.
    return list(dict.fromkeys(re.sub(r"@\d+$", "", url) for url in urls if isinstance(url, str)))


async def _hear_several(http: EngineHttp, replica: Replica, source: Source, times: int) -> bool:
    said = set(await _ask(http, replica, source, times))
    if not source.steady:
        # A push may be under way, after which the old answer never returns.
        return len(said) > 1 and len(said & set(await _ask(http, replica, source, QUESTIONS))) > 1
    known = replica.sightings.get(source.name, [])
    if times < QUESTIONS and said - set(known[-1:]):
        # Another engine, or the same one, started again.
        said |= set(await _ask(http, replica, source, QUESTIONS))
    if said:
        replica.sightings[source.name] = [*known, *(each for each in said if each not in known)][-_REMEMBERED:]
    return len(said) > 1 or not said.isdisjoint(known[:-1])


async def _ask(http: EngineHttp, replica: Replica, source: Source, times: int) -> list[str]:
    """What was answered, by those that have an answer."""
    for route in source.routes:
        # The session stands in the URL as well: some balancers go by that.
        route += "&session=" if "?" in route else "?session="

        async def ask(session: str, path: str = route) -> str:
            content = await http.ask_aside(replica, path + session, session, source.body)
            return "" if content is None else source.read(content)

        first, *others = _RANDOM.sample(_SESSIONS, times)
        # A server that has no such route is asked once.
        if said := await ask(first):
            return [said, *filter(None, await asyncio.gather(*map(ask, others)))]
    return []
