"""Rounds of kill -9 under load: what is killed when follows from a seed, and so does what harnesses, trainer and engine do.

    CrashRounds(7, shared, folder).run(rounds=25)

A round lets the load run for a moment, kills one process or several, starts them again and waits for as many whole replies as there are
harnesses. After the last round the harnesses end what they are at, the rest is delivered, and everything is held against the oracle. The
log has the seed and every kill.
"""

from __future__ import annotations

import itertools
import json
import random
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from contract.client import ServiceClient
from tests.support.crashes.agents import Agents, Told
from tests.support.crashes.oracle import Checked, check_all
from tests.support.crashes.setups import Setup
from tests.support.crashes.trainer import Journal, acknowledge, note_lease
from tests.support.crashes.victims import TrainerVictim, Victim
from tests.support.engine.scripted_engine import Generation, Reply, Say, ScriptedEngine
from tests.support.engine.template_families import Family
from tests.support.service.verbatim_process import ADMIN, TRAINER, wait_until
from trainer_client.client import TrainerClient
from trainer_client.errors import LeaseLost
from trainer_client.lease import Lease

WORDS = ["fish", "fishing", "ing", "sing", "ring", "the", "cat", "dog", "value", "answer", "step", "Paris", "weather"]
PROGRESS_SECONDS = 60.0
DRAIN_SECONDS = 90.0
LEFT_SECONDS = 50.0
"""By then the services have closed what nobody asks for any more: they look every ten seconds for what is thirty seconds old."""


@dataclass(frozen=True)
class Survived:
    """One run. `kills` by process; `refusals` are the errors that harnesses were told and asked again after."""

    seed: int
    rounds: int
    seconds: float
    kills: Counter[str]
    refusals: Counter[str]
    walked_away: int
    asked_again: int
    checked: Checked


class CrashRounds:
    """`forgetful`: in the first half of the rounds some sessions are closed by harnesses that do not wait for the answer."""

    def __init__(
        self,
        seed: int,
        setup: Callable[[Path, str], Setup],
        folder: Path,
        *,
        agents: int = 8,
        forgetful: bool = False,
        note: Callable[[str], None] = lambda line: None,
    ) -> None:
        self.log: list[str] = []
        self._note = note
        self._dice = random.Random(seed)
        self._seed = seed
        self._began = time.monotonic()
        self._kills: Counter[str] = Counter()
        self._journal = folder / "journal.jsonl"
        self._journal.touch()
        self._engine = ScriptedEngine("qwen3", updatable=False, max_model_len=65536)
        self._engine.script = _speaker(self._engine.family, seed)
        self._engine.start()
        self._setup = setup(folder, self._engine.url)
        urls = [service.url for service in self._setup.services]
        self._trainer = TrainerVictim(self._journal, urls, self._dice)
        self._agents = Agents(urls, seed, agents)
        self._replies_per_round = agents
        self._forgetful = forgetful
        self._remembered_at = 0.0
        victims: list[Victim] = [*self._setup.stores, *self._setup.services, self._trainer]
        self._victims = {victim.name: victim for victim in victims}

    def run(self, rounds: int) -> Survived:
        """Raises AssertionError, with the log as its note, when a promise is broken."""
        self._say(f"seed {self._seed}, {rounds} rounds")
        try:
            with ExitStack() as stack:
                stack.callback(self._engine.stop)
                for victim in self._victims.values():
                    stack.callback(victim.kill)
                self._start(list(self._victims))
                checked = self._survive(rounds)
        except BaseException as error:
            error.add_note("\n".join(self.log))
            raise
        told, seconds = self._agents.told, time.monotonic() - self._began
        return Survived(self._seed, rounds, seconds, self._kills, told.refusals, told.walked_away, told.asked_again, checked)

    def _survive(self, rounds: int) -> Checked:
        self._agents.start()
        if self._forgetful:
            self._agents.forgetting.set()
        try:
            for number in range(rounds):
                if number == rounds // 2:
                    self._agents.forgetting.clear()
                    self._remembered_at = time.monotonic()
                self._round(number)
        finally:
            self._agents.stop()
        self._say("the harnesses are done")
        self._trainer.kill()
        self._drain()
        self._say("all is delivered")
        services = self._setup.services
        checked = check_all(self._told, self._engine.generations, services[0].url, self._setup.redis_url, self._journal)
        for service in services:
            assert "Traceback" not in service.written, f"{service.name} wrote:\n{service.written[-6000:]}"
        self._say(f"checked: {checked}")
        return checked

    def _round(self, number: int) -> None:
        time.sleep(self._dice.uniform(0.05, 0.6))
        names = self._dice.choices(*zip(*self._setup.targets.items(), strict=True))[0]
        self._say(f"round {number}: kill {', '.join(names)}; {self._told_so_far()}")
        for name in names:
            self._victims[name].kill()
            self._kills[name] += 1
        time.sleep(self._dice.uniform(0.0, 0.4))
        self._start(names)
        # What is received is kept by the engine for nobody here.
        self._engine.received.clear()
        replies = len(self._told.replies) + self._replies_per_round
        wait_until(lambda: len(self._told.replies) >= replies or self._told.unexpected != [], PROGRESS_SECONDS, "replies go on")
        assert self._told.unexpected == [], self._told.unexpected[:10]

    def _start(self, names: Sequence[str]) -> None:
        for name in names:
            self._victims[name].start()
        # A service that is killed again before it serves is a crash as well: mostly nobody waits.
        waits = self._dice.random() < 0.3
        if waits or not self._told.replies:
            for name in names:
                self._victims[name].await_ready()

    def _drain(self) -> None:
        """Deliver and acknowledge what is left; find out which acknowledgements happened though their answer was lost."""
        for service in self._setup.services:
            service.await_ready()
        if self._forgetful:
            self._await_the_forgotten()
        write = Journal(self._journal)
        self._confirm(write)
        with TrainerClient(self._setup.services[0].url, TRAINER, consumer="the last") as client:
            deadline = time.monotonic() + DRAIN_SECONDS
            while self._undelivered() and time.monotonic() < deadline:
                batch = client.lease(max_groups=8, wait_seconds=0.5, lease_seconds=30.0)
                if batch is not None:
                    note_lease(batch, write)
                    acknowledge(batch, write)
        write.close()

    def _await_the_forgotten(self) -> None:
        """Those whose close was begun are closed by now; the others are as open as they were, and nobody misses their groups."""
        time.sleep(max(0.0, self._remembered_at + LEFT_SECONDS - time.monotonic()))
        for session_id in self._told.forgotten:
            path = f"{self._setup.services[0].url}/sessions/{session_id}"
            session = httpx.get(path, headers={"Authorization": f"Bearer {ADMIN}"}, timeout=10).json()
            assert session["status"] in ("open", "completed"), f"session {session_id} is left {session['status']}"
            if session["status"] == "completed":
                self._told.groups[session["group_id"]] = [session_id]

    def _confirm(self, write: Journal) -> None:
        steps = self._steps()
        settled = {step["lease"] for step in steps if step["what"] in ("acknowledged", "lost")}
        doubtful = {step["lease"] for step in steps if step["what"] == "acknowledging"} - settled
        client = ServiceClient(self._setup.services[0].url, TRAINER, timeout_seconds=10, retry_seconds=20)
        for lease_id in sorted(doubtful):
            try:
                Lease(client, lease_id, 0.0, lease_seconds=1.0, keep=False).ack()
            except LeaseLost:
                continue
            write("confirmed", lease=lease_id)
        client.close()

    def _undelivered(self) -> set[str]:
        steps = self._steps()
        confirmed = {step["lease"] for step in steps if step["what"] == "confirmed"}
        done = [
            step
            for step in steps
            if step["what"] == "acknowledged" or (step["what"] == "acknowledging" and step["lease"] in confirmed)
        ]
        return set(self._told.groups) - {group_id for step in done for group_id in step["groups"]}

    def _steps(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self._journal.read_text().splitlines()]

    @property
    def _told(self) -> Told:
        return self._agents.told

    def _told_so_far(self) -> str:
        return f"{len(self._told.replies)} replies so far, {len(self._told.groups)} groups"

    def _say(self, line: str) -> None:
        entry = f"{time.monotonic() - self._began:7.2f} s  {line}"
        self.log.append(entry)
        self._note(entry)


def _speaker(family: Family, seed: int) -> Callable[[Generation, int], Reply]:
    """Replies of random words, each with a number of its own, most with a tool call; in splits that the tokenizer would not make."""
    numbers = itertools.count()
    fish, ing, fishing = (family.id_of(word) for word in ("fish", "ing", "fishing"))

    def speak(generation: Generation, index: int) -> Reply:
        number = next(numbers)
        dice = random.Random(f"{seed} {number}")
        text = " ".join([*dice.choices(WORDS, k=dice.randint(1, 12)), str(number)])
        calls = [("lookup", {"key": dice.choice(WORDS), "depth": number})] if dice.random() < 0.6 else []
        ids = [
            part
            for token in family.encode(family.speak(text, calls=calls))
            for part in ((fish, ing) if token == fishing else (token,))
        ]
        return Say(token_ids=ids, seconds_per_token=dice.choice((0.0, 0.002, 0.01)))

    return speak
