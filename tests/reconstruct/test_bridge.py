"""The bridge between a sampled reply and the next generation, proven on small chat templates written by hand.

A template here is a function from messages to ids. Text is one id per character (its code point), so that every id can be read;
ids below 10 are the special tokens. Each template has one family's way of ending a turn and of showing earlier ones.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from reconstruct.prompt import Bridge, Rendering, Reply, derive, turn_end
from reconstruct.records import Ids, pack_ids

Message = dict[str, Any]
T = TypeVar("T")

SYSTEM, USER, TOOL, BOT, END, THINK, UNTHINK, CALL, EOM = range(1, 10)
NEWLINE = ord("\n")
OPENER = {"system": SYSTEM, "user": USER, "tool": TOOL, "assistant": BOT}

LITERAL = "<end>"
"""What the end-of-turn token looks like when someone writes it."""


def spell(text: str) -> list[int]:
    return [ord(character) for character in text]


def body(message: Message) -> list[int]:
    """A message as the model says it: reasoning between its marks, content, tool calls."""
    reasoning = message.get("reasoning_content") or ""
    thought = [THINK, *spell(reasoning), UNTHINK] if reasoning else []
    calls = [item for call in message.get("tool_calls") or () for item in (CALL, *spell(call["function"]["arguments"]))]
    return [*thought, *spell(message.get("content") or ""), *calls]


def unthought(message: Message) -> Message:
    return {key: value for key, value in message.items() if key != "reasoning_content"}


# The templates. `generate` asks for the generation prompt.


def chatml(messages: Sequence[Message], generate: bool) -> list[int]:
    """Every turn ends in END and a newline that the model does not say."""
    turns = [item for message in messages for item in (OPENER[message["role"]], *body(message), END, NEWLINE)]
    return [*turns, BOT] if generate else turns


def unclosed(messages: Sequence[Message], generate: bool) -> list[int]:
    """No turn ends: the model stops by saying the opener of the next turn, USER or TOOL."""
    turns = [item for message in messages for item in (OPENER[message["role"]], *body(message))]
    return [*turns, BOT] if generate else turns


def tight(messages: Sequence[Message], generate: bool) -> list[int]:
    """END closes assistant turns alone, nothing follows it, and there is no generation prompt."""
    turns: list[int] = []
    for message in messages:
        turns += [*body(message), END] if message["role"] == "assistant" else [OPENER[message["role"]], *body(message)]
    return turns


def forgetful(messages: Sequence[Message], generate: bool) -> list[int]:
    """As chatml, but no thinking is ever shown again."""
    return chatml([unthought(message) for message in messages], generate)


def present(messages: Sequence[Message], generate: bool) -> list[int]:
    """As chatml, but thinking is shown only after the latest user message; the last turn gets an empty thought if it has none."""
    latest = max((at for at, message in enumerate(messages) if message["role"] == "user"), default=-1)
    shown = [message if at > latest else unthought(message) for at, message in enumerate(messages)]
    if shown and shown[-1]["role"] == "assistant" and not shown[-1].get("reasoning_content") and not generate:
        *earlier, last = shown
        return [*chatml(earlier, False), BOT, THINK, UNTHINK, *body(last), END, NEWLINE]
    return chatml(shown, generate)


def latest(messages: Sequence[Message], generate: bool) -> list[int]:
    """As chatml, but thinking is shown of the last assistant message alone."""
    at = max((at for at, message in enumerate(messages) if message["role"] == "assistant"), default=-1)
    return chatml([*map(unthought, messages[:at]), *messages[at:]] if at >= 0 else messages, generate)


def two_ends(messages: Sequence[Message], generate: bool) -> list[int]:
    """A turn with tool calls ends in EOM, others in END; the last turn gets an empty thought if it has none."""
    turns: list[int] = []
    for at, message in enumerate(messages):
        blank = [THINK, UNTHINK] if at == len(messages) - 1 and message["role"] == "assistant" and not generate else []
        end = EOM if message.get("tool_calls") else END
        turns += [OPENER[message["role"]], *blank, *body(message), end]
    return [*turns, BOT] if generate else turns


def tools_last(messages: Sequence[Message], generate: bool) -> list[int]:
    """The list of tools stands before the latest user message, so it moves with every user turn."""
    latest = max((at for at, message in enumerate(messages) if message["role"] == "user"), default=-1)
    turns: list[int] = []
    for at, message in enumerate(messages):
        tools = [CALL, *spell("tools")] if at == latest else []
        turns += [*tools, OPENER[message["role"]], *body(message), END, NEWLINE]
    return [*turns, BOT] if generate else turns


@dataclass(frozen=True)
class Family:
    render: Callable[[Sequence[Message], bool], list[int]]
    stops: Callable[[Message, Sequence[Message]], int]
    """The token with which the model ends a reply, given what follows it."""


def stop_at(token: int) -> Callable[[Message, Sequence[Message]], int]:
    return lambda reply, tail: token


CHATML = Family(chatml, stop_at(END))
UNCLOSED = Family(unclosed, lambda reply, tail: OPENER[tail[0]["role"]])
TIGHT = Family(tight, stop_at(END))
FORGETFUL = Family(forgetful, stop_at(END))
PRESENT = Family(present, stop_at(END))
TWO_ENDS = Family(two_ends, lambda reply, tail: EOM if reply.get("tool_calls") else END)
TOOLS_LAST = Family(tools_last, stop_at(END))
LATEST = Family(latest, stop_at(END))

APPEND_ONLY = [CHATML, UNCLOSED, TIGHT]
ALL = [*APPEND_ONLY, FORGETFUL, PRESENT, LATEST, TWO_ENDS, TOOLS_LAST]
OF_EACH = settings(max_examples=40)
"""Examples per family: about three hundred in all."""


def named(families: Sequence[Family]) -> list[Any]:
    return [pytest.param(family, id=family.render.__name__) for family in families]


def run(steps: Generator[tuple[Rendering, ...], Sequence[Ids], T], family: Family) -> T:
    """Answer every rendering the generator wants with the family's template."""
    wanted = next(steps)
    while True:
        try:
            wanted = steps.send([pack_ids(family.render(one.messages, one.add_generation_prompt)) for one in wanted])
        except StopIteration as stop:
            result: T = stop.value
            return result


def close_of(family: Family) -> Ids:
    return run(turn_end(), family)


def bridge(
    family: Family,
    history: Sequence[Message],
    reply: Message,
    sampled: Sequence[int],
    tail: Sequence[Message],
    *,
    closed: bool = True,
    retain: bool = False,
) -> list[int] | str:
    """The bridge's ids, or the reason why there is none."""
    told = Reply(reply, pack_ids(sampled), closed)
    outcome = run(derive(history, told, tail, close_of(family), retain_thinking=retain), family)
    return outcome.ids.tolist() if isinstance(outcome, Bridge) else outcome.reason


def said(family: Family, reply: Message, tail: Sequence[Message], *, closed: bool = True) -> list[int]:
    """What the model samples to say `reply`, its stop token included unless it was cut."""
    return [*body(reply), *([family.stops(reply, tail)] if closed else [])]


def user(content: str = "u") -> Message:
    return {"role": "user", "content": content}


def assistant(content: str = "a", thought: str = "", *arguments: str) -> Message:
    calls = [
        {"id": f"call_x_{at}", "type": "function", "function": {"name": "f", "arguments": text}}
        for at, text in enumerate(arguments)
    ]
    reasoning = {"reasoning_content": thought} if thought else {}
    return {"role": "assistant", "content": content, **reasoning, **({"tool_calls": calls} if calls else {})}


def tool(content: str = "r", at: int = 0) -> Message:
    return {"role": "tool", "tool_call_id": f"call_x_{at}", "content": content}


# How a turn ends


@pytest.mark.parametrize(
    ("family", "close"),
    [
        (CHATML, [END, NEWLINE]),
        (UNCLOSED, []),
        (TIGHT, [END]),
        (FORGETFUL, [END, NEWLINE]),
        (PRESENT, [END, NEWLINE]),
        (TWO_ENDS, [END]),
    ],
    ids=["chatml", "unclosed", "tight", "forgetful", "present", "two_ends"],
)
def test_the_turn_end_is_read_off_two_short_dialogues(family: Family, close: list[int]) -> None:
    assert close_of(family).tolist() == close


# What stands between


def test_the_newline_after_the_end_of_turn_is_in_the_bridge() -> None:
    """The model stops at END; the template goes on with a newline.

    sampled  a END
    bridge         \\n  USER v END \\n  BOT
    """
    between = bridge(CHATML, [user()], assistant(), [ord("a"), END], [user("v")])
    assert between == [NEWLINE, USER, ord("v"), END, NEWLINE, BOT]


def test_a_stop_token_that_opens_the_next_turn_is_not_doubled() -> None:
    """
    sampled  a USER
    bridge          v BOT
    """
    assert bridge(UNCLOSED, [user()], assistant(), [ord("a"), USER], [user("v")]) == [ord("v"), BOT]
    assert bridge(UNCLOSED, [user()], assistant("", "", "{}"), [CALL, *spell("{}"), TOOL], [tool()]) == [ord("r"), BOT]


def test_a_stop_token_that_opens_another_turn_than_the_next_is_refused() -> None:
    """The model asked for a user's turn, the harness answers with a tool's."""
    assert bridge(UNCLOSED, [user()], assistant(), [ord("a"), USER], [tool()]) == "turn_end_differs"


def test_no_newline_is_made_up_where_the_template_has_none() -> None:
    assert bridge(TIGHT, [user()], assistant(), [ord("a"), END], [user("v")]) == [USER, ord("v")]


@pytest.mark.parametrize(
    ("family", "expected"),
    [
        (CHATML, [END, NEWLINE, USER, ord("v"), END, NEWLINE, BOT]),
        (UNCLOSED, [USER, ord("v"), BOT]),
        (TIGHT, [END, USER, ord("v")]),
    ],
    ids=["chatml", "unclosed", "tight"],
)
def test_a_reply_cut_by_length_gets_the_templates_turn_end(family: Family, expected: list[int]) -> None:
    assert bridge(family, [user()], assistant("abc"), spell("abc"), [user("v")], closed=False) == expected


def test_a_reply_cut_before_its_first_token_is_closed_too() -> None:
    assert bridge(CHATML, [user()], assistant(""), [], [user("v")], closed=False) == [
        END,
        NEWLINE,
        USER,
        ord("v"),
        END,
        NEWLINE,
        BOT,
    ]


def test_a_reply_ended_by_a_stop_string_keeps_its_sampled_tail() -> None:
    """The stop string ## is in the ids though not in the text; after it comes the template's turn end.

    sampled  a # #
    bridge         END \\n  USER v END \\n  BOT
    """
    between = bridge(CHATML, [user()], assistant("a"), spell("a##"), [user("v")], closed=False)
    assert between == [END, NEWLINE, USER, ord("v"), END, NEWLINE, BOT]


def test_a_model_that_ended_its_turn_otherwise_than_the_template_is_refused() -> None:
    """It said EOM where the template writes END: the context would not be what the template shows."""
    assert bridge(CHATML, [user()], assistant(), [ord("a"), EOM], [user("v")]) == "turn_end_differs"
    assert bridge(CHATML, [user()], assistant(""), [], [user("v")]) == "turn_end_differs"


def test_the_sampled_ids_are_not_looked_at_but_for_the_last() -> None:
    """A split that the tokenizer would not make: the bridge is the same."""
    odd = [2000, 2001, END]
    assert bridge(CHATML, [user()], assistant("fishing"), odd, [user()]) == bridge(
        CHATML, [user()], assistant("fishing"), [*spell("fishing"), END], [user()]
    )


def test_two_assistant_messages_in_one_tail_are_both_rendered() -> None:
    between = bridge(
        CHATML, [user()], assistant("a"), [ord("a"), END], [user("v"), assistant("w"), user("x"), assistant("y"), user("z")]
    )
    assert between == [NEWLINE, *chatml([user("v"), assistant("w"), user("x"), assistant("y"), user("z")], True)]


# Turns of their own kind


def call_ends(messages: Sequence[Message], generate: bool) -> list[int]:
    """A turn with tool calls ends in EOM, others in END and a newline; nothing is shown otherwise when it is the last."""
    turns: list[int] = []
    for message in messages:
        turns += [OPENER[message["role"]], *body(message), *([EOM] if message.get("tool_calls") else [END, NEWLINE])]
    return [*turns, BOT] if generate else turns


def two_token_end(messages: Sequence[Message], generate: bool) -> list[int]:
    """The model ends its turn with EOM and END, both of which it says; a newline follows."""
    turns: list[int] = []
    for message in messages:
        turns += [OPENER[message["role"]], *body(message), EOM, END, NEWLINE]
    return [*turns, BOT] if generate else turns


CALL_ENDS = Family(call_ends, lambda reply, tail: EOM if reply.get("tool_calls") else END)
TWO_TOKEN_END = Family(two_token_end, stop_at(END))


def test_a_turn_that_ends_in_its_own_token_is_joined_where_the_rendering_ends_in_it_too() -> None:
    """
    sampled  CALL { } EOM
    bridge                TOOL r END \\n  BOT
    """
    reply = assistant("", "", "{}")
    after = [TOOL, ord("r"), END, NEWLINE, BOT]
    assert bridge(CALL_ENDS, [user()], reply, [*body(reply), EOM], [tool()]) == after
    assert bridge(CALL_ENDS, [user()], reply, [*body(reply), END], [tool()]) == "turn_end_unknown"
    assert bridge(CALL_ENDS, [user()], reply, body(reply), [tool()], closed=False) == "turn_end_unknown"


def test_a_turn_end_of_several_tokens_is_not_repeated_as_far_as_it_was_said() -> None:
    """
    sampled  a EOM END
    bridge             \\n  USER v EOM END \\n  BOT
    """
    after = [NEWLINE, USER, ord("v"), EOM, END, NEWLINE, BOT]
    assert bridge(TWO_TOKEN_END, [user()], assistant(), [ord("a"), EOM, END], [user("v")]) == after
    assert bridge(TWO_TOKEN_END, [user()], assistant(), [ord("a"), EOM], [user("v")], closed=False) == [END, *after]
    assert bridge(TWO_TOKEN_END, [user()], assistant(), [ord("a")], [user("v")], closed=False) == [EOM, END, *after]
    assert bridge(TWO_TOKEN_END, [user()], assistant(), [ord("a"), END], [user("v")]) == "turn_end_differs"


def test_a_reply_cut_while_thinking_gets_the_end_of_its_thinking_first() -> None:
    """
    sampled  THINK t
    bridge           UNTHINK END \\n  USER v END \\n  BOT
    """
    reply = assistant("", "t")
    after = [END, NEWLINE, USER, ord("v"), END, NEWLINE, BOT]
    assert bridge(CHATML, [user()], reply, [THINK, ord("t")], [user("v")], closed=False) == [UNTHINK, *after]
    assert bridge(CHATML, [user()], reply, [THINK, ord("t"), UNTHINK], [user("v")], closed=False) == after
    assert bridge(PRESENT, [user()], reply, [THINK, ord("t")], [user("v")], closed=False, retain=True) == [UNTHINK, *after]


def test_thinking_that_is_never_shown_has_no_known_end() -> None:
    reply = assistant("", "t")
    assert bridge(FORGETFUL, [user()], reply, [THINK, ord("t")], [user("v")], closed=False) == "thinking_dropped"
    assert bridge(FORGETFUL, [user()], reply, [THINK, ord("t")], [user("v")], closed=False, retain=True) == "turn_end_unknown"


def test_a_made_up_dialogue_that_the_template_does_not_take_proves_nothing() -> None:
    """As templates that take no tool result without its call: no ids are sent for the rendering with another reply."""

    def strict(messages: Sequence[Message], generate: bool) -> list[int]:
        if any(late["role"] == "tool" and not early.get("tool_calls") for early, late in itertools.pairwise(messages)):
            return []
        return present(messages, generate)

    reply = assistant("", "", "{}")
    assert bridge(PRESENT, [user()], reply, said(PRESENT, reply, [tool()]), [tool()]) == [NEWLINE, *chatml([tool()], True)]
    family = Family(strict, stop_at(END))
    assert bridge(family, [user()], reply, said(PRESENT, reply, [tool()]), [tool()]) == "turn_end_unknown"


# A literal end of turn


def as_text(messages: Sequence[Message], generate: bool) -> list[int]:
    """chatml by a tokenizer that knows a special token only where the template wrote it."""
    return chatml(messages, generate)


def as_token(messages: Sequence[Message], generate: bool) -> list[int]:
    """chatml by a tokenizer that takes the written token for the special one, as those that tokenize the rendered text do."""
    text = "".join(chr(item) for item in chatml(messages, generate))
    return [END if part == LITERAL else ord(part) for part in re.findall(f"{LITERAL}|.", text, re.DOTALL)]


def present_as_token(messages: Sequence[Message], generate: bool) -> list[int]:
    text = "".join(chr(item) for item in present(messages, generate))
    return [END if part == LITERAL else ord(part) for part in re.findall(f"{LITERAL}|.", text, re.DOTALL)]


@pytest.mark.parametrize("render", [as_text, as_token, present_as_token])
@pytest.mark.parametrize(
    "reply",
    [assistant(), assistant(LITERAL), assistant(f"a{LITERAL}\n"), assistant("", "", f'{{"text": "{LITERAL}\\n"}}')],
    ids=["plain", "reply", "reply ends so", "arguments"],
)
@pytest.mark.parametrize("text", [LITERAL, f"v{LITERAL}", f"{LITERAL}\n{LITERAL}\n"])
def test_a_literal_end_of_turn_changes_nothing(
    render: Callable[[Sequence[Message], bool], list[int]], reply: Message, text: str
) -> None:
    """In user text, tool output, replies and tool arguments: the bridge begins where the reply ends and holds the whole tail."""
    family = Family(render, stop_at(END))
    tail = [tool(text), tool(f"{text}w", 1)]
    rendered_tail = render(tail, True)
    assert bridge(family, [user(text)], reply, said(family, reply, tail), tail) == [NEWLINE, *rendered_tail]


# Thinking


THOUGHT = assistant("a", "t")


def test_thinking_dropped_at_a_new_user_turn_is_no_bridge_unless_it_is_retained() -> None:
    """What the deployed model would see has no thinking before the second user turn."""
    sampled = [THINK, ord("t"), UNTHINK, ord("a"), END]
    assert bridge(PRESENT, [user()], THOUGHT, sampled, [user("v")]) == "thinking_dropped"
    assert bridge(PRESENT, [user()], THOUGHT, sampled, [user("v")], retain=True) == [NEWLINE, USER, ord("v"), END, NEWLINE, BOT]


def test_thinking_dropped_from_a_cut_reply_is_no_bridge_unless_it_is_retained() -> None:
    sampled = [THINK, ord("t"), UNTHINK, ord("a")]
    assert bridge(PRESENT, [user()], THOUGHT, sampled, [user("v")], closed=False) == "thinking_dropped"
    assert bridge(PRESENT, [user()], THOUGHT, sampled, [user("v")], closed=False, retain=True) == [
        *(END, NEWLINE, USER, ord("v"), END, NEWLINE, BOT)
    ]


@pytest.mark.parametrize("retain", [False, True])
def test_thinking_stays_inside_a_tool_loop(retain: bool) -> None:
    reply = assistant("", "t", "{}")
    sampled = [THINK, ord("t"), UNTHINK, CALL, *spell("{}"), END]
    assert bridge(PRESENT, [user()], reply, sampled, [tool()], retain=retain) == [NEWLINE, TOOL, ord("r"), END, NEWLINE, BOT]


def test_thinking_that_the_template_never_shows_again_is_no_bridge_unless_it_is_retained() -> None:
    """The template drops it at once, also inside a tool loop: the rendering of the reply alone is a prefix of the continuation, and
    proves nothing about the thinking that was sampled."""
    sampled = [THINK, ord("t"), UNTHINK, ord("a"), END]
    assert bridge(FORGETFUL, [user()], THOUGHT, sampled, [tool()]) == "thinking_dropped"
    assert bridge(FORGETFUL, [user()], THOUGHT, sampled, [tool()], retain=True) == [NEWLINE, TOOL, ord("r"), END, NEWLINE, BOT]


def test_thinking_of_an_earlier_reply_dropped_after_this_one_is_a_rewritten_history_unless_it_is_retained() -> None:
    """The template shows the latest reply's thinking alone, so this reply hid the one it was sampled after."""
    history = [user(), assistant("", "t", "{}"), tool()]
    assert bridge(LATEST, history, THOUGHT, said(LATEST, THOUGHT, [user()]), [user("v")]) == "history_rewritten"
    assert isinstance(bridge(LATEST, history, THOUGHT, said(LATEST, THOUGHT, [user()]), [user("v")], retain=True), list)


def test_thinking_of_an_earlier_turn_dropped_now_is_a_rewritten_history_unless_it_is_retained() -> None:
    """The latest reply has no thinking of its own, but the one before it, inside the same tool loop, has."""
    history = [user(), assistant("", "t", "{}"), tool()]
    sampled = [ord("a"), END]
    assert bridge(PRESENT, history, assistant(), sampled, [user("v")]) == "history_rewritten"
    assert bridge(PRESENT, history, assistant(), sampled, [user("v")], retain=True) == [
        NEWLINE,
        USER,
        ord("v"),
        END,
        NEWLINE,
        BOT,
    ]


@pytest.mark.parametrize("tail", [[tool()], [user("v")]], ids=["tool", "user"])
def test_a_last_turn_shown_otherwise_than_earlier_ones_is_proven_by_another_reply(tail: list[Message]) -> None:
    """As the last message the reply is shown with an empty thought, as an earlier one without: neither rendering is a prefix of the
    other, but the suffix that all replies share is."""
    assert bridge(PRESENT, [user()], assistant(), [ord("a"), END], tail) == [NEWLINE, *chatml(tail, True)]


@pytest.mark.parametrize("content", ["x", "ax", "7", "x7", "x \n", " ", ""])
def test_no_reply_is_taken_for_the_one_it_is_compared_with(content: str) -> None:
    """The proof by another reply must not share the reply's own last characters."""
    reply = assistant(content)
    assert bridge(PRESENT, [user()], reply, said(PRESENT, reply, [tool()]), [tool()]) == [NEWLINE, *chatml([tool()], True)]


# What cannot be proven


@pytest.mark.parametrize("retain", [False, True])
def test_a_history_rewritten_for_other_reasons_than_thinking_is_never_bridged(retain: bool) -> None:
    """The list of tools has moved behind the reply: retained thinking is no leave for that."""
    assert bridge(TOOLS_LAST, [user()], assistant(), [ord("a"), END], [user("v")], retain=retain) == "history_rewritten"


@pytest.mark.parametrize("retain", [False, True])
def test_a_turn_end_that_is_not_the_usual_one_is_no_place_to_join(retain: bool) -> None:
    """A cut reply with a tool call ends in EOM here. The next END is the one after the tool's result: joining there loses it."""
    reply = assistant("", "", "{}")
    assert bridge(TWO_ENDS, [user()], reply, body(reply), [tool()], closed=False, retain=retain) == "turn_end_unknown"
    assert bridge(TWO_ENDS, [user()], reply, [*body(reply), EOM], [tool()], retain=retain) in (
        "turn_end_unknown",
        "turn_end_differs",
    )


def test_a_template_that_renders_nothing_of_the_reply_is_refused() -> None:
    def deaf(messages: Sequence[Message], generate: bool) -> list[int]:
        return chatml([message for message in messages if message["role"] != "assistant"], generate)

    assert isinstance(bridge(Family(deaf, stop_at(END)), [user()], assistant(), [ord("a"), END], [user("v")]), str)


# Properties

texts = st.text(st.sampled_from("ax7 \n<"), max_size=3) | st.just(LITERAL)
thoughts = st.sampled_from(["", "", "t", "x"])
users = st.builds(user, texts)
answers = st.builds(assistant, texts, thoughts)
calling = st.builds(assistant, texts, thoughts, texts)


@st.composite
def dialogues(draw: st.DrawFn) -> list[Message]:
    """A system message or none, a user message, and turns: answers followed by a user, tool calls followed by results."""
    messages: list[Message] = [{"role": "system", "content": "s"}] if draw(st.booleans()) else []
    messages.append(draw(users))
    for _ in range(draw(st.integers(1, 4))):
        if draw(st.booleans()):
            messages += [draw(answers), draw(users)]
        else:
            messages += [draw(calling), tool(draw(texts))]
            if draw(st.booleans()):
                messages.append(draw(users))
    return messages


@pytest.mark.parametrize("family", named(APPEND_ONLY))
@OF_EACH
@given(messages=dialogues(), cuts=st.lists(st.booleans(), min_size=4, max_size=4))
def test_a_dialogue_played_turn_by_turn_is_the_dialogue_rendered_at_once(
    family: Family, messages: list[Message], cuts: list[bool]
) -> None:
    """Whenever the template only appends and the sampled ids are those it would render. Cut and closed replies alike."""
    turns = [at for at, message in enumerate(messages) if message["role"] == "assistant"]
    prompt = family.render(messages[: turns[0]], True)
    for at, cut, end in zip(turns, cuts, [*turns[1:], len(messages)], strict=False):
        tail = messages[at + 1 : end]
        sampled = said(family, messages[at], tail, closed=not cut)
        between = bridge(family, messages[:at], messages[at], sampled, tail, closed=not cut)
        assert isinstance(between, list)
        prompt = [*prompt, *sampled, *between]
        assert prompt == family.render(messages[:end], True)


@pytest.mark.parametrize("family", named(ALL))
@OF_EACH
@given(messages=dialogues(), cut=st.booleans())
def test_whatever_the_template_does_a_bridge_is_what_it_would_have_rendered(
    family: Family, messages: list[Message], cut: bool
) -> None:
    """Sound: every bridge that is given is right; where the template rewrites, there is none."""
    at = max(at for at, message in enumerate(messages) if message["role"] == "assistant")
    history, reply, tail = messages[:at], messages[at], messages[at + 1 :]
    sampled = said(family, reply, tail, closed=not cut)
    between = bridge(family, history, reply, sampled, tail, closed=not cut)
    if isinstance(between, list):
        assert [*family.render(history, True), *sampled, *between] == family.render(messages, True)


@pytest.mark.parametrize("family", named(ALL))
@OF_EACH
@given(messages=dialogues(), retain=st.booleans())
def test_a_known_rendering_of_the_parents_request_spares_asking_for_it(
    family: Family, messages: list[Message], retain: bool
) -> None:
    at = max(at for at, message in enumerate(messages) if message["role"] == "assistant")
    history, reply, tail = messages[:at], messages[at], messages[at + 1 :]
    told = Reply(reply, pack_ids(said(family, reply, tail)), True)
    outcomes = []
    for asked in (None, pack_ids(family.render(history, True))):
        steps = derive(history, told, tail, close_of(family), retain_thinking=retain, asked=asked)
        outcome = run(steps, family)
        outcomes.append(outcome.ids.tolist() if isinstance(outcome, Bridge) else outcome.reason)
    assert outcomes[0] == outcomes[1]


def test_an_append_only_turn_costs_two_renderings_at_once() -> None:
    """Without its generation prompt up to the reply, and the whole request: both in the first step."""
    told = Reply(assistant(), pack_ids([ord("a"), END]), True)
    asked = pack_ids(chatml([user()], True))
    steps = derive([user()], told, [user("v")], close_of(CHATML), retain_thinking=False, asked=asked)
    wanted = next(steps)
    assert [(len(one.messages), one.add_generation_prompt) for one in wanted] == [(2, False), (3, True)]
    with pytest.raises(StopIteration):
        steps.send([pack_ids(chatml(one.messages, one.add_generation_prompt)) for one in wanted])


@pytest.mark.parametrize("family", named(ALL))
@OF_EACH
@given(messages=dialogues(), cut=st.booleans())
def test_retained_thinking_loses_nothing_of_the_tail(family: Family, messages: list[Message], cut: bool) -> None:
    """With `retain` the context may hold more thinking than the template shows, and nothing else may differ."""
    at = max(at for at, message in enumerate(messages) if message["role"] == "assistant")
    history, reply, tail = messages[:at], messages[at], messages[at + 1 :]
    sampled = said(family, reply, tail, closed=not cut)
    between = bridge(family, history, reply, sampled, tail, closed=not cut, retain=True)
    if isinstance(between, list):
        rendered = [*family.render(history, True), *sampled, *between]
        assert without_thinking(rendered) == without_thinking(family.render(messages, True))


def without_thinking(ids: Sequence[int]) -> list[int]:
    kept, thinking = [], False
    for item in ids:
        thinking = thinking or item == THINK
        if not thinking:
            kept.append(item)
        thinking = thinking and item != UNTHINK
    return kept
