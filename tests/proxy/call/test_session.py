"""What a session remembers of its histories changes how fast a call is planned, never what is found."""

from __future__ import annotations

import contextlib
import copy
import re
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest
from fastapi import APIRouter
from hypothesis import given
from hypothesis import strategies as st

from proxy.app import Addition
from proxy.call.cache import SessionCache
from proxy.call.draft import Draft
from proxy.call.phases import Continuation
from proxy.call.plan import find_parent
from proxy.call.record import locate
from proxy.call.session import Session
from proxy.dialects.base import HistoryMessage, ParsedMessage, Past, Request, seal, tool_call_id
from proxy.services import Services
from proxy.store.states import SessionInfo
from reconstruct.codec import encode
from reconstruct.messages import chain, digest_message, digest_messages, root_key
from reconstruct.records import pack_ids
from tests.support.engine.scripted_engine import ScriptedEngine
from tests.support.service.redis_server import RedisServer
from tests.support.service.running_service import RunningService, wait_until
from tests.support.sessions.calls import call

CALLED = {"role": "assistant", "tool_calls": [{"id": "a", "function": {"name": "f"}}, {"id": "b", "function": {"name": "f"}}]}
MESSAGES: list[dict[str, Any]] = [
    {"role": "user", "content": "q"},
    {"role": "user", "content": "r"},
    {"role": "assistant", "content": "said"},
    {"role": "assistant", "tool_calls": [{"id": "b", "function": {"name": "f"}}]},
    CALLED,
    {"role": "tool", "tool_call_id": "a", "content": "x"},
    {"role": "tool", "tool_call_id": "b", "content": "x"},
    {"role": "tool", "tool_call_id": "of nobody", "content": "x"},
]
ROOTS = [b"one root", b"another"]
NAMED = "0123456789abcdef01234567"

messages_lists = st.lists(st.sampled_from(MESSAGES), max_size=6)


@st.composite
def requests(draw: st.DrawFn) -> list[tuple[bytes, list[dict[str, Any]]]]:
    """Histories that mostly go on from the beginning of an earlier one, under one root or another."""
    made: list[list[dict[str, Any]]] = [[]]
    for _ in range(draw(st.integers(1, 10))):
        earlier = draw(st.sampled_from(made))
        made.append(earlier[: draw(st.integers(0, len(earlier)))] + draw(messages_lists))
    return [(draw(st.sampled_from(ROOTS)), history) for history in made]


def new_session() -> Session:
    return Session(SessionInfo("s", b"", 0.0))


def read(raw: bytes, _: Past) -> list[ParsedMessage]:
    return [ParsedMessage(msgspec.json.decode(raw))]


def seen_by(session: Session, messages: list[dict[str, Any]]) -> list[HistoryMessage]:
    """What a call brings that is recorded."""
    draft = Draft(session)
    history = [draft.read_item(msgspec.json.encode(message), read)[0] for message in messages]
    draft.keep()
    return history


@given(requests())
def test_fingerprints_are_those_of_the_whole_history_whatever_came_before(
    made: list[tuple[bytes, list[dict[str, Any]]]],
) -> None:
    session = new_session()
    for root, messages in made:
        history = seen_by(session, messages)
        chained = session.extend_chain(root, history)
        assert chained.fingerprints == chain(root, digest_messages(messages))
        session.remember(chained)


@given(messages_lists, messages_lists)
def test_a_chain_goes_on_from_any_beginning(first: list[dict[str, Any]], rest: list[dict[str, Any]]) -> None:
    whole = digest_messages([*first, *rest])
    known = chain(ROOTS[0], whole[: len(first)])
    assert chain(ROOTS[0], whole, known) == chain(ROOTS[0], whole)


def test_a_message_is_decoded_once_per_session_and_dialect() -> None:
    session, raw = new_session(), b'{"role": "user", "content": "q"}'

    def other_dialect(raw: bytes, _: Past) -> list[ParsedMessage]:
        return [ParsedMessage({"role": "user", "content": "something else"})]

    one, again = seen_by(session, [MESSAGES[0]]), seen_by(session, [MESSAGES[0]])
    assert one[0] is again[0]
    assert [seen.message for seen in Draft(session).read_item(raw, read)] == [{"role": "user", "content": "q"}]
    assert [seen.message for seen in Draft(session).read_item(raw, other_dialect)] == [
        {"role": "user", "content": "something else"}
    ]


def test_reasoning_that_came_sealed_counts_as_what_it_takes_in_memory() -> None:
    session, thought = new_session(), "wait, no, " * 10_000

    def read_sealed(raw: bytes, past: Past) -> list[ParsedMessage]:
        opened = past.seals.open(raw.decode())
        assert opened is not None
        return [ParsedMessage({"role": "assistant", "content": "", "reasoning_content": opened[1]})]

    draft, raw = Draft(session), seal("0123456789abcdef01234567", thought).encode()
    assert draft.read_item(raw, read_sealed)[0].message["reasoning_content"] == thought
    draft.keep()
    assert session.memory_bytes > len(thought) > 10 * len(raw)


def test_how_a_message_replays_a_reply_is_not_believed_of_another_message_that_takes_its_place_in_memory() -> None:
    """CPython gives a freed object's address, and so its id(), to the next of its size."""
    session = new_session()
    session.learn([encode(call("c1", fields={"reply": b'{"role":"assistant","content":"said"}'}))], 0)
    for said in ("said", "something else", "something else") * 50:
        message = {"role": "assistant", "content": said}
        seen = HistoryMessage(message, digest_message(message))
        assert (session.projection("c1", seen, {}) is not None) == (said == "said")


def test_a_history_that_names_a_call_of_another_process_is_hashed_again_once_that_is_known() -> None:
    session = Session(SessionInfo("s", b"", 0.0, echo_policy="minted"))
    named = {
        "role": "assistant",
        "content": "said otherwise",
        "tool_calls": [{"id": tool_call_id(NAMED, 0), "function": {"name": "f"}}],
    }
    history = seen_by(session, [MESSAGES[0], named])
    before = session.extend_chain(ROOTS[0], history)
    session.remember(before)
    reply = b'{"role":"assistant","content":"said"}'
    recorded = call(NAMED, fields={"reply": reply, "fingerprint": before.fingerprints[1]})
    session.learn([encode(recorded)], 0)
    fresh = Session(SessionInfo("s", b"", 0.0, echo_policy="minted"))
    fresh.learn([encode(recorded)], 0)
    after = session.extend_chain(ROOTS[0], history).fingerprints
    assert after == fresh.extend_chain(ROOTS[0], history).fingerprints != before.fingerprints


@pytest.mark.case(17)
def test_the_root_of_a_call_is_that_of_its_own_tools_whatever_was_offered_before() -> None:
    session = Session(SessionInfo("s", b"", 0.0))
    told: list[Any] = [True, 1, 1.0, None, "1", [], {}]
    values = [(policy, [{"strict": value}], {"a": value}) for value in told for policy in ("", "p")]
    for asked in [*values, *values, *(value for value in values for _ in range(2))]:
        policy, tools, _ = asked
        assert session.roots(*asked) == (root_key(*asked), root_key(policy, tools, {}))


@pytest.mark.case(30)
@pytest.mark.parametrize("named", ["a" * 24, "b" * 24])
def test_of_two_calls_that_said_the_same_the_one_goes_on_whose_id_the_reply_carries(named: str) -> None:
    """Two samples of one request make the same tool call: nothing but the id that was minted into it tells them apart."""

    def reply(call_id: str) -> dict[str, Any]:
        function = {"name": "f", "arguments": "{}"}
        return {"role": "assistant", "tool_calls": [{"id": f"call_{call_id}_0", "type": "function", "function": function}]}

    known, asked = new_session(), {"role": "user", "content": "q"}
    root = known.roots("", (), {})[1]
    _, fingerprint, reply_fingerprint = chain(root, digest_messages([asked, reply("of any")]))
    for call_id in ("a" * 24, "b" * 24):
        texts = {"messages": msgspec.json.encode([asked]), "reply": msgspec.json.encode(reply(call_id))}
        prints = {"root_key": root, "fingerprint": fingerprint, "reply_fingerprint": reply_fingerprint}
        known.forest.add(call(call_id, fields={**texts, **prints}, delta=[1], said=[2]))
    result = {"role": "tool", "tool_call_id": f"call_{named}_0", "content": "x"}
    found = find_parent(known, Request("chat", "m", seen_by(known, [asked, reply(named), result])))
    assert found.parent is not None and found.parent.call_id == named


@pytest.mark.parametrize("learned", [("c1", "c2"), ("c2", "c1")], ids=["in order", "its own first"])
def test_of_twins_that_said_the_same_words_every_process_goes_on_from_the_same_one(learned: tuple[str, str]) -> None:
    """Each process knows the calls that it recorded itself before those of others. The old bug: two of them went on from different
    twins, and a session had other rows than in one process."""
    said = {"role": "assistant", "content": "yes"}
    known, asked = new_session(), {"role": "user", "content": "q"}
    root = known.roots("", (), {})[1]
    _, fingerprint, reply_fingerprint = chain(root, digest_messages([asked, said]))
    texts = {"messages": msgspec.json.encode([asked]), "reply": msgspec.json.encode(said)}
    prints = {"root_key": root, "fingerprint": fingerprint, "reply_fingerprint": reply_fingerprint}
    for call_id in learned:
        known.forest.add(call(call_id, fields={**texts, **prints}, delta=[1], said=[2]))
    found = find_parent(known, Request("chat", "m", seen_by(known, [asked, said, {"role": "user", "content": "r"}])))
    assert found.parent is not None and found.parent.call_id == "c2"


@pytest.mark.parametrize(
    ("prompt", "reason"),
    [([1, 2, 3], None), ([1, 9, 3], "history_rewritten"), ([1, 2], None)],
    ids=["extends", "differs", "same"],
)
def test_a_fresh_rendering_that_begins_with_all_of_its_parents_ids_extends_it_and_has_no_reason_to_branch(
    prompt: list[int], reason: str | None
) -> None:
    """c1 was asked 1 and said 2; what follows was rendered afresh, since nothing proved beforehand that it goes on from 1 2."""
    known = new_session()
    known.forest.add(call("c1", delta=[1], said=[2]))
    found = Continuation(b"root", [b"start", b"asked again"], known.call("c1"), reply_at=0)
    where = locate(known, found, pack_ids(prompt), "history_rewritten")
    assert (where.parent_id, where.branch_reason) == ("c1", reason)
    known.forest.add(call("c2", parent="c1", base="c1", base_length=where.base_length, delta=prompt[where.base_length :]))
    assert known.forest.extends("c2") == (reason is None)


@pytest.fixture(scope="module")
def engine() -> Iterator[ScriptedEngine]:
    with ScriptedEngine("qwen3") as engine:
        yield engine


def test_an_edit_of_early_reasoning_is_found_among_messages_that_were_looked_at_before(
    engine: ScriptedEngine, redis_server: RedisServer
) -> None:
    """The chain leaves reasoning out: only the comparison of each replayed reply finds such an edit. What it found for one history
    must not be believed of another."""
    tools = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}]
    with RunningService(engine.url, redis_server.url, engine_api="token") as service:
        session = service.session()
        engine.say(*[engine.family.speak("", reasoning=f"thought {turn}", calls=[("f", {})]) for turn in range(6)])
        messages: list[Any] = [{"role": "user", "content": "q"}]

        def turn(history: list[Any]) -> list[Any]:
            reply = session.answer(history, tools=tools)
            return [*history, reply, {"role": "tool", "tool_call_id": reply["tool_calls"][0]["id"], "content": "done"}]

        for _ in range(3):
            messages = turn(messages)
        edited = copy.deepcopy(messages)
        edited[1]["reasoning_content"] = "a thought of the harness's own"
        edited = turn(turn(edited)[: len(messages)])
        turn(messages)
        calls = session.calls
    ids = [call["call_id"] for call in calls]
    assert [call["parent_id"] for call in calls] == [None, ids[0], ids[1], None, None, ids[2]]
    assert [call["branch_reason"] for call in calls[3:]] == ["edited", "repeated", None]
    assert "own" in engine.generations[3].prompt
    assert calls[5]["prompt_ids"][: len(calls[2]["prompt_ids"])] == calls[2]["prompt_ids"]


@pytest.mark.parametrize(("room", "found"), [(None, {"memory": 2, "store": 0}), (0, {"memory": 0, "store": 2})])
def test_metrics_tell_whether_calls_found_their_session_in_memory(
    engine: ScriptedEngine, redis_server: RedisServer, room: int | None, found: dict[str, int]
) -> None:
    held: list[SessionCache] = []

    def add(services: Services) -> Addition:
        held.append(services.cache)
        return Addition(APIRouter(), contextlib.nullcontext)

    settings: dict[str, Any] = {"adding": [add], "engine_api": "token", "session_cache_bytes": room}
    with RunningService(engine.url, redis_server.url, **settings) as service:
        session = service.session()
        history: list[Any] = [{"role": "user", "content": "q"}]
        for _ in range(3):
            history += [session.answer(history), {"role": "user", "content": "go on"}]
            # The call before may still be on its way out, and holds its session.
            wait_until(lambda: room is None or not held[0].is_used(session.session_id), 60, "the call is over")
        page = service.request("GET", "/metrics").text
    told = {
        where: re.search(rf'^verbatim_session_opens_total{{found="{where}"}} (\S+)$', page, re.MULTILINE) for where in found
    }
    assert {where: float(each[1]) for where, each in told.items() if each} == found
    used, limit = map(float, re.findall(r"^verbatim_session_memory_(?:limit_)?bytes (\S+)$", page, re.MULTILINE))
    assert used <= limit and (used > 0) == (room is None)


def test_a_session_that_others_left_room_for_only_in_part_is_read_anew_from_its_request_and_not_from_the_store(
    engine: ScriptedEngine, redis_server: RedisServer
) -> None:
    """Every call of a session beyond the memory for all read its whole session from the store."""
    with RunningService(engine.url, redis_server.url, engine_api="token", session_cache_bytes=600_000) as service:
        sessions = [service.session() for _ in range(14)]
        histories: list[list[Any]] = [[{"role": "user", "content": "q" * 4_000}] for _ in sessions]
        for _ in range(3):
            for session, history in zip(sessions, histories, strict=True):
                history += [session.answer(history), {"role": "user", "content": "go on"}]
        page = service.request("GET", "/metrics").text
        found = dict(re.findall(r'^verbatim_session_opens_total{found="(\w+)"} (\S+)$', page, re.MULTILINE))
        assert {where: float(count) for where, count in found.items()} == {"memory": 0, "stripped": 28, "store": 0}
        for session in sessions:
            rows, accounting = session.trajectories()
            assert (len(rows), accounting["quarantined"]) == (1, [])
