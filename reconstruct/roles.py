"""Roles: the purpose of a call, and the source of that information.

main: the agent's own work. subagent: a helper agent's. compaction: summarising a history that is about to be rewritten. side:
titles, routing and the like. `role_source` is one of:

declared   by the harness, in headers about itself, or by its definition, whose rules come with the session
rule       by a rule of the service's operator
inferred   from the shape of the session or from a prompt. A call of which nothing is known is `main`, inferred

Text never decides what is trained: a user, a tool or the agent could write text that takes a call out of training or puts it in. A
prompt that reads like a compaction only labels its call, which is trained as without the label, unless the harness's definition declares
that its compactions are known by what it writes itself (`RoleRule.system`, `RoleRule.user`). The shape of a session is not text: a
call without tools, at its own root, in a session with a conversation with tools is inferred to be `side` (see `infer_side_calls`);
the operator decides whether such calls are trained.

Rules are data. The first match decides: the operator's, then the session's, then the built-in ones. Headers as of 2026: codex 0.169,
claude-code 2.1, opencode 1.18.
"""

from __future__ import annotations

import json
import re
from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, NamedTuple

from reconstruct.records import DECLARED, INFERRED, RULE, Call

ROLES = ("main", "subagent", "compaction", "side")

_TEXT_ONLY = r"(?s)\ACRITICAL: Respond with TEXT ONLY\. Do NOT call any tools\..*detailed summary of th"
_SUMMARY = (
    r"(?i)context checkpoint compaction|detailed summary of (?:the|our|this) conversation|"
    r"summari[sz]e (?:the|our|this) (?:conversation|chat|session)|<state_snapshot>|conversation (?:history )?compaction"
)

_WORDS: Mapping[str, tuple[str, ...]] = {
    _TEXT_ONLY: ("critical: respond with text only",),
    _SUMMARY: ("compaction", "detailed summary of ", "summarise ", "summarize ", "<state_snapshot>"),
}
"""For each expression above, words of which every match contains one, in lower case. Searching words first costs a tenth of the
expression, which every call would otherwise pay for its whole last message."""


@dataclass(frozen=True, slots=True)
class RoleRule:
    """Matches a call if all its conditions do: `header` is present and its value matches `value`; `tools`: the call offers tools or
    not; `system` matches the system prompt; `user` matches the last message if it is the user's, never a tool's result; `text` matches
    the system prompt or the last message. `agent_header` names the agent. `value`, `system`, `user` and `text` are regular expressions.
    Text of a user, a tool or an agent can match `text` and may be in a system prompt, and a user's can match `user`: the author of a rule
    must allow for that.

    Raises ValueError for an unknown role or an invalid expression, on which every call would fail.
    """

    role: str
    header: str = ""
    value: str = ""
    tools: bool | None = None
    text: str = ""
    agent_header: str = ""
    system: str = ""
    user: str = ""

    def __post_init__(self) -> None:
        for name in ("header", "agent_header"):
            object.__setattr__(self, name, getattr(self, name).lower())
        if self.role not in ROLES:
            raise ValueError(f"the role {self.role!r} is not one of {', '.join(ROLES)}")
        for expression in (self.value, self.text, self.system, self.user):
            try:
                re.compile(expression)
            except re.error as error:
                raise ValueError(f"the expression {expression!r} is invalid: {error}") from error


def encode_rule(rule: RoleRule) -> dict[str, Any]:
    """The fields that are set, as `POST /sessions` takes them."""
    values = {each.name: getattr(rule, each.name) for each in fields(rule)}
    return {name: value for name, value in values.items() if value not in ("", None)}


@dataclass(frozen=True, slots=True)
class Marks:
    """What rules match: headers with lower-case names, whether tools are offered, the system prompt and the last message, and whether
    that is the user's."""

    headers: Mapping[str, str]
    tools: bool
    system: str = ""
    last: str = ""
    from_user: bool = False


class Purpose(NamedTuple):
    """The role of a call. `agent` is the harness's name of the agent, `source` a `role_source`."""

    role: str
    agent: str
    source: str


BUILT_IN: tuple[RoleRule, ...] = (
    RoleRule("compaction", header="x-openai-subagent", value=r"^compact"),
    RoleRule("subagent", header="x-openai-subagent", agent_header="thread-id"),
    RoleRule("subagent", header="x-codex-parent-thread-id", agent_header="thread-id"),
    RoleRule("subagent", header="x-claude-code-agent-id", agent_header="x-claude-code-agent-id"),
    RoleRule("subagent", header="x-parent-session-id", agent_header="x-session-id"),
)
"""Headers that harnesses send about themselves."""

LABELS: tuple[RoleRule, ...] = (
    # Claude Code 2.1 offers its tools here too and instructs the model to call none.
    RoleRule("compaction", text=_TEXT_ONLY),
    RoleRule("compaction", tools=False, text=_SUMMARY),
)
"""Prompts of compactions. They label a call but do not change what is trained."""


def find_purpose(marks: Marks, rules: Sequence[RoleRule] = (), declared: Sequence[RoleRule] = ()) -> Purpose:
    """The first match among the operator's `rules`, those `declared` with the session, the built-in ones, and the labels; else main."""
    system, last = _Text(marks.system), _Text(marks.last)
    for given, source in ((rules, RULE), (declared, DECLARED), (BUILT_IN, DECLARED), (LABELS, INFERRED)):
        for rule in given:
            if rule.tools not in (None, marks.tools) or (rule.header and rule.header not in marks.headers):
                continue
            if _fits(rule, marks, system, last):
                return Purpose(rule.role, marks.headers.get(rule.agent_header, ""), source)
    return Purpose("main", "", INFERRED)


def infer_side_calls(calls: Sequence[Call]) -> Sequence[Call]:
    """The calls, with the role `side` for those with an inferred role whose conversation offers no tools, if the same policy has a
    conversation with tools in the session that is the agent's own work.

    A conversation is a root and its descendants. The whole session is needed: a title is often requested first. Labels of prompts have
    no effect."""
    roots = [call for call in calls if call.node.parent_id is None]
    kinds = {call.root_key: call for call in roots}
    if len(kinds) < 2:
        return calls
    with_tools = {key for key, call in kinds.items() if _offers_tools(call)}
    working = {call.policy for call in roots if call.root_key in with_tools and _may_be_main(call)}
    beside = {call.call_id for call in roots if call.root_key not in with_tools and call.policy in working}
    if not beside:
        return calls
    aside = _find_descendants(beside, calls)
    return [replace(call, role="side") if call.call_id in aside and call.role_source == INFERRED else call for call in calls]


def _find_descendants(roots: set[str], calls: Sequence[Call]) -> set[str]:
    """The ids of `roots` and their descendants."""
    children: dict[str | None, list[str]] = {}
    for call in calls:
        children.setdefault(call.node.parent_id, []).append(call.call_id)
    found, waiting = set(roots), list(roots)
    while waiting:
        below = [call_id for call_id in children.get(waiting.pop(), ()) if call_id not in found]
        found.update(below)
        waiting += below
    return found


def credited_role(call: Call, *, train_inferred: bool) -> str:
    """The role that decides whether the call is trained: its own if declared or set by a rule. An inferred role counts as main, except
    a side call's if those are not trained."""
    if call.role_source == INFERRED and (train_inferred or call.role != "side"):
        return "main"
    return call.role


def is_wanted(role: str, source: str, wanted: Container[str]) -> bool:
    """Whether a row has one of the `wanted` roles. An inferred compaction counts as main."""
    return ("main" if source == INFERRED and role != "side" else role) in wanted


def _may_be_main(call: Call) -> bool:
    return call.role == "main" or call.role_source == INFERRED


def _offers_tools(root: Call) -> bool:
    """Whether the root's request had tools; True if its preamble does not say."""
    try:
        return bool(json.loads(root.preamble)["tools"])
    except (ValueError, TypeError, LookupError):
        return True


@dataclass(slots=True)
class _Text:
    """A text to search, with its lower-case form cached."""

    _text: str
    _small: str | None = None

    def holds(self, expression: str) -> bool:
        words = _WORDS.get(expression)
        if words is not None:
            if self._small is None:
                self._small = lower_case(self._text)
            for word in words:
                if word in self._small:
                    break
            else:
                return False
        return re.search(expression, self._text) is not None


def lower_case(text: str) -> str:
    """`text` in lower case, also for letters that a case-insensitive regular expression equates with a to z."""
    if text.isascii():
        return text.lower()
    # casefold leaves the first unchanged and makes two letters of the second.
    return text.replace("\u0131", "i").replace("\u0130", "i").casefold()


def _fits(rule: RoleRule, marks: Marks, system: _Text, last: _Text) -> bool:
    """Whether the rule's values and texts match."""
    if rule.header and not re.search(rule.value, marks.headers[rule.header]):
        return False
    if rule.system and not system.holds(rule.system):
        return False
    if rule.user and not (marks.from_user and last.holds(rule.user)):
        return False
    return not rule.text or system.holds(rule.text) or last.holds(rule.text)
