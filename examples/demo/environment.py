"""The corridor: a small environment with a tool, and a rule that only trying can teach.

An agent walks past three coloured doors. At each it may try one key; the tool says whether the door opened and what colour
the next one has. A call names the door it is meant for and the key. Which key fits which colour is always the same and told
nowhere, so a policy that knows nothing opens one door in three, and one that has learned opens all. The reward is the share
of doors opened.
"""

from __future__ import annotations

import itertools
import json
import random
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

FITS = {"red": 2, "green": 3, "blue": 1}
KEYS = len(FITS)
DOORS = 3

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "open",
            "parameters": {
                "type": "object",
                "properties": {"door": {"type": "string"}, "key": {"type": "integer"}},
                "required": ["door", "key"],
            },
        },
    }
]


@dataclass(slots=True)
class Corridor:
    """One attempt. `doors` are the colours in order; `opened` grows by one entry for each key tried."""

    doors: tuple[str, ...]
    opened: list[bool] = field(default_factory=list)

    @property
    def instruction(self) -> str:
        return f"Open {len(self.doors)} doors with keys 1 to {KEYS}. Door: {self.doors[0]}"

    @property
    def done(self) -> bool:
        return len(self.opened) == len(self.doors)

    @property
    def reward(self) -> float:
        return sum(self.opened) / len(self.doors)

    @property
    def door(self) -> str:
        """The colour of the door to be opened now."""
        return self.doors[len(self.opened)]

    def open(self, door: str, key: int) -> str:
        """What the tool answers: whether the door opened, and the next door."""
        self.opened.append(door == self.door and key == FITS[door])
        following = "No door" if self.done else f"Door: {self.door}"
        return f"{'opened' if self.opened[-1] else 'wrong key'}. {following}"


def call_of(name: str, arguments: str) -> tuple[str, int] | None:
    """The door and the key of a tool call, or None when it is no proper call of `open`."""
    try:
        given = json.loads(arguments)
        door, key = given["door"], given["key"]
    except (ValueError, KeyError, TypeError):
        return None
    return (door, key) if name == "open" and isinstance(door, str) and type(key) is int else None


def corridors(rng: random.Random) -> Iterator[tuple[str, ...]]:
    """Rows of doors for ever: every combination of colours once, shuffled, then all of them again."""
    every = list(itertools.product(FITS, repeat=DOORS))
    while True:
        yield from rng.sample(every, len(every))


def call_message(door: str, key: int, call_id: str) -> dict[str, Any]:
    """An assistant's turn that tries `key` at `door`."""
    function = {"name": "open", "arguments": json.dumps({"door": door, "key": key})}
    return {"role": "assistant", "content": None, "tool_calls": [{"id": call_id, "type": "function", "function": function}]}


def tool_message(text: str, call_id: str) -> dict[str, Any]:
    """The tool's answer to the call `call_id`."""
    return {"role": "tool", "tool_call_id": call_id, "content": text}
