"""A family of the scripted engine for a real model's chat template: its control tokens, and a model that says what its template shows.

The templates come from a public source distribution (`make templates`); none is part of this repository. What a model samples is read off
its own template: the text between the prompt and the end of a turn, in the rendering that ends with the turn. So what is sampled is
canonical wherever the template shows a turn the way it was prompted.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import jinja2

from tests.support.engine.template_families import Family
from tests.support.engine.template_markup import Markup, Parsed
from tests.support.sessions.conversations import TOOLS

TEMPLATES = Path(__file__).parents[2] / ".cache/templates"

Message = Mapping[str, Any]

_CONTROL = re.compile(
    r"<\|[^<>|\s'{}]{1,60}\|>|<\uff5c[^<>\uff5c\s'{}]{1,60}\uff5c>|</?s>|\[/?[A-Z_]{3,}\]|<SPECIAL_\d+>|<(?:bos|eos|sep)>|<(?:begin|end)_of_[a-z_]+>"
    r"|<\|family_end\|>|<(?:start|end)_of_turn>|<\|[a-z_]+>|<[a-z_]+\|>|<seed:[a-z_]+>|\[e~\[|\]~!?b\[|\]~b\]|</?role>|</?assistant>|</?think>|</?seed:think>"
)
"""What a template writes between texts: each is one token."""

_BEGIN, _END = "<|family_begin|>", "<|family_end|>"
"""A template's `bos_token` and `eos_token`, which its file does not say."""

_THOUGHTS = (
    ("<think>", "</think>"),
    ("<seed:think>", "</seed:think>"),
    ("<|START_THINKING|>", "<|END_THINKING|>"),
    ("[THINK]", "[/THINK]"),
)


class Untold(Exception):
    """The template does not show what the conversation needs; says which."""


@dataclass(frozen=True)
class Spoken:
    """What the model samples in a turn: its text with the stop token, and the stop token."""

    text: str
    stop: str


class NativeFamily:
    """`name` is the file's name without its ending. `engine` is the family for a scripted engine, which parses as `said` tells."""

    def __init__(self, name: str) -> None:
        self.name = name
        self._source = (TEMPLATES / f"{name}.jinja").read_text(encoding="utf-8")
        self.said: dict[str, Parsed] = {}
        """What a sampled text means, without its stop token: the engine's parsers."""
        self._plain = self._family(set())
        # Some templates put their tokens together.
        self._plain = self._family({*_CONTROL.findall(self._show_all())})

    def _family(self, controls: set[str]) -> Family:
        known = {*controls, *_CONTROL.findall(self._source)} - {_BEGIN, _END, "<s>", "</s>"}
        return Family(
            self.name,
            (_BEGIN, _END, "<s>", "</s>", *sorted(known)),
            _END,
            Markup(lambda said: "", self._parse),
            bos=_BEGIN,
            file=TEMPLATES / f"{self.name}.jinja",
        )

    def _show_all(self) -> str:
        """What the template writes around an answer and what comes before it, as far as it takes them."""
        texts = [""]
        for history in ([_user("q")], [_user("q"), {"role": "assistant", "content": "a"}, _user("q")]):
            with suppress(Untold):
                texts.append(self.render(history, generate=True))
        return "".join(texts)

    def _parse(self, text: str, tools: bool, opened: bool) -> Parsed:
        # Nothing is sampled yet when a stream begins.
        return self.said[text] if text else Parsed(None, None)

    def engine(self, stops: Sequence[str]) -> Family:
        """With these stop tokens. Without a BOS where the template has none."""
        others = tuple(sorted({*stops} - {_END}))
        return replace(self._plain, other_ends=others, bos=_BEGIN if _BEGIN in self._prompt([_user("q")]) else "")

    def new_id(self, number: int, position: int) -> str:
        """The id of the conversation's call of that number and position in its turn: as its model samples it, or of a form that the
        strictest templates take."""
        if "Kimi" not in self.name:
            return f"id{number:07d}"
        return f"functions.lookup:{position if 'functions.' in self._source else number}"

    def render(self, messages: Sequence[Message], *, generate: bool = False) -> str:
        """Raises Untold if the template refuses the messages."""
        try:
            return self._plain.render_text(messages, TOOLS, add_generation_prompt=generate)
        except (jinja2.TemplateError, TypeError, ValueError) as error:
            raise Untold(f"the template refuses it: {error}") from error

    def _prompt(self, messages: Sequence[Message]) -> str:
        return self.render(messages, generate=True)

    @cached_property
    def close(self) -> str:
        """The end of an assistant's turn."""
        left, right = (self.render([_user("?"), {"role": "assistant", "content": each}]) for each in ("x", "7"))
        return left[len(left) - _shared(left[::-1], right[::-1]) :].removesuffix(self._unasked)

    def speak(self, history: Sequence[Message], reply: Message, following: Message) -> Spoken:
        """What the model samples after the history for this reply. Raises Untold."""
        prompt, shown = self._prompt(history), self.render([*history, reply])
        if not all(text in shown for text in _texts(reply)):
            raise Untold("the template does not show all of a reply")
        body = self._continue(prompt, shown, reply)
        ends = [*_CONTROL.finditer(body)]
        if ends and body.endswith(self.close) and _CONTROL.search(self.close):
            return Spoken(body[: ends[-1].end()], ends[-1].group())
        # Another kind of turn ends otherwise, or shows its end only when the conversation goes on, or ends where the next begins.
        continued = self.render([*history, reply, following], generate=True)
        shown = shown.removesuffix(self._unasked)
        found = re.match(rf"\s*({_CONTROL.pattern})", continued[len(shown) :]) if continued.startswith(shown) else None
        if ends and not body[ends[-1].end() :].strip() and (found is None or found.group(1) not in self.close):
            return Spoken(body[: ends[-1].end()], ends[-1].group())
        return Spoken(body + found.group(), found.group(1)) if found else Spoken(body + _END, _END)

    def _continue(self, prompt: str, shown: str, reply: Message) -> str:
        """What follows the prompt, also where a history shows a turn without the thoughts that its prompt opens."""
        shown = shown.removesuffix(self._unasked)
        given, ids = self._plain.encode(prompt), self._plain.encode(shown)
        if ids[: len(given)] == given:
            return shown[len(prompt) :]
        opened = next(
            (pair for pair in _THOUGHTS if pair[1] not in prompt[-40:].rpartition(pair[0])[2] and pair[0] in prompt[-40:]), None
        )
        header = self._header.partition(opened[0])[0] if opened else self._header
        rest = self._plain.decode(ids[_shared(given, ids) :])
        if header and header in shown:
            rest = min(rest, shown.rpartition(header)[2], key=len)
        if opened is None:
            return rest
        # What the history shows of the thoughts, the prompt has begun.
        return f"{reply.get('reasoning_content') or ''}{opened[1]}{rest.partition(opened[1])[2] if opened[1] in rest else rest}"

    @cached_property
    def _header(self) -> str:
        """What the template writes to have the model speak."""
        asked, history = self._prompt([_user("q")]), self.render([_user("q")])
        return asked[len(history) :] if asked.startswith(history) else ""

    @cached_property
    def _unasked(self) -> str:
        """The header of a template that writes it whether it is asked to or not."""
        history = self.render([_user("q")])
        if self._header or self._prompt([_user("q")]) != history:
            return ""
        after = self.render([_user("q"), {"role": "assistant", "content": "x"}])
        length = _shared(history[::-1], after[::-1])
        found = _CONTROL.search(after, len(after) - length)
        return after[found.start() :] if found else ""

    def has_thoughts(self) -> bool:
        """Whether the template shows what the model thinks at least while it calls tools, or its prompt opens it."""
        prompt = self._prompt([_user("q")]).rstrip()
        call = {"id": self.new_id(0, 0), "type": "function", "function": {"name": "lookup", "arguments": {"key": "alpha"}}}
        thought = {"role": "assistant", "content": "", "reasoning_content": "step by step", "tool_calls": [call]}
        opened = any(prompt.endswith(opener) for opener, _ in _THOUGHTS)
        return opened or "step by step" in self.render([_user("q"), thought])


def _shared(left: Sequence[Any], right: Sequence[Any]) -> int:
    """The length of the common beginning."""
    length = min(len(left), len(right))
    return next((at for at in range(length) if left[at] != right[at]), length)


def _texts(message: Message) -> list[str]:
    texts = [str(message.get("content") or "")]
    for call in message.get("tool_calls") or ():
        texts += [call["function"]["name"], *call["function"]["arguments"].values()]
    return texts


def _user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def find_families() -> list[str]:
    """The names of the fetched templates. Raises FileNotFoundError where there are none."""
    names = sorted(file.stem for file in TEMPLATES.glob("*.jinja"))
    if not names:
        raise FileNotFoundError(f"no templates in {TEMPLATES}: run `make templates`")
    return names
