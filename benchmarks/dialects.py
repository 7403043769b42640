"""What each dialect costs: the same conversations asked in all of them, on both paths to the engine, streamed and whole.

    python -m benchmarks.dialects [--quick]

The service has one core and a durable Redis, the engine is static, wrk asks over 16 connections (see `benchmarks.calls`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from benchmarks.contenders import Proxy, verbatim
from benchmarks.load import Body, Target
from benchmarks.replies import LARGE, MODEL, SMALL, Size, numbered_at_mark
from benchmarks.results import Grid, main, median_of, number, progress
from benchmarks.trials import measured, open_all, warm_all

CONNECTIONS = 16
PATHS = {
    "chat": "/v1/chat/completions",
    "responses": "/v1/responses",
    "messages": "/v1/messages",
    "gemini": f"/v1beta/models/{MODEL}:generateContent",
}
_GEMINI_STREAM = f"/v1beta/models/{MODEL}:streamGenerateContent?alt=sse"


def body_in(dialect: str, size: Size, stream: bool) -> Body:
    """The conversation of `size.body` in another dialect."""
    messages = size.messages()
    streams = {"stream": True} if stream else {}
    if dialect == "gemini":
        roles = {"user": "user", "assistant": "model"}
        contents = [{"role": roles[said["role"]], "parts": [{"text": said["content"]}]} for said in messages]
        asked: dict[str, Any] = {"contents": contents, "generationConfig": {"maxOutputTokens": size.sampled}}
    elif dialect == "responses":
        asked = {"model": MODEL, "input": messages, "max_output_tokens": size.sampled, **streams}
    else:
        asked = {"model": MODEL, "messages": messages, "max_tokens": size.sampled, **streams}
    return numbered_at_mark(asked)


def run(quick: bool) -> dict[str, Any]:
    sizes, streams = ((SMALL,), (False,)) if quick else ((SMALL, LARGE), (False, True))
    seconds, rounds = 1, 1
    cells = []
    with progress() as bar:
        task = bar.add_task("dialects", total=len(sizes) * len(streams) * 2 * len(PATHS) * rounds)
        for size in sizes:
            for stream in streams:
                for api in ("chat", "token"):
                    cells += _measure(size, stream, api, seconds, rounds, lambda: bar.advance(task))
    return {"connections": CONNECTIONS, "cells": cells}


def _measure(
    size: Size, stream: bool, api: str, seconds: float, rounds: int, advance: Callable[[], None]
) -> list[dict[str, Any]]:
    with open_all(size, stream, {"service": partial(verbatim, api=api)}) as opened:
        proxies = {dialect: _in(dialect, opened["service"], stream) for dialect in PATHS}
        bodies = {dialect: body_in(dialect, size, stream) for dialect in PATHS}
        warmed = warm_all(proxies, bodies)
        found = measured(proxies, bodies, CONNECTIONS, seconds, rounds, warmed, advance)
    setting = {"size": size.name, "streamed": stream, "api": api}
    return [{"dialect": dialect, **setting, **cell} for dialect, cell in found.items()]


def _in(dialect: str, proxy: Proxy, stream: bool) -> Proxy:
    """The same service, its sessions asked in another dialect."""
    path = _GEMINI_STREAM if dialect == "gemini" and stream else PATHS[dialect]
    targets = tuple(Target(target.path.replace(PATHS["chat"], path), target.key) for target in proxy.targets)
    return replace(proxy, targets=targets)


def tables(result: dict[str, Any]) -> Sequence[Grid]:
    settings = list(dict.fromkeys((cell["size"], cell["streamed"]) for cell in result["cells"]))
    columns = (
        "dialect",
        "chat path, calls/s",
        "p50 ms",
        "CPU s per 1,000 calls",
        "token path, calls/s",
        "p50 ms",
        "CPU s per 1,000 calls",
    )
    grids = []
    for size, streamed in settings:
        there = [cell for cell in result["cells"] if cell["size"] == size and cell["streamed"] == streamed]
        rows = []
        for dialect in dict.fromkeys(cell["dialect"] for cell in there):
            own = [cell for cell in there if cell["dialect"] == dialect]
            rows.append((dialect, *(text for cell in own for text in _texts(cell))))
        title = f"Dialects, {size} calls, {'streamed' if streamed else 'whole'}, {result['connections']} connections"
        grids.append(Grid(title, columns, tuple(rows)))
    return grids


def _texts(cell: dict[str, Any]) -> Iterator[str]:
    for name in ("calls_per_second", "p50_ms", "cpu_seconds_per_1000_calls"):
        yield number(median_of(cell, name))


if __name__ == "__main__":
    main("dialects", __doc__, run, tables)
