"""Chat templates of real model families through the service: rows per conversation, and why more than one. `make templates`."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence

from tests import ROOT
from tests.support.engine.scripted_engine import ScriptedEngine
from tests.support.service.redis_server import running_redis
from tests.support.service.running_service import RunningService
from tests.templates.conversations import SHAPES, Played, play_all
from tests.templates.native_families import find_families

PAGE = ROOT / "docs/templates.md"

Results = Mapping[str, Mapping[str, Played | str]]

_PAGE = """\
# Templates

How many training rows a conversation becomes under the chat template of each model family. `make templates` plays {families} templates
from a public source distribution, each in six shapes: a tool loop of two calls and an answer, the same with thinking, two calls at once,
text beside a call, and the two loops followed by a new user turn. It plays them through the service, on an engine that renders with the
template and samples what the template shows of such a turn. Every row is recomputed: before each trained token stand exactly the ids that
the engine was given and had sampled. And every prompt is the template's own rendering of the conversation, with the engine's ids of tool
calls, wherever that rendering begins with what was sampled.

One row is the best there is. More cost tokens, never correctness; the reasons are those of
[`branch_reason`](concepts.md#the-session-tree). `thinking_dropped` is the template's own doing: at that point it hides from the model
what the model thought, and `VERBATIM_THINKING=retain` keeps it. A dash: the template has no such conversation (no thinking, one call per
turn, no tools, or it refuses it).

What this does not show: the engine is scripted, so a tokenizer is a small one with the template's control tokens, and the replies are those
that the template itself would write. Parsers of a real engine may read a reply otherwise.

{table}

## Why more than one

{reasons}

## Without a conversation

{without}

Written by `make templates ARGS=--write`.
"""


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="make templates", description=__doc__)
    parser.add_argument("names", nargs="*", help="only templates whose names contain one of these")
    parser.add_argument("--write", action="store_true", help=f"write {PAGE.relative_to(ROOT)}")
    options = parser.parse_args(arguments)
    names = [name for name in find_families() if not options.names or any(each in name for each in options.names)]
    results: dict[str, Mapping[str, Played | str]] = {}
    with running_redis() as redis:

        def serve(engine: ScriptedEngine) -> RunningService:
            return RunningService(engine.url, redis.url, engine_api="token")

        for name in names:
            results[name] = play_all(name, serve)
            print(f"{name}: {', '.join(map(_cell, results[name].values()))}", flush=True)  # noqa: T201
    if options.write:
        PAGE.write_text(write_page(results), encoding="utf-8")
    differing = [
        name for name, played in results.items() for each in played.values() if isinstance(each, Played) and each.differing
    ]
    return 1 if differing else 0


def write_page(results: Results) -> str:
    played = {name: shapes for name, shapes in results.items() if any(isinstance(each, Played) for each in shapes.values())}
    head = f"| template | {' | '.join(SHAPES)} |\n|---|{'---|' * len(SHAPES)}\n"
    table = "\n".join(f"| {name} | {' | '.join(map(_cell, shapes.values()))} |" for name, shapes in played.items())
    reasons = [
        f"- {name}: "
        + "; ".join(
            f"{shape}: {_reasons(each)}" for shape, each in shapes.items() if isinstance(each, Played) and each.rows > 1
        )
        for name, shapes in played.items()
        if any(isinstance(each, Played) and each.rows > 1 for each in shapes.values())
    ]
    without = [f"- {name}: {next(iter(shapes.values()))}" for name, shapes in results.items() if name not in played]
    return _PAGE.format(families=len(played), table=head + table, reasons="\n".join(reasons), without="\n".join(without))


def _cell(played: Played | str) -> str:
    return str(played.rows) if isinstance(played, Played) else "–"


def _reasons(played: Played) -> str:
    counts = {reason: played.reasons.count(reason) for reason in dict.fromkeys(played.reasons)}
    return ", ".join(f"`{reason}`" + (f" {count}×" if count > 1 else "") for reason, count in counts.items())


if __name__ == "__main__":
    sys.exit(main())
