"""The agent: an ordinary script on the openai SDK that knows a base URL, a key and its tools. Nothing of Verbatim.

It reads one JSON job a line from standard input, works on all of them at once, and writes one JSON outcome a line:

    {"job_id", "base_url", "api_key", "model", "doors", "max_tokens", "extra_body"}
    {"job_id", "opened": [true, false, true], "reward", "turns", "completion_tokens", "error"}

A reply that calls no tool ends the attempt with what was opened so far. `error` is the last error of the SDK, or null.
"""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Callable, Coroutine
from typing import Any

import httpx
from openai import AsyncOpenAI, OpenAIError

from examples.demo.environment import TOOLS, Corridor, call_of, tool_message

Attempt = Callable[[AsyncOpenAI, dict[str, Any]], Coroutine[Any, Any, dict[str, Any]]]
"""The outcome of one job, by a client of its session."""


async def attempt(client: AsyncOpenAI, job: dict[str, Any]) -> dict[str, Any]:
    """The outcome of one job."""
    corridor = Corridor(tuple(job["doors"]))
    messages: list[Any] = [{"role": "user", "content": corridor.instruction}]
    outcome: dict[str, Any] = {"job_id": job["job_id"], "turns": 0, "completion_tokens": 0, "error": None}
    try:
        while not corridor.done:
            reply = await client.chat.completions.create(
                model=job["model"],
                messages=messages,
                tools=TOOLS,
                max_tokens=job["max_tokens"],
                extra_body=job["extra_body"],
            )
            outcome["turns"] += 1
            outcome["completion_tokens"] += reply.usage.completion_tokens
            message = reply.choices[0].message
            call = message.tool_calls[0] if message.tool_calls else None
            wish = call_of(call.function.name, call.function.arguments) if call else None
            if wish is None:
                break
            messages += [message.model_dump(exclude_none=True), tool_message(corridor.open(*wish), call.id)]
    except OpenAIError as error:
        outcome["error"] = f"{type(error).__name__}: {error}"
    return outcome | {"opened": corridor.opened, "reward": corridor.reward}


async def work(attempt: Attempt) -> None:
    """Make an attempt at each job that is read, until there are no more."""
    lines = asyncio.StreamReader(limit=2**20)
    loop = asyncio.get_running_loop()
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(lines), sys.stdin)
    # One pool of connections for all attempts: a client of its own would set up TLS for each of them.
    pool = httpx.AsyncClient(timeout=300, limits=httpx.Limits(max_connections=256, max_keepalive_connections=256))
    running: set[asyncio.Task[None]] = set()
    async with pool:
        while line := await lines.readline():
            task = asyncio.create_task(_work_on(attempt, json.loads(line), pool))
            running.add(task)
            task.add_done_callback(running.discard)
        for task in running:
            task.cancel()


async def _work_on(attempt: Attempt, job: dict[str, Any], pool: httpx.AsyncClient) -> None:
    client = AsyncOpenAI(base_url=job["base_url"], api_key=job["api_key"], http_client=pool, max_retries=5)
    print(json.dumps(await attempt(client, job)), flush=True)


if __name__ == "__main__":
    asyncio.run(work(attempt))
