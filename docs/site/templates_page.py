"""The page of chat templates, from the committed run of `make templates`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).resolve().parents[1] / "results" / "templates.json"

PAGE = """# Templates

How many training rows a conversation becomes under the chat template of each model family. `make templates` plays {families} templates
from a public source distribution, each in six shapes: a tool loop of two calls and an answer, the same with thinking, two calls at once,
text beside a call, and the two loops followed by a new user turn. It plays them through the service, on an engine that renders with the
template and samples what the template shows of such a turn. Every row is recomputed: before each trained token stand exactly the ids that
the engine was given and had sampled. And every prompt is the template's own rendering of the conversation, with the engine's ids of tool
calls, wherever that rendering begins with what was sampled.

One row is the best there is. More cost tokens, never correctness; the reasons are those of
[`branch_reason`](../concepts.md#the-session-tree). `thinking_dropped` is the template's own doing: at that point it hides from the model
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


def render() -> str:
    results: dict[str, Any] = json.loads(RESULTS.read_text(encoding="utf-8"))
    played = {name: shapes for name, shapes in results.items() if not isinstance(shapes, str)}
    shapes = list(next(iter(played.values())))
    lines = [f"| template | {' | '.join(shapes)} |", f"|---|{'---|' * len(shapes)}"]
    lines += [
        f"| {name} | {' | '.join(str(each['rows']) if each else '-' for each in of.values())} |" for name, of in played.items()
    ]
    more = {
        name: {shape: each["reasons"] for shape, each in of.items() if each and each["rows"] > 1} for name, of in played.items()
    }
    reasons = [
        f"- {name}: {'; '.join(f'{shape}: {_count(why)}' for shape, why in of.items())}" for name, of in more.items() if of
    ]
    without = [f"- {name}: {why}" for name, why in results.items() if isinstance(why, str)]
    texts = {"table": lines, "reasons": reasons, "without": without}
    return PAGE.format(families=len(played), **{name: "\n".join(text) for name, text in texts.items()})


def _count(reasons: list[str]) -> str:
    counts = {reason: reasons.count(reason) for reason in dict.fromkeys(reasons)}
    return ", ".join(f"`{reason}`" + (f" {count} times" if count > 1 else "") for reason, count in counts.items())
