"""`verbatim run`: one harness, one session, from its creation to its close."""

from __future__ import annotations

import json
import math
import os
import shlex
import shutil
import signal
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Self
from urllib.parse import quote

import httpx
import typer

from cli.control import TIMEOUT_SECONDS, Control, HeldBack
from cli.refusal import Refusal
from cli.sessions import accounting_line, rows_by_role
from cli.stop_signals import StopSignals
from reconstruct.roles import rule_as_wire
from rollout.harnesses.catalogue import load
from rollout.harnesses.definition import Harness
from rollout.harnesses.prepared import Endpoint, HarnessError

if TYPE_CHECKING:
    from rich.status import Status

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
    from rollout.harnesses.prepared import MissingExecutable
    from rollout.harnesses.process import find_executable

    command = (definition.argv or words)[0]
    try:
        if "{" not in command:
            find_executable(command, env)
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
    from rollout.harnesses.prepared import CannotStart, HarnessError, MissingExecutable, build_environment
    from rollout.harnesses.process import HarnessProcess

    workdir = Path.cwd()
    try:
        model = model or (session.first_model() if definition.takes_model else "")
        prompt = words if definition.takes_command else " ".join(words)
        prepared = definition.prepare(session.endpoint, model, prompt, home, workdir=workdir)
        prepared.write(home)
        tell(f"session {session.session_id}: {definition.name}" + (f" with model {model}" if model else ""))
        env = build_environment(os.environ, prepared, home, passed)
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
    from rollout.harnesses.process import read_version

    there = read_version(definition.version_argv, env, workdir) if definition.version_argv else None
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
    from rollout.attempts import Failure

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


# A session that a subcommand opens for a harness, from its creation to its close.


CLOSE_TRIES = 3
MOST_ERROR_CHARACTERS = 4000


def chosen(name_or_path: str) -> Harness:
    """The definition of that name or path. Raises `Refusal` (exit code 2)."""
    try:
        return load(name_or_path)
    except HarnessError as error:
        raise Refusal(str(error), exit_code=2) from error


def open_session(control: Control, definition: Harness, **fields: Any) -> OpenedSession:
    """A new session for that harness; fields that are None are left out. Raises `Refusal`."""
    fields |= {"metadata": {"harness": definition.name}}
    # A service of an earlier build does not know them.
    fields |= {"role_rules": [rule_as_wire(rule) for rule in definition.roles]} if definition.roles else {}
    created = control.post("/sessions", {name: value for name, value in fields.items() if value is not None})
    return OpenedSession(control, created["session_id"], Endpoint(created["base_urls"], created["api_key"]))


def open_when_let_in(
    control: Control, stop: StopSignals, show: Callable[[str], object], definition: Harness, **fields: Any
) -> OpenedSession:
    """As `open_session`, and asks again while the service holds new sessions back, which it lets `show` say.

    Raises `Refusal`, when it is stopped while it waits with the signal's exit code."""
    while True:
        try:
            return open_session(control, definition, **fields)
        except HeldBack as held:
            show(f"waiting until the service takes a new session: {held}")
            if stop.wait(held.retry_after_seconds):
                raise Refusal("stopped while it waited: no session was opened", exit_code=128 + (stop.number or 0)) from None


@dataclass(frozen=True, slots=True)
class OpenedSession:
    control: Control
    session_id: str
    endpoint: Endpoint

    @property
    def path(self) -> str:
        return f"/sessions/{quote(self.session_id, safe='')}"

    def first_model(self) -> str:
        """The first model that the session's own model list names. Raises `Refusal`."""
        url = self.endpoint.base_urls["openai"] + "/models"
        try:
            answer = httpx.get(url, headers={"Authorization": f"Bearer {self.endpoint.api_key}"}, timeout=TIMEOUT_SECONDS)
            return str(answer.raise_for_status().json()["data"][0]["id"])
        except IndexError as error:
            raise Refusal(f"{url} names no model: no engine is up; wait for one or pass --model") from error
        except (httpx.HTTPError, httpx.InvalidURL, ValueError, KeyError, TypeError) as error:
            raise Refusal(f"{url} did not name the models ({error}): pass --model") from error

    def close(self, status: str, *, error: str | None = None, reward: float | None = None) -> None:
        """Freeze the session; tried again when the service cannot take it at once. Raises `Refusal`."""
        body: dict[str, Any] = {"status": status}
        if error is not None:
            body["error"] = error[:MOST_ERROR_CHARACTERS]
        if reward is not None:
            body["reward"] = reward
        for left in reversed(range(CLOSE_TRIES)):
            try:
                self.control.post(f"{self.path}/close", body)
                return
            except Refusal as refusal:
                if not left:
                    raise Refusal(f"session {self.session_id} could not be closed as {status}: {refusal}") from refusal
                time.sleep(1)

    def has_calls(self) -> bool:
        """Whether a call of it was recorded. Raises `Refusal`."""
        return bool(self.control.get(self.path)["calls"])

    def summary(self, status: str | None = None) -> list[str]:
        """A line with how it ended (`status`, or else as what it was closed), its calls, and where its sampled tokens went, and one with
        its rows by role. Raises `Refusal`."""
        session = self.control.get(self.path)
        exported = self.control.get(f"{self.path}/trajectories")
        rows = exported["trajectories"]
        line = accounting_line(len(rows), exported["accounting"])
        told = [f"session {self.session_id} {status or session['status']}: {session['calls']} calls, {line}"]
        return [*told, f"rows: {rows_by_role(rows)}"] if rows else told


# `verbatim env`: a session for a harness that is started by other means: its variables, files and command.


FORMATS = ("shell", "json")


def env(
    harness: HarnessName,
    session_id: SessionId = None,
    model: ModelName = None,
    home: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR",
            help="Write the harness's files into DIR, which is made if needed, and print it as HOME. Not your own home: files "
            "of the same name are replaced. Left out: the files are printed.",
        ),
    ] = None,
    output: Annotated[
        str, typer.Option("--format", metavar="shell|json", help="shell: lines for eval. json: one object with everything.")
    ] = "shell",
    url: ServiceUrl = None,
) -> None:
    """Open a session and print what a harness needs to use it.

    For harnesses that verbatim run cannot start: in a container, on another machine, from a script of yours. The session stays
    open until it is closed with POST /sessions/ID/close. VERBATIM_ADMIN_TOKEN must be the token of the service.

    \b
    eval "$(verbatim env --harness shell)"; python my_agent.py
    (eval "$(verbatim env --harness codex --home /tmp/h1)"; codex exec "Fix the failing test")
    verbatim env --harness qwen-code --format json > session.json

    What is printed holds the session's key. The text {prompt} stands where the task goes.
    """
    from cli.control import Control

    definition = chosen(harness)
    if output not in FORMATS:
        raise Refusal(f"--format cannot be {output!r}: choose one of {', '.join(FORMATS)}", exit_code=2)
    if home is not None and home.resolve() == Path.home().resolve():
        raise Refusal(f"--home {home} is your own home, whose files would be replaced: name another folder", exit_code=2)
    session = open_session(Control(url), definition, session_id=session_id)
    try:
        given = describe(definition, session, model, home)
    except BaseException as error:
        # Ctrl-C too: nobody was told of the session, so nobody else would close it.
        session.close("failed", error=f"verbatim env broke off: {error}")
        raise
    typer.echo(json.dumps(given, indent=2) if output == "json" else as_shell(given, session))


def describe(definition: Harness, session: OpenedSession, model: str | None, home: Path | None) -> dict[str, Any]:
    """Everything the harness needs, as one JSON object; its files are written when there is a `home`."""
    from rollout.harnesses.prepared import HarnessError, home_variables

    model = model or (session.first_model() if definition.takes_model else "")
    place = home.absolute() if home is not None else Path.home()
    prepared = definition.prepare(session.endpoint, model, ["{prompt}"], place)
    if home is not None:
        try:
            prepared.write(place)
        except (OSError, HarnessError) as error:
            raise Refusal(f"--home {home}: {error}") from error
    return {
        "harness": definition.name,
        "session_id": session.session_id,
        "api_key": session.endpoint.api_key,
        "base_urls": dict(session.endpoint.base_urls),
        "model": model,
        "home": None if home is None else str(place),
        "env": {**({} if home is None else home_variables(place)), **prepared.env},
        "unset": list(prepared.unset),
        "files": dict(prepared.files),
        "argv": list(prepared.argv),
    }


def as_shell(given: dict[str, Any], session: OpenedSession) -> str:
    """Lines for a POSIX shell. Each command ends with a semicolon and comments come last, so that an eval without quotes, which
    joins the lines, still does the same."""
    lines = [f"unset {name};" for name in given["unset"]]
    lines += [f"export {name}={shlex.quote(value)};" for name, value in given["env"].items()]
    lines += [f"# session {given['session_id']} of {given['harness']}; close it afterwards with"]
    lines += [f'#   curl -X POST {session.control.url}{session.path}/close -H "Authorization: Bearer $VERBATIM_ADMIN_TOKEN" \\']
    lines += ['#     -d \'{"status": "completed", "reward": 1.0}\'']
    lines += [f"# start it with: {shlex.join(given['argv'])}"]
    if given["files"] and given["home"] is None:
        lines += ["# these files must be in its home; --home DIR writes them:"]
        for path, text in given["files"].items():
            lines += [f"# ~/{path}", *(f"#   {line}".rstrip() for line in text.splitlines())]
    return "\n".join(lines)


# Options of the commands that open a session for a harness.


HarnessName = Annotated[
    str,
    typer.Option(
        metavar="NAME",
        help="aider, claude-code, cline, codex, continue, copilot-cli, droid, gemini-cli, gptme, kilo, kimi-cli, llm, mini-swe-agent, "
        "mistral-vibe, openai-agents, opencode, openhands, pi, qwen-code, shell, a definition in the folder VERBATIM_HARNESSES, or the "
        "path of a .toml file.",
    ),
]
SessionId = Annotated[str | None, typer.Option(metavar="ID", help="The new session's id. Default: a random one.")]
ModelName = Annotated[
    str | None, typer.Option(metavar="M", help="The model to ask for. Default: the first one the service names.")
]
ServiceUrl = Annotated[
    str | None, typer.Option(metavar="URL", help="Where the service is. Default: VERBATIM_URL, or http://127.0.0.1:8700.")
]

# What a command needs beside what every command has.


def check_installed(command: str, modules: Sequence[str], extras: str) -> None:
    """Raises `Refusal` where a module is missing; it says with which extras of the package it comes."""
    if missing := [name for name in modules if find_spec(name) is None]:
        raise Refusal(f"verbatim {command} needs {', '.join(missing)}: pip install 'verbatim-rl[{extras}]'")
