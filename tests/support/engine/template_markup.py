"""How the families' models write reasoning and tool calls, and how an engine reads them back."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Said:
    """What a model says in one turn; `calls` are (name, arguments)."""

    content: str
    reasoning: str
    calls: tuple[tuple[str, Any], ...]


@dataclass(frozen=True)
class Parsed:
    """What an engine reads in a sampled text; `calls` are (name, arguments as JSON text), `ids` those that the text has of them."""

    reasoning: str | None
    content: str | None
    calls: tuple[tuple[str, str], ...] = ()
    ids: tuple[str, ...] = ()


@dataclass(frozen=True)
class Markup:
    """`parse(text, tools, opened)`: `opened` when the prompt's end opened the reasoning. `call_marks` begin a tool call: nothing
    after one is certain text while a reply streams. `new_id` makes the id of a call whose text has none, as vLLM's parser does."""

    speak: Callable[[Said], str]
    parse: Callable[[str, bool, bool], Parsed]
    tokens: tuple[str, ...] = ()
    call_marks: tuple[str, ...] = ()
    opener: str = ""
    new_id: Callable[[], str] = lambda: f"chatcmpl-tool-{os.urandom(8).hex()}"

    def name_calls(self, parsed: Parsed) -> list[tuple[str, str, str]]:
        """(id, name, arguments) of each call."""
        ids = parsed.ids or tuple(self.new_id() for _ in parsed.calls)
        return [(identifier, *call) for identifier, call in zip(ids, parsed.calls, strict=True)]

    def is_open(self, prompt: str) -> bool:
        return bool(self.opener) and prompt.endswith(self.opener)

    def certain(self, text: str) -> str:
        """The beginning of a growing reply that no later token can turn into markup."""
        found = [text.index(mark) for mark in self.call_marks if mark in text]
        text = text[: min(found)] if found else text
        marks = (*self.call_marks, *self.tokens)
        longest = max((n for mark in marks for n in range(1, len(mark)) if text.endswith(mark[:n])), default=0)
        return text[: len(text) - longest]


def _dumps(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


def _thought(text: str, opened: bool, start: str = "<think>", end: str = "</think>") -> tuple[str | None, str]:
    """(reasoning, the rest) of a text that may think first."""
    if end in text:
        thought, _, rest = text.partition(end)
        return thought.removeprefix("\n").removeprefix(start) if thought.lstrip("\n").startswith(start) else thought, rest
    bare = text.lstrip("\n")
    if bare.startswith(start):
        return bare.removeprefix(start), ""
    return (text, "") if opened else (None, text)


def _whole(reasoning: str | None, rest: str) -> Parsed:
    return Parsed(reasoning or None, rest or None)


def _read_calls(reasoning: str | None, rest: str, mark: str, found: list[tuple[str, Any]]) -> Parsed:
    content = rest[: rest.index(mark)]
    return Parsed(reasoning or None, content if content.strip() else None, tuple((name, _dumps(args)) for name, args in found))


# Qwen3: <think>, and hermes tool calls.


def _qwen3_speak(said: Said) -> str:
    calls = [f'<tool_call>\n{{"name": "{name}", "arguments": {_dumps(args)}}}\n</tool_call>' for name, args in said.calls]
    thought = f"<think>\n{said.reasoning}\n</think>\n\n" if said.reasoning else ""
    return thought + "\n".join(([said.content] if said.content else []) + calls) + "<|im_end|>"


_HERMES = re.compile(r"<tool_call>(.*?)</tool_call>|<tool_call>(.*)", re.DOTALL)


def _qwen3_parse(text: str, tools: bool, opened: bool) -> Parsed:
    reasoning, rest = _thought(text, opened)
    if not tools or "<tool_call>" not in rest:
        return _whole(reasoning, rest)
    try:
        raw = [json.loads(closed or cut) for closed, cut in _HERMES.findall(rest)]
        return _read_calls(reasoning, rest, "<tool_call>", [(call["name"], call["arguments"]) for call in raw])
    except (ValueError, KeyError, TypeError):
        return _whole(reasoning, rest)


QWEN3 = Markup(
    _qwen3_speak,
    _qwen3_parse,
    tokens=("<think>", "</think>", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>"),
    call_marks=("<tool_call>",),
)


# Llama 3: the whole reply is a JSON object, or it is text.


def _llama3_speak(said: Said) -> str:
    if not said.calls:
        return said.content + "<|eot_id|>"
    ((name, args),) = said.calls
    return f'{{"name": "{name}", "parameters": {_dumps(args)}}}<|eot_id|>'


def _llama3_parse(text: str, tools: bool, opened: bool) -> Parsed:
    if tools and text.startswith("{"):
        try:
            call, _ = json.JSONDecoder().raw_decode(text)
            return Parsed(None, None, ((call["name"], _dumps(call["parameters"])),))
        except (ValueError, KeyError, TypeError):
            pass
    return _whole(None, text)


LLAMA3 = Markup(_llama3_speak, _llama3_parse, call_marks=("{",))


# GLM-4.5: <think> in every turn, calls as key and value pairs, and the next turn's opener as the stop token.


def _glm4_speak(said: Said) -> str:
    text = f"\n<think>{said.reasoning}</think>" + (f"\n{said.content}" if said.content else "")
    for name, args in said.calls:
        text += f"\n<tool_call>{name}\n"
        for key, value in args.items():
            shown = value if isinstance(value, str) else _dumps(value)
            text += f"<arg_key>{key}</arg_key>\n<arg_value>{shown}</arg_value>\n"
        text += "</tool_call>"
    return text + ("<|observation|>" if said.calls else "<|user|>")


_GLM_CALL = re.compile(r"<tool_call>(.*?)\n(.*?)</tool_call>", re.DOTALL)
_GLM_PAIR = re.compile(r"<arg_key>(.*?)</arg_key>\s*<arg_value>(.*?)</arg_value>", re.DOTALL)


def _glm4_parse(text: str, tools: bool, opened: bool) -> Parsed:
    reasoning, rest = _thought(text, opened)
    if not tools or "<tool_call>" not in rest:
        return _whole(reasoning, rest)
    found = [
        (name, {key: _json_or_text(value) for key, value in _GLM_PAIR.findall(body)}) for name, body in _GLM_CALL.findall(rest)
    ]
    return _read_calls(reasoning, rest, "<tool_call>", found) if found else _whole(reasoning, rest)


def _glm4_arguments(body: str) -> dict[str, Any]:
    return {key: _json_or_text(value) for key, value in _GLM_PAIR.findall(body)}


def _json_or_text(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return text


GLM4 = Markup(
    _glm4_speak,
    _glm4_parse,
    tokens=("<think>", "</think>", "<tool_call>", "</tool_call>", "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"),
    call_marks=("<tool_call>", "\n<tool_call>"),
)


# DeepSeek-V3.1: thinking opened by the prompt, calls between tokens of their own.


def _deepseek_speak(said: Said) -> str:
    calls = [f"<｜tool▁call▁begin｜>{name}<｜tool▁sep｜>{_dumps(args)}<｜tool▁call▁end｜>" for name, args in said.calls]
    made = f"<｜tool▁calls▁begin｜>{''.join(calls)}<｜tool▁calls▁end｜>" if calls else ""
    thought = f"{said.reasoning}</think>" if said.reasoning else ""
    return thought + said.content + made + "<｜end▁of▁sentence｜>"


_DEEPSEEK_CALL = re.compile(r"<｜tool▁call▁begin｜>(.*?)<｜tool▁sep｜>(.*?)<｜tool▁call▁end｜>", re.DOTALL)


def _deepseek_parse(text: str, tools: bool, opened: bool) -> Parsed:
    reasoning, rest = _thought(text, opened)
    found = _DEEPSEEK_CALL.findall(rest) if tools else []
    if not found:
        return _whole(reasoning, rest)
    return _read_calls(reasoning, rest, "<｜tool▁calls▁begin｜>", [(name, _json_or_text(args)) for name, args in found])


DEEPSEEK = Markup(
    _deepseek_speak,
    _deepseek_parse,
    tokens=(
        *(
            "<think>",
            "</think>",
            "<｜tool▁calls▁begin｜>",
            "<｜tool▁calls▁end｜>",
            "<｜tool▁call▁begin｜>",
            "<｜tool▁call▁end｜>",
        ),
        *("<｜tool▁sep｜>", "<｜tool▁output▁begin｜>", "<｜tool▁output▁end｜>"),
    ),
    call_marks=("<｜tool▁calls▁begin｜>",),
    opener="<think>",
)


# Harmony: channels. The prompt ends in <|start|>assistant.


def _harmony_speak(said: Said) -> str:
    thought = f"<|channel|>analysis<|message|>{said.reasoning}<|end|><|start|>assistant" if said.reasoning else ""
    if not said.calls:
        return f"{thought}<|channel|>final<|message|>{said.content}<|return|>"
    ((name, args),) = said.calls
    return f"{thought}<|channel|>commentary to=functions.{name} <|constrain|>json<|message|>{_dumps(args)}<|call|>"


_HARMONY = re.compile(
    r"<\|channel\|>([^<]*)(?:<\|constrain\|>\w+)?<\|message\|>(.*?)(?:<\|end\|>|<\|call\|>|<\|return\|>|\Z)", re.DOTALL
)


def _harmony_parse(text: str, tools: bool, opened: bool) -> Parsed:
    reasoning, content, calls = "", "", []
    for header, body in _HARMONY.findall(text):
        if "to=functions." in header:
            calls.append((header.partition("to=functions.")[2].strip(), body))
        elif header.startswith("analysis"):
            reasoning += body
        else:
            content += body
    return Parsed(reasoning or None, content or None, tuple(calls))


HARMONY = Markup(_harmony_speak, _harmony_parse, call_marks=("<|channel|>commentary",))


# Mistral: nothing before an answer, calls as one JSON list.


def _mistral_speak(said: Said) -> str:
    if not said.calls:
        return said.content + "</s>"
    calls = [f'{{"name": "{name}", "arguments": {_dumps(args)}}}' for name, args in said.calls]
    return f"[TOOL_CALLS][{', '.join(calls)}]</s>"


def _mistral_parse(text: str, tools: bool, opened: bool) -> Parsed:
    content, mark, rest = text.partition("[TOOL_CALLS]")
    if not tools or not mark:
        return _whole(None, text)
    try:
        raw, _ = json.JSONDecoder().raw_decode(rest)
        return Parsed(None, content or None, tuple((call["name"], _dumps(call["arguments"])) for call in raw))
    except (ValueError, KeyError, TypeError):
        return _whole(None, text)


MISTRAL = Markup(
    _mistral_speak,
    _mistral_parse,
    tokens=(
        *("[SYSTEM_PROMPT]", "[/SYSTEM_PROMPT]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]", "[INST]", "[/INST]"),
        *("[TOOL_CALLS]", "[TOOL_RESULTS]", "[/TOOL_RESULTS]"),
    ),
    call_marks=("[TOOL_CALLS]",),
    new_id=lambda: os.urandom(5).hex()[:9],
)


# Gemma: tool calls in fenced blocks.


def _gemma_speak(said: Said) -> str:
    calls = [f'```tool_call\n{{"name": "{name}", "arguments": {_dumps(args)}}}\n```' for name, args in said.calls]
    return "\n".join(([said.content] if said.content else []) + calls) + "<end_of_turn>"


_GEMMA_CALL = re.compile(r"```tool_call\n(.*?)\n```", re.DOTALL)


def _gemma_parse(text: str, tools: bool, opened: bool) -> Parsed:
    found = _GEMMA_CALL.findall(text) if tools else []
    try:
        calls = [(call["name"], call["arguments"]) for call in map(json.loads, found)]
    except (ValueError, KeyError, TypeError):
        calls = []
    return _read_calls(None, text, "```tool_call", calls) if calls else _whole(None, text)


GEMMA = Markup(_gemma_speak, _gemma_parse, call_marks=("```tool_call",))


# Kimi: the model writes the ids of its calls, which hold their names.


def _kimi_speak(said: Said) -> str:
    calls = [
        f"<|tool_call_begin|>functions.{name}:{at}<|tool_call_argument_begin|>{_dumps(args)}<|tool_call_end|>"
        for at, (name, args) in enumerate(said.calls)
    ]
    section = f"<|tool_calls_section_begin|>{''.join(calls)}<|tool_calls_section_end|>" if calls else ""
    return f"{said.content}{section}<|im_end|>"


_KIMI_CALL = re.compile(
    r"<\|tool_call_begin\|>(functions\.(.*?):\d+)<\|tool_call_argument_begin\|>(.*?)<\|tool_call_end\|>", re.DOTALL
)


def _kimi_parse(text: str, tools: bool, opened: bool) -> Parsed:
    content, _, section = text.partition("<|tool_calls_section_begin|>")
    found = _KIMI_CALL.findall(section) if tools else []
    if not found:
        return _whole(None, text)
    calls = tuple((name, arguments) for _, name, arguments in found)
    return Parsed(None, content or None, calls, tuple(identifier for identifier, _, _ in found))


KIMI = Markup(
    _kimi_speak,
    _kimi_parse,
    tokens=(
        *("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>", "<|tool_call_begin|>", "<|tool_call_end|>"),
        "<|tool_call_argument_begin|>",
    ),
    call_marks=("<|tool_calls_section_begin|>",),
)
