"""Harnesses that meet failures at random, through the service: what they got is trained, what they did not get is an attempt.

The harness knows what it got; what the service says once the session is closed is held against that. Run with `-s` to see what each
seed met.
"""

from __future__ import annotations

import random
import re
import threading
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest
from openai import APIError

from tests.support.engine.scripted_engine import Fail, Say, ScriptedEngine
from tests.support.engine.scripted_fixtures import Running, both_paths
from tests.support.service.redis_server import running_redis
from tests.support.service.running_service import RunningService, Session, hanging_up, wait_until
from tests.support.sessions.conversations import turn

SEEDS = range(4)
REQUESTS = 14
WORDS = ("hello", "world", "fish", "sing", "Paris")


@pytest.fixture(scope="module")
def running() -> Iterator[Running]:
    """On a store of its own: the pushes here are nobody else's."""
    with running_redis() as redis, both_paths(redis) as running:
        yield running


@dataclass
class Harness:
    """Asks in several conversations at random. `got` has the ids of the calls whose replies it read to their end, `cut` those among them
    that a limit or a push cut."""

    session: Session
    service: RunningService
    engine: ScriptedEngine
    weights: Path
    random: random.Random
    got: list[str] = field(default_factory=list)
    cut: set[str] = field(default_factory=set)
    met: Counter[str] = field(default_factory=Counter)

    def run(self) -> None:
        talks = [[turn("user", "find it")] for _ in range(2)]
        while self.met.total() < REQUESTS:
            talk = self.random.choice(talks)
            reply = self.ask(talk)
            # Without a reply it asks the same again, or something else in its place.
            if reply is not None:
                talk += [reply, turn("user", self.words())]
            elif self.random.random() < 0.3:
                talk[-1] = turn("user", self.words())

    def ask(self, messages: list[dict[str, Any]]) -> dict[str, Any] | None:
        """The reply; None where it did not get one. Everything but the history differs from one request to the next."""
        body = {"messages": messages, "stream": self.random.random() < 0.5, "temperature": self.random.random()}
        failures = (self.get_whole, self.get_limited, self.get_cut_by_a_push, self.break_off, self.fail_to_parse, self.hang_up)
        met = self.random.choice((self.get_whole, *failures))
        self.met[met.__name__] += 1
        return met(body)

    def words(self) -> str:
        return " ".join(self.random.choices(WORDS, k=5))

    def read(self, body: dict[str, Any]) -> dict[str, Any]:
        """The reply, read to its end."""
        answer = self.session.client.chat.completions.create(model="policy", **body)
        if not body["stream"]:
            (choice,) = answer.choices
            call_id, content, reason = answer.id, choice.message.content, choice.finish_reason
        else:
            chunks = [chunk for chunk in answer if chunk.choices]
            content = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
            call_id, reason = chunks[0].id, chunks[-1].choices[0].finish_reason
        self.got.append(call_id.removeprefix("chatcmpl-"))
        if reason == "length":
            self.cut.add(self.got[-1])
        return turn("assistant", content)

    def get_whole(self, body: dict[str, Any]) -> dict[str, Any]:
        self.engine.say(self.words())
        return self.read(body)

    def get_limited(self, body: dict[str, Any]) -> dict[str, Any]:
        self.engine.say(self.words())
        return self.read({**body, "max_tokens": self.random.randint(1, 3)})

    def get_cut_by_a_push(self, body: dict[str, Any]) -> dict[str, Any]:
        gate, made = threading.Event(), len(self.engine.generations)
        self.engine.say(Say(self.words(), gate=gate, gate_after=2))
        version = self.service.request("GET", "/weights").json()["current"]["version"] + 1
        with ThreadPoolExecutor(1) as pool:
            reply = pool.submit(self.read, body)
            try:
                self.wait_for_tokens(made, 2)
                pushed = {"version": version, "path": str(self.weights), "mode": "abort"}
                answer = self.service.request("POST", "/weights", json=pushed)
                assert answer.status_code == 200, answer.text
            finally:
                gate.set()
            return reply.result()

    def break_off(self, body: dict[str, Any]) -> None:
        """The connection to the engine breaks, or the engine says that it fails, after two tokens."""
        after: dict[str, Any] = {self.random.choice(["break_after", "error_after"]): 2}
        self.engine.say(Say(self.words(), **after))
        self.fail(body)

    def fail_to_parse(self, body: dict[str, Any]) -> None:
        """What was sampled whole cannot be parsed; on the chat path the engine fails instead."""
        on_chat = self.service.settings.engine_api == "chat"
        self.engine.say(Say(self.words(), error_after=4 if on_chat else None))
        # A step of a stream that cannot be parsed leaves the reply to be parsed when it is whole.
        self.engine.fault("/v1/chat/completions/derender", *[Fail(500, "no parser")] * 2)
        self.fail(body)

    def fail(self, body: dict[str, Any]) -> None:
        with pytest.raises((APIError, httpx.HTTPError)):
            self.read(body)
        self.engine.reset()

    def hang_up(self, body: dict[str, Any]) -> None:
        gate, made = threading.Event(), len(self.engine.generations)
        self.engine.say(Say(self.words(), gate=gate, gate_after=2))
        url = f"{self.session.base_url}/chat/completions"
        with hanging_up(url, {"model": "policy", **body}, self.session.api_key):
            self.wait_for_tokens(made, 2)
        # What is still to be parsed of it must not meet the next failure.
        wait_until(lambda: all(call["status"] != "in_flight" for call in self.session.calls), 120, "the call is recorded")
        gate.set()

    def wait_for_tokens(self, made: int, tokens: int) -> None:
        self.engine.wait_for(
            lambda: len(self.engine.generations) == made + 1 and len(self.engine.last.sampled.get(0, ())) == tokens
        )


@pytest.mark.case(55)
@pytest.mark.parametrize("seed", SEEDS)
def test_what_a_harness_got_is_trained_and_what_it_did_not_get_leaves_the_session_complete(
    running: Running, service: RunningService, tmp_path: Path, seed: int
) -> None:
    session = service.session(group_id=f"g{seed}", group_size=1)
    harness = Harness(session, service, running[0].reset(), tmp_path, random.Random(seed))
    harness.run()
    wait_until(lambda: all(call["status"] != "in_flight" for call in session.calls), 120, "every call is recorded")
    session.close(reward=1.0)
    calls = {call["call_id"]: call for call in session.calls}
    lost = calls.keys() - set(harness.got)
    print(f"\nseed {seed}: {dict(harness.met)}; {len(calls)} calls, {len(lost)} attempts")  # noqa: T201
    assert {call_id for call_id, call in calls.items() if call["delivered"]} == set(harness.got) <= calls.keys()
    rows, accounting = session.trajectories()
    reasons = {item["call_id"]: item["reason"] for item in accounting["quarantined"]}
    unknown = {call_id for call_id, reason in reasons.items() if reason == "weight_version_unknown"}
    # A chat endpoint tells its version apart from the reply: a push may have gone on meanwhile, or not be known to this process yet.
    assert unknown <= (set(harness.got) if service.settings.engine_api == "chat" else set())
    trained = {call_id for row in rows if any(row["loss_mask"]) for call_id in row["call_ids"]}
    known = set(harness.got) - unknown
    assert trained - unknown == {call_id for call_id in known if calls[call_id]["completion_ids"]}
    assert accounting["exported_tokens"] == sum(len(calls[call_id]["completion_ids"]) for call_id in known)
    assert reasons == dict.fromkeys(lost, "not_delivered") | dict.fromkeys(unknown, "weight_version_unknown")
    assert accounting["complete"] == (not unknown)
    assert {row["call_ids"][-1]: row["truncated"] for row in rows} == {
        row["call_ids"][-1]: row["call_ids"][-1] in harness.cut for row in rows
    }
    assert count_replayable(service, session) == len(harness.got)


def count_replayable(service: RunningService, session: Session) -> int:
    """How many requests a fork of the session can be given the replies of, as a refusal says."""
    answer = service.request("POST", "/sessions", json={"replay": {"session_id": session.session_id, "until": 1000}})
    assert answer.status_code == 400, answer.text
    found = re.search(r"has (\d+) recorded requests", answer.json()["error"]["message"])
    assert found is not None, answer.text
    return int(found[1])
