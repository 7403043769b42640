"""Canonical messages: what is the same history, what is the same reply shown otherwise, and what is an edit."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from reconstruct.messages import (
    canonical_json,
    chain,
    digest_message,
    digest_messages,
    hash_bytes,
    minted_call_ids,
    name_calls,
    projection,
    reasoning_of,
    render_key,
    root_key,
    without_lines,
)

Message = dict[str, Any]

ROOT = root_key("policy", [], {})


def user(content: Any = "hi", **more: Any) -> Message:
    return {"role": "user", "content": content, **more}


def assistant(content: Any = None, calls: Sequence[Message] | None = None, **more: Any) -> Message:
    return {"role": "assistant", "content": content, **({"tool_calls": calls} if calls is not None else {}), **more}


def tool_call(
    identifier: str = "call_a_0", name: str = "read", arguments: Any = '{"path": "a", "line": 1}', **more: Any
) -> Message:
    return {"id": identifier, "type": "function", "function": {"name": name, "arguments": arguments}, **more}


def result(identifier: str = "call_a_0", content: Any = "ok", **more: Any) -> Message:
    return {"role": "tool", "tool_call_id": identifier, "content": content, **more}


def fingerprint(messages: Sequence[Mapping[str, Any]], root: bytes = ROOT) -> bytes:
    return chain(root, digest_messages(messages))[-1]


def same(left: Sequence[Mapping[str, Any]], right: Sequence[Mapping[str, Any]]) -> bool:
    return fingerprint(left) == fingerprint(right)


# Tool arguments


@pytest.mark.case(14)
@pytest.mark.parametrize(
    "replayed",
    ['{"line": 1, "path": "a"}', '{"path":"a","line":1}', ' {\n "path" : "\\u0061", "line": 1 } ', {"path": "a", "line": 1}],
)
def test_reordered_or_respaced_tool_arguments_are_the_same_call(replayed: Any) -> None:
    sent = assistant(calls=[tool_call()])
    back = assistant(calls=[tool_call(arguments=replayed)])
    assert same([user(), sent], [user(), back])
    assert projection(sent, back) == "arguments"


@pytest.mark.parametrize(("sent", "replayed"), [("1.0", "1"), ("1e3", "1000"), ("-2.0", "-2"), ("0.50", "0.5")])
def test_a_number_written_otherwise_is_the_same_number(sent: str, replayed: str) -> None:
    """JavaScript harnesses parse the model's 1.0 and write 1: taken for an edit, every such turn would fork the session."""
    left, right = (assistant(calls=[tool_call(arguments=f'{{"line": {number}}}')]) for number in (sent, replayed))
    assert projection(left, right) == "arguments"
    assert same([left], [right])


@pytest.mark.parametrize(
    "replayed",
    [
        '{"path": "a", "line": 2}',
        '{"path": "a"}',
        '{"path": "a", "line": "1"}',
        '{"path": "a", "line": true}',
        '{"path": "a", "line": 1, "more": 0}',
        '{"path": "a", "line": 1',
        "",
    ],
)
def test_other_tool_arguments_are_an_edit(replayed: str) -> None:
    sent = assistant(calls=[tool_call()])
    back = assistant(calls=[tool_call(arguments=replayed)])
    assert not same([user(), sent], [user(), back])
    assert projection(sent, back) is None


def test_the_order_of_a_list_in_tool_arguments_matters() -> None:
    sent, back = (assistant(calls=[tool_call(arguments=text)]) for text in ('{"of": [1, 2]}', '{"of": [2, 1]}'))
    assert projection(sent, back) is None


@pytest.mark.case(15)
@pytest.mark.parametrize(("sent", "replayed"), [("", "{}"), ("{}", None), ("", None), (" ", "{ }")])
def test_absent_tool_arguments_are_alike(sent: Any, replayed: Any) -> None:
    left, right = assistant(calls=[tool_call(arguments=sent)]), assistant(calls=[tool_call(arguments=replayed)])
    assert same([left], [right])
    assert projection(left, right) == "arguments"


def test_arguments_that_are_no_json_are_compared_as_they_are() -> None:
    broken = assistant(calls=[tool_call(arguments='{"path": "a"')])
    assert projection(broken, broken) == "exact"
    assert projection(broken, assistant(calls=[tool_call(arguments='{"path":"a"')])) is None


@pytest.mark.case(23)
@pytest.mark.parametrize(
    "repaired",
    [
        [tool_call(name="Read")],
        [tool_call(arguments='{"path": "./a", "line": 1}')],
        [tool_call(), tool_call("call_a_1")],
        [],
        None,
    ],
)
def test_a_repaired_or_renamed_tool_call_is_an_edit(repaired: Any) -> None:
    sent = assistant(calls=[tool_call()])
    assert projection(sent, assistant(calls=repaired)) is None
    assert not same([sent], [assistant(calls=repaired)])


def test_a_tool_calls_id_and_added_fields_are_no_part_of_the_reply() -> None:
    sent = assistant(calls=[tool_call("call_a_0")])
    back = assistant(calls=[tool_call("toolu_9", index=0, provider="x")], refusal=None, annotations=[], audio=None)
    assert projection(sent, back) == "exact"
    assert same([sent], [back])


# Absent values


@pytest.mark.case(15)
@pytest.mark.parametrize("left", [None, "", []])
@pytest.mark.parametrize("right", [None, "", []])
@pytest.mark.parametrize("make", [user, assistant, lambda content: result(content=content)])
def test_null_and_empty_contents_are_alike(left: Any, right: Any, make: Any) -> None:
    assert same([make(left)], [make(right)])


def test_an_absent_content_is_an_empty_one() -> None:
    assert same([{"role": "assistant", "tool_calls": [tool_call()]}], [assistant("", [tool_call()])])
    assert projection({"role": "assistant", "tool_calls": [tool_call()]}, assistant("", [tool_call()])) == "exact"


@pytest.mark.case(15)
@pytest.mark.parametrize("empty", [None, "", []])
def test_null_and_empty_optional_fields_are_alike(empty: Any) -> None:
    assert same([user(name=empty)], [user()])
    assert same([assistant("yes", tool_calls=empty, reasoning_content=empty)], [assistant("yes")])
    assert projection(assistant("yes", tool_calls=empty), assistant("yes", reasoning_content=empty)) == "exact"


def test_a_name_given_to_a_message_is_no_part_of_its_history_but_of_its_dress() -> None:
    """Only a rendering tells whether a template shows it."""
    plain, named = ({"role": "user", "content": "q", **name} for name in ({}, {"name": "ann"}))
    assert digest_message(plain).digest == digest_message(named).digest
    assert (digest_message(plain).name, digest_message(named).name) == ("", "ann")
    keys = [render_key(b"root", names) for names in ([], [(0, "ann")], [(1, "ann")], [(0, "bob")], [(0, "ann"), (1, "ann")])]
    assert keys[0] == b"root"
    assert len(set(keys)) == len(keys)
    assert digest_message({"role": "assistant", "content": "q", "name": "ann"}).name == ""


# Contents


def test_a_string_is_one_text_part() -> None:
    assert same([user("hi")], [user([{"type": "text", "text": "hi"}])])
    assert same(
        [user("hi")], [user([{"type": "text", "text": "hi", "cache_control": {"type": "ephemeral"}}], cache_control={"a": 1})]
    )
    assert projection(assistant("yes"), assistant([{"type": "text", "text": "yes"}])) == "exact"


def test_two_text_parts_are_not_their_sum() -> None:
    """Templates may render parts with something between them."""
    assert not same([user([{"type": "text", "text": "a"}, {"type": "text", "text": "b"}])], [user("ab")])


def test_image_parts_are_compared_without_their_null_fields() -> None:
    image: Message = {"type": "image_url", "image_url": {"url": "data:,x"}}
    assert same([user([image])], [user([{**image, "image_url": {"url": "data:,x", "detail": None}}])])
    assert not same([user([image])], [user([{**image, "image_url": {"url": "data:,y"}}])])


def test_a_users_white_space_matters() -> None:
    assert not same([user("hi")], [user("hi\n")])


@pytest.mark.parametrize(
    ("sent", "replayed"), [("yes\n", "yes"), ("\n\nyes", "yes"), ("yes", " yes "), (" \n", ""), (" ", None)]
)
def test_a_trimmed_reply_is_the_same_reply(sent: str, replayed: str | None) -> None:
    assert projection(assistant(sent), assistant(replayed)) == "trimmed"
    assert same([assistant(sent)], [assistant(replayed)])


@pytest.mark.case(16)
def test_a_changed_reply_is_an_edit() -> None:
    assert projection(assistant("yes, do"), assistant("yes")) is None
    assert projection(assistant("yes"), assistant([{"type": "image_url", "image_url": {"url": "x"}}])) is None
    assert not same([assistant("yes, do")], [assistant("yes")])


# Reasoning


@pytest.mark.parametrize("key", ["reasoning_content", "reasoning"])
@pytest.mark.parametrize(
    ("replayed", "used"),
    [
        ("think", "exact"),
        (" think\n", "reasoning_trimmed"),
        ("", "reasoning_dropped"),
        (None, "reasoning_dropped"),
        ("other", None),
    ],
)
def test_dropped_or_trimmed_reasoning_is_the_same_reply_other_is_not(key: str, replayed: str | None, used: str | None) -> None:
    """The fingerprint leaves the reasoning out, so that a replay without it finds its call; the projection then compares it."""
    sent, back = assistant("yes", reasoning_content="think"), {**assistant("yes"), key: replayed}
    assert projection(sent, back) == used
    assert same([sent], [back])


def test_reasoning_that_was_never_said_is_an_edit() -> None:
    assert projection(assistant("yes"), assistant("yes", reasoning_content="think")) is None


def test_all_that_was_lost_is_named() -> None:
    sent = assistant("yes\n", [tool_call()], reasoning_content="think")
    back = assistant("yes", [tool_call(arguments='{"line": 1, "path": "a"}')])
    assert projection(sent, back) == "trimmed,arguments,reasoning_dropped"


def test_the_digest_leaves_out_the_reasoning_and_the_projection_tells_an_edit_of_it() -> None:
    one, two, none = (assistant("yes", reasoning_content=text) for text in ("a", "b", None))
    assert digest_message(one) == digest_message(two) == digest_message(none)
    assert projection(one, two) is None
    assert projection(one, none) == "reasoning_dropped"


# Tool results


def parallel(first: str, second: str, *results: Message) -> list[Message]:
    return [user(), assistant(calls=[tool_call(first), tool_call(second, "write")]), *results]


def test_a_tool_result_names_its_call_by_position_not_by_id() -> None:
    """A harness that mints its own ids replays the same history."""
    sent = parallel("call_a_0", "call_a_1", result("call_a_0", "x"), result("call_a_1", "y"))
    back = parallel("toolu_1", "toolu_2", result("toolu_1", "x"), result("toolu_2", "y"))
    assert same(sent, back)


def test_parallel_tool_results_in_swapped_order_are_another_history() -> None:
    in_order = parallel("a", "b", result("a", "x"), result("b", "y"))
    swapped = parallel("a", "b", result("b", "y"), result("a", "x"))
    assert not same(in_order, swapped)


def test_tool_results_that_answer_each_others_calls_are_another_history() -> None:
    assert not same(
        parallel("a", "b", result("a", "x"), result("b", "y")), parallel("a", "b", result("b", "x"), result("a", "y"))
    )


def test_ids_are_those_of_the_latest_turn() -> None:
    """Position 0 of the second turn is not position 0 of the first, yet both histories number their turns alike."""
    both = [
        [*parallel(a, b, result(a), result(b)), assistant(calls=[tool_call(c)]), result(c)]
        for a, b, c in (("1", "2", "3"), ("x", "y", "x"))
    ]
    assert same(*both)


def test_a_tool_result_for_a_call_that_nobody_made_keeps_its_id() -> None:
    assert not same([user(), result("nobody_1")], [user(), result("nobody_2")])


def test_a_message_is_digested_alike_wherever_it_stands() -> None:
    """A replayed history need not be digested again: positions of tool calls are the chain's affair."""
    messages = parallel("a", "b", result("a", "x"), result("b", "y"))
    assert digest_messages(messages) == [digest_message(message) for message in messages]
    assert digest_message(result("a", "x")).digest == digest_message(result("b", "x")).digest
    assert digest_message(messages[1]).call_ids == ("a", "b")
    assert [digest_message(message).answers for message in messages] == ["", "", "a", "b"]


# Volatile lines


BILLING = re.compile(r"^x-billing-header:.*$", re.MULTILINE)


def system(content: Any) -> Message:
    return {"role": "system", "content": content}


@pytest.mark.parametrize("role", ["system", "developer"])
def test_a_header_line_that_changes_with_every_request_is_no_part_of_the_history(role: str) -> None:
    """Left in, every call would be a new root."""
    text = "x-billing-header: cch={};\nYou are helpful.\nBe brief."
    requests = [[{"role": role, "content": text.format(count)}, user()] for count in ("1a", "2b")]
    assert not same(*requests)
    cleaned = [[without_lines(message, BILLING) for message in request] for request in requests]
    assert same(*cleaned)
    assert cleaned[0] == [{"role": role, "content": "You are helpful.\nBe brief."}, user()]


def test_a_part_that_held_only_a_volatile_line_goes_with_it() -> None:
    header, prompt = {"type": "text", "text": "x-billing-header: 1"}, {"type": "text", "text": "You are helpful."}
    assert without_lines(system([header, prompt]), BILLING) == system([prompt])
    assert same([without_lines(system([header, prompt]), BILLING)], [system("You are helpful.")])


@pytest.mark.parametrize(
    "message",
    [
        user("x-billing-header: 1"),
        assistant("x-billing-header: 1"),
        result(content="x-billing-header: 1"),
        system("say x-billing-header: 1"),
        system(None),
        system([{"type": "image_url", "image_url": {"url": "x-billing-header: 1"}}]),
    ],
)
def test_only_whole_lines_of_the_system_prompt_are_volatile(message: Message) -> None:
    assert without_lines(message, BILLING) == message


# Surrogates


LONE = json.loads('"\\ud83d"')
"""Half of an emoji: what a tool prints when its output is cut in the middle of a character."""


@pytest.mark.case(22)
def test_a_lone_surrogate_in_tool_output_has_an_identity_of_its_own() -> None:
    cut = parallel("a", "b", result("a", f"cut {LONE}"), result("b"))
    assert same(cut, json.loads(json.dumps(cut)))
    assert not same(cut, parallel("a", "b", result("a", "cut "), result("b")))
    assert not same(cut, parallel("a", "b", result("a", "cut \ufffd"), result("b")))


def test_a_lone_surrogate_in_a_reply_is_replayed_exactly() -> None:
    sent = assistant(f"cut {LONE}", [tool_call(arguments='{"path": "\\ud83d"}')], reasoning_content=LONE)
    back = assistant(f"cut {LONE} ", [tool_call(arguments='{"path":"\\ud83d"}')], reasoning_content=LONE)
    assert projection(sent, back) == "trimmed,arguments"
    assert digest_message(sent).digest == digest_message(back).digest


def test_an_escaped_emoji_is_the_emoji() -> None:
    sent, back = (assistant(calls=[tool_call(arguments=text)]) for text in ('{"say": "\\ud83d\\ude00"}', '{"say": "😀"}'))
    assert projection(sent, back) == "arguments"


# The chain


@pytest.mark.case(19)
def test_two_assistant_messages_in_one_tail_are_two_links_of_the_chain() -> None:
    """A harness that splits or adds an assistant message changes the history after the first of them alone."""
    history = [user(), assistant("yes"), user("go on")]
    two = [*history, assistant("one"), assistant("two"), user("more")]
    one = [*history, assistant("one\ntwo"), user("more")]
    left, right = (chain(ROOT, digest_messages(messages)) for messages in (two, one))
    assert left[:4] == right[:4]
    assert left[4] != right[4]
    assert left[-1] != right[-1]


def test_few_shot_assistant_messages_are_links_that_no_reply_has_made() -> None:
    """The chain after a few-shot turn is found under no call's reply, so the request is a root: its messages are prompt."""
    few_shot = [user("2+2"), assistant("4"), user("3+3")]
    answered = {fingerprint([*few_shot, assistant("6")])}
    links = chain(ROOT, digest_messages([*few_shot, assistant("6"), user("4+4")]))
    assert [position for position, link in enumerate(links) if link in answered] == [4]


def test_every_message_moves_every_later_link() -> None:
    messages = [user("a"), assistant("b"), user("c"), assistant("d")]
    links = chain(ROOT, digest_messages(messages))
    assert len(set(links)) == 5
    other = chain(ROOT, digest_messages([user("x"), *messages[1:]]))
    assert not set(links[1:]) & set(other[1:])


def test_a_role_is_part_of_a_message() -> None:
    assert (
        len({fingerprint([{"role": role, "content": "x"}]) for role in ("system", "developer", "user", "assistant", "tool")})
        == 5
    )


@pytest.mark.case(17)
@pytest.mark.parametrize(
    ("policy", "tools", "kwargs"),
    [
        ("other", [], {}),
        ("policy", [{"type": "function", "function": {"name": "read"}}], {}),
        ("policy", [], {"enable_thinking": False}),
    ],
)
def test_another_policy_tools_or_template_kwargs_make_a_root(policy: str, tools: list[Any], kwargs: dict[str, Any]) -> None:
    root = root_key(policy, tools, kwargs)
    assert root != ROOT
    assert fingerprint([user()], root) != fingerprint([user()], ROOT)


def test_tools_are_compared_by_their_parsed_fields() -> None:
    tools = [{"type": "function", "function": {"name": "read", "parameters": {"type": "object", "required": []}}}]
    again = [
        {
            "function": {"parameters": {"required": [], "type": "object"}, "description": None, "name": "read"},
            "type": "function",
        }
    ]
    assert root_key("policy", tools, {}) == root_key("policy", again, {})
    swapped = [*tools, {"type": "function", "function": {"name": "write"}}]
    assert root_key("policy", swapped, {}) != root_key("policy", swapped[::-1], {})


def test_minted_call_ids_name_the_call_they_come_from() -> None:
    message = assistant(
        calls=[tool_call("call_7f3a_0"), tool_call("call_7f3a_1"), tool_call("toolu_x"), tool_call("call_of_some_other")]
    )
    assert minted_call_ids(message) == ["7f3a", "7f3a"]
    assert minted_call_ids(user()) == []
    assert minted_call_ids(assistant(calls=[{"type": "function", "function": {"name": "read"}}])) == []


# Properties

json_values = st.recursive(
    st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=6,
)


@pytest.mark.case(14)
@given(st.dictionaries(st.text(max_size=4), json_values, max_size=4), st.randoms())
def test_any_order_and_spacing_of_any_arguments_is_the_same_call(arguments: dict[str, Any], random: Any) -> None:
    keys = list(arguments)
    random.shuffle(keys)
    text = json.dumps(
        {key: arguments[key] for key in keys}, indent=random.choice([None, 0, 2]), ensure_ascii=random.choice([True, False])
    )
    sent, back = assistant(calls=[tool_call(arguments=json.dumps(arguments))]), assistant(calls=[tool_call(arguments=text)])
    assert projection(sent, back) in ("exact", "arguments")
    assert same([sent], [back])


contents = st.none() | st.text(st.characters(exclude_categories=()), max_size=6)
replies = st.builds(
    lambda content, names, reasoning: assistant(
        content, [tool_call(f"call_a_{at}", name) for at, name in enumerate(names)], **reasoning
    ),
    contents,
    st.lists(st.sampled_from(["read", "write"]), max_size=2),
    st.sampled_from([{}, {"reasoning_content": "a"}, {"reasoning": " a"}, {"reasoning_content": "b"}]),
)


@given(replies, replies)
def test_a_reply_replayed_under_a_projection_always_has_the_fingerprint_of_what_was_sent(sent: Message, back: Message) -> None:
    """Otherwise a replay that is no edit would not be found. The other way round only reasoning may differ."""
    equal = digest_message(sent).digest == digest_message(back).digest
    if projection(sent, back) is not None:
        assert equal
    elif equal:
        assert reasoning_of(sent).strip() != reasoning_of(back).strip()


@given(replies)
def test_a_reply_replayed_as_it_was_is_exact(sent: Message) -> None:
    assert projection(sent, json.loads(json.dumps(sent))) == "exact"


@given(st.lists(st.binary(max_size=4), max_size=4), st.lists(st.binary(max_size=4), max_size=4))
def test_only_equal_lists_of_parts_hash_alike(left: list[bytes], right: list[bytes]) -> None:
    assert (hash_bytes(*left) == hash_bytes(*right)) == (left == right)


@given(json_values)
def test_canonical_json_is_json_of_the_same_value(value: Any) -> None:
    assert json.loads(canonical_json(value)) == value


EDIT_SCHEMA = {
    "type": "object",
    "properties": {
        "path": {"type": "string"},
        "all": {"type": "boolean", "default": False},
        "edits": {"type": "array", "items": {"type": "object", "properties": {"times": {"type": "integer", "default": 1}}}},
    },
}


@pytest.mark.parametrize(
    ("said", "replayed", "used"),
    [
        ('{"path": "a"}', '{"path": "a", "all": false}', "defaults"),
        ('{"edits": [{"old": "x"}, {}]}', '{"all": false, "edits": [{"times": 1, "old": "x"}, {"times": 1.0}]}', "defaults"),
        ('{"path": "a", "all": true}', '{"all": true, "path": "a"}', "arguments"),
        ('{"path": "a"}', '{"path": "a", "all": true}', None),
        ('{"path": "a"}', '{"path": "b", "all": false}', None),
        ('{"path": "a"}', '{"path": "a", "other": null, "more": 1}', None),
        ('{"path": "a", "all": false}', '{"path": "a"}', None),
        ('{"edits": [{}]}', '{"edits": [{"times": 1}, {"times": 1}]}', None),
    ],
)
def test_defaults_that_a_harness_fills_in_are_no_edit(said: str, replayed: str, used: str | None) -> None:
    """Claude Code reads a call by its schema and writes `"replace_all": false` into it where the model left it out."""
    sent, back = assistant(calls=[tool_call(arguments=said)]), assistant(calls=[tool_call(arguments=replayed)])
    name = tool_call()["function"]["name"]
    assert projection(sent, back, {name: EDIT_SCHEMA}) == used
    if used == "defaults":
        assert projection(sent, back) is None
        assert projection(sent, back, {"another": EDIT_SCHEMA}) is None


@pytest.mark.parametrize("depth", [150, 600, 50_000])
def test_arguments_nested_without_end_are_told_apart_by_their_text(depth: int) -> None:
    """A model that repeats itself writes them; they were recorded nowhere, because taking them apart ended in the recursion limit."""
    deep, deeper = ('{"a":' * levels + "1" + "}" * levels for levels in (depth, depth + 1))
    told = {fingerprint([user(), assistant(calls=[tool_call(arguments=each)])]) for each in (deep, deeper, deep)}
    assert len(told) == 2


def test_arguments_of_many_flat_brackets_are_compared_by_what_they_say() -> None:
    spaced, tight = ('{"a": ' + f"[{between.join(['[1]'] * 500)}]" + "}" for between in (", ", ","))
    assert fingerprint([assistant(calls=[tool_call(arguments=spaced)])]) == fingerprint(
        [assistant(calls=[tool_call(arguments=tight)])]
    )


@pytest.mark.parametrize(
    ("sent", "replayed", "used"),
    [
        ("a\r\nb", "a\nb", "reencoded"),
        ("caf\u00e9", "cafe\u0301", "reencoded"),
        ("a \nb", "a\nb", None),
        ("a\rb", "a\nb", None),
        ("\ufb01sh", "fish", None),
        (" a\r\nb", "a\nb", "reencoded"),
    ],
)
def test_texts_that_unicode_or_line_ends_tell_apart_are_one(sent: str, replayed: str, used: str | None) -> None:
    """Canonical forms alone: a ligature and its letters are two texts, and so are lines with and without blanks at their ends."""
    assert projection({"role": "assistant", "content": sent}, {"role": "assistant", "content": replayed}) == used


@pytest.mark.parametrize(
    ("sent", "replayed", "used"),
    [
        ("9007199254740993", "9007199254740992", "reencoded"),
        ("9007199254740993", "9007199254740994", None),
        ("12345678901234567891", "12345678901234567000", "reencoded"),
        ('[1, {"a": 9007199254740993}]', '[1, {"a": 9007199254740992}]', "reencoded"),
        ("9007199254740991", "9007199254740992", None),
        ("1" + "0" * 400 + "1", "1" + "0" * 401, None),
        ('"9007199254740993"', '"9007199254740992"', None),
    ],
)
def test_integers_are_one_that_a_double_holds_as_one(sent: str, replayed: str, used: str | None) -> None:
    """9007199254740993 is 2^53 + 1: a double holds it as 2^53."""

    def called(value: str) -> dict[str, Any]:
        return {"role": "assistant", "tool_calls": [{"id": "a", "function": {"name": "f", "arguments": f'{{"n": {value}}}'}}]}

    assert projection(called(sent), called(replayed)) == used


def test_results_are_named_after_the_reply_that_was_sent_up_to_the_next_one() -> None:
    """Calls that a harness gives one id are answered in their order; results of a call that nobody made, or of other calls, stay."""

    def calls(*identifiers: str) -> Message:
        return {"role": "assistant", "tool_calls": [{"id": each, "function": {"name": "f"}} for each in identifiers]}

    def results(*identifiers: str) -> list[Message]:
        return [{"role": "tool", "tool_call_id": each, "content": "7"} for each in identifiers]

    later = [calls("mine"), *results("mine")]
    assert name_calls(calls("mine", "x"), calls("a", "b"), [*results("x", "mine"), *later]) == [*results("b", "a"), *later]
    assert name_calls(calls("", ""), calls("a", "b"), results("", "")) == results("a", "b")
    assert name_calls(calls("mine"), calls("a"), results("nobody's")) == results("nobody's")
    assert name_calls(calls("b"), calls("a", "b"), results("b")) == results("b")
    assert name_calls(calls("mine"), calls("a"), [{"role": "user", "content": "go on"}])[0]["content"] == "go on"
