"""The bridge between a sampled reply and the next generation, proven on small chat templates written by hand.

A template here is a function from messages to ids. Text is one id per character (its code point), so that every id can be read;
ids below 10 are the special tokens. Each template has one family's way of ending a turn and of showing earlier ones.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from reconstruct.messages import split_thought
from reconstruct.prompt import Bridge, Rendering, SampledReply, Unproven, derive, turn_end
from reconstruct.records import Ids, pack_ids

Message = Mapping[str, Any]
T = TypeVar("T")

SYSTEM, USER, TOOL, BOT, END, THINK, UNTHINK, CALL, EOM = range(1, 10)
UNCALL = 0
NEWLINE = ord("\n")
OPENER = {"system": SYSTEM, "user": USER, "tool": TOOL, "assistant": BOT}

EXTRA = 999
"""An end token that no template writes."""

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


def call_ends(messages: Sequence[Message], generate: bool) -> list[int]:
    """A turn with tool calls ends in EOM, others in END and a newline; nothing is shown otherwise when it is the last."""
    turns: list[int] = []
    for message in messages:
        turns += [OPENER[message["role"]], *body(message), *([EOM] if message.get("tool_calls") else [END, NEWLINE])]
    return [*turns, BOT] if generate else turns


def paired(messages: Sequence[Message], generate: bool) -> list[int]:
    """As chatml, but it takes no tool result without its call, and a call is closed by a mark of its own."""
    turns: list[int] = []
    for at, message in enumerate(messages):
        if message["role"] == "tool" and not any(before.get("tool_calls") for before in messages[:at]):
            return []
        closed = [UNCALL] if message.get("tool_calls") else []
        turns += [OPENER[message["role"]], *body(message), *closed, END, NEWLINE]
    return [*turns, BOT] if generate else turns


def user_last(messages: Sequence[Message], generate: bool) -> list[int]:
    """As paired, but the last message must be a user's or a tool's, and neither a reply nor a generation prompt has an opener."""
    return [item for item in paired(messages, False) if item != BOT] if messages[-1]["role"] != "assistant" else []


def eager(messages: Sequence[Message], generate: bool) -> list[int]:
    """As paired, but the generation prompt is there whether it is asked for or not."""
    return paired(messages, True)


def returns(messages: Sequence[Message], generate: bool) -> list[int]:
    """As eager, but the answer that comes last ends in EOM, not in END, and so the model ends it."""
    turns = paired(messages, False)
    if messages[-1]["role"] == "assistant" and turns and not messages[-1].get("tool_calls"):
        return [*turns[:-2], EOM, BOT]
    return [*turns, BOT] if turns else []


def moves_text(messages: Sequence[Message], generate: bool) -> list[int]:
    """As chatml, but the text beside a call is moved behind the call's results."""
    turns: list[int] = []
    waiting: list[int] = []
    for message in messages:
        if waiting and message["role"] != "tool":
            turns, waiting = [*turns, *waiting], []
        if message.get("tool_calls"):
            waiting = spell(message["content"])
            message = {**message, "content": ""}
        turns += [OPENER[message["role"]], *body(message), END, NEWLINE]
    turns += waiting
    return [*turns, BOT] if generate else turns


THOUGHT_MARKS = re.compile(r"<think>.*</think>", re.DOTALL)


def strips(messages: Sequence[Message], generate: bool) -> list[int]:
    """As chatml, but a thought that stands in the content is shown only after the latest user message."""
    latest = max((at for at, message in enumerate(messages) if message["role"] == "user"), default=-1)
    shown = [
        {**message, "content": THOUGHT_MARKS.sub("", message["content"])}
        if at < latest and message["role"] == "assistant"
        else message
        for at, message in enumerate(messages)
    ]
    return chatml(shown, generate)


@dataclass(frozen=True)
class Family:
    render: Callable[[Sequence[Message], bool], list[int]]
    stops: Callable[[Message, Sequence[Message]], int]
    """The token with which the model ends a reply, given what follows it."""
    closes_calls: bool = False
    """Whether a mark closes the calls of a reply."""


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
CALL_ENDS = Family(call_ends, lambda reply, tail: EOM if reply.get("tool_calls") else END)
PAIRED = Family(paired, stop_at(END), closes_calls=True)
USER_LAST = Family(user_last, stop_at(END), closes_calls=True)
EAGER = Family(eager, stop_at(END), closes_calls=True)
RETURNS = Family(returns, stop_at(END), closes_calls=True)
MOVES_TEXT = Family(moves_text, stop_at(END))
STRIPS = Family(strips, stop_at(END))

APPEND_ONLY = [CHATML, UNCLOSED, TIGHT, PAIRED, USER_LAST, EAGER, RETURNS]
ALL = [*APPEND_ONLY, FORGETFUL, PRESENT, LATEST, TWO_ENDS, CALL_ENDS, TOOLS_LAST, MOVES_TEXT, STRIPS]
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


def close_of(family: Family) -> Ids | None:
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
    told = SampledReply(reply, pack_ids(sampled), closed)
    outcome = run(derive(history, told, tail, close_of(family), retain_thinking=retain), family)
    return outcome.ids.tolist() if isinstance(outcome, Bridge) else outcome.reason


def bridge_and_end(
    family: Family, history: Sequence[Message], reply: Message, sampled: Sequence[int], tail: Sequence[Message]
) -> tuple[list[int], bool]:
    """The bridge's ids, and whether they declare a turn end of the template's. The turn end is looked for."""
    outcome = run(derive(history, SampledReply(reply, pack_ids(sampled), True), tail, None, retain_thinking=False), family)
    assert isinstance(outcome, Bridge), outcome
    return outcome.ids.tolist(), outcome.adds_end


def said(family: Family, reply: Message, tail: Sequence[Message], *, closed: bool = True) -> list[int]:
    """What the model samples to say `reply`, its stop token included unless it was cut."""
    mark = [UNCALL] if family.closes_calls and reply.get("tool_calls") else []
    return [*body(reply), *mark, *([family.stops(reply, tail)] if closed else [])]


def respell(ids: Sequence[int]) -> list[int]:
    """The same text in ids that no template writes."""
    return [item + ODD if item >= 10 else item for item in ids]


ODD = 1_000_000


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
        (PAIRED, [END, NEWLINE]),
        # Nothing tells the end from the opener of what follows.
        (USER_LAST, [END, NEWLINE, USER]),
        (EAGER, [END, NEWLINE, USER]),
        # As an earlier turn ends, not as the last one does.
        (RETURNS, [END, NEWLINE, USER]),
    ],
    ids=lambda value: value.render.__name__ if isinstance(value, Family) else None,
)
def test_the_turn_end_is_read_off_short_dialogues(family: Family, close: list[int]) -> None:
    found = close_of(family)
    assert found.tolist() == close


def test_a_template_that_takes_no_dialogue_of_two_speakers_has_no_turn_end() -> None:
    assert close_of(Family(lambda messages, generate: [], stop_at(END))) is None


# What stands between


def test_the_newline_after_the_end_of_turn_is_in_the_bridge() -> None:
    """The model stops at END; the template goes on with a newline.

    sampled  a END
    bridge         \\n  USER v END \\n  BOT
    """
    between = bridge(CHATML, [user()], assistant(), [ord("a"), END], [user("v")])
    assert between == [NEWLINE, USER, ord("v"), END, NEWLINE, BOT]


@pytest.mark.case(4)
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


@pytest.mark.case(62)
@pytest.mark.parametrize(
    "family", [CHATML, PAIRED, USER_LAST, EAGER, RETURNS, PRESENT], ids=lambda family: family.render.__name__
)
@pytest.mark.parametrize(
    ("reply", "tail"), [(assistant(), [user("v")]), (assistant("", "", "{}"), [tool()])], ids=["answer", "call"]
)
def test_a_turn_that_the_model_ended_with_another_of_its_end_tokens_keeps_it_and_gets_the_templates_own(
    family: Family, reply: Message, tail: list[Message]
) -> None:
    """The model's generation config has two end tokens, of which the template writes one. Each such reply began a row.

    sampled  a EOM
    bridge         END \\n  USER v END \\n  BOT
    """
    sampled = [*said(family, reply, tail)[:-1], EOM]
    between, added = bridge_and_end(family, [user()], reply, sampled, tail)
    whole = family.render([user(), reply, *tail], True)
    shown = whole[len(whole) - len(between) :]
    assert between == shown and between[:2] == [END, NEWLINE] and added
    assert bridge_and_end(family, [user()], reply, respell(sampled), tail) == (between, True)


def test_only_a_turn_end_that_the_model_did_not_choose_is_declared() -> None:
    for sampled in ([ord("a"), END], [ord("a") + ODD, END]):
        assert bridge_and_end(CHATML, [user()], assistant(), sampled, [user("v")])[1] is False
    cut = SampledReply(assistant(), pack_ids([ord("a") + ODD]), False)
    outcome = run(derive([user()], cut, [user("v")], None, retain_thinking=False), CHATML)
    assert isinstance(outcome, Bridge) and not outcome.adds_end


def test_where_no_turn_ends_another_end_token_stays_and_the_next_turn_opens() -> None:
    """EOM opens no turn here, so the model asked for no other turn than the one that comes."""
    assert bridge_and_end(UNCLOSED, [user()], assistant(), [ord("a"), EOM], [user("v")]) == ([USER, ord("v"), BOT], True)


def test_a_token_of_the_next_turns_opener_is_not_taken_for_the_turns_end() -> None:
    """A model that ends a turn by saying BOT or USER: what the template writes before that is not lost."""
    for opener in (USER, BOT):
        between, _ = bridge_and_end(CHATML, [user()], assistant(), [ord("a"), opener], [user("v")])
        assert between == [END, NEWLINE, USER, ord("v"), END, NEWLINE, BOT]


def test_a_reply_without_ids_that_is_said_to_have_ended_is_refused() -> None:
    assert bridge(CHATML, [user()], assistant(""), [], [user("v")]) == "turn_end_differs"


def test_the_sampled_ids_are_not_looked_at_but_for_the_last() -> None:
    """A split that the tokenizer would not make: the bridge is the same."""
    odd = [2000, 2001, END]
    assert bridge(CHATML, [user()], assistant("fishing"), odd, [user()]) == bridge(
        CHATML, [user()], assistant("fishing"), [*spell("fishing"), END], [user()]
    )


@pytest.mark.case(19)
def test_two_assistant_messages_in_one_tail_are_both_rendered() -> None:
    between = bridge(
        CHATML, [user()], assistant("a"), [ord("a"), END], [user("v"), assistant("w"), user("x"), assistant("y"), user("z")]
    )
    assert between == [NEWLINE, *chatml([user("v"), assistant("w"), user("x"), assistant("y"), user("z")], True)]


# Turns of their own kind


def two_token_end(messages: Sequence[Message], generate: bool) -> list[int]:
    """The model ends its turn with EOM and END, both of which it says; a newline follows."""
    turns: list[int] = []
    for message in messages:
        turns += [OPENER[message["role"]], *body(message), EOM, END, NEWLINE]
    return [*turns, BOT] if generate else turns


TWO_TOKEN_END = Family(two_token_end, stop_at(END))


def test_a_turn_that_ends_in_its_own_token_is_joined_where_the_rendering_ends_in_it_too() -> None:
    """
    sampled  CALL { } EOM
    bridge                TOOL r END \\n  BOT
    """
    reply = assistant("", "", "{}")
    after = [TOOL, ord("r"), END, NEWLINE, BOT]
    assert bridge(CALL_ENDS, [user()], reply, [*body(reply), EOM], [tool()]) == after
    assert bridge(CALL_ENDS, [user()], reply, respell([*body(reply), EOM]), [tool()]) == after
    assert bridge(CALL_ENDS, [user()], reply, [*body(reply), END], [tool()]) == "turn_end_unknown"


def test_a_cut_turn_with_an_end_of_its_own_goes_on_only_where_the_template_writes_the_same_ids() -> None:
    """Then its end follows them; otherwise nothing tells it from the syntax of the call."""
    reply = assistant("", "", "{}")
    after = [EOM, TOOL, ord("r"), END, NEWLINE, BOT]
    assert bridge(CALL_ENDS, [user()], reply, body(reply), [tool()], closed=False) == after
    assert bridge(CALL_ENDS, [user()], reply, respell(body(reply)), [tool()], closed=False) == "turn_end_unknown"


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


@pytest.mark.parametrize("family", [PAIRED, USER_LAST, EAGER, RETURNS], ids=lambda family: family.render.__name__)
@pytest.mark.parametrize("spelling", [list, respell], ids=["canonical", "split otherwise"])
def test_a_template_that_takes_no_result_without_its_call_and_no_last_reply_is_bridged(
    family: Family, spelling: Callable[[Sequence[int]], list[int]]
) -> None:
    """As MiniMax, Mistral's own tokenizer and gpt-oss are rendered: each call began a row."""
    reply = assistant("", "", "{}")
    sampled = spelling(said(family, reply, [tool()]))
    whole, prompt = family.render([user(), reply, tool()], True), family.render([user()], True)
    assert bridge(family, [user()], reply, sampled, [tool()]) == whole[len(prompt) + len(sampled) :]


def test_a_made_up_dialogue_that_the_template_does_not_take_proves_nothing() -> None:
    """No ids are sent for a rendering that is rejected."""

    def strict(messages: Sequence[Message], generate: bool) -> list[int]:
        return [] if any(message["content"] == "x" for message in messages) else chatml(messages, generate)

    family = Family(strict, stop_at(END))
    told = SampledReply(assistant(), pack_ids([ord("a") + ODD, END]), True)
    outcome = run(derive([user()], told, [user("v")], pack_ids([END, NEWLINE]), retain_thinking=False), family)
    assert isinstance(outcome, Unproven) and outcome.reason == "turn_end_unknown"


@pytest.mark.parametrize("spelling", [list, respell], ids=["canonical", "split otherwise"])
def test_text_that_the_template_moves_behind_a_result_rewrites_the_history(
    spelling: Callable[[Sequence[int]], list[int]],
) -> None:
    """As Gemma does. What follows the text is then not all that follows the reply: the tool's result would be lost."""
    reply = assistant("a", "", "{}")
    sampled = spelling([*body(reply), END])
    assert bridge(MOVES_TEXT, [user()], reply, sampled, [tool()]) == "history_rewritten"
    assert bridge(MOVES_TEXT, [user()], reply, sampled, [tool(), user("v")]) == "history_rewritten"
    silent = assistant("", "", "{}")
    after = [NEWLINE, TOOL, ord("r"), END, NEWLINE, BOT]
    assert bridge(MOVES_TEXT, [user()], silent, spelling([*body(silent), END]), [tool()]) == after


def test_a_call_that_the_template_does_not_show_is_a_rewritten_history() -> None:
    def speechless(messages: Sequence[Message], generate: bool) -> list[int]:
        return chatml([{**message, "tool_calls": []} for message in messages], generate)

    reply = assistant("", "", "{}")
    family = Family(speechless, stop_at(END))
    assert bridge(family, [user()], reply, [*body(reply), END], [tool()]) == "history_rewritten"


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


@pytest.mark.case(6)
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


@pytest.mark.case(7)
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


@pytest.mark.case(8)
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


def test_thinking_of_an_earlier_reply_dropped_after_this_one_is_no_bridge_unless_it_is_retained() -> None:
    """The template shows the latest reply's thinking alone, so this reply hid the one it was sampled after: inside a tool loop, too.
    The reason was history_rewritten."""
    history = [user(), assistant("", "t", "{}"), tool()]
    called = assistant("", "t", "{}")
    assert bridge(LATEST, history, THOUGHT, said(LATEST, THOUGHT, [user()]), [user("v")]) == "thinking_dropped"
    assert bridge(LATEST, history, called, said(LATEST, called, [tool()]), [tool()]) == "thinking_dropped"
    assert isinstance(bridge(LATEST, history, THOUGHT, said(LATEST, THOUGHT, [user()]), [user("v")], retain=True), list)


def test_thinking_of_an_earlier_turn_dropped_now_is_no_bridge_unless_it_is_retained() -> None:
    """The latest reply has no thinking of its own, but the one before it, inside the same tool loop, has."""
    history = [user(), assistant("", "t", "{}"), tool()]
    sampled = [ord("a"), END]
    assert bridge(PRESENT, history, assistant(), sampled, [user("v")]) == "thinking_dropped"
    assert bridge(PRESENT, history, assistant(), sampled, [user("v")], retain=True) == [
        NEWLINE,
        USER,
        ord("v"),
        END,
        NEWLINE,
        BOT,
    ]


IN_CONTENT = assistant("<think>t</think>a")


def test_thinking_that_the_engine_left_in_the_content_is_treated_as_all_thinking_is() -> None:
    """An engine without a reasoning parser: the template hides the thought all the same, and the row kept it in silence."""
    sampled = [*body(IN_CONTENT), END]
    after = [NEWLINE, USER, ord("v"), END, NEWLINE, BOT]
    for spelled in (sampled, respell(sampled)):
        assert bridge(STRIPS, [user()], IN_CONTENT, spelled, [tool()]) == [NEWLINE, TOOL, ord("r"), END, NEWLINE, BOT]
        assert bridge(STRIPS, [user()], IN_CONTENT, spelled, [user("v")]) == "thinking_dropped"
        assert bridge(STRIPS, [user()], IN_CONTENT, spelled, [user("v")], retain=True) == after
        assert bridge(CHATML, [user()], IN_CONTENT, spelled, [user("v")]) == after


def test_thinking_that_an_earlier_reply_holds_in_its_content_is_retained_too() -> None:
    history = [user(), IN_CONTENT, tool()]
    sampled = respell([ord("b"), END])
    assert bridge(STRIPS, history, assistant("b"), sampled, [user("v")]) == "thinking_dropped"
    after = [NEWLINE, USER, ord("v"), END, NEWLINE, BOT]
    assert bridge(STRIPS, history, assistant("b"), sampled, [user("v")], retain=True) == after


@pytest.mark.parametrize(
    ("content", "thought"),
    [
        ("<think>t</think>a", "<think>t"),
        ("t\n</think>\n\na", "t\n"),
        ("[THINK]t[/THINK]a", "[THINK]t"),
        ("<seed:think>t</seed:think>a", "<seed:think>t"),
        ("<think>\n\n</think>\n\na", None),
        ("what does <b>x</b> mean", None),
        ("a", None),
        (None, None),
    ],
)
def test_a_thought_in_the_content_is_known_by_its_mark_unless_it_is_empty(content: str | None, thought: str | None) -> None:
    found = split_thought({"role": "assistant", "content": content})
    assert (None if found is None else found[0]) == thought


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
    cut = respell(body(reply))
    assert bridge(TWO_ENDS, [user()], reply, cut, [tool()], closed=False, retain=retain) == "turn_end_unknown"
    assert bridge(TWO_ENDS, [user()], reply, [*cut, END], [tool()], retain=retain) == "turn_end_unknown"
    assert bridge(TWO_ENDS, [user()], reply, [*cut, EOM], [tool()], retain=retain) == [TOOL, ord("r"), END, BOT]


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
@given(messages=dialogues(), cuts=st.lists(st.booleans(), min_size=4, max_size=4), odd=st.booleans())
def test_a_dialogue_played_turn_by_turn_is_the_dialogue_rendered_at_once(
    family: Family, messages: list[Message], cuts: list[bool], odd: bool
) -> None:
    """Whenever the template only appends, also where the sampled ids are not those it would render. Cut and closed replies alike."""
    turns = [at for at, message in enumerate(messages) if message["role"] == "assistant"]
    prompt = family.render(messages[: turns[0]], True)
    for at, cut, end in zip(turns, cuts, [*turns[1:], len(messages)], strict=False):
        reply, tail = messages[at], messages[at + 1 : end]
        sampled = said(family, reply, tail, closed=not cut)
        spelled = respell(sampled) if odd else sampled
        between = bridge(family, messages[:at], reply, spelled, tail, closed=not cut)
        if between == "turn_end_unknown" and odd and cut and (reply.get("tool_calls") or reply.get("reasoning_content")):
            # Nothing tells what is left of the call, or of the thought, where no turn ends or no rendering ends in a reply.
            assert family in (UNCLOSED, USER_LAST, EAGER, RETURNS)
            return
        assert isinstance(between, list), between
        prompt = [*prompt, *sampled, *between]
        assert prompt == family.render(messages[:end], True)


@pytest.mark.parametrize("odd", [False, True], ids=["canonical", "split otherwise"])
@pytest.mark.parametrize("family", named(ALL))
@OF_EACH
@given(messages=dialogues(), cut=st.booleans(), other=st.booleans())
def test_whatever_the_template_does_a_bridge_is_what_it_would_have_rendered(
    family: Family, odd: bool, messages: list[Message], cut: bool, other: bool
) -> None:
    """Sound: every bridge that is given is right; where the template rewrites, there is none. Another end token is kept."""
    at = max(at for at, message in enumerate(messages) if message["role"] == "assistant")
    history, reply, tail = messages[:at], messages[at], messages[at + 1 :]
    sampled = said(family, reply, tail, closed=not cut)
    extra = [EXTRA] if other and not cut else []
    spelled = [*(respell(sampled) if odd else sampled)[: -1 if extra else None], *extra]
    between = bridge(family, history, reply, spelled, tail, closed=not cut)
    if isinstance(between, list):
        kept = sampled[:-1] if extra else sampled
        assert [*family.render(history, True), *kept, *between] == family.render(messages, True)


@pytest.mark.parametrize("family", named(ALL))
@OF_EACH
@given(messages=dialogues(), retain=st.booleans())
def test_a_known_rendering_of_the_parents_request_saves_one(family: Family, messages: list[Message], retain: bool) -> None:
    at = max(at for at, message in enumerate(messages) if message["role"] == "assistant")
    history, reply, tail = messages[:at], messages[at], messages[at + 1 :]
    told = SampledReply(reply, pack_ids(said(family, reply, tail)), True)
    outcomes = []
    for asked in (None, pack_ids(family.render(history, True))):
        steps = derive(history, told, tail, close_of(family), retain_thinking=retain, asked=asked)
        outcome = run(steps, family)
        outcomes.append(outcome.ids.tolist() if isinstance(outcome, Bridge) else outcome.reason)
    assert outcomes[0] == outcomes[1]


def test_a_reply_in_the_templates_own_ids_costs_one_rendering_and_one_in_others_two_more() -> None:
    """The whole request; then, at once, the same with another reply and with another tail."""
    asked = pack_ids(chatml([user()], True))
    told = SampledReply(assistant(), pack_ids([ord("a"), END]), True)
    steps = derive([user()], told, [user("v")], close_of(CHATML), retain_thinking=False, asked=asked)
    wanted = next(steps)
    assert [(len(one.messages), one.add_generation_prompt) for one in wanted] == [(3, True)]
    with pytest.raises(StopIteration):
        steps.send([pack_ids(chatml(one.messages, one.add_generation_prompt)) for one in wanted])
    told = SampledReply(assistant(), pack_ids([ord("a") + ODD, END]), True)
    steps = derive([user()], told, [user("v")], close_of(CHATML), retain_thinking=False, asked=asked)
    wanted = steps.send([pack_ids(chatml(one.messages, one.add_generation_prompt)) for one in next(steps)])
    assert [(len(one.messages), one.add_generation_prompt) for one in wanted] == [(3, True), (3, True)]
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
