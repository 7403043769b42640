"""CallLine: one call in a list, and the filters of that list."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np

from reconstruct.accounting import Settled
from reconstruct.forest import Forest, order_key
from reconstruct.messages import reasoning_of
from reconstruct.records import Call

SAID_CHARACTERS = 160

_decode = msgspec.json.decode


@dataclass(frozen=True, slots=True)
class CallLine:
    """`number` counts from 1 in canonical order. `logprob` is the mean of the sampled tokens', None without any. `refused` says why
    the call is quarantined, "" where it is trained."""

    number: int
    call_id: str
    parent_id: str | None
    branch_reason: str
    role: str
    role_source: str
    agent: str
    dialect: str
    api: str
    status: str
    finish_reason: str
    prompt_tokens: int
    sampled_tokens: int
    versions: Sequence[int]
    logprob: float | None
    started_at: float
    engine_seconds: float
    delivered: bool
    refused: str
    said: str
    tools: Sequence[str]
    in_tree: bool


@dataclass(frozen=True, slots=True)
class CallFilter:
    """What a list of calls is cut down to; "" is no limit. `text` is looked for in what the call says and is told."""

    text: str = ""
    role: str = ""
    only: str = ""

    def takes(self, line: CallLine, call: Call) -> bool:
        return (not self.role or line.role == self.role) and _is(self.only, line) and self._tells(line, call)

    def _tells(self, line: CallLine, call: Call) -> bool:
        if not self.text:
            return True
        wanted = self.text.casefold()
        named = (line.call_id, line.branch_reason, line.finish_reason, line.agent, line.refused, *line.tools)
        return any(wanted in name.casefold() for name in named) or _in_json(wanted, call)


ONLY: Mapping[str, str] = {
    "": "all calls",
    "trained": "trained",
    "quarantined": "quarantined",
    "branch": "begin a branch",
    "tools": "call tools",
    "cut": "cut short",
}


def call_lines(settled: Settled, delivered: Container[str], refused: Mapping[str, str]) -> list[CallLine]:
    """Every recorded call in canonical order."""
    calls = sorted([*settled.forest.calls.values(), *settled.stray], key=order_key)
    return [
        _line(number, call, settled.forest, call.call_id in delivered, refused.get(call.call_id, ""))
        for number, call in enumerate(calls, 1)
    ]


def branch_reasons(lines: Iterable[CallLine]) -> dict[str, int]:
    """How often calls did not go on from their parent, by reason, the most frequent first."""
    return dict(Counter(line.branch_reason for line in lines if line.branch_reason).most_common())


def said_of(reply: Mapping[str, Any]) -> tuple[str, list[str]]:
    """The beginning of what a reply says, and the names of the tools it calls."""
    content = reply.get("content")
    text = content if isinstance(content, str) and content.strip() else reasoning_of(reply)
    names = [str((call.get("function") or {}).get("name") or "") for call in reply.get("tool_calls") or ()]
    begun = " ".join(text[: 4 * SAID_CHARACTERS].split())
    whole = len(text) <= 4 * SAID_CHARACTERS and len(begun) <= SAID_CHARACTERS
    return begun if whole else f"{begun[: SAID_CHARACTERS - 1]}…", names


def _line(number: int, call: Call, forest: Forest, delivered: bool, refused: str) -> CallLine:
    node, in_tree = call.node, call.call_id in forest
    said, tools = said_of(_decode(call.reply))
    mean = float(np.mean(node.logprobs)) if len(node.logprobs) else math.nan
    return CallLine(
        number=number,
        call_id=call.call_id,
        parent_id=node.parent_id,
        branch_reason=node.branch_reason or "",
        role=call.role,
        role_source=call.role_source,
        agent=call.agent,
        dialect=call.dialect,
        api=call.api,
        status=call.status,
        finish_reason=call.finish_reason,
        prompt_tokens=forest.prompt_length(call.call_id) if in_tree else len(node.delta_ids),
        sampled_tokens=len(node.completion_ids),
        versions=sorted({span.version for span in node.spans}),
        logprob=mean if math.isfinite(mean) else None,
        started_at=call.started_at,
        engine_seconds=call.engine_seconds,
        delivered=delivered,
        refused=refused,
        said=said,
        tools=tools,
        in_tree=in_tree,
    )


def _is(only: str, line: CallLine) -> bool:
    tests = {
        "trained": not line.refused,
        "quarantined": bool(line.refused),
        "branch": bool(line.branch_reason),
        "tools": bool(line.tools),
        "cut": line.finish_reason in ("length", "abort") or line.status != "finished",
    }
    return tests.get(only, True)


def _in_json(wanted: str, call: Call) -> bool:
    """Whether a string of the call's own messages or of its reply holds the text."""
    return any(wanted in text.casefold() for text in _strings([_decode(call.messages), _decode(call.reply)]))


def _strings(value: Any) -> Iterable[str]:
    left = [value]
    while left:
        each = left.pop()
        if isinstance(each, str):
            yield each
        elif isinstance(each, dict):
            left.extend(each.values())
        elif isinstance(each, list):
            left.extend(each)
