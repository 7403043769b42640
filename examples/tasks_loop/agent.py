"""The agent as it lies in a rollout's sandbox: the standard library, three variables, and the corridor beside it. Nothing of Verbatim.

    python3 agent.py red green blue

What it tried is left in attempt.json, with the tokens that it was told of. A reply that calls no tool ends the attempt.
"""

from __future__ import annotations

import json
import os
import sys
import urllib.request
from pathlib import Path
from typing import Any

from environment import TOOLS, Corridor, call_of, tool_message

LONGEST_REPLY = 40


def attempt(doors: list[str]) -> dict[str, Any]:
    """`tried`: its keys, each with the door it was meant for."""
    corridor, tokens = Corridor(tuple(doors)), 0
    tried: list[tuple[str, int]] = []
    messages: list[Any] = [{"role": "user", "content": corridor.instruction}]
    while not corridor.done:
        answer = ask(messages)
        tokens += answer["usage"]["completion_tokens"]
        message = answer["choices"][0]["message"]
        call = message["tool_calls"][0] if message.get("tool_calls") else None
        wish = call_of(call["function"]["name"], call["function"]["arguments"]) if call else None
        if wish is None:
            break
        tried.append(wish)
        said = {name: value for name, value in message.items() if value is not None}
        messages += [said, tool_message(corridor.open(*wish), call["id"])]
    return {"tried": tried, "completion_tokens": tokens}


def ask(messages: list[Any]) -> Any:
    body = {"model": os.environ["OPENAI_MODEL"], "messages": messages, "tools": TOOLS, "max_tokens": LONGEST_REPLY}
    headers = {"Authorization": f"Bearer {os.environ['OPENAI_API_KEY']}", "Content-Type": "application/json"}
    url = os.environ["OPENAI_BASE_URL"] + "/chat/completions"
    with urllib.request.urlopen(urllib.request.Request(url, json.dumps(body).encode(), headers)) as answer:
        return json.load(answer)


if __name__ == "__main__":
    Path("attempt.json").write_text(json.dumps(attempt(sys.argv[1:])))
