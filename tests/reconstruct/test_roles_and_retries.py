"""What a call was for, which attempts count, and lines that mean nothing: by declared rules and on proof only.

Where it counts through the real service and a real Redis, with the openai SDK as the harness and a scripted engine.
"""

from __future__ import annotations

import json
import re
import string
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from typing import Any

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from proxy.settings import Settings
from proxy.store.sessions import SessionStore
from reconstruct.roles import LABELS, Marks, RoleRule, find_purpose, infer_side_calls, lower_case
from tests.support.engine.scripted_engine import Fail, Generation, Say, ScriptedEngine
from tests.support.engine.scripted_fixtures import Running
from tests.support.service.redis_server import RedisServer
from tests.support.service.running_service import TRAINER, RunningService, Session, hanging_up, wait_until
from tests.support.sessions.calls import call
from tests.support.sessions.conversations import TOOLS, turn

RULES = [
    RoleRule("side", header="x-purpose", value="^judge$", agent_header="X-Judge-Name"),
    RoleRule("main", header="x-openai-subagent", value="^review"),
    RoleRule("compaction", text=r"^Shrink this\b"),
]
STAMPS = [r"^x-anthropic-billing-header:.*$", r"^Current time: .*$"]
SYSTEM = "You are a coding agent."
TITLE = "You are a title generator. You output ONLY a thread title."


@pytest.fixture(scope="module")
def running(redis_server: RedisServer) -> Iterator[Running]:
    with redis_server.client() as client:
        client.flushall()
    with (
        ScriptedEngine("qwen3") as engine,
        RunningService(engine.url, redis_server.url, engine_api="token") as plain,
        RunningService(
            engine.url,
            redis_server.url,
            engine_api="token",
            role_rules=RULES,
            train_roles=["main", "inferred_side"],
            volatile_lines=STAMPS,
        ) as ruled,
        RunningService(engine.url, redis_server.url, engine_api="token", train_roles=["main", "subagent"]) as untrained,
    ):
        yield engine, {"plain": plain, "ruled": ruled, "untrained": untrained}


@pytest.fixture
def service(running: Running) -> RunningService:
    return running[1]["plain"]


@pytest.fixture
def ruled(running: Running) -> RunningService:
    """A service with a user's own rules, which trains the role main alone."""
    return running[1]["ruled"]


@pytest.fixture
def untrained(running: Running) -> RunningService:
    """A service that does not train what it infers to be side calls."""
    return running[1]["untrained"]


def asked(text: str, system: str = SYSTEM) -> list[dict[str, Any]]:
    return [turn("system", system), turn("user", text)]


def reasons(session: Session) -> dict[str, str]:
    """Quarantined calls and why."""
    return {item["call_id"]: item["reason"] for item in session.trajectories()[1]["quarantined"]}


def finished(session: Session) -> int:
    """How many calls are recorded with their result."""
    return sum(call["status"] != "in_flight" for call in session.calls)


def all_delivered(session: Session) -> bool:
    return all(call["delivered"] for call in session.calls)


def trained(session: Session) -> set[str]:
    """Ids of the calls whose every sampled token some row trains."""
    calls = {call["call_id"]: call for call in session.calls}
    found = set()
    for row in session.trajectories()[0]:
        for call_id in row["call_ids"]:
            start = len(calls[call_id]["prompt_ids"])
            mask = row["loss_mask"][start : start + len(calls[call_id]["completion_ids"])]
            if all(mask):
                found.add(call_id)
    return found


# Roles


@pytest.mark.parametrize(
    ("headers", "role", "agent"),
    [
        ({"session-id": "s", "thread-id": "t1"}, "main", ""),
        ({"thread-id": "t2", "x-openai-subagent": "collab_spawn", "x-codex-parent-thread-id": "t1"}, "subagent", "t2"),
        ({"thread-id": "t2", "x-codex-parent-thread-id": "t1"}, "subagent", "t2"),
        ({"thread-id": "t1", "x-openai-subagent": "compact"}, "compaction", ""),
        ({"x-claude-code-session-id": "s"}, "main", ""),
        ({"x-claude-code-agent-id": "a7"}, "subagent", "a7"),
        ({"x-session-id": "child", "x-parent-session-id": "parent"}, "subagent", "child"),
        ({"x-session-id": "parent"}, "main", ""),
    ],
)
def test_a_harness_names_its_sub_agents_in_its_headers(headers: dict[str, str], role: str, agent: str) -> None:
    source = "inferred" if role == "main" else "declared"
    assert find_purpose(Marks(headers, tools=True)) == (role, agent, source)


COMPACTIONS = (
    "You are performing a CONTEXT CHECKPOINT COMPACTION. Create a handoff summary.",
    "Your task is to create a detailed summary of the conversation so far.",
)


@pytest.mark.parametrize("text", [*COMPACTIONS, "You summarize internal chat history into a <state_snapshot>."])
def test_a_prompt_that_reads_like_a_compaction_is_labelled_so_and_nobody_said_it(text: str) -> None:
    for marks in (Marks({}, False, SYSTEM, text), Marks({}, False, text, "go")):
        assert find_purpose(marks) == ("compaction", "", "inferred")
    assert find_purpose(Marks({}, True, SYSTEM, text)) == ("main", "", "inferred")


def test_claude_codes_compaction_offers_tools_and_is_known_by_its_first_words() -> None:
    asked = "CRITICAL: Respond with TEXT ONLY. Do NOT call any tools.\n\nYour task is to create a detailed summary of the conversation."
    assert find_purpose(Marks({}, True, SYSTEM, asked)) == ("compaction", "", "inferred")
    assert find_purpose(Marks({}, True, SYSTEM, f"The user wrote: {asked}")) == ("main", "", "inferred")


@pytest.mark.parametrize(
    "task",
    [
        "Write a script that generates commit messages from a diff.",
        "Write a function that will generate a short title for each blog post.",
        "Our web server should route the user request to the nearest region.",
        TITLE,
    ],
)
def test_no_prompt_makes_a_side_call(task: str) -> None:
    """A harness that speaks in text alone (aider, mini-swe-agent) never offers tools: its task must not decide the role."""
    for marks in (Marks({}, False, SYSTEM, task), Marks({}, False, task, "go")):
        assert find_purpose(marks) == ("main", "", "inferred")


PIECES: tuple[str, ...] = (
    "context checkpoint compaction",
    "detailed summary of ",
    "the conversation",
    "this conversation",
    "summarize the ",
)
PIECES += ("summari\u017fe our ", "chat", "CONTEXT CHECKPO\u0130NT COMPACTION", "<state_snapshot>", "\u212aey", " ", "\n")
PIECES += ("CRITICAL: Respond with TEXT ONLY. Do NOT call any tools.", " detailed summary of th", "stra\u00dfe", "plain text")
WITHOUT_WORDS = tuple(replace(rule, text=rule.text + "(?:)") for rule in LABELS)
"""The labels' rules, by expressions that mean the same and are always looked for in full."""

texts = st.lists(
    st.sampled_from(PIECES).flatmap(lambda piece: st.sampled_from((piece, piece.upper(), piece.title()))), max_size=5
)


@given(texts.map("".join), texts.map("".join), st.booleans())
def test_looking_for_words_first_changes_no_role(system: str, last: str, tools: bool) -> None:
    marks = Marks({}, tools, system, last)
    assert find_purpose(marks)[:2] == find_purpose(marks, WITHOUT_WORDS)[:2]


def test_whatever_an_expression_takes_for_a_letter_counts_as_that_letter_in_a_word() -> None:
    everything = "".join(chr(point) for point in range(0x110000) if not 0xD800 <= point < 0xE000)
    found = re.findall("(?i)[a-z]", everything)
    assert len(found) > 52
    assert all(re.fullmatch(f"(?i){lower_case(letter)}", letter) for letter in found)
    assert {lower_case(f"\u00e9{letter}")[1:] for letter in found} == set(string.ascii_lowercase)


def test_the_first_rule_that_fits_decides() -> None:
    rules = (RoleRule("side", header="x-a"), RoleRule("subagent", header="x-a", value="^1$"))
    assert find_purpose(Marks({"x-a": "1"}, True), rules) == ("side", "", "rule")
    assert find_purpose(Marks({"x-a": "1"}, True), rules[1:]) == ("subagent", "", "rule")
    assert find_purpose(Marks({"x-a": "2"}, True), rules[1:]) == ("main", "", "inferred")


def test_the_operators_rules_come_before_those_of_the_harness_and_these_before_the_built_in_ones() -> None:
    marks = Marks({"x-openai-subagent": "compact"}, False, "", COMPACTIONS[0])
    rules, declared = [RoleRule("main", tools=False)], [RoleRule("side", tools=False)]
    assert find_purpose(marks, rules, declared) == ("main", "", "rule")
    assert find_purpose(marks, declared=declared) == ("side", "", "declared")
    assert find_purpose(marks) == ("compaction", "", "declared")
    assert find_purpose(replace(marks, headers={})) == ("compaction", "", "inferred")


def test_a_rule_may_ask_for_several_things_at_once() -> None:
    rule = RoleRule("side", header="X-Kind", value="^probe", tools=False, text="(?i)ping", agent_header="X-Who")
    assert find_purpose(Marks({"x-kind": "probe-1", "x-who": "me"}, False, "", "PING"), (rule,)) == ("side", "me", "rule")
    for marks in (
        Marks({"x-kind": "a probe"}, False, "", "ping"),
        Marks({"x-kind": "probe"}, True, "", "ping"),
        Marks({"x-kind": "probe"}, False, "", "pong"),
        Marks({}, False, "", "ping"),
    ):
        assert find_purpose(marks, (rule,)) == ("main", "", "inferred")


def test_role_rules_and_volatile_lines_are_read_from_the_environment_as_json(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VERBATIM_ROLE_RULES", json.dumps([{"role": "side", "header": "x-title", "tools": False}]))
    monkeypatch.setenv("VERBATIM_VOLATILE_LINES", json.dumps(["^Now: .*$"]))
    settings = Settings()
    assert settings.role_rules == [RoleRule("side", header="x-title", tools=False)]
    assert settings.volatile_lines == ["^Now: .*$"]


@pytest.mark.parametrize(
    "settings",
    [
        {"role_rules": [{"role": "sidecall", "header": "x-title"}]},
        {"role_rules": [{"role": "side", "text": "(unclosed"}]},
        {"role_rules": [{"role": "side", "header": "x-title", "value": "*"}]},
        {"volatile_lines": ["^Now: (.*$"]},
    ],
    ids=["unknown role", "broken text", "broken value", "broken line"],
)
def test_a_rule_that_cannot_work_is_refused_at_the_start(settings: dict[str, Any]) -> None:
    """Else every call of the service would fail, or its tokens be quarantined under a role that nobody meant."""
    with pytest.raises(ValidationError):
        Settings(**settings)


def test_a_subagents_call_is_exported_and_trained_as_one(engine: ScriptedEngine, service: RunningService) -> None:
    session = service.session()
    session.ask(asked("do it"), tools=TOOLS, extra_headers={"thread-id": "t1"})
    session.ask(asked("help"), tools=TOOLS, extra_headers={"thread-id": "t2", "x-codex-parent-thread-id": "t1"})
    rows, accounting = session.trajectories()
    assert [(row["role"], row["agent"], any(row["loss_mask"])) for row in rows] == [
        ("main", "", True),
        ("subagent", "t2", True),
    ]
    assert accounting["quarantined"] == []


DECLARED: dict[str, Any] = {"role_rules": [{"role": "side", "tools": False}]}
"""As a definition says of a harness whose own work always offers tools."""


@pytest.mark.parametrize("builder", ["merged", "per_call"])
def test_roles_that_are_not_trained_are_shown_with_an_all_zero_mask_and_quarantined(
    engine: ScriptedEngine, service: RunningService, builder: str
) -> None:
    session = service.session(**DECLARED)
    session.ask(asked("Generate a title for this conversation:", TITLE))
    session.ask(asked("fix the bug"), tools=TOOLS)
    history = [*asked("fix the bug"), turn("assistant", "done"), turn("user", "Sum it up.")]
    session.ask(history, tools=TOOLS, extra_headers={"x-openai-subagent": "compact"})
    title, work, summary = session.calls
    assert [(call["role"], call["role_source"]) for call in (title, work, summary)] == [
        ("side", "declared"),
        ("main", "inferred"),
        ("compaction", "declared"),
    ]
    rows, accounting = session.trajectories(builder)
    assert [(row["role"], row["role_source"], any(row["loss_mask"])) for row in rows] == [
        ("side", "declared", False),
        ("main", "inferred", True),
        ("compaction", "declared", False),
    ]
    for row, made in zip(rows, (title, work, summary), strict=True):
        assert row["token_ids"] == made["prompt_ids"] + made["completion_ids"]
    for row in (rows[0], rows[2]):
        assert not any(row["logprobs"])
        assert row["weight_versions"] == []
    assert accounting["quarantined"] == [
        {"call_id": title["call_id"], "tokens": len(title["completion_ids"]), "reason": "role_side"},
        {"call_id": summary["call_id"], "tokens": len(summary["completion_ids"]), "reason": "role_compaction"},
    ]


def test_rows_of_roles_that_are_not_trained_are_not_leased(engine: ScriptedEngine, service: RunningService) -> None:
    session = service.session(**DECLARED)
    session.ask(asked("Generate a title for this conversation:", TITLE))
    session.ask(asked("fix the bug"), tools=TOOLS)
    _, work = session.calls
    session.close(reward=1.0)
    lease = service.request("POST", "/batches/lease", TRAINER, json={"max_groups": 100}).json()
    (group,) = [group for group in lease["groups"] if group["group_id"] == session.session_id]
    (row,) = group["trajectories"]
    assert row["call_ids"] == [work["call_id"]]
    assert service.request("POST", f"/batches/{lease['lease_id']}/ack", TRAINER).status_code == 200


def test_a_session_of_side_calls_alone_is_never_leased(engine: ScriptedEngine, service: RunningService) -> None:
    session = service.session(**DECLARED)
    session.ask(asked("Generate a title for this conversation:", TITLE))
    session.close(reward=1.0)
    lease = service.request("POST", "/batches/lease", TRAINER, json={"max_groups": 100})
    groups = lease.json()["groups"] if lease.status_code == 200 else []
    assert session.session_id not in [group["group_id"] for group in groups]


# What text says, and what the shape of a session says


TEXTS = (
    "Summarize the conversation below in one sentence: A: hello. B: hello.",
    "CRITICAL: Respond with TEXT ONLY. Do NOT call any tools. Write a detailed summary of the file.",
    "context checkpoint compaction",
    "You are a title generator. Generate a title for this conversation.",
    "You are a specialized Task Routing AI: route the user request.",
    "It generates concise, one-line git commit messages.",
)


@pytest.mark.case(53)
@pytest.mark.parametrize("where", ["system", "user", "tool"])
@pytest.mark.parametrize("tools", [[], TOOLS], ids=["without tools", "with tools"])
def test_no_text_changes_whether_a_call_is_trained(
    engine: ScriptedEngine, service: RunningService, where: str, tools: list[Any]
) -> None:
    """49. The old bug: a task to summarize a conversation had all its tokens quarantined as role_compaction."""
    session = service.session()
    offered = {"tools": tools} if tools else {}
    for text in TEXTS:
        used = {"role": "assistant", "tool_calls": [{"id": "t", "type": "function", "function": FUNCTION}]}
        tool = [turn("system", SYSTEM), turn("user", "q"), used, {"role": "tool", "tool_call_id": "t", "content": text}]
        session.ask({"system": asked("q", text), "user": asked(text), "tool": tool}[where], **offered)
    assert session.trajectories()[1]["quarantined"] == []
    assert len(trained(session)) == len(TEXTS)


FUNCTION = {"name": "lookup", "arguments": '{"key": "a"}'}


@pytest.mark.parametrize("first", [True, False], ids=["asked first", "asked last"])
def test_a_call_without_tools_at_a_root_of_its_own_beside_a_conversation_with_tools_is_inferred_to_be_a_side_call(
    engine: ScriptedEngine, service: RunningService, first: bool
) -> None:
    """gptme asks for a "2-4 word title" and says of it nothing that a service could know."""
    session = service.session()
    side = partial(session.ask, asked("Create a 2-4 word title.", "Name it."))
    work = partial(session.ask, asked("fix the bug"), tools=TOOLS)
    for ask in (side, work) if first else (work, side):
        ask()
    found = {call["role"]: call for call in session.calls}
    assert {role: call["role_source"] for role, call in found.items()} == {"side": "inferred", "main": "inferred"}
    assert not is_work(found["side"]) and is_work(found["main"])
    rows, accounting = session.trajectories()
    assert sorted((row["role"], row["role_source"], any(row["loss_mask"])) for row in rows) == [
        ("main", "inferred", True),
        ("side", "inferred", True),
    ]
    assert accounting["quarantined"] == []


def is_work(made: dict[str, Any]) -> bool:
    return "fix the bug" in str(made["messages"])


def test_inferred_side_calls_are_left_out_where_the_operator_says_so_and_texts_change_nothing_of_it(
    engine: ScriptedEngine, untrained: RunningService
) -> None:
    session = untrained.session()
    session.ask(asked("Create a 2-4 word title."))
    session.ask(asked(TEXTS[0]))
    session.ask(asked("fix the bug"), tools=TOOLS)
    session.ask(asked(TEXTS[1]), tools=TOOLS)
    title, titled, *work = session.calls
    assert reasons(session) == {title["call_id"]: "role_side", titled["call_id"]: "role_side"}
    assert trained(session) == {call["call_id"] for call in work}
    assert [call["role"] for call in work] == ["main", "compaction"]


def test_a_side_call_is_inferred_beside_the_agents_own_work_alone() -> None:
    """m is a conversation without tools; beside it is one with tools of each kind: another policy's, a sub-agent's, the agent's."""
    with_tools = {"root_key": b"tools", "preamble": b'{"tools": [1]}'}
    without = call("m1", delta=[1], said=[2], fields={"root_key": b"none", "preamble": b'{"tools": []}'})
    goes_on = call("m2", parent="m1", base="m1", base_length=2, delta=[3], said=[4], fields={"root_key": b"named"})

    def roles(**fields: Any) -> list[str]:
        beside = call("m3", delta=[9], said=[9], fields={**with_tools, **fields})
        return [found.role for found in infer_side_calls([without, goes_on, beside])][:2]

    assert roles() == ["side", "side"]
    assert roles(marks={"policy": "judge"}) == ["main", "main"]
    assert roles(role="subagent", role_source="declared") == ["main", "main"]
    assert roles(role="compaction", role_source="inferred") == ["side", "side"]
    assert roles(preamble=b"") == ["side", "side"], "what is not known to offer none may be the agent's own"
    assert [found.role for found in infer_side_calls([without, goes_on])] == ["main", "main"]


def test_what_was_declared_is_not_inferred() -> None:
    said = {"root_key": b"none", "preamble": b'{"tools": []}', "role_source": "rule"}
    tools = call("c2", delta=[9], said=[9], fields={"root_key": b"tools", "preamble": b'{"tools": [1]}'})
    for role in ("main", "subagent"):
        calls = infer_side_calls([call("c1", delta=[1], said=[2], fields={**said, "role": role}), tools])
        assert [found.role for found in calls] == [role, "main"]


def test_a_users_own_rules_come_before_the_built_in_ones(engine: ScriptedEngine, ruled: RunningService) -> None:
    session = ruled.session()
    session.ask(asked("a"), extra_headers={"x-purpose": "judge", "x-judge-name": "sphinx"})
    session.ask(asked("b"), extra_headers={"x-purpose": "judges"})
    session.ask(asked("c"), extra_headers={"x-openai-subagent": "review", "thread-id": "t"})
    session.ask(asked("d"), extra_headers={"x-openai-subagent": "collab_spawn", "thread-id": "t"})
    session.ask(asked("Shrink this history."), tools=TOOLS)
    rows, accounting = session.trajectories()
    assert [(row["role"], row["agent"]) for row in rows] == [
        ("side", "sphinx"),
        ("main", ""),
        ("main", ""),
        ("subagent", "t"),
        ("compaction", ""),
    ]
    assert [any(row["loss_mask"]) for row in rows] == [False, True, True, False, False]
    assert [item["reason"] for item in accounting["quarantined"]] == ["role_side", "role_subagent", "role_compaction"]


def test_a_summary_made_in_place_is_context_and_not_trained(engine: ScriptedEngine, ruled: RunningService) -> None:
    """The compaction call extends the work and is extended in turn: one row, whose middle is masked."""
    session = ruled.session()
    messages = asked("do it")
    messages.append(session.answer(messages, tools=TOOLS))
    messages.append(turn("user", "Shrink this history."))
    messages.append(session.answer(messages, tools=TOOLS))
    messages.append(turn("user", "go on"))
    session.answer(messages, tools=TOOLS)
    first, summary, last = session.calls
    assert [call["role"] for call in (first, summary, last)] == ["main", "compaction", "main"]
    rows, _ = session.trajectories()
    (row,) = [row for row in rows if row["call_ids"][-1] == last["call_id"]]
    assert row["call_ids"] == [first["call_id"], summary["call_id"], last["call_id"]]
    assert trained(session) == {first["call_id"], last["call_id"]}
    assert reasons(session) == {summary["call_id"]: "role_compaction"}


# Retries, through the service


def gated(text: str, after: int) -> tuple[Say, threading.Event]:
    gate = threading.Event()
    return Say(text, gate=gate, gate_after=after), gate


def post(session: Session, body: dict[str, Any], **headers: str) -> httpx.Response:
    """The same bytes as `hanging_up` sends: by them a repetition is known."""
    return httpx.post(
        f"{session.base_url}/chat/completions",
        content=json.dumps({"model": "policy", **body}),
        headers={"Authorization": f"Bearer {session.api_key}", "Content-Type": "application/json", **headers},
        timeout=60,
    )


class GivesUp(httpx.BaseTransport):
    """Gives the first request up, as a timeout would, when `wait` returns; the others are sent as they are."""

    def __init__(self, session: Session, wait: Callable[[], None]) -> None:
        self._session = session
        self._wait: Callable[[], None] | None = wait
        self._http = httpx.HTTPTransport()

    def handle_request(self, request: httpx.Request) -> httpx.Response:
        if (wait := self._wait) is None:
            return self._http.handle_request(request)
        self._wait = None
        with hanging_up(str(request.url), json.loads(request.content), self._session.api_key):
            wait()
        raise httpx.ReadTimeout("the answer did not come in time", request=request)

    def close(self) -> None:
        self._http.close()


def is_sampling(engine: ScriptedEngine, generations: int, tokens: int) -> bool:
    """Whether that is how many the engine has been asked for, and how far it is with the last of them."""
    return len(engine.generations) == generations and len(engine.last.sampled.get(0, ())) == tokens


def test_a_call_the_sdk_gave_up_and_sent_again_is_in_the_quarantine(engine: ScriptedEngine, service: RunningService) -> None:
    """23: the abandoned attempt is untrained, with a reason; what follows stands on the attempt that arrived."""
    session = service.session()
    messages = asked("q")
    messages += [session.answer(messages), turn("user", "more")]
    slow, _ = gated("hello world", 2)
    engine.say(slow, "hello world")
    with httpx.Client(transport=GivesUp(session, lambda: engine.wait_for(lambda: is_sampling(engine, 2, tokens=2)))) as http:
        patient = session.client.with_options(http_client=http, max_retries=1)
        reply = patient.chat.completions.create(model="policy", messages=messages)
    messages += [reply.choices[0].message.model_dump(exclude_none=True), turn("user", "and more")]
    session.answer(messages)
    wait_until(lambda: len(session.calls) == 4 and session.calls[0]["delivered"], 120, "every call is recorded")
    first, *attempts, last = sorted(session.calls, key=lambda call: call["started_at"])
    assert [(call["status"], call["parent_id"]) for call in attempts] == [
        ("aborted", first["call_id"]),
        ("finished", first["call_id"]),
    ]
    assert last["parent_id"] == attempts[1]["call_id"]
    assert reasons(session) == {attempts[0]["call_id"]: "not_delivered"}
    (row,), _ = session.trajectories()
    assert row["call_ids"] == [first["call_id"], attempts[1]["call_id"], last["call_id"]]


Undelivered = Callable[[Session, dict[str, Any]], None]


@pytest.fixture
def undelivered(redis_server: RedisServer, engine: ScriptedEngine, monkeypatch: pytest.MonkeyPatch) -> Undelivered:
    """Asks for a reply that is sampled to its end and whose harness is gone before its record is in the store: finished, never
    delivered."""
    recording, commit = threading.Event(), SessionStore.commit

    async def told(*args: Any, **named: Any) -> int:
        recording.set()
        return await commit(*args, **named)

    monkeypatch.setattr(SessionStore, "commit", told)

    def ask(session: Session, body: dict[str, Any]) -> None:
        reply, gate = gated("hello world", 2)
        engine.say(reply)
        made = len(engine.generations)
        with redis_server.client() as client:
            try:
                with hanging_up(f"{session.base_url}/chat/completions", {"model": "policy", **body}, session.api_key):
                    engine.wait_for(lambda: is_sampling(engine, made + 1, tokens=2))
                    client.execute_command("CLIENT", "PAUSE", 60_000, "WRITE")
                    recording.clear()
                    gate.set()
                    assert recording.wait(60)
                # The service hears of the harness that hung up before it hears of the record.
                time.sleep(0.5)
            finally:
                client.execute_command("CLIENT", "UNPAUSE")

    return ask


@pytest.mark.parametrize("again", [{}, {"stream": True}, {"temperature": 0.5}, {"messages": asked("q again")}], ids=str)
def test_a_finished_reply_that_never_arrived_is_an_attempt_whatever_is_asked_next(
    engine: ScriptedEngine, service: RunningService, undelivered: Undelivered, again: dict[str, Any]
) -> None:
    """The old bug: it was trained with the session's reward where the next body differed in anything, `stream` included."""
    session = service.session()
    body = {"messages": asked("q"), "stream": False}
    undelivered(session, body)
    wait_until(lambda: len(session.calls) == 1 and session.calls[0]["status"] == "finished", 120, "it is recorded")
    (lost,) = session.calls
    assert not lost["delivered"]
    assert reasons(session) == {lost["call_id"]: "not_delivered"}, "also as the only attempt there is"
    assert post(session, {**body, **again}).status_code == 200
    wait_until(lambda: session.calls[-1]["delivered"], 120, "the delivery is noted")
    _, read = session.calls
    assert reasons(session) == {lost["call_id"]: "not_delivered"}
    assert trained(session) == {read["call_id"]}
    session.close(reward=1.0)
    assert session.trajectories()[1]["complete"]


@pytest.mark.case(56)
@pytest.mark.parametrize("stream", [False, True])
def test_a_marked_retry_leaves_delivered_replies_whole(engine: ScriptedEngine, service: RunningService, stream: bool) -> None:
    session = service.session()
    body = {"messages": asked("q"), "stream": stream}
    for count in ("0", "1", "2"):
        assert post(session, body, **{"x-stainless-retry-count": count}).status_code == 200
    wait_until(lambda: all_delivered(session), 60, "all are delivered")
    assert reasons(session) == {}
    assert trained(session) == {call["call_id"] for call in session.calls}


@pytest.mark.case(56)
def test_one_failed_request_of_eight_equal_ones_costs_no_other(engine: ScriptedEngine, service: RunningService) -> None:
    """51: the openai SDK sends the failed one again, marked as a retry, while the other seven are delivered."""
    session = service.session(max_retries=1)
    engine.fault("/inference/v1/generate", Fail(500))
    with ThreadPoolExecutor(8) as pool:
        replies = list(pool.map(lambda _: session.ask(asked("q")), range(8)))
    assert len(replies) == 8
    wait_until(lambda: all_delivered(session), 60, "all are delivered")
    assert len(session.calls) == 8
    assert reasons(session) == {}
    assert trained(session) == {call["call_id"] for call in session.calls}


@pytest.mark.case(25)
def test_a_retried_first_turn_loses_nothing_afterwards(engine: ScriptedEngine, service: RunningService) -> None:
    """22: whichever of the two attempts the harness goes on from, the other one changes nothing of what follows."""
    for chosen in (0, 1):
        session = service.session()
        engine.say("hello", "world", "fish", "sing")
        headers: tuple[dict[str, str], ...] = ({}, {"x-stainless-retry-count": "1"})
        replies = [post(session, {"messages": asked("q")}, **headers[n]).json()["choices"][0]["message"] for n in (0, 1)]
        messages = asked("q")
        for message in (replies[chosen], None):
            messages += [message or session.answer(messages), turn("user", "more")]
        session.answer(messages)
        wait_until(lambda opened=session: all_delivered(opened), 60, "all are delivered")  # type: ignore[misc]
        calls = session.calls
        path = [calls[chosen]["call_id"], calls[2]["call_id"], calls[3]["call_id"]]
        assert [call["parent_id"] for call in calls[2:]] == path[:2]
        rows, _ = session.trajectories()
        assert path in [row["call_ids"] for row in rows]
        assert reasons(session) == {}, "both were delivered"


def test_concurrent_equal_requests_are_samples_and_not_retries(engine: ScriptedEngine, service: RunningService) -> None:
    """24: best-of-n by hand."""
    session = service.session()
    gates: list[threading.Event] = []

    def script(generation: Generation, index: int) -> Say:
        gates.append(threading.Event())
        return Say("hello world", gate=gates[-1])

    engine.script = script
    talks = [threading.Thread(target=post, args=(session, {"messages": asked("q")})) for _ in range(4)]
    for talk in talks:
        talk.start()
    wait_until(lambda: len(gates) == 4, 60, "all are being sampled")
    for number, gate in enumerate(gates, 1):
        gate.set()
        wait_until(lambda count=number: finished(session) == count, 60, "the next is recorded")  # type: ignore[misc]
    for talk in talks:
        talk.join()
    wait_until(lambda: all_delivered(session), 60, "all are delivered")
    assert reasons(session) == {}
    assert len(trained(session)) == 4
    # Also of those that were under way when the first was recorded.
    assert [call["branch_reason"] for call in session.calls] == [None, "repeated", "repeated", "repeated"]


# Volatile lines


def billing(request: int) -> str:
    return f"x-anthropic-billing-header: cc_version=2.1.329.a{request}; cc_entrypoint=cli; cch={request:05x};"


@pytest.mark.case(21)
def test_a_header_line_that_changes_with_each_request_is_no_branch(engine: ScriptedEngine, service: RunningService) -> None:
    """19: Claude Code's billing line, in a text part of its own or on a line of the prompt. The model never sees it."""
    session = service.session()
    history: list[Any] = [turn("user", "q")]
    for request in range(4):
        parts = [{"type": "text", "text": billing(request)}, {"type": "text", "text": SYSTEM}]
        system = parts if request % 2 else f"{billing(request)}\n{SYSTEM}"
        history += [session.answer([turn("system", system), *history]), turn("user", "more")]
    (row,), _ = session.trajectories()
    assert row["call_ids"] == [call["call_id"] for call in session.calls]
    assert not any("billing" in generation.prompt for generation in engine.generations)
    assert all(SYSTEM in generation.prompt for generation in engine.generations)


def test_a_line_the_settings_do_not_name_is_part_of_the_prompt(engine: ScriptedEngine, service: RunningService) -> None:
    session = service.session()
    for minute in range(2):
        session.ask(asked("q", f"{SYSTEM}\nCurrent time: 12:0{minute}"))
    assert [generation.prompt.count("Current time") for generation in engine.generations] == [1, 1]
    assert session.calls[1]["branch_reason"] == "new_root"


def test_a_user_names_further_volatile_lines(engine: ScriptedEngine, ruled: RunningService) -> None:
    session = ruled.session()
    history: list[Any] = [turn("user", "q\nCurrent time: this one is the user's")]
    for request in range(3):
        system = f"{billing(request)}\n{SYSTEM}\nCurrent time: 12:0{request}\nBe brief."
        history += [session.answer([turn("system", system), *history]), turn("user", "more")]
    (row,), _ = session.trajectories()
    assert len(row["call_ids"]) == 3
    assert engine.last.prompt.count("Current time") == 1
    assert f"{SYSTEM}\nBe brief." in engine.last.prompt


def test_a_retry_whose_volatile_line_changed_is_not_proven_to_be_one(engine: ScriptedEngine, service: RunningService) -> None:
    """The proof is the same body: a request that a harness built anew is another request."""
    session = service.session()
    for request in range(2):
        assert post(session, {"messages": asked("q", f"{billing(request)}\n{SYSTEM}")}).status_code == 200
    wait_until(lambda: all_delivered(session), 60, "both are delivered")
    assert reasons(session) == {}
    assert session.calls[1]["branch_reason"] == "repeated"
