"""`verbatim run`: one harness, one session, from its creation to its close."""

from __future__ import annotations

import math
import os
import shlex
import shutil
import signal
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Self

import typer

from cli.harness_options import HarnessName, ModelName, ServiceUrl, SessionId
from cli.refusal import Refusal
from cli.stop_signals import StopSignals

if TYPE_CHECKING:
    from rich.status import Status

    from cli.opened_session import OpenedSession
    from rollout.harnesses.definition import Harness

TIMED_OUT = 124
NOT_EXECUTABLE = 126
NOT_FOUND = 127


def run(
    harness: HarnessName,
    words: Annotated[
        list[str] | None, typer.Argument(metavar="-- PROMPT", help="The task, or for shell the command and its arguments.")
    ] = None,
    model: ModelName = None,
    url: ServiceUrl = None,
    session_id: SessionId = None,
    task_id: Annotated[str | None, typer.Option(metavar="ID", help="The task this is an attempt at.")] = None,
    group_id: Annotated[
        str | None, typer.Option(metavar="ID", help="The group of attempts that a trainer compares with each other.")
    ] = None,
    group_size: Annotated[
        int | None, typer.Option(metavar="N", min=1, help="How many sessions make the group whole. Needs --group-id.")
    ] = None,
    reward: Annotated[
        float | None, typer.Option(metavar="X", help="Close with this reward. Only when the harness ends with exit code 0.")
    ] = None,
    timeout: Annotated[
        float | None,
        typer.Option(metavar="SECONDS", min=0.001, help="Stop the harness after so long. Default: let it run."),
    ] = None,
    env: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME[=VALUE]",
            help="Give the harness this variable, which it would not get: keys, proxies and vendors' settings are withheld.",
        ),
    ] = None,
    keep_home: Annotated[bool, typer.Option("--keep-home", help="Leave the harness's home in place and say where.")] = False,
) -> None:
    """Run a harness against a new session, and close the session when it ends.

    The harness works in the current directory, with a temporary home that holds its configuration and nothing of yours. PATH is
    kept. VERBATIM_ADMIN_TOKEN must be the token of the service.

    \b
    verbatim run --harness codex -- "Fix the failing test"
    verbatim run --harness claude-code --timeout 600 --group-id t1 --group-size 8 -- "Add a --json flag"
    verbatim run --harness shell -- python my_agent.py --steps 3

    The exit code is the harness's; 124 after a timeout, 130 after Ctrl-C (which is passed on; a second one kills), 126 or 127
    when it could not be started. The session is closed as completed, failed, timeout or cancelled to match, and as failed, with a
    warning, when the harness never called the model. While the service takes no new session because the trainers are behind, the
    command waits.
    """
    from cli.control import Control
    from cli.opened_session import chosen, open_when_let_in

    definition = chosen(harness)
    passed, words = passed_variables(env or []), words or []
    check_words(definition, words)
    if reward is not None and not math.isfinite(reward):
        raise Refusal(f"--reward cannot be {reward}: a finite number is needed", exit_code=2)
    look_for(definition, words, {**os.environ, **definition.env, **passed})
    control = Control(url)
    fields = {"session_id": session_id, "task_id": task_id, "group_id": group_id, "group_size": group_size}
    with StopSignals() as stop:
        with Waiting() as waiting:
            session = open_when_let_in(control, stop, waiting.show, definition, **fields)
        outcome = Outcome("failed", 1, "verbatim run broke off")
        try:
            with temporary_home(keep_home) as home:
                outcome = attempt(definition, session, words, model, home, passed, timeout, stop)
            outcome = refuse_silence(definition.name, session, outcome)
        finally:
            close(session, outcome, reward)
    report(session, outcome, reward)
    raise typer.Exit(outcome.exit_code)


@dataclass(frozen=True, slots=True)
class Outcome:
    """How the run ended: the session's status, the command's exit code, what went wrong, and what may have."""

    status: str
    exit_code: int
    error: str | None = None
    warning: str | None = None
    summary: str | None = None
    """The word for it in the summary, where the session's status says less."""


def passed_variables(given: list[str]) -> dict[str, str]:
    """`NAME=VALUE` as it is, `NAME` with the caller's value. Raises `Refusal` (exit code 2)."""
    passed = {}
    for item in given:
        name, equals, value = item.partition("=")
        if not name or (not equals and name not in os.environ):
            raise Refusal(f"--env {item!r} is neither NAME=VALUE nor a variable that is set", exit_code=2)
        passed[name] = value if equals else os.environ[name]
    return passed


def check_words(definition: Harness, words: list[str]) -> None:
    """Raises `Refusal` (exit code 2) when there are words for a harness that takes none, or none for one that does."""
    if definition.takes_prompt and not any(words):
        what = "command" if definition.takes_command else "prompt"
        raise Refusal(f"{definition.name} needs a {what}: put it behind --", exit_code=2)
    if words and not definition.takes_prompt:
        raise Refusal(f"{definition.name} takes no prompt: its definition has no {{prompt}}", exit_code=2)


def look_for(definition: Harness, words: list[str], env: Mapping[str, str]) -> None:
    """Raises `Refusal` (exit code 127) when the harness is not there, before a session is opened for it."""
    from rollout.harnesses.errors import MissingExecutable
    from rollout.harnesses.process import executable

    command = (definition.argv or words)[0]
    try:
        if "{" not in command:
            executable(command, env)
    except MissingExecutable as error:
        raise Refusal(not_there(definition, str(error)), exit_code=NOT_FOUND) from error


def not_there(definition: Harness, sentence: str) -> str:
    if not definition.install:
        return sentence
    return f"{definition.name} is not installed: {sentence}. Install it with\n  " + "\n  ".join(definition.install)


def attempt(
    definition: Harness,
    session: OpenedSession,
    words: list[str],
    model: str | None,
    home: Path,
    passed: dict[str, str],
    timeout_seconds: float | None,
    stop: StopSignals,
) -> Outcome:
    """Start the harness and wait for its end."""
    from rollout.harnesses.errors import CannotStart, HarnessError, MissingExecutable
    from rollout.harnesses.process import HarnessProcess
    from rollout.harnesses.surroundings import surroundings

    workdir = Path.cwd()
    try:
        model = model or (session.first_model() if definition.takes_model else "")
        prompt = words if definition.takes_command else " ".join(words)
        prepared = definition.prepared(session.endpoint, model, prompt, home, workdir=workdir)
        prepared.write(home)
        tell(f"session {session.session_id}: {definition.name}" + (f" with model {model}" if model else ""))
        env = surroundings(os.environ, prepared, home, passed)
        if stop.number is not None:
            return outcome_of(definition.name, 0, None, stop.number)
        process = HarnessProcess(prepared.argv, env, workdir, stdin=definition.stdin, given=prepared.stdin)
    except MissingExecutable as error:
        return Outcome("failed", NOT_FOUND, not_there(definition, str(error)))
    except CannotStart as error:
        return Outcome("failed", NOT_EXECUTABLE, str(error))
    except (Refusal, HarnessError) as error:
        return Outcome("failed", 1, str(error))
    stop.watch(process)
    ended = process.wait(timeout_seconds)
    outcome = outcome_of(definition.name, ended.exit_code, timeout_seconds if ended.timed_out else None, stop.number)
    return outcome if stop.number is not None else replace(outcome, warning=untested(definition, env, workdir))


def untested(definition: Harness, env: Mapping[str, str], workdir: Path) -> str | None:
    """What to say where the harness is of another version than its definition was tested with."""
    from rollout.harnesses.process import version_there

    there = version_there(definition.version_argv, env, workdir) if definition.version_argv else None
    if there is None or there == definition.version:
        return None
    return (
        f"{definition.name} is version {there} here, and its definition was tested with {definition.version}: another version may "
        "make other side calls, so compare the rows by role"
    )


def outcome_of(name: str, exit_code: int, timed_out_after: float | None, stopped_by: int | None) -> Outcome:
    if timed_out_after is not None:
        return Outcome("timeout", TIMED_OUT, f"{name} was stopped after {timed_out_after:g} seconds")
    if stopped_by is not None:
        return Outcome("cancelled", 128 + stopped_by, f"{name} was stopped by {signal.Signals(stopped_by).name}")
    if exit_code:
        return Outcome("failed", exit_code, f"{name} ended with exit code {exit_code}")
    return Outcome("completed", 0)


def refuse_silence(name: str, session: OpenedSession, outcome: Outcome) -> Outcome:
    """The outcome, or that of a harness that ended well and never called the model: nothing was attempted, and a reward of it would
    stand for nothing."""
    from rollout.failures import Failure

    with suppress(Refusal):
        if outcome.status == "completed" and not session.has_calls():
            error = f"{name} ended with exit code 0 and never called the model: see what it printed, and which base URL and key it read"
            return replace(outcome, status="failed", error=f"{Failure.NO_CALLS}: {error}", summary=Failure.NO_CALLS)
    return outcome


@contextmanager
def temporary_home(keep: bool) -> Iterator[Path]:
    home = Path(tempfile.mkdtemp(prefix="verbatim-home-"))
    try:
        yield home
    finally:
        if keep:
            tell(f"the harness's home is {home}")
        else:
            shutil.rmtree(home, ignore_errors=True)
            if home.exists():
                tell(f"the harness's home {home} could not be removed: something in it is not writable")


def close(session: OpenedSession, outcome: Outcome, reward: float | None) -> None:
    """Raises `Refusal` with the harness's exit code, or 1 where that was 0, when the service does not take it."""
    try:
        session.close(outcome.status, error=outcome.error, reward=reward if outcome.status == "completed" else None)
    except Refusal as refusal:
        raise Refusal(
            f"{outcome.error}; {refusal}" if outcome.error else str(refusal), exit_code=outcome.exit_code or 1
        ) from None


def report(session: OpenedSession, outcome: Outcome, reward: float | None) -> None:
    """What became of it, on stderr: stdout is the harness's."""
    if outcome.error:
        tell(f"warning: {outcome.error}" if outcome.summary else outcome.error)
    try:
        for line in session.summary(outcome.summary):
            tell(line)
    except Refusal as refusal:
        tell(f"session {session.session_id} {outcome.status}; {refusal}")
    if outcome.warning:
        tell(outcome.warning)
    look = f"verbatim audit {shlex.quote(session.session_id)}, or GET {session.control.url}{session.path}/trajectories"
    tell(f"look at it: {look}")
    if outcome.status == "completed" and reward is None:
        tell(f"no trainer gets it before it has a reward: POST {session.control.url}{session.path}/reward")


class Waiting:
    """What is waited for, on stderr: on a terminal a line that moves and goes away, elsewhere one line in all."""

    def __init__(self) -> None:
        self._status: Status | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._status is not None:
            self._status.stop()

    def show(self, sentence: str) -> None:
        from rich.console import Console
        from rich.text import Text

        if self._status is not None:
            self._status.update(Text(sentence))
            return
        console = Console(stderr=True)
        self._status = console.status(Text(sentence))
        if console.is_terminal:
            self._status.start()
        else:
            tell(sentence)


def tell(sentence: str) -> None:
    typer.echo(f"verbatim: {sentence}", err=True)
