"""Control tokens that stand in text: what opens and closes turns for a chat template, written by a user, a tool or an agent.

An engine renders messages to one text and tokenises that, so that `<|im_end|>` within a message becomes the same id as the end of
that message: whoever writes a tool's answer can close the turn and open another one under any role. No engine that is spoken
to here renders messages with their text kept apart (vLLM 0.32: neither render nor tokenize can be told). What the model sees is
then what it is, and the ids are true; the call and the rows that hold it say so.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import msgspec

_MOST = 16
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

_encode = msgspec.json.Encoder().encode


def control_tokens(messages: Iterable[Mapping[str, Any]], tools: Sequence[Any] = ()) -> tuple[str, ...]:
    """Those that texts of the messages and tools hold, sorted, each once and `_MOST` at most. Text parts are looked at as
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
            _look("\0".join(_said(message.get(name)) for name in _FIELDS), found)
    return tuple(sorted(found)[:_MOST]) if found else ()


def _look(text: str, found: set[str]) -> None:
    if ("<" in text or "]" in text) and any(piece in text for piece in _PIECES):
        found.update(_CONTROL.findall(text))


def _said(value: Any) -> str:
    return value if isinstance(value, str) else _encode(value).decode() if value else ""


def _text(part: Any) -> str:
    text = part.get("text") if isinstance(part, Mapping) else part
    return text if isinstance(text, str) else "\n"
