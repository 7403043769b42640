"""`verbatim run`: a session for one harness that runs here, and the sessions that other commands of harnesses share."""

from __future__ import annotations

import math
import os
import shlex
import shutil
import signal
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Self
from urllib.parse import quote

import httpx
import typer

from cli.options import HARNESS, MODEL, GroupId, GroupSize, NewSessionId, Reward, RunName, ServiceUrl, TaskId
from cli.refusal import CommandError
from cli.sessions import accounting_line, count_roles
from cli.stop_signals import StopSignals
from reconstruct.roles import encode_rule
from rollout.harnesses.catalogue import load
from rollout.harnesses.definition import Harness, find_unserved
from rollout.harnesses.limits import Limits, explain_unknown_window, read_window
from rollout.harnesses.prepared import HarnessError, SessionAccess

if TYPE_CHECKING:
    from rich.status import Status

    from cli.control import CommandClient


TIMED_OUT = 124
NOT_EXECUTABLE = 126
NOT_FOUND = 127


def run(
    harness: Annotated[str, HARNESS],
    words: Annotated[
        list[str] | None,
        typer.Argument(metavar="-- PROMPT", help="The prompt; for the harness shell, the command and its arguments."),
    ] = None,
    model: Annotated[str | None, MODEL] = None,
    url: ServiceUrl = None,
    session_id: NewSessionId = None,
    task_id: TaskId = None,
    group_id: GroupId = None,
    group_size: GroupSize = None,
    run: RunName = None,
    reward: Reward = None,
    timeout: Annotated[
        float | None,
        typer.Option(metavar="SECONDS", min=0.001, help="Stop the harness after this time. Default: no limit."),
    ] = None,
    env: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME[=VALUE]",
            help="Pass this variable to the harness. Keys, proxies and vendors' settings are withheld unless passed. Repeatable.",
        ),
    ] = None,
    keep_home: Annotated[bool, typer.Option("--keep-home", help="Keep the harness's home and print its path.")] = False,
) -> None:
    """Run a harness in a new session, and close the session when it ends.

    The harness works in the current directory with your PATH and a temporary home that holds only its configuration.
    VERBATIM_ADMIN_TOKEN must be the token of the service.

    \b
    verbatim run --harness codex -- "Fix the failing test"
    verbatim run --harness claude-code --timeout 600 --group-id t1 --group-size 8 -- "Add a --json flag"
    verbatim run --harness shell -- python my_agent.py --steps 3

    The exit code is the harness's; 124 after a timeout, 130 after Ctrl-C (which is passed on; a second one kills), 126 or 127
    if it could not be started. The session is closed as completed, failed, timeout or cancelled to match; as failed, with a
    warning, if the harness never called the model; as completed, with a warning, if it ends with a code that its definition
    gives for finished work and the last reply did finish it. While the service accepts no new sessions because the trainers are behind, the
    command waits.
    """
    from cli.control import CommandClient
    from rollout.harnesses.process import adopt_orphans, end_orphans

    definition = load_harness(harness)
    passed, words = parse_variables(env or []), words or []
    check_words(definition, words)
    if reward is not None and not math.isfinite(reward):
        raise CommandError(f"--reward {reward} is invalid: pass a finite number", exit_code=2)
    check_executable(definition, words, {**os.environ, **definition.env, **passed})
    control = CommandClient(url)
    fields = {"session_id": session_id, "task_id": task_id, "group_id": group_id, "group_size": group_size, "run": run}
    with StopSignals() as stop:
        with WaitIndicator() as waiting:
            session = open_when_admitted(control, stop, waiting.show, definition, **fields)
        outcome = RunEnd("failed", 1, "verbatim run broke off")
        try:
            with make_home(keep_home) as home:
                adopt_orphans()
                try:
                    outcome = attempt(definition, session, words, model, home, passed, timeout, stop)
                finally:
                    # A helper that the harness detached would call a closed session, and keep the home from its removal.
                    end_orphans()
            outcome = check_calls(definition, session, outcome)
        finally:
            close(session, outcome, reward)
    report(session, outcome, reward)
    raise typer.Exit(outcome.exit_code)


@dataclass(frozen=True, slots=True)
class RunEnd:
    """How the run ended: the session's status, the command's exit code, the error, and a warning. `summary` replaces the status in the
    summary if the status says too little."""

    status: str
    exit_code: int
    error: str | None = None
    warning: str | None = None
    summary: str | None = None


def parse_variables(given: list[str]) -> dict[str, str]:
    """The variables of --env; `NAME` alone takes the value of this process. Raises `CommandError` (exit code 2)."""
    passed = {}
    for item in given:
        name, equals, value = item.partition("=")
        if not name or (not equals and name not in os.environ):
            raise CommandError(f"--env {item!r} is neither NAME=VALUE nor the name of a set variable", exit_code=2)
        passed[name] = value if equals else os.environ[name]
    return passed


def check_words(definition: Harness, words: list[str]) -> None:
    """Raises `CommandError` (exit code 2) for a missing prompt, or one that the harness does not take."""
    if definition.takes_prompt and not any(words):
        what = "command" if definition.takes_command else "prompt"
        raise CommandError(f"{definition.name} needs a {what}: put it after --", exit_code=2)
    if words and not definition.takes_prompt:
        raise CommandError(f"{definition.name} takes no prompt: its definition has no {{prompt}}", exit_code=2)


def check_executable(definition: Harness, words: list[str], env: Mapping[str, str]) -> None:
    """Raises `CommandError` (exit code 127) if the harness is not installed, before a session is opened."""
    from rollout.harnesses.prepared import MissingExecutable
    from rollout.harnesses.process import find_executable

    command = (definition.argv or words)[0]
    try:
        if "{" not in command:
            find_executable(command, env)
    except MissingExecutable as error:
        raise CommandError(explain_missing(definition, str(error)), exit_code=NOT_FOUND) from error


def explain_missing(definition: Harness, sentence: str) -> str:
    if not definition.install:
        return sentence
    return f"{definition.name} is not installed: {sentence}. Install it with\n  " + "\n  ".join(definition.install)


def attempt(
    definition: Harness,
    session: RunSession,
    words: list[str],
    model: str | None,
    home: Path,
    passed: dict[str, str],
    timeout_seconds: float | None,
    stop: StopSignals,
) -> RunEnd:
    """Run the harness to its end."""
    from rollout.harnesses.prepared import CannotStart, HarnessError, MissingExecutable, build_environment
    from rollout.harnesses.process import HarnessProcess

    workdir = Path.cwd()
    try:
        model, limits = find_model(definition, session, model)
        prompt = words if definition.takes_command else " ".join(words)
        prepared = definition.prepare(session.endpoint, model, prompt, home, workdir=workdir, limits=limits)
        prepared.write(home)
        tell(f"session {session.session_id}: {definition.name}" + (f" with model {model}" if model else ""))
        env = build_environment(os.environ, prepared, home, passed)
        if stop.number is not None:
            return make_outcome(definition.name, 0, None, stop.number)
        process = HarnessProcess(prepared.argv, env, workdir, stdin=definition.stdin, given=prepared.stdin)
    except MissingExecutable as error:
        return RunEnd("failed", NOT_FOUND, explain_missing(definition, str(error)))
    except CannotStart as error:
        return RunEnd("failed", NOT_EXECUTABLE, str(error))
    except (CommandError, HarnessError) as error:
        return RunEnd("failed", 1, str(error))
    stop.watch(process)
    ended = process.wait(timeout_seconds)
    start_line()
    outcome = make_outcome(definition.name, ended.exit_code, timeout_seconds if ended.timed_out else None, stop.number)
    return outcome if stop.number is not None else replace(outcome, warning=check_version(definition, env, workdir))


def find_model(definition: Harness, session: RunSession, name: str | None) -> tuple[str, Limits]:
    """The model to ask for, empty if the harness takes none, and the limits of its calls. A window that a harness takes and nobody knows is
    reported. Raises `CommandError` if none is named and none is listed."""
    card: Mapping[str, Any] = {}
    if name is None and definition.takes_model:
        card = session.first_model()
        name = card["id"]
    elif definition.takes_limits:
        card = session.describe_model(name or "") if name else session.first_model()
    window = read_window(card)
    if window is None and definition.takes_limits:
        tell(explain_unknown_window(definition.name, name or ""))
    return name or "", Limits(window)


def check_version(definition: Harness, env: Mapping[str, str], workdir: Path) -> str | None:
    """A warning if the harness's version is not the one its definition was tested with."""
    from rollout.harnesses.process import read_version

    there = read_version(definition.version_argv, env, workdir) if definition.version_argv else None
    if there is None or there == definition.version:
        return None
    return (
        f"{definition.name} is version {there}, but its definition was tested with {definition.version}: another version may make "
        "other side calls, so compare the rows by role"
    )


def make_outcome(name: str, exit_code: int, timed_out_after: float | None, stopped_by: int | None) -> RunEnd:
    if timed_out_after is not None:
        return RunEnd("timeout", TIMED_OUT, f"{name} was stopped after {timed_out_after:g} seconds")
    if stopped_by is not None:
        return RunEnd("cancelled", 128 + stopped_by, f"{name} was stopped by {signal.Signals(stopped_by).name}")
    if exit_code:
        return RunEnd("failed", exit_code, f"{name} ended with exit code {exit_code}")
    return RunEnd("completed", 0)


def check_calls(definition: Harness, session: RunSession, outcome: RunEnd) -> RunEnd:
    """`outcome` in view of the session's calls: a failure if the harness exited with code 0 and never called the model, because a reward
    would be meaningless; completed if it exited with another code after it had finished its work (`Harness.has_finished`)."""
    from contract.attempts import Failure

    name, code = definition.name, outcome.exit_code
    with suppress(CommandError):
        if outcome.status == "completed" and not session.has_calls():
            error = (
                f"{name} ended with exit code 0 and never called the model: check its output, and the base URL and key it read"
            )
            return replace(outcome, status="failed", error=f"{Failure.NO_CALLS}: {error}", summary=Failure.NO_CALLS)
        if outcome.status == "failed" and code in definition.finished_exit_codes and session.has_finished(definition, code):
            warning = f"{name} ended with exit code {code}, but had finished its work: its definition says how that is told"
            return replace(outcome, status="completed", error=None, warning="; ".join(filter(None, (outcome.warning, warning))))
    return outcome


@contextmanager
def make_home(keep: bool) -> Iterator[Path]:
    home = Path(tempfile.mkdtemp(prefix="verbatim-home-"))
    try:
        yield home
    finally:
        if keep:
            tell(f"the harness's home is {home}")
        else:
            shutil.rmtree(home, ignore_errors=True)
            if home.exists():
                tell(f"the harness's home {home} could not be removed: it contains something that is not writable")


def close(session: RunSession, outcome: RunEnd, reward: float | None) -> None:
    """Raises `CommandError` with the harness's exit code, or 1 if that was 0, if the session cannot be closed."""
    try:
        session.close(outcome.status, error=outcome.error, reward=reward if outcome.status == "completed" else None)
    except CommandError as refusal:
        raise CommandError(
            f"{outcome.error}; {refusal}" if outcome.error else str(refusal), exit_code=outcome.exit_code or 1
        ) from None


def report(session: RunSession, outcome: RunEnd, reward: float | None) -> None:
    """Print the outcome to stderr; stdout is the harness's."""
    if outcome.error:
        tell(f"warning: {outcome.error}" if outcome.summary else outcome.error)
    try:
        for line in session.summary(outcome.summary):
            tell(line)
    except CommandError as refusal:
        tell(f"session {session.session_id} {outcome.status}; {refusal}")
    if outcome.warning:
        tell(outcome.warning)
    name = shlex.quote(session.session_id)
    tell(f"inspect it: verbatim audit {name}, or GET {session.control.url}{session.path}/trajectories")
    if outcome.status == "completed" and reward is None:
        tell(f"no trainer gets it until it has a reward: verbatim sessions reward {name} REWARD")


class WaitIndicator:
    """What the command waits for, on stderr: a spinner on a terminal, otherwise one line."""

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


def start_line() -> None:
    """Begin a line on stderr if it goes where stdout goes: what the harness printed there may not have ended its own."""
    out, err = (os.fstat(number) for number in (1, 2))
    if os.path.samestat(out, err):
        typer.echo(err=True)


def tell(sentence: str) -> None:
    typer.echo(f"verbatim: {sentence}", err=True)


# The session of a harness


CALLS_PAGE = 200
CLOSE_TRIES = 3
MOST_ERROR_CHARACTERS = 4000


def load_harness(name_or_path: str) -> Harness:
    """The definition with this name or path. Raises `CommandError` (exit code 2)."""
    try:
        return load(name_or_path)
    except HarnessError as error:
        raise CommandError(str(error), exit_code=2) from error


def open_session(control: CommandClient, definition: Harness, **fields: Any) -> RunSession:
    """A new session for this harness; fields that are None are left out. Raises `CommandError`."""
    fields |= {"metadata": {"harness": definition.name}, "role_rules": [encode_rule(rule) for rule in definition.roles]}
    created = control.post("/sessions", {name: value for name, value in fields.items() if value is not None})
    return RunSession(control, created["session_id"], SessionAccess(created["base_urls"], created["api_key"]))


def open_when_admitted(
    control: CommandClient, stop: StopSignals, show: Callable[[str], object], definition: Harness, **fields: Any
) -> RunSession:
    """As `open_session`, but waits while the service accepts no new sessions, and reports that to `show`.

    Raises `CommandError`; with the signal's exit code if stopped while waiting."""
    from cli.control import RequestFailed
    from contract.client import hold_seconds
    from contract.errors import HeldBack

    while True:
        try:
            return open_session(control, definition, **fields)
        except RequestFailed as failed:
            if not isinstance(failed.error, HeldBack):
                raise
            show(f"waiting until the service accepts a new session: {failed}")
            if stop.wait(hold_seconds(failed.error)):
                raise CommandError("stopped while waiting: no session was opened", exit_code=128 + (stop.number or 0)) from None


@dataclass(frozen=True, slots=True)
class RunSession:
    control: CommandClient
    session_id: str
    endpoint: SessionAccess

    @property
    def path(self) -> str:
        return f"/sessions/{quote(self.session_id, safe='')}"

    def first_model(self) -> Mapping[str, Any]:
        """The first entry of the session's model list. Raises `CommandError`."""
        url = self.endpoint.base_urls["openai"] + "/models"
        try:
            first = self._get("/models")["data"][0]
            return {**first, "id": str(first["id"])}
        except IndexError as error:
            raise CommandError(f"{url} lists no model: no engine is up; wait for one or pass --model") from error
        except (httpx.HTTPError, httpx.InvalidURL, ValueError, KeyError, TypeError) as error:
            raise CommandError(f"{url} did not list the models ({error}): pass --model") from error

    def describe_model(self, name: str) -> Mapping[str, Any]:
        """The model's entry in the session's model list; empty if the service has none now: the harness will be told why."""
        try:
            return {**self._get(f"/models/{quote(name)}")}
        except (httpx.HTTPError, httpx.InvalidURL, ValueError, TypeError):
            return {}

    def _get(self, path: str) -> Any:
        from cli.control import TIMEOUT_SECONDS

        url = self.endpoint.base_urls["openai"] + path
        answer = httpx.get(url, headers={"Authorization": f"Bearer {self.endpoint.api_key}"}, timeout=TIMEOUT_SECONDS)
        return answer.raise_for_status().json()

    def close(self, status: str, *, error: str | None = None, reward: float | None = None) -> None:
        """Close the session, with retries. Raises `CommandError`."""
        body: dict[str, Any] = {"status": status}
        if error is not None:
            body["error"] = error[:MOST_ERROR_CHARACTERS]
        if reward is not None:
            body["reward"] = reward
        for left in reversed(range(CLOSE_TRIES)):
            try:
                self.control.post(f"{self.path}/close", body)
                return
            except CommandError as refusal:
                if not left:
                    raise CommandError(f"session {self.session_id} could not be closed as {status}: {refusal}") from refusal
                time.sleep(1)

    def has_calls(self) -> bool:
        """Raises `CommandError`."""
        return bool(self.control.get(self.path)["calls"])

    def has_finished(self, definition: Harness, exit_code: int) -> bool:
        """Whether the session's last call was served and ended the harness's work. Raises `CommandError`."""
        page = self.control.get(f"{self.path}/calls", limit=CALLS_PAGE)
        calls: list[dict[str, Any]] = page["calls"]
        while page["cursor"] is not None:
            page = self.control.get(f"{self.path}/calls", limit=CALLS_PAGE, cursor=page["cursor"])
            calls += page["calls"]
        unserved = find_unserved(calls, self.control.get(self.path))
        return unserved is None and definition.has_finished(exit_code, calls)

    def summary(self, status: str | None = None) -> list[str]:
        """A line with the session's status (or `status`), its calls and the accounting of its sampled tokens, and one with its rows by
        role. Raises `CommandError`."""
        session = self.control.get(self.path)
        exported = self.control.get(f"{self.path}/trajectories")
        rows = exported["trajectories"]
        line = accounting_line(len(rows), exported["accounting"])
        lines = [f"session {self.session_id} {status or session['status']}: {session['calls']} calls, {line}"]
        return [*lines, f"rows: {count_roles(rows)}"] if rows else lines
