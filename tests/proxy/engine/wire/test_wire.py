"""The wire to the engine breaks in mid-reply: what had been sampled and heard is recorded and not trained, the harness gets an error
soon, and the next call goes on from where the conversation was."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from openai import APIError, InternalServerError

from tests.support.engine.scripted_engine import Say, ScriptedEngine, logprobs_of
from tests.support.service.faulty_wire import FaultyWire
from tests.support.service.running_service import RunningService, Session, wait_until

SILENCE_SECONDS = 1.0
"""How long the engine may say nothing."""
SOON_SECONDS = 60.0
"""By then a harness must have its error, with room for a slow machine."""
SAMPLED_BEFORE = 6
ESTABLISHED, KEEPALIVE = "01", "02"
FAULTS: dict[str, Callable[[FaultyWire], None]] = {
    "reset": FaultyWire.reset,
    "black hole": FaultyWire.black_hole,
    "half open": FaultyWire.half_open,
}
each_fault = pytest.mark.parametrize("fault", FAULTS.values(), ids=FAULTS)


@dataclass
class Line:
    """Engine, wire and service; `gate` holds the engine back after a few tokens until it is set."""

    engine: ScriptedEngine
    wire: FaultyWire
    service: RunningService
    gate: threading.Event = field(default_factory=threading.Event)

    def say_slowly(self) -> None:
        text = "hello world in Paris the weather is sunny today"
        self.engine.say(Say(text, gate=self.gate, gate_after=SAMPLED_BEFORE))

    def await_sampled(self) -> None:
        self.engine.wait_for(lambda: bool(self.engine.generations) and self._sampled() == SAMPLED_BEFORE)

    def mend(self) -> None:
        self.wire.heal()
        self.gate.set()
        self.service.await_ready()

    def _sampled(self) -> int:
        return len(self.engine.last.sampled.get(0, ()))


@contextmanager
def line_to(redis_url: str, **settings: Any) -> Iterator[Line]:
    with (
        ScriptedEngine("qwen3") as engine,
        FaultyWire(engine.port) as wire,
        RunningService(wire.url, redis_url, **settings) as service,
    ):
        line = Line(engine, wire, service)
        # With so little patience its first visit may have been in vain.
        line.service.await_ready()
        yield line


@pytest.fixture
def line(redis_url: str, often_visited: None) -> Iterator[Line]:
    with line_to(redis_url, engine_timeout_seconds=SILENCE_SECONDS, engine_connect_seconds=SILENCE_SECONDS) as made:
        yield made


@each_fault
def test_a_stream_whose_engine_is_cut_off_keeps_what_was_heard_and_ends_in_an_error(
    line: Line, fault: Callable[[FaultyWire], None]
) -> None:
    session, first = begun(line)
    line.say_slowly()
    heard: list[str] = []
    with ThreadPoolExecutor(1) as pool:
        reading = pool.submit(read, session, first, heard)
        line.await_sampled()
        wait_until(lambda: "hello" in "".join(heard), 120, "the harness hears the beginning")
        fault(line.wire)
        broken = reading.result(timeout=SOON_SECONDS)
    assert isinstance(broken, APIError)
    made = line.engine.last
    line.mend()
    (_, cut) = session.calls
    ids = cut["completion_ids"]
    assert cut["status"] == "failed"
    assert 0 < len(ids) <= SAMPLED_BEFORE and ids == made.sampled[0][: len(ids)]
    assert cut["prompt_ids"] == made.prompt_ids and cut["logprobs"] == logprobs_of(made.prompt_ids, ids)
    assert line.engine.family.decode(ids).startswith("".join(heard))
    assert [(item["call_id"], item["tokens"]) for item in session.trajectories()[1]["quarantined"]] == [
        (cut["call_id"], len(ids))
    ]
    assert_goes_on(line, session, first)


@pytest.mark.parametrize("fault", [FaultyWire.reset, FaultyWire.half_open], ids=["reset", "half open"])
def test_a_whole_reply_that_never_comes_is_an_error_that_may_be_tried_again(
    line: Line, fault: Callable[[FaultyWire], None]
) -> None:
    session, first = begun(line)
    line.say_slowly()
    with ThreadPoolExecutor(1) as pool:
        asking = pool.submit(session.ask, first)
        line.await_sampled()
        fault(line.wire)
        with pytest.raises(InternalServerError) as refused:
            asking.result(timeout=SOON_SECONDS)
    assert refused.value.status_code in (502, 503)
    line.mend()
    assert_goes_on(line, session, first)


@pytest.mark.parametrize("size", [0, 40, 400, 900])
def test_a_stream_that_is_reset_after_so_many_bytes_keeps_whole_tokens_only(line: Line, size: int) -> None:
    """An event cut in two is no token: what is recorded is a beginning of what was sampled, each with its logprob."""
    session = line.service.session()
    line.say_slowly()
    line.gate.set()
    heard: list[str] = []
    with ThreadPoolExecutor(1) as pool:
        reading = pool.submit(read, session, [{"role": "user", "content": "q"}], heard)
        line.engine.wait_for(lambda: bool(line.engine.generations))
        line.wire.reset_after(size)
        broken = reading.result(timeout=SOON_SECONDS)
    line.mend()
    made = line.engine.last
    for call in session.calls:
        ids = call["completion_ids"]
        assert ids == made.sampled[0][: len(ids)]
        assert call["logprobs"] == logprobs_of(made.prompt_ids, ids)
        assert (call["status"] == "finished") == (broken is None)
    session.trajectories()
    assert answered(line, session, [{"role": "user", "content": "q"}], "hello") == "hello"


def test_a_machine_that_vanished_is_noticed_though_the_engine_may_be_silent_for_an_hour(redis_url: str) -> None:
    """Connections to the engine ask for signs of life: the kernel's timer for that runs while the engine thinks."""
    with line_to(redis_url, engine_timeout_seconds=3600.0) as line, ThreadPoolExecutor(1) as pool:
        session = line.service.session()
        line.say_slowly()
        asking = pool.submit(session.ask, "q")
        line.await_sampled()
        # The one for what the engine's kernel has still to acknowledge comes first.
        wait_until(lambda: set(timers_towards(line.wire.port)) == {KEEPALIVE}, 120, "every connection is watched")
        line.gate.set()
        asking.result(timeout=SOON_SECONDS)


def timers_towards(port: int) -> list[str]:
    """The timer of every open connection to the port, from /proc/net/tcp: 02 is keepalive."""
    rows = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
    return [row[5].partition(":")[0] for row in rows if row[2].endswith(f":{port:04X}") and row[3] == ESTABLISHED]


def begun(line: Line) -> tuple[Session, list[Any]]:
    """A session with one turn behind it, and its next question. A machine that stands still for longer than the engine may be silent
    costs the turn: then it is another session's."""
    deadline = time.monotonic() + SOON_SECONDS
    messages: list[Any] = [{"role": "user", "content": "q"}]
    while True:
        session = line.service.session()
        line.engine.reset().say("hello")
        try:
            return session, [*messages, session.answer(messages), {"role": "user", "content": "again"}]
        except InternalServerError:
            assert time.monotonic() < deadline


def read(session: Session, messages: list[Any], heard: list[str]) -> Exception | None:
    """What ended the stream before its end, if anything did."""
    began = time.monotonic()
    try:
        for chunk in session.ask(messages, stream=True):
            heard.extend(choice.delta.content or "" for choice in chunk.choices)
            assert time.monotonic() - began < SOON_SECONDS
    except APIError as broken:
        ended: Exception = broken
        return ended
    return None


def answered(line: Line, session: Session, messages: list[Any], says: str) -> str:
    """The reply's text. An idle connection that hangs shows it only when it is used: that call is refused, and asked again."""
    deadline = time.monotonic() + SOON_SECONDS
    while True:
        line.engine.reset().say(says)
        try:
            return str(session.answer(messages)["content"])
        except InternalServerError as error:
            assert error.status_code in (502, 503) and time.monotonic() < deadline


def assert_goes_on(line: Line, session: Session, messages: list[Any]) -> None:
    """The question is asked again, and its call continues the first turn as if nothing had been."""
    assert answered(line, session, messages, "hello world") == "hello world"
    calls = session.calls
    first, last = calls[0], calls[-1]
    assert last["parent_id"] == first["call_id"] and last["status"] == "finished"
    before = first["prompt_ids"] + first["completion_ids"]
    assert last["prompt_ids"][: len(before)] == before
    rows, _ = session.trajectories()
    assert [row["call_ids"] for row in rows] == [[first["call_id"], last["call_id"]]]
