"""Screens: a small environment that must be looked at, and a rule that only trying can teach.

A screen is a picture of two by two squares, one of them red. The agent is asked to click the red one and answers with a square's number,
counted from the top left: `click 3`. What the text says is always the same, so a policy that does not look clicks one screen in four.
The reward is the share of screens clicked right.
"""

from __future__ import annotations

import io
import itertools
import random
import re
from collections.abc import Iterator
from typing import Any

COLOURS = {"r": (220, 40, 40), "g": (60, 170, 75), "b": (60, 90, 200), "y": (230, 200, 70)}
TARGET = "r"
SQUARES = 4
SIDE = 28
"""Of a square, in pixels."""
ASK = "Click the red square."
PER_SESSION = 2
"""Screens that one attempt sees, one after the other."""

_CLICK = re.compile(r"click ([1-4])")


def draw(screen: str) -> bytes:
    """The PNG of a screen: the colours of its squares, from the top left, row by row."""
    from PIL import Image

    picture = Image.new("RGB", (2 * SIDE, 2 * SIDE))
    for at, colour in enumerate(screen):
        left, top = at % 2 * SIDE, at // 2 * SIDE
        picture.paste(COLOURS[colour], (left, top, left + SIDE, top + SIDE))
    file = io.BytesIO()
    picture.save(file, "PNG")
    return file.getvalue()


def find_target(screen: str) -> int:
    """The number of the square to click."""
    return screen.index(TARGET) + 1


def read_click(text: str) -> int | None:
    """The number in an answer; None if it is no click."""
    found = _CLICK.fullmatch(text.strip())
    return int(found.group(1)) if found else None


def every_screen() -> list[str]:
    others = [colour for colour in COLOURS if colour != TARGET]
    return [
        "".join(rest[:at]) + TARGET + "".join(rest[at:])
        for at in range(SQUARES)
        for rest in itertools.product(others, repeat=SQUARES - 1)
    ]


def draw_tasks(rng: random.Random) -> Iterator[tuple[str, ...]]:
    """The screens of one task after another, without end."""
    screens = every_screen()
    while True:
        yield tuple(rng.choice(screens) for _ in range(PER_SESSION))


def ask_message(image: dict[str, Any]) -> dict[str, Any]:
    """A user's turn that shows `image`, a part of a message."""
    return {"role": "user", "content": [image, {"type": "text", "text": ASK}]}
