"""Roles: what a call was for, and who says so.

main: the agent's own work. subagent: a helper agent's. compaction: summarising a history that is about to be rewritten. side:
titles, routing and the like. `role_source` tells who says so:

declared   the harness, in headers that it sends about itself, or its definition, whose rules come with the session
rule       a rule of the service's operator
inferred   nobody: concluded from the shape of the session, or from a prompt. A call of which nothing is known is `main`, inferred

Text decides nothing: whoever writes in a prompt, a user, a tool or the agent, could take a call out of training by it, or put it
in. A prompt that reads like a compaction labels its call, which is trained as what it would be without the label. The shape of a session
is no text: a call that offers no tools, at a root of its own, beside a conversation with tools is inferred `side` (see
`infer_side_calls`); whether such calls are trained is the operator's to say.

Rules are data. The first that fits decides: the operator's, then those of the session, then the built-in ones. Headers as read from
the harnesses in 2026: codex 0.169, claude-code 2.1, opencode 1.18.
"""

from __future__ import annotations

import json
import re
from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, NamedTuple

from reconstruct.forest import Forest
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
"""Of the expressions above: a text in which none of the words stands, in any case, holds none of them. Finding words costs a
tenth of what the expressions do, which every call would pay for its whole last message."""


@dataclass(frozen=True, slots=True)
class RoleRule:
    """Fits a call when everything it names does: `header` is there and its value matches `value`; the call offers tools or not;
    `system` is found in the system prompt; `text` is found there or in the last message. `agent_header` names the agent.
    `value`, `system` and `text` are regular expressions. What a user, a tool or an agent writes can match `text`, and may stand in a
    system prompt: whoever gives a rule answers for that.

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


def encode_rule(rule: RoleRule) -> dict[str, Any]:
    """The fields that say something, as `POST /sessions` takes them."""
    told = {each.name: getattr(rule, each.name) for each in fields(rule)}
    return {name: value for name, value in told.items() if value not in ("", None)}


@dataclass(frozen=True, slots=True)
class Marks:
    """What rules look at: lower-case header names, whether tools were offered, the system prompt and the last message."""

    headers: Mapping[str, str]
    tools: bool
    system: str = ""
    last: str = ""


class Purpose(NamedTuple):
    """What a call is for. `agent` is whose it is, as the harness names its agents; `source` who says so."""

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
"""What harnesses say of themselves in headers."""

LABELS: tuple[RoleRule, ...] = (
    # Claude Code 2.1 offers its tools here as everywhere, and says that none must be called.
    RoleRule("compaction", text=_TEXT_ONLY),
    RoleRule("compaction", tools=False, text=_SUMMARY),
)
"""What prompts read like. They name a call and change nothing of what is trained."""


def find_purpose(marks: Marks, rules: Sequence[RoleRule] = (), declared: Sequence[RoleRule] = ()) -> Purpose:
    """By the first rule that fits: of the operator's `rules`, of those `declared` with the session, of the built-in ones; else by
    what its prompt reads like, else main."""
    system, last = _Searched(marks.system), _Searched(marks.last)
    for given, source in ((rules, RULE), (declared, DECLARED), (BUILT_IN, DECLARED), (LABELS, INFERRED)):
        for rule in given:
            if rule.tools not in (None, marks.tools) or (rule.header and rule.header not in marks.headers):
                continue
            if _fits(rule, marks, system, last):
                return Purpose(rule.role, marks.headers.get(rule.agent_header, ""), source)
    return Purpose("main", "", INFERRED)


def infer_side_calls(calls: Sequence[Call]) -> Sequence[Call]:
    """The calls, with `side` as the role of those that nobody says anything of and whose conversation offers no tools, where the same
    policy has a conversation with tools in the session that is the agent's own work.

    A conversation is a root and what goes on from it. It takes the whole session to tell: a title is often asked for first. What a
    prompt reads like changes nothing of it."""
    roots = [call for call in calls if call.node.parent_id is None]
    kinds = {call.root_key: call for call in roots}
    if len(kinds) < 2:
        return calls
    with_tools = {key for key, call in kinds.items() if _offers_tools(call)}
    working = {call.policy for call in roots if call.root_key in with_tools and _may_be_main(call)}
    beside = {call.call_id for call in roots if call.root_key not in with_tools and call.policy in working}
    if not beside:
        return calls
    aside = _going_on_from(beside, calls)
    return [replace(call, role="side") if call.call_id in aside and call.role_source == INFERRED else call for call in calls]


def _going_on_from(roots: set[str], calls: Sequence[Call]) -> set[str]:
    """The ids of `roots` and of all calls below them."""
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
    """The role by which it is decided whether the call is trained: its own where it was declared or a rule says so. One that is only
    inferred counts as main, but for a side call where those are not trained."""
    if call.role_source == INFERRED and (train_inferred or call.role != "side"):
        return "main"
    return call.role


def is_wanted(role: str, source: str, wanted: Container[str]) -> bool:
    """Whether a row is of one of the `wanted` roles. One whose prompt merely reads like a compaction is the agent's own work."""
    return ("main" if source == INFERRED and role != "side" else role) in wanted


def _may_be_main(call: Call) -> bool:
    return call.role == "main" or call.role_source == INFERRED


def _offers_tools(root: Call) -> bool:
    """Whether the root's request had tools; True where its preamble does not say."""
    try:
        return bool(json.loads(root.preamble)["tools"])
    except (ValueError, TypeError, LookupError):
        return True


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


# Retries: an attempt is superseded by a later one only on proof that its reply was not delivered; otherwise both stand.
#
# Two calls are attempts at the same when they have the same request (equal digests of equal bodies) below the same parent. What a
# later request says of itself proves nothing about an earlier reply: of identical requests at once, one that the engine failed comes
# again with the mark of a retry, while the replies to the others were read. A call that something continues was delivered, whatever
# was noted. Choices of one request (n > 1) are not retries of each other: they started together.


REASON = "superseded"


def find_superseded(forest: Forest, delivered: Container[str]) -> set[str]:
    """Ids of the calls whose retry took their place; `delivered` holds the ids of those whose answer went out whole."""
    attempts: dict[tuple[str | None, bytes], list[Call]] = {}
    for call in forest.in_order():
        attempts.setdefault((call.node.parent_id, call.digest), []).append(call)
    lost: set[str] = set()
    for calls in attempts.values():
        if len(calls) > 1:
            lost.update(_lost(forest, calls, delivered))
    return lost


def _lost(forest: Forest, calls: list[Call], delivered: Container[str]) -> Iterable[str]:
    latest = calls[-1].started_at
    for call in calls:
        undelivered = call.call_id not in delivered and not forest.children(call.call_id)
        if undelivered and call.started_at < latest:
            yield call.call_id
