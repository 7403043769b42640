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
    RoleRule("side", tools=False, system=r"(?i)\btitle generator\b|\bgenerate a (?:\S+ ){0,3}title\b|\bsession title\b"),
    RoleRule("side", tools=False, system=r"(?i)\bgenerates? (?:a )?(?:concise,? |one-line )*(?:git )?commit messages?\b"),
    RoleRule("side", tools=False, system=r"(?i)task routing ai|route the (?:user )?request"),
    # Claude Code 2.1 offers its tools here as everywhere, and says that none must be called.
    RoleRule("compaction", text=r"(?s)\ACRITICAL: Respond with TEXT ONLY\. Do NOT call any tools\..*detailed summary of th"),
    RoleRule(
        "compaction",
        tools=False,
        text=r"(?i)context checkpoint compaction|detailed summary of (?:the|our|this) conversation|"
        r"summari[sz]e (?:the|our|this) (?:conversation|chat|session)|<state_snapshot>|conversation (?:history )?compaction",
    ),
)


def role_of(marks: Marks, rules: Sequence[RoleRule] = BUILT_IN) -> tuple[str, str]:
    """(role, agent) by the first rule that fits; ("main", "") when none does."""
    for rule in rules:
        if _fits(rule, marks):
            return rule.role, marks.headers.get(rule.agent_header.lower(), "") if rule.agent_header else ""
    return "main", ""


def _fits(rule: RoleRule, marks: Marks) -> bool:
    if rule.header:
        value = marks.headers.get(rule.header.lower())
        if value is None or not re.search(rule.value, value):
            return False
    if rule.tools is not None and rule.tools != marks.tools:
        return False
    if rule.system and not re.search(rule.system, marks.system):
        return False
    return not rule.text or any(re.search(rule.text, text) for text in (marks.system, marks.last))
