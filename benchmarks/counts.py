"""What fixed calls cost in counts instead of seconds, and whether that has grown over the recorded baseline.

    python -m benchmarks.counts              # prints the counts beside the baseline; exit code 1 where one has grown too much
    python -m benchmarks.counts --record     # makes them the baseline of this minor version of Python
    python -m benchmarks.counts --files --only "streamed, call 2"   # prints the files that a call enters, and how many functions of each

Each case is one call to the real application (everything behind the HTTP server's protocol), with a real redis-server and a scripted
engine in processes of their own, or one reconstruction of a session. Of several rounds the cheapest counts, since whatever else runs in
a process can only add to it. `benchmarks/counting.py` says what is counted.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import sys
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass
from importlib.metadata import version
from itertools import pairwise
from pathlib import Path
from typing import Any
from unittest.mock import patch

import uvloop

from benchmarks.application import Application, application, scripted_engine
from benchmarks.counting import Instructions, Peak, RedisMeter
from benchmarks.nginx import WITH_PLUGIN
from benchmarks.paced_engine import Behavior, behave, paced_engine
from benchmarks.processes import ROOT, redis_server
from benchmarks.reconstruction import CONTEXT, Shape, records
from benchmarks.sessions import TOOLS, recorded
from proxy.engine.wire.channels import Channel
from reconstruct.accounting import account, settle
from reconstruct.builders import merged
from reconstruct.codec import decode

BASELINE = ROOT / "benchmarks" / "baseline.json"
GROWTH = 0.15
"""By how much a count may be above its baseline."""
ROUNDS = 4
TURNS = 10
SAMPLED = 128
PLUGIN_PROMPT = 1_000
EVENTS_A_READ = 8
_LONGEST_HEAD = 1024
_READ_AT_ONCE = 16 * 1024
LIBRARIES = ("aiohttp", "hiredis", "msgspec", "numpy", "redis", "uvloop")
PYTHON = f"{sys.version_info.major}.{sys.version_info.minor}"

Counts = dict[str, int]
Figures = dict[str, Counts]
"""By case, by what is counted."""

SYSTEM = "You look keys up until you know the answer, and you say how you found it. " * 40
QUESTION = "Find alpha, and say which of the other keys it is made of."


@dataclass(frozen=True, slots=True)
class Case:
    """A call at `path` below a session of the service that takes `api` to its engine, after `before` calls of the same session. `api`
    "plugin": the token path to an engine with the plugin, which answers every prompt alike.

    `streamed`: its answer takes long enough for the rest of the process to talk to Redis; then only what does not depend on that is
    counted."""

    name: str
    api: str
    path: str
    body: Callable[[list[dict[str, Any]]], dict[str, Any]]
    before: int = 0
    streamed: bool = False


def _chat(messages: list[dict[str, Any]]) -> dict[str, Any]:
    head = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": QUESTION}]
    return {"model": "policy", "messages": [*head, *messages], "tools": TOOLS}


def _streamed(messages: list[dict[str, Any]]) -> dict[str, Any]:
    return {**_chat(messages), "stream": True}


def agent_body(messages: list[dict[str, Any]]) -> dict[str, Any]:
    """A coding agent's: a long system prompt, many tools, and work behind it, before `messages`."""
    head = [{"role": "system", "content": _prose("system", 15_000)}, {"role": "user", "content": QUESTION}]
    return {"model": "policy", "messages": [*head, *_WORK, *messages], "tools": _AGENT_TOOLS}


def _responses(messages: list[dict[str, Any]]) -> dict[str, Any]:
    tool = {"type": "function", **TOOLS[0]["function"]}  # type: ignore[dict-item]
    return {"model": "policy", "instructions": SYSTEM, "input": QUESTION, "tools": [tool]}


def _responses_streamed(messages: list[dict[str, Any]]) -> dict[str, Any]:
    return {**_responses(messages), "stream": True}


def _messages(messages: list[dict[str, Any]]) -> dict[str, Any]:
    asked = [{"role": "user", "content": [{"type": "text", "text": QUESTION}]}]
    return {"model": "policy", "system": SYSTEM, "messages": asked, "max_tokens": 4096}


def _messages_streamed(messages: list[dict[str, Any]]) -> dict[str, Any]:
    return {**_messages(messages), "stream": True}


def _gemini(messages: list[dict[str, Any]]) -> dict[str, Any]:
    return {
        "systemInstruction": {"parts": [{"text": SYSTEM}]},
        "contents": [{"role": "user", "parts": [{"text": QUESTION}]}],
    }


def _completions(messages: list[dict[str, Any]]) -> dict[str, Any]:
    return {"model": "policy", "prompt": SYSTEM + QUESTION}


def _completions_streamed(messages: list[dict[str, Any]]) -> dict[str, Any]:
    return {**_completions(messages), "stream": True}


_TEXT = """
the file that you read is changed only after its test has failed once and what it prints was seen so never write
more than one step at a time look for where a value comes from before you use it again name what you found in full
paths keep lines short and say why not how return an error with code message and field when input has no known form
ask nothing twice
"""


def _prose(seed: str, length: int) -> str:
    """So many characters of words in no order."""
    return " ".join(random.Random(seed).choices(_TEXT.split(), k=length))[:length]


def _agent_tool(number: int) -> dict[str, Any]:
    properties = {f"field_{at}": {"type": "string", "description": _prose(f"{number} {at}", 200)} for at in range(4)}
    parameters = {"type": "object", "properties": properties, "required": ["field_0"]}
    return {
        "type": "function",
        "function": {"name": f"tool_{number}", "description": _prose(f"tool {number}", 700), "parameters": parameters},
    }


def _worked(number: int) -> Iterator[dict[str, Any]]:
    called = {"name": "tool_1", "arguments": json.dumps({"field_0": _prose(f"asked {number}", 100)})}
    yield {
        "role": "assistant",
        "content": _prose(f"said {number}", 200),
        "tool_calls": [{"id": f"call_{number}", "type": "function", "function": called}],
    }
    yield {"role": "tool", "tool_call_id": f"call_{number}", "content": _prose(f"found {number}", 2000)}


_AGENT_TOOLS = [_agent_tool(number) for number in range(28)]
_WORK = [message for number in range(15) for message in _worked(number)]


CASES = (
    Case("token path, first call", "token", "/v1/chat/completions", _chat),
    Case(f"token path, call {TURNS}", "token", "/v1/chat/completions", _chat, TURNS - 1),
    Case("plugin path, first call", "plugin", "/v1/chat/completions", _chat),
    Case("chat path, first call", "chat", "/v1/chat/completions", _chat),
    Case(f"chat path, call {TURNS}", "chat", "/v1/chat/completions", _chat, TURNS - 1),
    Case("chat path, streamed", "chat", "/v1/chat/completions", _streamed, streamed=True),
    Case("token path, streamed, call 2", "token", "/v1/chat/completions", _streamed, 1, streamed=True),
    Case("agent-shaped, first call", "token", "/v1/chat/completions", agent_body),
    Case("agent-shaped, call 3", "token", "/v1/chat/completions", agent_body, 2),
    Case("responses", "token", "/v1/responses", _responses),
    Case("responses, streamed", "token", "/v1/responses", _responses_streamed, streamed=True),
    Case("messages", "token", "/v1/messages", _messages),
    Case("messages, streamed", "token", "/v1/messages", _messages_streamed, streamed=True),
    Case("generateContent", "token", "/v1beta/models/policy:generateContent", _gemini),
    Case("generateContent, streamed", "token", "/v1beta/models/policy:streamGenerateContent", _gemini, streamed=True),
    Case("completions", "token", "/v1/completions", _completions),
    Case("completions, streamed", "token", "/v1/completions", _completions_streamed, streamed=True),
)
SESSION = Shape("50 calls deep", 50, 800, 200, lambda number: number - 1 if number else None)


@contextmanager
def steady_reads() -> Iterator[None]:
    """An answer that an engine streams comes in reads of `EVENTS_A_READ`, each in a turn of the loop of its own, whatever the network
    makes of it: a busy machine would count more of them, or fewer."""
    receive, held = Channel.data_received, dict[Channel, bytes]()

    def hold(channel: Channel, data: bytes) -> None:
        whole = held.pop(channel, b"") + data
        if b"text/event-stream" not in whole[:_LONGEST_HEAD]:
            receive(channel, whole)
        elif whole.endswith(b"\r\n0\r\n\r\n"):
            events = whole.split(b"\n\n")
            ends = [*range(0, len(events), EVENTS_A_READ), len(events)]
            feed(channel, [b"\n\n".join(events[start:end]) + b"\n\n" * (end < len(events)) for start, end in pairwise(ends)])
        else:
            held[channel] = whole

    def feed(channel: Channel, reads: Sequence[bytes]) -> None:
        receive(channel, reads[0])
        if len(reads) > 1:
            asyncio.get_running_loop().call_soon(feed, channel, reads[1:])

    with patch.object(Channel, "data_received", hold):
        yield


async def prepared(app: Application, case: Case) -> tuple[str, str, dict[str, Any]]:
    """(session id, key, body): a session in which the case's call is the next. The connection to the engine was used just now: on a slow
    machine it could else be closed as idle, and a call would count what connecting takes."""
    _, other = await app.opened()
    session_id, key = await app.opened()
    history: list[dict[str, Any]] = []
    for turn in range(case.before):
        message = json.loads(await app.post(case.path, key, {**case.body(history), "stream": False}))["choices"][0]["message"]
        history += [message, {"role": "user", "content": f"{turn}: go on. " * 8}]
    await app.post(case.path, other, case.body([]))
    return session_id, key, case.body(history)


@asynccontextmanager
async def applications(redis_port: int) -> AsyncIterator[dict[str, Application]]:
    """By the `api` of cases."""
    async with AsyncExitStack() as stack:
        scripted, paced = stack.enter_context(scripted_engine(SAMPLED)), stack.enter_context(paced_engine())
        behave(paced, Behavior(PLUGIN_PROMPT, SAMPLED, 0))
        stack.enter_context(steady_reads())
        engines = {"token": (scripted, "token"), "chat": (scripted, "chat"), "plugin": (paced + WITH_PLUGIN, "token")}
        yield {name: await stack.enter_async_context(application(url, redis_port, api)) for name, (url, api) in engines.items()}


async def entered(cases: Sequence[Case]) -> dict[str, Counter[str]]:
    """By case and file, how many of the file's functions a call enters."""
    found = {}
    with redis_server() as redis_port:
        async with applications(redis_port) as apps:
            for case in cases:
                app = apps[case.api]
                instructions = Instructions()
                _, key, body = await prepared(app, case)
                with instructions.counted():
                    await app.post(case.path, key, body)
            found[case.name] = Counter(str(Path(file).relative_to(ROOT)) for file, _ in instructions.functions)
    return found


async def counted(app: Application, case: Case, redis_port: int) -> Counts:
    """One round."""
    meter, instructions, peak = RedisMeter(redis_port), Instructions(), Peak()
    session_id, key, body = await prepared(app, case)
    meter.start()
    with instructions.counted():
        await app.post(case.path, key, body)
    traffic = meter.taken()
    meter.close()
    stored = recorded(redis_port, session_id)[1]
    _, key, body = await prepared(app, case)
    with peak.counted():
        await app.post(case.path, key, body)
    entered = {
        "files": len(instructions.files),
        "functions": len(instructions.functions),
        "calls": instructions.calls,
        "file_changes": instructions.file_changes,
    }
    if case.streamed:
        return {"own_instructions": instructions.own, "peak_bytes": peak.bytes, "stored_bytes": stored, **entered}
    return {
        "own_instructions": instructions.own,
        "library_instructions": instructions.library,
        "peak_bytes": peak.bytes,
        # What is larger than its buffer a server reads as it comes in.
        **({"redis_reads": traffic.reads} if traffic.bytes_in < _READ_AT_ONCE else {}),
        "redis_bytes_in": traffic.bytes_in,
        "redis_bytes_out": traffic.bytes_out,
        "stored_bytes": stored,
        **entered,
    }


def reconstructed() -> Counts:
    """From the bytes of a session's records to its rows and their accounting."""
    stored = records(SESSION)

    def rebuild() -> None:
        calls = [decode(record) for record in stored]
        settled = settle(calls, delivered={call.call_id for call in calls})
        rows = merged(settled, CONTEXT)
        assert account(settled, rows).sampled_tokens == SESSION.calls * SESSION.sampled

    rebuild()
    instructions, peak = Instructions(), Peak()
    with instructions.counted():
        rebuild()
    with peak.counted():
        rebuild()
    return {
        "own_instructions": instructions.own,
        "library_instructions": instructions.library,
        "peak_bytes": peak.bytes,
    }


async def counted_cases(cases: Sequence[Case]) -> Figures:
    with redis_server() as redis_port:
        async with applications(redis_port) as apps:
            rounds = []
            # The first of each opens connections, loads scripts and fills caches.
            for _ in range(ROUNDS + 1):
                rounds.append({case.name: await counted(apps[case.api], case, redis_port) for case in cases})
    return {case.name: _cheapest([round_[case.name] for round_ in rounds[1:]]) for case in cases}


def _cheapest(rounds: Sequence[Counts]) -> Counts:
    return {what: min(counts[what] for counts in rounds) for what in rounds[0]}


def figures(only: str = "") -> Figures:
    """The counts of every case whose name contains `only`."""
    cases = [case for case in CASES if only in case.name]
    found = uvloop.run(counted_cases(cases)) if cases else {}
    name = f"reconstruction, {SESSION.name}"
    return {**found, name: reconstructed()} if only in name else found


def libraries() -> dict[str, str]:
    return {name: version(name) for name in LIBRARIES}


def grown(baseline: Mapping[str, Mapping[str, int]], now: Figures, *, same_libraries: bool) -> list[str]:
    """A sentence for each count that is more than `GROWTH` above its baseline, or that has none.

    Instructions of libraries are held against it only under the versions it was recorded with."""
    complaints = []
    for case, counts in now.items():
        for what, count in counts.items():
            if what == "library_instructions" and not same_libraries:
                continue
            before = baseline.get(case, {}).get(what)
            if before is None:
                complaints.append(f"{case}: {what} has no baseline")
            elif count > before * (1 + GROWTH):
                complaints.append(f"{case}: {what} grew by {count / before - 1:.0%}, from {before:,} to {count:,}")
    return complaints


def shown(baseline: Mapping[str, Mapping[str, int]], now: Figures) -> Iterator[str]:
    for case, counts in now.items():
        yield case
        for what, count in counts.items():
            before = baseline.get(case, {}).get(what)
            yield f"  {what:22}{count:>12,}" + (f"{count / before - 1:>+9.1%}" if before else "")


def recorded_baseline() -> dict[str, Any]:
    """By minor version of Python: `libraries`, `figures`."""
    return dict(json.loads(BASELINE.read_text())) if BASELINE.exists() else {}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--record", action="store_true", help="make the counts the baseline of this Python")
    parser.add_argument("--only", default="", metavar="TEXT", help="cases whose name contains it")
    parser.add_argument("--json", action="store_true", help="print the counts alone, as JSON")
    parser.add_argument("--files", action="store_true", help="print the files that each case enters instead")
    options = parser.parse_args()
    if options.files:
        for name, files in uvloop.run(entered([case for case in CASES if options.only in case.name])).items():
            print(f"{name}: {len(files)} files", *(f"  {file:40}{count:4}" for file, count in sorted(files.items())), sep="\n")
        return
    now, known = figures(options.only), recorded_baseline()
    if options.json:
        print(json.dumps(now))
        return
    baseline = known.get(PYTHON, {})
    print("\n".join(shown(baseline.get("figures", {}), now)))
    if options.record:
        known[PYTHON] = {"libraries": libraries(), "figures": {**baseline.get("figures", {}), **now}}
        BASELINE.write_text(json.dumps(known, indent=1, sort_keys=True) + "\n")
        print(f"recorded as the baseline of Python {PYTHON}: {BASELINE}")
        return
    if not baseline:
        raise SystemExit(f"there is no baseline for Python {PYTHON}: python -m benchmarks.counts --record")
    if complaints := grown(baseline["figures"], now, same_libraries=baseline["libraries"] == libraries()):
        raise SystemExit("\n".join(complaints))


if __name__ == "__main__":
    main()
