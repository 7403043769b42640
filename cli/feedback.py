"""A reward and the evaluator's feedback on a terminal: lines about failures in red, lines about passes in green.

Colours appear on terminals only, and not if NO_COLOR is set (rich decides both).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from rich.console import Console
from rich.text import Text

FIRST_LINES = 8
"""How much of a feedback an overview shows."""

_NONE_FAILED = re.compile(r"\b(?:0|no) (?:fail\w*|errors?)", re.IGNORECASE)
_FAILED = re.compile(
    r"\b(?:fail(?:s|ed|ure|ures|ing)?|error(?:s|ed)?|\w*(?:Error|Exception)|traceback|not|no|wrong|missing)\b", re.I
)
_CONTROLS = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]|[\x00-\x08\x0b-\x1f\x7f-\x9f]")
_PASSED = re.compile(r"\b(?:pass(?:es|ed)?|ok|success\w*|yes|correct)\b", re.IGNORECASE)


def print_reward(console: Console, session: Mapping[str, Any]) -> None:
    """The reward of a session in the API's shape, and all of its evaluator's feedback. Nothing without a reward."""
    if session.get("reward") is not None:
        print_feedback(console, "reward", session["reward"], read_feedback(session))


def read_feedback(session: Mapping[str, Any]) -> str:
    feedback = (session.get("reward_metadata") or {}).get("feedback")
    return feedback if isinstance(feedback, str) else ""


def print_feedback(
    console: Console, title: str, reward: float | None, feedback: str, most: int | None = None, rest: str = ""
) -> None:
    """`title` with the reward, and the feedback below it. Of more than `most` lines the first ones, and that `rest` shows all."""
    head = Text(title)
    if reward is not None:
        head.append(" ").append(f"{reward:g}", "bold green" if reward > 0 else "bold red")
    console.print(head, soft_wrap=True, highlight=False)
    lines = remove_controls(feedback).strip().splitlines()
    for line in lines[:most]:
        console.print(Text(f"  {line}", _style(line)), soft_wrap=True, highlight=False)
    if most is not None and len(lines) > most:
        console.print(Text(f"  … {len(lines) - most} more lines: {rest}", "dim"), soft_wrap=True, highlight=False)


def remove_controls(text: str) -> str:
    """`text` without escape sequences: what an agent printed may be in it, and must not steer the terminal."""
    return _CONTROLS.sub("", text)


def _style(line: str) -> str:
    if _FAILED.search(_NONE_FAILED.sub("", line)):
        return "red"
    return "green" if _PASSED.search(line) else ""
