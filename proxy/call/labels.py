"""Labels that a record has from its texts: tool calls that are none, and control tokens. They are for trainers; what is trained does
not depend on them.

An engine's parser delivers a call that the model never finished as a whole one without arguments, or drops the markup that shows it. So a
tool call must be what it claims to be, a call of an offered tool with arguments that its schema accepts, and what the model opened it
must have closed.

Control tokens open and close turns for a chat template, but may be written by a user, a tool or an agent. An engine renders the messages to
one text and tokenizes it, so `<|im_end|>` inside a message becomes the same id as the end of that message: whoever writes a tool's output
can close the turn and open another under any role. No supported engine keeps message text apart when it renders (vLLM 0.32 has no option
for it in render or tokenize), only the service's own renderer does (chat_format.py). The recorded ids are what the model saw.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import msgspec

from proxy.dialects.base import Request
from proxy.dialects.fields import UNPARSED, accepts, arguments_object

_encode = msgspec.json.Encoder().encode

_MARKUP = (
    *(("<tool_call>", "</tool_call>"), ("<tool_calls>", "</tool_calls>"), ("<function=", "</function>")),
    *(
        ("<function_calls>", "</function_calls>"),
        ("<minimax:tool_call>", "</minimax:tool_call>"),
        ("<seed:tool_call>", "</seed:tool_call>"),
    ),
    *(
        ("<|tool_call|>", ""),
        ("<|tool_call>", "<tool_call|>"),
        ("[TOOL_CALLS]", ""),
        ("<|python_tag|>", ""),
        ("functools[", "]"),
        ("<|tools_prefix|>", "<|tools_suffix|>"),
        ("<longcat_tool_call>", "</longcat_tool_call>"),
    ),
    *(("<|action_start|>", "<|action_end|>"), ("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>")),
    *(("<|tool_call_begin|>", "<|tool_call_end|>"), ("<|tool_call_start|>", "<|tool_call_end|>")),
    *(("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"), ("<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>")),  # noqa: RUF001
    *(("<｜DSML｜function_calls>", "</｜DSML｜function_calls>"), ("<｜DSML｜tool_calls>", "</｜DSML｜tool_calls>")),  # noqa: RUF001
)
"""How a tool call begins and ends in the formats that vLLM 0.32 and SGLang parse (vllm/tool_parsers); "" where whole JSON ends it."""
_ARGUMENTS = re.compile(r"\{|\[\s*[\{\]]")


def has_invalid_call(request: Request, message: Mapping[str, Any], finish_reason: str, sampled: str | None = None) -> bool:
    """Whether the model meant to call a tool and its call is not one, or not whole: the engine's parser left it in the text; its tool was
    not offered; its arguments are no JSON object, or lack a required property, or have one of another type than their schema's; or
    the `sampled` text (None: not known) opens a call that it does not close. A truncated reply has none."""
    if not request.offers_calls or finish_reason not in ("stop", "tool_calls"):
        return False
    calls = message.get("tool_calls") or ()
    if not all(_is_accepted(request.schemas, call["function"]) for call in calls):
        return True
    content = message.get("content")
    if isinstance(content, str) and any(opener in content for opener, _ in _MARKUP):
        return True
    return sampled is not None and _is_unfinished(sampled, len(calls))


def _is_accepted(schemas: Mapping[str, Any], function: Mapping[str, Any]) -> bool:
    if function.get("name") not in schemas:
        return False
    given = arguments_object(function["arguments"])
    return UNPARSED not in given and accepts(schemas[function["name"]], given)


def _is_unfinished(sampled: str, calls: int) -> bool:
    """Whether the text opens more calls than it closes, or opens some of which the parser made none."""
    for opener, closer in _MARKUP:
        opened = sampled.count(opener)
        if opened and (not calls or not (opened <= sampled.count(closer) if closer else _has_arguments(sampled, opener))):
            return True
    return False


def _has_arguments(sampled: str, opener: str) -> bool:
    """Whether whole JSON follows the last opener."""
    begun = _ARGUMENTS.search(sampled, sampled.rindex(opener) + len(opener))
    if begun is None:
        return False
    try:
        json.JSONDecoder().raw_decode(sampled, begun.start())
    except ValueError:
        return False
    return True


_MOST_CONTROL_TOKENS = 16
"""Different ones that are kept of a call."""

_CONTROL = re.compile(
    r"<\|[^<>|\s]{1,64}\|>"  # ChatML, Llama 3, harmony, GLM, Phi
    "|<\uff5c[^<>\uff5c]{1,64}\uff5c>"  # DeepSeek
    r"|</?s>|<</?SYS>>|\[/?(?:INST|SYSTEM_PROMPT|AVAILABLE_TOOLS|TOOL_CALLS|TOOL_RESULTS|TOOL_CONTENT|THINK|ARGS|CALL_ID)\]"  # Mistral
    r"|<(?:bos|eos|pad|start_of_turn|end_of_turn)>|<\|(?:turn|channel|tool)>|<(?:turn|channel|tool)\|>"  # Gemma
    r"|\[gMASK\]|<sop>"  # GLM
)
_PIECES = (
    *("<|", "|>", "<\uff5c", "<s>", "</s>", "SYS>>", "_turn>", "<bos>", "<eos>", "<pad>", "<sop>"),
    *("INST]", "PROMPT]", "TOOLS]", "CALLS]", "RESULTS]", "CONTENT]", "THINK]", "ARGS]", "_ID]", "MASK]"),
)
"""A text with none of these holds none of those, which is seen many times faster."""

_FIELDS = ("tool_calls", "name", "reasoning_content", "reasoning", "tool_call_id")


def find_control_tokens(messages: Iterable[Mapping[str, Any]], tools: Sequence[Any] = ()) -> tuple[str, ...]:
    """Those that texts of the messages and tools hold, sorted, each once and `_MOST_CONTROL_TOKENS` at most. Text parts are looked at as
    templates put them together: one after the other."""
    found: set[str] = set()
    if tools:
        _look(_encode(tools).decode(), found)
    for message in messages:
        content = message.get("content")
        if isinstance(content, list):
            content = "".join(map(_text, content))
        if content and isinstance(content, str):
            _look(content, found)
        # Beside its role and content: most messages have no more.
        if len(message) > 2:
            _look("\0".join(_as_text(message.get(name)) for name in _FIELDS), found)
    return tuple(sorted(found)[:_MOST_CONTROL_TOKENS]) if found else ()


def _look(text: str, found: set[str]) -> None:
    if "<" not in text and "]" not in text:
        return
    for piece in _PIECES:
        if piece in text:
            found.update(_CONTROL.findall(text))
            return


def _as_text(value: Any) -> str:
    return value if isinstance(value, str) else _encode(value).decode() if value else ""


def _text(part: Any) -> str:
    text = part.get("text") if isinstance(part, Mapping) else part
    return text if isinstance(text, str) else "\n"
