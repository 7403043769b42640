"""Texts that cannot fit into an engine's window are refused before an engine tokenises them, which takes it many times as long."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from proxy.dialects.base import Request
from proxy.errors import ContextTooLong

TOKEN_BYTES = 256
"""The most bytes of text, blanks not counted, that one token is taken to stand for. The longest of common vocabularies have 128, so nothing
that fits is refused here; an agent's prose has three to five."""
PIECE_CHARACTERS = 2**16
"""A text is measured a piece at a time, so that threads that share the interpreter wait for one piece at most."""
_SHOWN_ROLES = ("system", "user", "tool")
"""Whose messages templates show whole; of the assistant's they may drop thinking."""


def check_length(request: Request, window: int) -> None:
    """Raise ContextTooLong for a prompt or messages that have more tokens than the window in any vocabulary."""
    if request.prompt is None:
        check_texts(find_texts(request.messages), window, "messages")
    elif isinstance(request.prompt, str):
        check_texts([request.prompt], window, "prompt")


def check_texts(texts: Iterable[str], window: int, param: str) -> None:
    """Raise ContextTooLong for texts of one prompt that have more tokens than the window in any vocabulary."""
    size = measure_texts(texts, TOKEN_BYTES * window)
    if size <= TOKEN_BYTES * window:
        return
    tokens = size // TOKEN_BYTES + 1
    raise ContextTooLong(
        f"This model's maximum context length is {window} tokens. However, your messages have at least {tokens} tokens: more than "
        f"{TOKEN_BYTES} bytes of text, blanks not counted, for each token of the window. Please reduce the length of the messages.",
        param=param,
        tokens=tokens,
        window=window,
    )


def measure_texts(texts: Iterable[str], most: int) -> int:
    """The UTF-8 bytes of the texts without blanks, which templates trim. Stops once it is more than `most`."""
    size = 0
    for text in texts:
        for start in range(0, len(text), PIECE_CHARACTERS):
            size += len("".join(text[start : start + PIECE_CHARACTERS].split()).encode("utf-8", "replace"))
            if size > most:
                return size
    return size


def find_texts(messages: Iterable[Mapping[str, Any]]) -> Iterator[str]:
    """The texts of messages that stand in the prompt whatever the template."""
    for message in messages:
        if message.get("role") in _SHOWN_ROLES:
            content = message.get("content")
            for part in content if isinstance(content, list) else [content]:
                text = part.get("text") if isinstance(part, dict) else part
                if isinstance(text, str):
                    yield text
