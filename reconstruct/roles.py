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
    `text` is found in the system prompt or in the last message. `agent_header` names the agent."""

    role: str
    header: str = ""
    value: str = ""
    tools: bool | None = None
    text: str = ""
    agent_header: str = ""


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
    RoleRule(
        "side", tools=False, text=r"(?i)\btitle generator\b|generate a (?:short |brief |concise )*title\b|\bsession title\b"
    ),
    RoleRule("side", tools=False, text=r"(?i)generates? (?:a )?(?:concise |one-line )*(?:git )?commit messages?\b"),
    RoleRule("side", tools=False, text=r"(?i)task routing ai|route the (?:user )?request"),
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
            return rule.role, marks.headers.get(rule.agent_header, "") if rule.agent_header else ""
    return "main", ""


def _fits(rule: RoleRule, marks: Marks) -> bool:
    if rule.header:
        value = marks.headers.get(rule.header.lower())
        if value is None or not re.search(rule.value, value):
            return False
    if rule.tools is not None and rule.tools != marks.tools:
        return False
    return not rule.text or any(re.search(rule.text, text) for text in (marks.system, marks.last))
