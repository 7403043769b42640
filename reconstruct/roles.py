"""Roles: what a call was for, by declared rules over what the harness itself says of it.

main: the agent's own work. subagent: a helper agent's. compaction: summarising a history that is about to be rewritten. side:
titles, routing and the like. The first rule that fits decides; a call that none fits is main. Rules are data: a user adds to
them in the settings, and those come first.

Headers and prompts as read from the harnesses in 2026: codex 0.169, claude-code 2.1, opencode 1.18, gemini-cli 0.61, aider 0.86.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

ROLES = ("main", "subagent", "compaction", "side")

_TITLE = r"(?i)\btitle generator\b|\bgenerate a (?:\S+ ){0,3}title\b|\bsession title\b"
_COMMIT_MESSAGE = r"(?i)\bgenerates? (?:a )?(?:concise,? |one-line )*(?:git )?commit messages?\b"
_ROUTE = r"(?i)task routing ai|route the (?:user )?request"
_TEXT_ONLY = r"(?s)\ACRITICAL: Respond with TEXT ONLY\. Do NOT call any tools\..*detailed summary of th"
_SUMMARY = (
    r"(?i)context checkpoint compaction|detailed summary of (?:the|our|this) conversation|"
    r"summari[sz]e (?:the|our|this) (?:conversation|chat|session)|<state_snapshot>|conversation (?:history )?compaction"
)

_WORDS: Mapping[str, tuple[str, ...]] = {
    _TITLE: ("title",),
    _COMMIT_MESSAGE: ("commit message",),
    _ROUTE: ("task routing ai", "route the "),
    _TEXT_ONLY: ("critical: respond with text only",),
    _SUMMARY: ("compaction", "detailed summary of ", "summarise ", "summarize ", "<state_snapshot>"),
}
"""Of the expressions above: a text in which none of the words stands, in any case, holds none of them. Finding words costs a
tenth of what the expressions do, which every call would pay for its whole last message."""


@dataclass(frozen=True, slots=True)
class RoleRule:
    """Fits a call when everything it names does: `header` is there and its value matches `value`; the call offers tools or not;
    `system` is found in the system prompt; `text` is found there or in the last message. `agent_header` names the agent.
    `value`, `system` and `text` are regular expressions.

    Raises ValueError for a role there is none of, or a broken expression: every call would fail by it.
    """

    role: str
    header: str = ""
    value: str = ""
    tools: bool | None = None
    text: str = ""
    agent_header: str = ""
    system: str = ""

    def __post_init__(self) -> None:
        for name in ("header", "agent_header"):
            object.__setattr__(self, name, getattr(self, name).lower())
        if self.role not in ROLES:
            raise ValueError(f"the role {self.role!r} is none of {', '.join(ROLES)}")
        for expression in (self.value, self.text, self.system):
            try:
                re.compile(expression)
            except re.error as error:
                raise ValueError(f"the expression {expression!r} is broken: {error}") from error


@dataclass(frozen=True, slots=True)
class Marks:
    """What rules look at: lower-case header names, whether tools were offered, the system prompt and the last message."""

    headers: Mapping[str, str]
    tools: bool
    system: str = ""
    last: str = ""


BUILT_IN: tuple[RoleRule, ...] = (
    RoleRule("compaction", header="x-openai-subagent", value=r"^compact"),
    RoleRule("subagent", header="x-openai-subagent", agent_header="thread-id"),
    RoleRule("subagent", header="x-codex-parent-thread-id", agent_header="thread-id"),
    RoleRule("subagent", header="x-claude-code-agent-id", agent_header="x-claude-code-agent-id"),
    RoleRule("subagent", header="x-parent-session-id", agent_header="x-session-id"),
    # In the system prompt alone: a task may well speak of titles, commit messages and routes, and a harness without tools is
    # no sign of a side call.
    RoleRule("side", tools=False, system=_TITLE),
    RoleRule("side", tools=False, system=_COMMIT_MESSAGE),
    RoleRule("side", tools=False, system=_ROUTE),
    # Claude Code 2.1 offers its tools here as everywhere, and says that none must be called.
    RoleRule("compaction", text=_TEXT_ONLY),
    RoleRule("compaction", tools=False, text=_SUMMARY),
)


def role_of(marks: Marks, rules: Sequence[RoleRule] = BUILT_IN) -> tuple[str, str]:
    """(role, agent) by the first rule that fits; ("main", "") when none does."""
    system, last = _Searched(marks.system), _Searched(marks.last)
    for rule in rules:
        if rule.tools not in (None, marks.tools) or (rule.header and rule.header not in marks.headers):
            continue
        if _fits(rule, marks, system, last):
            return rule.role, marks.headers.get(rule.agent_header, "")
    return "main", ""


class _Searched:
    """A text in which expressions are looked for."""

    __slots__ = ("_small", "_text")

    def __init__(self, text: str) -> None:
        self._text = text
        self._small: str | None = None

    def holds(self, expression: str) -> bool:
        words = _WORDS.get(expression)
        if words is not None:
            if self._small is None:
                self._small = small_letters(self._text)
            if not any(word in self._small for word in words):
                return False
        return re.search(expression, self._text) is not None


def small_letters(text: str) -> str:
    """`text` with every letter that a regular expression takes for one of a to z, whatever its case, as that letter."""
    if text.isascii():
        return text.lower()
    # The two letters that casefold leaves what they are, or makes two of.
    return text.replace("\u0131", "i").replace("\u0130", "i").casefold()


def _fits(rule: RoleRule, marks: Marks, system: _Searched, last: _Searched) -> bool:
    """Whether what the rule says of values and texts holds."""
    if rule.header and not re.search(rule.value, marks.headers[rule.header]):
        return False
    if rule.system and not system.holds(rule.system):
        return False
    return not rule.text or system.holds(rule.text) or last.holds(rule.text)
