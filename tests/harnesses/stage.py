"""A stage: the scripted engine, the real service over a real Redis, and one agent at a time that plays on it."""

from __future__ import annotations

import dataclasses
import logging
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, Self

from reconstruct.roles import encode_rule
from rollout.harnesses.catalogue import load
from rollout.harnesses.limits import Limits
from tests.harnesses.agent_run import Cli, Ended, run
from tests.harnesses.breaking_wire import BreakingWire
from tests.harnesses.outside import Outside
from tests.harnesses.player import Act, Player
from tests.harnesses.recorded_run import WORKDIR, RecordedRun
from tests.harnesses.scratch import TASK, make_repository
from tests.support.engine.scripted_engine import Generation, ScriptedEngine
from tests.support.engine.template_families import Family
from tests.support.service.running_service import RunningService, Session, wait_until

Record = dict[str, Any]


@dataclass(frozen=True)
class Played:
    """What is known after one run: of the agent, of the engine, and of the service's records."""

    cli: Cli
    session_id: str
    ended: Ended
    workdir: Path
    player: Player
    generations: list[Generation]
    calls: list[Record]
    rows: list[Record]
    accounting: Record
    outside: list[str]
    unknown: list[str]
    """What the service logged of endpoints that it does not have."""
    broke: bool = False

    @property
    def main_calls(self) -> list[Record]:
        return [call for call in self.calls if call["role"] == "main"]

    @property
    def main_rows(self) -> list[Record]:
        return [row for row in self.rows if row["role"] == "main"]

    @property
    def side_roles(self) -> list[str]:
        return [call["role"] for call in self.calls if call["role"] != "main"]

    @property
    def branches(self) -> dict[int, str]:
        """Turn -> reason, of the main calls that do not go on from another one as they should."""
        return {turn: call["branch_reason"] for turn, call in enumerate(self.main_calls) if call["branch_reason"]}

    def text_of(self, name: str) -> str:
        return (self.workdir / name).read_text(encoding="utf-8")


class Heard(logging.Handler):
    """Used in a `with` block; `said` is what the service logs of requests that it refuses and that `pattern` finds."""

    def __init__(self, pattern: str) -> None:
        super().__init__(logging.WARNING)
        self.said: list[str] = []
        self._pattern = re.compile(pattern)
        self._log = logging.getLogger("proxy.call.door")

    def __enter__(self) -> Self:
        self._log.addHandler(self)
        return self

    def __exit__(self, *_: object) -> None:
        self._log.removeHandler(self)

    def emit(self, record: logging.LogRecord) -> None:
        if self._pattern.search(record.getMessage()):
            self.said.append(record.getMessage())


NO_ENDPOINT = r"\A40[45] "


class Stage:
    """One engine and one service for many runs, each in a folder of its own below `folder`."""

    def __init__(self, engine: ScriptedEngine, service: RunningService, folder: Path) -> None:
        self._engine = engine
        self._service = service
        self._folder = folder

    @property
    def family(self) -> Family:
        return self._engine.family

    def workdir(self, cli: Cli, name: str) -> Path:
        """Where `play` puts the repository of that name: some agents' tools want whole paths."""
        return self._folder / f"{cli.harness}-{cli.dialect}-{name}" / "work"

    def play(
        self,
        cli: Cli,
        acts: Sequence[Act],
        name: str,
        *,
        helper: Sequence[Act] = (),
        prompt: str = TASK,
        at_home: Callable[[Path], object] = lambda home: None,
        prepare: Callable[[Path], object] = lambda workdir: None,
        break_at: bytes = b"",
        budget: Mapping[str, int] = MappingProxyType({}),
        replay: Mapping[str, Any] | None = None,
        echo_policy: str | None = None,
        timeout_seconds: float = 240.0,
    ) -> Played:
        """One run of the agent while the engine samples `acts`, and `helper` for what does not speak of the task. `prepare` is done
        to the repository first, `at_home` to the agent's home; its connection breaks where an answer first says `break_at`.
        `budget`, `replay` and `echo_policy` are the session's."""
        workdir = make_repository(self.workdir(cli, name))
        prepare(workdir)
        player = Player(self.family, acts, cli.side, task=prompt, helper=helper)
        self._engine.reset().script = player
        roles = [encode_rule(rule) for rule in load(cli.harness).roles]
        session = self._service.session(role_rules=roles, replay=replay, echo_policy=echo_policy, **budget)
        address = session.base_url.removesuffix("/v1")
        with ExitStack() as stack:
            outside, unknown = stack.enter_context(Outside()), stack.enter_context(Heard(NO_ENDPOINT))
            wire = stack.enter_context(BreakingWire(self._service.url, break_at)) if break_at else None
            if wire is not None:
                address = address.replace(self._service.url, wire.url)
            ended = run(
                *(cli, address, session.api_key, prompt, workdir, outside.variables),
                limits=Limits(self._engine.max_model_len),
                at_home=at_home,
                timeout_seconds=timeout_seconds,
            )
        return self._played(session, cli, ended, workdir, player, outside.asked, unknown.said, wire is not None and wire.broke)

    def fork(self, origin: Played, acts: Sequence[Act], name: str) -> Played:
        """The run of that name once more, in a fresh folder of the same path: its calls are replayed but for the last main one, for which
        the engine samples `acts`. A request that was not recorded is refused, or also sampled where the agent's requests differ in some
        runs."""
        pivot = origin.main_calls[-1]["call_id"]
        on_divergence = "live" if origin.cli.fork_policy is None else "fail"
        replay = {"session_id": origin.session_id, "until": pivot, "on_divergence": on_divergence}
        folder = origin.workdir.parent
        aside = folder.rename(folder.with_name(f"{folder.name}-origin"))
        try:
            played = self.play(origin.cli, acts, name, replay=replay, echo_policy=origin.cli.fork_policy)
        finally:
            forked = folder.rename(folder.with_name(f"{folder.name}-fork"))
            aside.rename(folder)
        return dataclasses.replace(played, workdir=forked / origin.workdir.name)

    def replay(self, cli: Cli, recorded: RecordedRun, origin: Played | None = None) -> Played:
        """The agent's recorded run, while the engine samples what it did then: there are no files, and no agent that could fail. With an
        `origin` it is a fork that replays all of that one."""
        player = Player(self.family, cli.steps(WORKDIR))
        self._engine.reset().script = player
        forked = {"session_id": origin.session_id, "on_divergence": "fail"} if origin is not None else None
        session = self._service.session(replay=forked, echo_policy=cli.fork_policy if forked else None)
        with Heard(NO_ENDPOINT) as unknown:
            recorded.send(session.base_url, session.api_key)
        return self._played(session, cli, Ended(0, "", "", 0.0), WORKDIR, player, [], unknown.said, False)

    def _played(self, session: Session, cli: Cli, ended: Ended, workdir: Path, player: Player, *seen: Any) -> Played:
        # An agent that gives up a call is gone before the call has ended.
        wait_until(lambda: all(call["status"] != "dangling" for call in session.calls), 60, "every call has ended")
        rows, accounting = session.trajectories()
        heard = player, list(self._engine.generations), session.calls, rows, accounting
        return Played(cli, session.session_id, ended, workdir, *heard, *seen)
