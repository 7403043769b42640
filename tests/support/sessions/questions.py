"""One question, as a client of each dialect asks it."""

from __future__ import annotations

from typing import Any


def ask_in_each_dialect(text: str) -> dict[str, tuple[str, dict[str, Any]]]:
    """By dialect, the path after a session's own and the body."""
    user = [{"role": "user", "content": text}]
    return {
        "chat": ("/v1/chat/completions", {"model": "policy", "messages": user}),
        "completions": ("/v1/completions", {"model": "policy", "prompt": text}),
        "responses": ("/v1/responses", {"model": "policy", "input": text}),
        "messages": ("/v1/messages", {"model": "policy", "messages": user, "max_tokens": 9}),
        "gemini": ("/v1beta/models/policy:generateContent", {"contents": [{"role": "user", "parts": [{"text": text}]}]}),
    }


QUESTIONS = ask_in_each_dialect("q")
