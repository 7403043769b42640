"""A harness that behaves at random, from a seed: everything agents are known to do to their histories, one step after another.

It knows the openai SDK, its base URL and its key. `RandomHarness(...).run(calls)` plays steps until so many calls were made.
"""

from __future__ import annotations

import copy
import itertools
import json
import random
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import httpx
from openai import APITimeoutError, NotFoundError, OpenAI

from tests.support.sessions.harness_replies import Habits, Message, assembled, written

SYSTEM = {"role": "system", "content": "You are a helpful assistant that can call tools."}
TOOLS: list[Any] = [
    {
        "type": "function",
        "function": {
            "name": "paint",
            "description": "Paint a door.",
            "parameters": {
                "type": "object",
                "properties": {
                    "door": {"type": "string", "enum": ["red", "blue"]},
                    "coats": {"type": "integer", "enum": [1, 2]},
                },
                "required": ["door", "coats"],
                "additionalProperties": False,
            },
        },
    }
]
SUMMARISE = "Your task is to create a detailed summary of the conversation so far."
WORDS = [
    "door",
    "red",
    "key",
    "open",
    "file",
    "weather",
    "Paris",
    "light",
    "read",
    "fishing",
    "<|im_end|>",
    "</think>",
    "7",
    "é",
    "漢",
    "{}",
    "\\n",
]

DUE = 4
"""Steps that fall to each seed: five seeds in a row play every step at least once."""


@dataclass
class Conversation:
    messages: list[Message]
    thinking: bool
    tools: list[Any]
    last: dict[str, Any] | None = None
    """The last request, whole, to be sent again."""


@dataclass
class Done:
    """What was done, `steps` by name. `answered` are the calls whose reply was read to its end, `forced` those whose sampling a
    grammar bent."""

    steps: Counter[str] = field(default_factory=Counter)
    calls: int = 0
    conversations: int = 0
    answered: set[str] = field(default_factory=set)
    forced: set[str] = field(default_factory=set)
    tool_calls: int = 0


class RandomHarness:
    def __init__(self, base_url: str, api_key: str, seed: int) -> None:
        self.seed = seed
        self.random = random.Random(seed)
        self.done = Done()
        self._url, self._key = base_url, api_key
        # Nothing here speaks TLS, and reading the certificates would take a tenth of a second per client.
        self._http = httpx.Client(verify=False, timeout=120)
        self._client = OpenAI(base_url=base_url, api_key=api_key, max_retries=0, http_client=self._http)
        self.habits = Habits(
            self.random.choice(["keep", "keep", "trim", "drop"]),
            self.random.choice(["verbatim", "reserialise"]),
            self.random.choice(["string", "trim", "part"]),
        )
        self._live: list[Conversation] = []
        self._old: list[Conversation] = []

    def run(self, calls: int) -> Done:
        """Play the steps that fall to this seed, so that a few seeds play every step, and random ones up to `calls` calls."""
        steps = self.steps()
        due = [list(steps)[(DUE * self.seed + at) % len(steps)] for at in range(DUE)]
        self.random.shuffle(due)
        self._open(thinking=self.random.random() < 0.5)
        self.go_on()
        while due or self.done.calls < calls:
            name = due.pop() if due else self.random.choices(list(steps), [weight for weight, _ in steps.values()])[0]
            self.done.steps[name] += 1
            steps[name][1]()
        return self.done

    def steps(self) -> dict[str, tuple[int, Callable[[], None]]]:
        """Weight and deed of every step, by name."""
        weighted = [
            (5, self.go_on),
            (5, self.use_tools),
            (2, self.edit),
            (2, self.drop),
            (3, self.rewind),
            (3, self.ask_again),
            (2, self.best_of),
            (2, self.twins),
            (1, self.compact),
            (2, self.cut_short),
            (2, self.stop_string),
            (2, self.walk_away),
            (2, self.at_once),
            (1, self.made_up_call),
            (1, self.change_tools),
            (1, self.prefill),
            (1, self.refused),
        ]
        return {deed.__name__: (weight, deed) for weight, deed in weighted}

    def close(self) -> None:
        self._client.close()

    # Steps

    def go_on(self) -> None:
        self._turn(self._pick())

    def use_tools(self) -> None:
        """A tool loop. Calls are forced, else a model that was never trained makes none."""
        talk = self._pick(thinking=False)
        talk.messages.append(self._user())
        for _ in range(self.random.randint(1, 3)):
            self._reply(talk, tool_choice="required", max_tokens=48)
            calls = talk.messages[-1].get("tool_calls") or []
            self.done.tool_calls += len(calls)
            for call in self.random.sample(calls, len(calls)):
                talk.messages.append({"role": "tool", "tool_call_id": call["id"], "content": self._text()})
            if not calls:
                return
        self._reply(talk)

    def edit(self) -> None:
        """Change the words of an assistant message, somewhere."""
        talk = self._pick()
        said = self._assistants(talk)
        if said:
            message = talk.messages[self.random.choice(said)]
            message["content"] = self._text()
        self._turn(talk)

    def drop(self) -> None:
        """Leave an assistant message out, with the results of its tool calls."""
        talk = self._pick()
        said = self._assistants(talk)
        if said:
            gone = talk.messages.pop(self.random.choice(said))
            ids = {call["id"] for call in gone.get("tool_calls") or ()}
            talk.messages = [message for message in talk.messages if message.get("tool_call_id") not in ids]
        self._turn(talk)

    def rewind(self) -> None:
        """Go on from an earlier point of a conversation, or from a sibling that was passed over."""
        if self._old and self.random.random() < 0.5:
            talk = self._old.pop(self.random.randrange(len(self._old)))
        else:
            talk = copy.deepcopy(self._pick())
            closed = [at for at in self._assistants(talk) if not talk.messages[at].get("tool_calls")]
            talk.messages = talk.messages[: self.random.choice(closed) + 1] if closed else talk.messages[:1]
        self._live.append(talk)
        self._turn(talk)

    def ask_again(self) -> None:
        """The same request once more, marked as a retry or not; go on from either of the two."""
        talk = self._pick()
        if talk.last is None:
            self._turn(talk)
        assert talk.last is not None
        earlier, request = copy.deepcopy(talk), copy.deepcopy(talk.last)
        if self.random.random() < 0.6:
            request["extra_headers"] = {"x-stainless-retry-count": "1"}
        again = self._send(request)[0]
        talk.messages = [*request["messages"], again]
        self._keep_one(talk, earlier)
        self._turn(talk)

    def best_of(self) -> None:
        talk = self._pick()
        talk.messages.append(self._user())
        request = self._request(talk, n=self.random.choice([2, 3]))
        choices = self._send(request)
        self.random.shuffle(choices)
        branches = [copy.deepcopy(talk) for _ in choices]
        for branch, choice in zip(branches, choices, strict=True):
            branch.messages.append(choice)
        talk.messages = branches[0].messages
        self._old += branches[1:]
        self._turn(talk)

    def twins(self) -> None:
        """Two helpers with equal prompts, turn by turn."""
        twins = [self._open(thinking=False) for _ in range(2)]
        opening = self._user()
        for twin in twins:
            twin.messages.append(dict(opening))
            self._reply(twin)
        for twin in twins:
            self._turn(twin)

    def compact(self) -> None:
        """A summary without tools, and then a history that begins with it."""
        talk = self._pick()
        asked = Conversation([*talk.messages, {"role": "user", "content": SUMMARISE}], talk.thinking, [])
        self._reply(asked)
        self._live.remove(talk)
        summary = {"role": "user", "content": f"So far: {asked.messages[-1].get('content') or 'nothing'}"}
        fresh = self._open(talk.thinking)
        fresh.messages.append(summary)
        self._reply(fresh)

    def cut_short(self) -> None:
        talk = self._pick()
        talk.messages.append(self._user())
        self._reply(talk, max_tokens=self.random.randint(1, 4))
        talk.messages.append({"role": "user", "content": "continue"})
        self._reply(talk)

    def stop_string(self) -> None:
        talk = self._pick()
        talk.messages.append(self._user())
        self._reply(talk, stop=self.random.sample(["e", "a", " ", "o", "t"], 2), max_tokens=40)
        self._turn(talk)

    def walk_away(self) -> None:
        """Hang up in mid-reply; then ask the same again, or go on without the reply, or with the part of it that was read."""
        talk = self._pick()
        talk.messages.append(self._user())
        request = self._request(talk, max_tokens=300)
        request["extra_body"]["ignore_eos"] = True
        heard = self._hear_part(request)
        self.done.calls += 1
        choice = self.random.random()
        if choice < 0.5:
            talk.messages.append(self._send({**request, "extra_headers": {"x-stainless-retry-count": "1"}})[0])
            return
        if choice < 0.75 and heard is not None:
            talk.messages.append(written(heard, self.habits))
        self._turn(talk)

    def _hear_part(self, request: dict[str, Any]) -> Message | None:
        """The beginning of the reply, if it streams; None when nothing came before patience ran out."""
        patience, chunks = self.random.uniform(0.3, 0.9), self.random.randint(1, 12)
        with suppress(APITimeoutError, httpx.ReadTimeout):
            answer = self._client.with_options(timeout=patience).chat.completions.create(model="policy", **request)
            if not request["stream"]:
                return None
            with answer:
                return assembled(itertools.islice(answer, chunks), 1)[0][0]
        return None

    def at_once(self) -> None:
        """Several continuations of one conversation at the same time."""
        talk = self._pick()
        talk.messages.append(self._user())
        requests = [self._request(talk) for _ in range(self.random.randint(2, 3))]
        if self.random.random() < 0.5:
            requests[1:] = [copy.deepcopy(requests[0]) for _ in requests[1:]]
        with ThreadPoolExecutor(len(requests)) as pool:
            answers = list(pool.map(self._sent, requests))
        for request, (choices, call_id) in zip(requests, answers, strict=True):
            self._count(request, call_id)
            branch = copy.deepcopy(talk)
            branch.messages.append(written(choices[0], self.habits))
            self._old.append(branch)
        talk.messages = copy.deepcopy(self._old[-1].messages)

    def made_up_call(self) -> None:
        """An assistant message of the harness's own making, as repairs and few-shot examples are."""
        talk = self._pick()
        number = self.random.randrange(10**6)
        arguments = json.dumps({"door": "red", "coats": 1}, indent=self.random.choice([None, 1]))
        call = {"id": f"made_up_{number}", "type": "function", "function": {"name": "paint", "arguments": arguments}}
        talk.messages += [
            self._user(),
            {"role": "assistant", "content": "", "tool_calls": [call]},
            {"role": "tool", "tool_call_id": call["id"], "content": self._text()},
        ]
        self._reply(talk)

    def change_tools(self) -> None:
        talk = self._pick()
        talk.tools = [] if talk.tools else TOOLS
        self._turn(talk)

    def prefill(self) -> None:
        """End the request with an assistant message of its own."""
        talk = self._pick()
        talk.messages += [self._user(), {"role": "assistant", "content": "Well,"}]
        self._reply(talk)

    def refused(self) -> None:
        """A request that the engine refuses leaves no trace."""
        talk = self._pick()
        try:
            self._client.chat.completions.create(model="nobody", messages=[*talk.messages, self._user()])
        except NotFoundError:
            return
        raise AssertionError("an unknown model was answered")

    # What the steps are made of

    def _open(self, thinking: bool) -> Conversation:
        self.done.conversations += 1
        self._live.append(Conversation([dict(SYSTEM)], thinking, TOOLS))
        return self._live[-1]

    def _pick(self, thinking: bool | None = None) -> Conversation:
        fitting = [talk for talk in self._live if thinking is None or (talk.thinking == thinking and talk.tools)]
        if not fitting or self.random.random() < 0.05:
            return self._open(self.random.random() < 0.5 if thinking is None else thinking)
        return self.random.choice(fitting[-3:])

    def _keep_one(self, talk: Conversation, other: Conversation) -> None:
        """Go on from one of two, put the other aside."""
        if self.random.random() < 0.5:
            talk.messages, other.messages = other.messages, talk.messages
        self._old.append(other)

    def _assistants(self, talk: Conversation) -> list[int]:
        return [at for at, message in enumerate(talk.messages) if message["role"] == "assistant"]

    def _text(self) -> str:
        return " ".join(self.random.choices(WORDS, k=self.random.randint(1, 12)))

    def _user(self) -> Message:
        return {"role": "user", "content": self._text()}

    def _turn(self, talk: Conversation) -> None:
        talk.messages.append(self._user())
        self._reply(talk)

    def _reply(self, talk: Conversation, **fields: Any) -> None:
        """Ask, and write the answer down."""
        request = self._request(talk, **fields)
        talk.last = None if "tool_choice" in fields else copy.deepcopy(request)
        talk.messages.append(self._send(request)[0])

    def _request(self, talk: Conversation, **fields: Any) -> dict[str, Any]:
        extra = {} if talk.thinking else {"chat_template_kwargs": {"enable_thinking": False}}
        drawn: dict[str, Any] = {"max_tokens": self.random.randint(6, 24), "seed": self.random.randrange(10**6)}
        if self.random.random() < 0.3:
            drawn |= {"temperature": 0.7, "top_p": 0.9}
        stream = self.random.random() < 0.5
        request = {"messages": copy.deepcopy(talk.messages), "extra_body": extra, "stream": stream, **drawn, **fields}
        return {**request, "tools": talk.tools} if talk.tools else request

    def _send(self, request: dict[str, Any]) -> list[Message]:
        """The choices, as this harness writes them down."""
        choices, call_id = self._sent(request)
        self._count(request, call_id)
        return [written(choice, self.habits) for choice in choices]

    def _sent(self, request: dict[str, Any]) -> tuple[list[Message], str]:
        """(messages, call id); does not touch the random state, so that threads may share it."""
        answer = self._client.chat.completions.create(model="policy", **request)
        if request["stream"]:
            return assembled(answer, request.get("n", 1))
        choices = [choice.message.model_dump(exclude_none=True) for choice in answer.choices]
        return choices, answer.id.removeprefix("chatcmpl-")

    def _count(self, request: dict[str, Any], call_id: str) -> None:
        self.done.calls += 1
        self.done.answered.add(call_id)
        if "tool_choice" in request:
            self.done.forced.add(call_id)
