"""Harnesses under load while everything is killed: the openai SDK, conversations of some turns, groups of two sessions.

They do what agents do when a service goes away: ask again until they are answered, at whichever process listens. What they were
told whole is in `Told`; only an error that says "later", or a broken connection, is taken for a reason to ask again.
"""

from __future__ import annotations

import itertools
import random
import threading
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import httpx
from openai import APIConnectionError, APIError, APIStatusError, APITimeoutError, OpenAI

from tests.support.service.verbatim_process import ADMIN
from tests.support.sessions.harness_replies import Message, add_delta

GROUP_SIZE = 2
PATIENCE_SECONDS = 60.0
"""Longer than anything that is killed needs to serve again."""
CALL_SECONDS = 30.0
"""By then a call has its answer or its error, whatever was killed."""
TOOLS: list[Any] = [
    {
        "type": "function",
        "function": {
            "name": "lookup",
            "description": "Looks a key up.",
            "parameters": {"type": "object", "properties": {"key": {"type": "string"}, "depth": {"type": "integer"}}},
        },
    }
]


@dataclass(frozen=True)
class Reply:
    """One that was read to its end; `parent_id` is the call whose reply comes last in the history it answers."""

    session_id: str
    call_id: str
    parent_id: str | None
    message: Message
    streamed: bool


@dataclass
class Told:
    """What the harnesses know. `groups`: the sessions whose close as completed was confirmed, by group."""

    replies: list[Reply] = field(default_factory=list)
    sessions: list[str] = field(default_factory=list)
    groups: dict[str, list[str]] = field(default_factory=dict)
    refusals: Counter[str] = field(default_factory=Counter)
    """What was answered by an error that may pass, or not at all, by its kind."""
    forgotten: list[str] = field(default_factory=list)
    """Sessions, each the one member of its group, whose close was asked for once by someone who did not wait for the answer."""
    unexpected: list[str] = field(default_factory=list)
    """Answers that no crash excuses."""
    walked_away: int = 0
    asked_again: int = 0


class Agents:
    """Some threads, each with a conversation after the other; `stop` lets them end the group they are at. While `forgetting` is
    set, some sessions are left to whoever finishes what nobody asks for any more."""

    def __init__(self, urls: list[str], seed: int, count: int) -> None:
        self.told = Told()
        self.forgetting = threading.Event()
        self.stopping = threading.Event()
        self._threads = [
            threading.Thread(target=self._run, args=(Agent(urls, f"{seed}-{number}", self),), name="agent")
            for number in range(count)
        ]

    def start(self) -> None:
        for thread in self._threads:
            thread.start()

    def stop(self) -> None:
        self.stopping.set()
        for thread in self._threads:
            thread.join()

    def _run(self, agent: Agent) -> None:
        try:
            agent.run()
        except Exception as error:
            self.told.unexpected.append(f"agent {agent.name} gave up: {error!r}")
        finally:
            agent.close()


class Agent:
    def __init__(self, urls: list[str], name: str, agents: Agents) -> None:
        self.name = name
        self._urls = urls
        self._told = agents.told
        self._stop = agents.stopping
        self._forgetting = agents.forgetting
        self._dice = random.Random(name)
        self._count = 0
        # Nothing here speaks TLS, and reading the certificates would take a tenth of a second per client.
        self._http = httpx.Client(verify=False, timeout=CALL_SECONDS)

    def run(self) -> None:
        group = 0
        while not self._stop.is_set():
            self._play_group(f"g{self.name}-{group}")
            if self._forgetting.is_set() and self._dice.random() < 0.5:
                self._leave_behind(f"g{self.name}-{group}-forgotten")
            group += 1

    def close(self) -> None:
        self._http.close()

    def _play_group(self, group_id: str) -> None:
        """Sessions until as many as the group needs are closed as completed."""
        completed: list[str] = []
        while len(completed) < GROUP_SIZE:
            session_id, key = self._open(group_id)
            self._converse(session_id, key)
            failed = self._dice.random() < 0.1
            body = {"status": "failed"} if failed else {"status": "completed", "reward": self._dice.random()}
            self._control("POST", f"/sessions/{session_id}/close", body)
            if not failed:
                completed.append(session_id)
        self._told.groups[group_id] = completed

    def _leave_behind(self, group_id: str) -> None:
        """A session that is closed by someone who dies at that very moment."""
        session_id, key = self._open(group_id, 1)
        self._converse(session_id, key)
        self._told.forgotten.append(session_id)
        with suppress(httpx.TransportError):
            path, body = f"/sessions/{session_id}/close", {"status": "completed", "reward": 1.0}
            self._request("POST", path, body, timeout=self._dice.choice((0.002, 0.01, 0.05)))

    def _open(self, group_id: str, size: int = GROUP_SIZE) -> tuple[str, str]:
        """A new session and its key. One whose creation was not answered is left alone: its key is lost."""

        def create() -> httpx.Response:
            self._count += 1
            fields = {"session_id": f"s{self.name}-{self._count}", "group_id": group_id, "group_size": size}
            return self._request("POST", "/sessions", fields)

        answer = self._until_answered(create)
        self._told.sessions.append(answer["session_id"])
        return answer["session_id"], answer["api_key"]

    def _converse(self, session_id: str, key: str) -> None:
        messages: list[Message] = [
            {"role": "system", "content": "You look keys up until you know the answer."},
            {"role": "user", "content": f"Find {session_id}."},
        ]
        parent_id = None
        for turn in range(self._dice.randint(2, 5)):
            reply = self._ask(session_id, key, messages, parent_id)
            parent_id = reply.call_id
            messages.append(reply.message)
            for call in reply.message.get("tool_calls") or ():
                messages.append({"role": "tool", "tool_call_id": call["id"], "content": f"value {turn}"})
            if not reply.message.get("tool_calls"):
                messages.append({"role": "user", "content": f"And then, in step {turn}?"})
            time.sleep(self._dice.uniform(0, 0.1))

    def _ask(self, session_id: str, key: str, messages: list[Message], parent_id: str | None) -> Reply:
        """The reply to this history, asked for until there is one."""
        deadline = time.monotonic() + PATIENCE_SECONDS
        for attempt in itertools.count():
            stream = self._dice.random() < 0.6
            found = self._attempt(session_id, key, messages, stream, attempt)
            if found is not None:
                reply = Reply(session_id, found[0], parent_id, found[1], stream)
                self._told.replies.append(reply)
                return reply
            assert time.monotonic() < deadline, f"session {session_id} got no answer within {PATIENCE_SECONDS} s"
            self._told.asked_again += 1
            time.sleep(self._dice.uniform(0.02, 0.2))
        raise AssertionError

    def _attempt(
        self, session_id: str, key: str, messages: list[Message], stream: bool, attempt: int
    ) -> tuple[str, Message] | None:
        """The call id and the message, None when it did not come whole."""
        url = f"{self._dice.choice(self._urls)}/s/{session_id}/v1"
        # As SDKs mark their own retries; other harnesses ask again without a word.
        retry = {"x-stainless-retry-count": str(attempt)} if attempt and self._dice.random() < 0.7 else {}
        client = OpenAI(base_url=url, api_key=key, max_retries=0, http_client=self._http)
        walks = stream and self._dice.random() < 0.06
        try:
            answer = client.chat.completions.create(
                model="policy", messages=list(messages), tools=TOOLS, stream=stream, extra_headers=retry
            )
            return self._read(answer, walks) if stream else _whole(answer)
        except (APIError, httpx.TransportError) as error:
            self._refused(error)
            return None

    def _read(self, stream: Any, walks: bool) -> tuple[str, Message] | None:
        """The reply, if its end came; what says that it has ended was sent after it was recorded."""
        message: Message = {"role": "assistant", "content": ""}
        call_id, ended = "", False
        try:
            for number, chunk in enumerate(stream):
                call_id = chunk.id.removeprefix("chatcmpl-")
                for choice in chunk.choices:
                    add_delta(message, choice.delta.model_dump(exclude_none=True))
                    ended = ended or choice.finish_reason is not None
                if walks and number == 2:
                    self._told.walked_away += 1
                    stream.close()
                    return None
        except (APIError, httpx.TransportError):
            if not ended:
                raise
        if not ended:
            self._told.unexpected.append(f"the stream of {call_id} ended without saying so")
        return (call_id, message) if ended else None

    def _refused(self, error: Exception) -> None:
        kind = _kind(error)
        self._told.refusals[kind] += 1
        if kind.startswith("unexpected"):
            self._told.unexpected.append(f"{kind}: {error!r}")

    def _control(self, method: str, path: str, body: Any) -> Any:
        return self._until_answered(lambda: self._request(method, path, body))

    def _request(self, method: str, path: str, body: Any, timeout: float = CALL_SECONDS) -> httpx.Response:
        headers = {"Authorization": f"Bearer {ADMIN}"}
        return self._http.request(method, self._dice.choice(self._urls) + path, json=body, headers=headers, timeout=timeout)

    def _until_answered(self, ask: Callable[[], httpx.Response]) -> Any:
        """The answer's body, below 300. 503 and silence are asked again."""
        deadline = time.monotonic() + PATIENCE_SECONDS
        while time.monotonic() < deadline:
            try:
                response = ask()
            except httpx.TransportError:
                self._told.refusals["control: no answer"] += 1
            else:
                if response.status_code < 300:
                    return response.json()
                assert response.status_code == 503, f"{response.request.url}: {response.status_code} {response.text}"
                self._told.refusals["control: 503"] += 1
            time.sleep(self._dice.uniform(0.05, 0.3))
        raise AssertionError(f"the control side was not there for {PATIENCE_SECONDS} s")


def _whole(answer: Any) -> tuple[str, Message]:
    message = answer.choices[0].message.model_dump(exclude_none=True)
    return answer.id.removeprefix("chatcmpl-"), message


def _kind(error: Exception) -> str:
    if isinstance(error, (APITimeoutError, httpx.TimeoutException)):
        return "unexpected: no answer in time"
    if isinstance(error, (APIConnectionError, httpx.TransportError)):
        return "connection broken"
    if isinstance(error, APIStatusError):
        passing = error.status_code in (502, 503)
        return f"{error.status_code}" if passing else f"unexpected: {error.status_code}"
    return "error in the stream"
