"""What an agent that `make harnesses` does not install sent in a plain run: recorded once from the agent itself (`record.py`), sent
again by the tests.

    {"agent": "kilo 7.7.7", "path": "/chat/completions", "headers": {…}, "body": {…},
     "turns": [{"kept": 0, "messages": […]}, {"kept": 2, "messages": […]}, …]}

`headers` and `body` are what all requests have in common. The messages of a turn are the first `kept` of the turn before, and then
those that it names. Ids of tool calls are `<call 0>` and so on, in the order in which the service minted them; the folder that the
agent worked in is WORKDIR. Long descriptions of tools and system prompts are cut: they end in `…`.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Self

import httpx

FOLDER = Path(__file__).with_name("recorded")
WORKDIR = Path("/repo")
CALL_ID = re.compile(r"call_[0-9a-f]+_\d+")
"""A tool call's id as the service mints it."""

Json = dict[str, Any]


@dataclass(frozen=True)
class RecordedRun:
    agent: str
    """Its name and version."""
    path: str
    """Below the base URL."""
    headers: Json
    body: Json
    turns: list[Json]

    @classmethod
    def of(cls, harness: str) -> Self:
        return cls(**json.loads((FOLDER / f"{harness}.json").read_text(encoding="utf-8")))

    def on_another_day(self) -> Self:
        """The same requests with other dates."""
        turns = re.sub(r"2026-\d\d-\d\dT\d\d", "2027-01-01T01", json.dumps(self.turns))
        return replace(self, turns=json.loads(turns))

    def send(self, base_url: str, api_key: str) -> None:
        """All requests to a session, one when the reply to the other has ended, with the ids that the replies had."""
        ids: list[str] = []
        messages: list[Json] = []
        with httpx.Client(headers={**self.headers, "authorization": f"Bearer {api_key}"}, timeout=60, verify=False) as client:
            for turn in self.turns:
                messages = [*messages[: turn["kept"]], *turn["messages"]]
                text = json.dumps({**self.body, "messages": messages})
                for number, minted in enumerate(ids):
                    text = text.replace(f"<call {number}>", minted)
                reply = client.post(base_url + self.path, content=text)
                assert reply.status_code == 200, reply.text
                ids += [found for found in dict.fromkeys(CALL_ID.findall(reply.text)) if found not in ids]
