"""Many long sessions in one process, round by round: does a call of the last round cost what one of the first costs?

    python -m benchmarks.rounds [--quick] [--out DIR]

One session holds a conversation until it has 100,000 tokens, and its records are copied into the store as those of 2,000 sessions. Then
every session makes a call in each round, in front of an engine that costs next to nothing: in the first round a process that was
just started reads all of them from the store, later ones show what it has kept. The room for each session is what is kept of it:
everything; ids and replies; or nothing. Beside them agents begin from nothing: a first call of 105 kB, half of it tools, and later turns.
"""

from __future__ import annotations

import json
import random
import re
import zlib
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from http.client import HTTPConnection
from typing import Any

import redis

from benchmarks.counts import agent_body
from benchmarks.processes import Started, connection_to, cpu_seconds, fast_engine, redis_process, request, resident_mib, serving
from benchmarks.results import Grid, main, number, progress, rounded
from benchmarks.sessions import TOOLS
from proxy.store import keys
from proxy.store.sessions import digest
from reconstruct.codec import decode

CONNECTIONS = 4
RESULT_BYTES = 7_000
"""Of a tool's answer; the fast engine makes a token of four bytes."""
SAMPLED = 199
CALLS = 50
"""Of each session, before the first round."""
_CRC_BYTES = 4
_OPENS = re.compile(r'^verbatim_session_opens_total\{found="(\w+)"\} (\S+)$', re.MULTILINE)
_MEMORY = re.compile(r"^verbatim_session_memory_bytes (\S+)$", re.MULTILINE)
_WORDS = [f"{word}{number}" for number in range(400) for word in ("door", "path", "value", "return", "line", "self", "import")]


@dataclass(frozen=True, slots=True)
class Setting:
    """So many sessions of `calls` calls, each with `room_bytes` of the memory for all of them."""

    name: str
    sessions: int
    calls: int
    room_bytes: int
    rounds: int


FULL = (
    Setting("100,000 tokens, room for ids and replies", 2_000, CALLS, 1_500_000, 3),
    Setting("100,000 tokens, room for all of it", 200, CALLS, 6_000_000, 2),
    Setting("100,000 tokens, room for a third of that", 200, CALLS, 250_000, 2),
    Setting("an agent from its first call on, room for all of it", 32, 0, 6_000_000, 5),
)
QUICK = (
    Setting("3 calls, room for ids and replies", 12, 3, 120_000, 2),
    Setting("an agent from its first call on, room for all of it", 2, 0, 6_000_000, 2),
)


@dataclass(slots=True)
class Talk:
    """A session's conversation; keeps its history as JSON, so that its own share of the time is small."""

    session_id: str
    api_key: str
    head: str
    messages: list[str] = field(default_factory=list)

    def turn(self, connection: HTTPConnection) -> None:
        body = f"{self.head}{', '.join(self.messages)}]}}".encode()
        headers = {"authorization": f"Bearer {self.api_key}", "content-type": "application/json"}
        connection.request("POST", f"/s/{self.session_id}/v1/chat/completions", body, headers)
        answer = connection.getresponse()
        content = answer.read()
        assert answer.status == 200, content
        message = json.loads(content)["choices"][0]["message"]
        words = random.Random(len(self.messages)).choices(_WORDS, k=RESULT_BYTES // 7)
        result = {"role": "tool", "tool_call_id": message["tool_calls"][0]["id"], "content": " ".join(words)[:RESULT_BYTES]}
        self.messages += [json.dumps(message), json.dumps(result)]


@dataclass(frozen=True, slots=True)
class Service:
    process: Started
    url: str
    store: Started

    def read(self) -> dict[str, float]:
        """CPU seconds of the service and of its store; sessions opened so far, by where they were; what they are estimated to take."""
        connection = connection_to(self.url)
        connection.request("GET", "/metrics")
        page = connection.getresponse().read().decode()
        connection.close()
        (kept,) = _MEMORY.findall(page)
        opens = {where: float(count) for where, count in _OPENS.findall(page)}
        return {"cpu": cpu_seconds(self.process.pid), "store_cpu": cpu_seconds(self.store.pid), "kept": float(kept), **opens}


def run(quick: bool) -> Iterator[dict[str, Any]]:
    found: list[dict[str, Any]] = []
    settings = QUICK if quick else FULL
    with ExitStack() as stack:
        bar = stack.enter_context(progress())
        task = bar.add_task("rounds", total=sum(setting.rounds for setting in settings))
        engine_url = stack.enter_context(fast_engine("--tokens", str(SAMPLED)))
        store, redis_port = stack.enter_context(redis_process(None))
        _, before_url = stack.enter_context(serving(engine_url, redis_port, "--engine-api", "chat"))
        for setting in settings:
            talks = _prepare(before_url, redis_port, setting)
            room = {"VERBATIM_SESSION_CACHE_BYTES": str(setting.sessions * setting.room_bytes)}
            rounds: list[dict[str, Any]] = []
            with serving(engine_url, redis_port, "--engine-api", "chat", env=room) as (process, url):
                for _ in range(setting.rounds):
                    rounds.append(_play(Service(process, url, store), talks))
                    bar.advance(task)
            found.append({"name": setting.name, "sessions": setting.sessions, "rounds": rounds})
            yield {"settings": found}


def _play(service: Service, talks: Sequence[Talk]) -> dict[str, Any]:
    """A round: a call of every session."""
    before = service.read()
    with ThreadPoolExecutor(CONNECTIONS) as pool:
        list(pool.map(partial(_ask, service.url), [talks[at::CONNECTIONS] for at in range(CONNECTIONS)]))
    return _figures(before, service.read(), len(talks), resident_mib(service.process.pid))


def _ask(url: str, talks: Sequence[Talk]) -> None:
    """A call of each, one after the other."""
    connection = connection_to(url)
    for talk in talks:
        talk.turn(connection)
    connection.close()


def _figures(before: dict[str, float], after: dict[str, float], calls: int, mib: float) -> dict[str, Any]:
    spent = {name: after[name] - before[name] for name in after}
    return {
        "calls": calls,
        "cpu_ms_per_call": rounded(1000 * spent["cpu"] / calls),
        "store_cpu_ms_per_call": rounded(1000 * spent["store_cpu"] / calls),
        "opens": {where: int(spent[where]) for where in ("memory", "stripped", "store")},
        "session_mib": rounded(after["kept"] / 2**20),
        "resident_mib": rounded(mib),
    }


def _prepare(url: str, redis_port: int, setting: Setting) -> list[Talk]:
    """The sessions, in the store: copies of one that was held by another process."""
    names = [f"{setting.calls:02}-{setting.room_bytes:09}-{number:06}" for number in range(setting.sessions + 1)]
    made = [request(url, "POST", "/sessions", {"session_id": name}) for name in names]
    body = _body() if setting.calls else agent_body([])
    origin, *copies = [_talk(each, body) for each in made]
    _ask(url, [origin] * setting.calls)
    for copy in copies:
        copy.messages = list(origin.messages)
    with redis.Redis(port=redis_port, protocol=2) as client:
        _copy(client, origin.session_id, [copy.session_id for copy in copies])
    return copies


def _body() -> dict[str, Any]:
    system = {"role": "system", "content": "You look keys up until you know the answer. " * 40}
    return {"model": "policy", "tools": TOOLS, "messages": [system, {"role": "user", "content": "Find alpha."}]}


def _talk(made: dict[str, Any], body: dict[str, Any]) -> Talk:
    head = json.dumps({name: value for name, value in body.items() if name != "messages"})
    return Talk(
        made["session_id"], made["api_key"], head[:-1] + ', "messages": [', [json.dumps(each) for each in body["messages"]]
    )


def _copy(client: redis.Redis, origin: str, session_ids: Sequence[str]) -> None:
    """The records of a session as those of others, whose ids are as long."""
    records: list[Any] = client.lrange(keys.calls(origin), 0, -1)
    call_ids = [decode(record).call_id for record in records]
    for session_id in session_ids:
        named = [record[:-_CRC_BYTES].replace(origin.encode(), session_id.encode()) for record in records]
        whole = [packed + zlib.crc32(packed).to_bytes(_CRC_BYTES, "little") for packed in named]
        if whole:
            client.rpush(keys.calls(session_id), *whole)
            index = zip(call_ids, map(digest, whole), strict=True)
            client.hset(keys.index(session_id), items=[part for pair in index for part in pair])


def tables(result: dict[str, Any]) -> Sequence[Grid]:
    rows = []
    for setting in result["settings"]:
        for at, each in enumerate(setting["rounds"], start=1):
            opened = (f"{count:,}" for count in each["opens"].values())
            spent = (number(each["cpu_ms_per_call"]), number(each["store_cpu_ms_per_call"]))
            sizes = (number(each["session_mib"]), number(each["resident_mib"]))
            rows.append((f"{setting['name']}: {setting['sessions']:,} sessions", str(at), *spent, *opened, *sizes))
    columns = (
        "",
        "round",
        "CPU ms per call",
        "Redis CPU ms",
        "in memory",
        "there, stripped",
        "read from the store",
        "sessions, MiB",
        "resident MiB",
    )
    return [Grid("A call of every session, round by round", columns, tuple(rows))]


if __name__ == "__main__":
    main("rounds", __doc__, run, tables, alone=False)
