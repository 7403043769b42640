"""Conversations in six shapes, played through the service under a real model's chat template, and what became of their rows.

A conversation has native messages, as its model's own tokenizer would render them, and the messages of the harness, which knows the ids
that the service minted. Every prompt is compared with the template's own rendering of the native ones.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from tests.support.engine.scripted_engine import Say, ScriptedEngine, logprobs_of
from tests.support.engine.template_families import Family
from tests.support.engine.template_markup import Parsed
from tests.support.service.running_service import RunningService, Session
from tests.templates.native_families import TOOLS, NativeFamily, Untold

Message = dict[str, Any]


@dataclass(frozen=True)
class Turn:
    """What the model does in a turn, and what the environment answers: results of its calls, or a user's next question."""

    content: str = ""
    keys: tuple[str, ...] = ()
    reasoning: str = ""
    user: str = ""


def _loop(reasoning: str = "") -> list[Turn]:
    return [
        Turn(keys=("alpha",), reasoning=reasoning),
        Turn(keys=("beta",), reasoning=reasoning),
        Turn("seven and eight", (), reasoning),
    ]


def _then_user(turns: Sequence[Turn], reasoning: str = "") -> list[Turn]:
    *before, last = turns
    return [*before, Turn(last.content, last.keys, last.reasoning, "thank you"), Turn("you are welcome", (), reasoning)]


SHAPES: dict[str, list[Turn]] = {
    "tool loop": _loop(),
    "tool loop, thinking": _loop("step by step"),
    "parallel calls": [Turn(keys=("alpha", "beta")), Turn("seven and eight")],
    "text beside a call": [Turn("I look it up.", ("alpha",)), Turn("seven")],
    "new user turn": _then_user(_loop()),
    "new user turn, thinking": _then_user(_loop("step by step"), "step by step"),
}


@dataclass(frozen=True)
class Played:
    """`rows` of the conversation and the `reasons` of its branches, in order; `differing` are the numbers of the calls whose prompt is not
    the template's own rendering, though that begins with all that was sampled before."""

    rows: int
    reasons: tuple[str, ...]
    differing: tuple[int, ...] = ()


@dataclass
class Conversation:
    family: NativeFamily
    turns: Sequence[Turn]
    native: list[Message] = field(default_factory=lambda: [{"role": "user", "content": "look both keys up"}])
    prompts: list[str] = field(default_factory=list)
    """What the template itself shows before each turn."""
    texts: list[str] = field(default_factory=list)
    stops: list[str] = field(default_factory=list)
    _calls: int = 0

    def prepare(self) -> None:
        """Find what the model samples in each turn. Raises Untold."""
        for turn in self.turns:
            reply = self._reply(turn)
            following = self._results(reply, turn)
            spoken = self.family.speak(self.native, reply, following[0])
            self.prompts.append(self.family.render(self.native, generate=True))
            self.texts.append(spoken.text)
            self.stops.append(spoken.stop)
            self.family.said[spoken.text.removesuffix(spoken.stop)] = _parsed(reply)
            self.native += [reply, *following]

    def _reply(self, turn: Turn) -> Message:
        reply: Message = {"role": "assistant", "content": turn.content}
        if turn.reasoning:
            reply["reasoning_content"] = turn.reasoning
        if turn.keys:
            reply["tool_calls"] = [self._call(key, at) for at, key in enumerate(turn.keys)]
        return reply

    def _call(self, key: str, position: int) -> Message:
        identifier = self.family.new_id(self._calls, position)
        self._calls += 1
        return {"id": identifier, "type": "function", "function": {"name": "lookup", "arguments": {"key": key}}}

    def _results(self, reply: Message, turn: Turn) -> list[Message]:
        calls = reply.get("tool_calls") or ()
        results = [{"role": "tool", "tool_call_id": call["id"], "content": f"{at + 7}"} for at, call in enumerate(calls)]
        return results or [{"role": "user", "content": turn.user or "more"}]


def _parsed(reply: Message) -> Parsed:
    calls = reply.get("tool_calls") or ()
    named = tuple((call["function"]["name"], f'{{"key": "{call["function"]["arguments"]["key"]}"}}') for call in calls)
    return Parsed(reply.get("reasoning_content"), reply["content"] or None, named, tuple(call["id"] for call in calls))


def play_all(name: str, serve: Callable[[ScriptedEngine], RunningService]) -> dict[str, Played | str]:
    """What became of each shape under the template, or why it has no such conversation."""
    family = NativeFamily(name)
    prepared = {shape: _prepare(family, turns) for shape, turns in SHAPES.items()}
    played: dict[str, Played | str] = {shape: each for shape, each in prepared.items() if isinstance(each, str)}
    conversations = {shape: each for shape, each in prepared.items() if isinstance(each, Conversation)}
    stops = {stop for conversation in conversations.values() for stop in conversation.stops}
    for shape, conversation in [*conversations.items()]:
        if any(
            stop in text[: -len(end)]
            for stop in stops
            for text, end in zip(conversation.texts, conversation.stops, strict=True)
        ):
            played[shape] = "what ends a turn stands within one"
            del conversations[shape]
    if conversations:
        with ScriptedEngine(family.engine([*stops])) as engine, serve(engine) as service:
            for shape, conversation in conversations.items():
                played[shape] = play(conversation, engine.reset(), service.session())
    return {shape: played[shape] for shape in SHAPES}


def _prepare(family: NativeFamily, turns: Sequence[Turn]) -> Conversation | str:
    conversation = Conversation(family, turns)
    try:
        if turns[0].reasoning and not family.has_thoughts():
            return "shows no thinking"
        conversation.prepare()
    except Untold as untold:
        return str(untold)
    return conversation


def play(conversation: Conversation, engine: ScriptedEngine, session: Session) -> Played:
    """The harness's side of the conversation; its rows are checked. Raises AssertionError where a row is not what was sampled."""
    family, messages = engine.family, conversation.native[:1]
    sampled = [canonical(family, *pair) for pair in zip(conversation.prompts, conversation.texts, strict=True)]
    for turn, ids in zip(conversation.turns, sampled, strict=True):
        engine.say(Say(token_ids=ids))
        reply = session.answer(messages, tools=TOOLS)
        messages.append(reply)
        calls = reply.get("tool_calls") or ()
        assert len(calls) == len(turn.keys)
        messages += [{"role": "tool", "tool_call_id": call["id"], "content": f"{at + 7}"} for at, call in enumerate(calls)]
        messages += [] if calls else [{"role": "user", "content": turn.user or "more"}]
    calls = session.calls
    reasons = tuple(call["branch_reason"] for call in calls if call["branch_reason"])
    return Played(check_rows(engine, session), reasons, tuple(find_differing(conversation, engine)))


def canonical(family: Family, prompt: str, text: str) -> list[int]:
    """The ids that the tokenizer has for the text after the prompt."""
    before, whole = family.encode(prompt), family.encode(prompt + text)
    return whole[len(before) :] if whole[: len(before)] == before else family.encode(text)


def find_differing(conversation: Conversation, engine: ScriptedEngine) -> list[int]:
    """The calls whose prompt is not the template's rendering, where that begins with the prompt and the reply before it."""
    differing, before = [], list[int]()
    for number, (prompt, generation) in enumerate(zip(conversation.prompts, engine.generations, strict=True)):
        own = engine.family.encode(prompt)
        if own[: len(before)] == before and generation.prompt_ids != own:
            differing.append(number)
        before = generation.prompt_ids + generation.sampled[0]
    return differing


def check_rows(engine: ScriptedEngine, session: Session) -> int:
    """How many rows there are. Before each trained token stand exactly the ids that the engine was given and had sampled; each token is
    trained once, with the logprob that the engine gave it."""
    rows, accounting = session.trajectories()
    assert accounting["quarantined"] == []
    given = {tuple(one.prompt_ids): one.sampled[0] for one in engine.generations}
    trained = 0
    for row in rows:
        ids, mask = row["token_ids"], [*row["loss_mask"], 0]
        starts = [at for at in range(len(ids)) if mask[at] and not mask[at - 1]]
        for start in starts:
            end = mask.index(0, start)
            assert given[tuple(ids[:start])] == ids[start:end]
            assert row["logprobs"][start:end] == logprobs_of(ids[:start], ids[start:end])
            trained += end - start
    assert trained == accounting["sampled_tokens"] == sum(map(len, given.values()))
    return len(rows)
