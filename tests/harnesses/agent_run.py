"""One command-line agent as the tests know it, and one run of it: bounded, in a home of its own, cut off from the world."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

from rollout.harnesses.catalogue import load
from rollout.harnesses.limits import UNKNOWN, Limits
from rollout.harnesses.prepared import SessionAccess, build_environment, fill
from rollout.harnesses.process import find_executable
from rollout.runtimes.local import supervisor
from tests.harnesses.installed import folder_of
from tests.harnesses.player import Step, ToolCall

MODEL = "policy"
RARE = "fishing"
"""A word that is one token of the tests' tokenizers and that no agent's prompt has in it."""


@dataclass(frozen=True)
class Tools:
    """How the model calls this agent's own tools."""

    read: Callable[[Path], ToolCall]
    edit: Callable[[Path, str, str], ToolCall]
    """(path, the text there, the text instead)"""
    shell: Callable[[str], ToolCall]


@dataclass(frozen=True)
class Cli:
    """`harness` names the definition that is tested. `steps` is a plain run in a directory; step `change_at` of it edits the
    file, and says RARE.

    What is expected of a run is data too: an agent that does something new to its history fails a test here."""

    harness: str
    dialect: str
    steps: Callable[[Path], Sequence[Step]]
    change_at: int
    tools: Tools | None = None
    streams: bool = True
    survives_broken_reply: bool = True
    """Whether it goes on when a reply ends in the dialect's error event."""
    survives_hang_up: bool = True
    """Whether it goes on when its connection breaks within a reply."""
    branches: Mapping[int, str] = field(default_factory=dict)
    """Turn -> reason of the branches that its own rewriting of its history makes in a plain run."""
    malformed: Sequence[str | None] = ()
    """The reason of each call's branch when the second of four replies has malformed arguments."""
    side_roles: Sequence[str] = ()
    """Roles of the calls beside the main ones in a plain run."""
    side: Mapping[str, str] = field(default_factory=dict)
    """Pattern of a side call's prompt -> what the model says to it."""
    fork_policy: str | None = "strict"
    """The echo policy of a fork that replays its plain run: minted where a user's message or tool results hold what differs between
    two runs. None: its requests differ in some runs (docs/forks.md)."""
    variables: Mapping[str, str] = field(default_factory=dict)
    """Given to it beside what its definition says; they may hold the placeholders of base URLs."""

    @classmethod
    def using(cls, harness: str, dialect: str, tools: Tools, *, last: Step | None = None, **more: Any) -> Self:
        """One whose plain run is that of `with_tools`."""
        return cls(harness, dialect, with_tools(tools, last=last), change_at=2, tools=tools, **more)


@dataclass(frozen=True)
class Ended:
    exit_code: int | None
    """None: it did not end by itself."""
    stdout: str
    stderr: str
    seconds: float

    def __str__(self) -> str:
        return (
            f"exit code {self.exit_code} after {self.seconds:.1f} s\n{self.stdout[-4000:]}\n--- stderr\n{self.stderr[-4000:]}"
        )


def with_tools(tools: Tools, *, last: Step | None = None) -> Callable[[Path], list[Step]]:
    """Five turns: read, read, edit (step 2), run a command, and the end. `last` where an agent ends by calling a tool."""

    def steps(workdir: Path) -> list[Step]:
        return [
            Step("", "I look at the notes first.", [tools.read(workdir / "notes.txt")]),
            Step("And now the file.", "", [tools.read(workdir / "number.py")]),
            Step(f"I change it, no {RARE}.", "It says 41 and should say 42.", [tools.edit(workdir / "number.py", "41", "42")]),
            Step("", "", [tools.shell("cat number.py > shown.txt")]),
            last or Step("Done: the value is 42.", "All of it is done."),
        ]

    return steps


def run(
    cli: Cli,
    address: str,
    key: str,
    prompt: str,
    workdir: Path,
    variables: Mapping[str, str],
    *,
    limits: Limits = UNKNOWN,
    at_home: Callable[[Path], object],
    timeout_seconds: float,
) -> Ended:
    """The agent's run in `workdir` by its shipped definition, with a home beside it. `address` is the session's, without a
    dialect's suffix; `limits` are what it is told; `at_home` is done to the home before the start. Everything that the agent
    started is ended."""
    home = workdir.with_name("home")
    home.mkdir()
    endpoint = SessionAccess({"openai": f"{address}/v1", "anthropic": address, "gemini": address}, key)
    prepared = load(cli.harness).prepare(endpoint, MODEL, prompt, home, workdir=workdir, limits=limits)
    prepared.write(home)
    at_home(home)
    path = f"{folder_of(prepared.argv[0])}{os.pathsep}{os.environ['PATH']}"
    given = {name: fill(text, endpoint.base_urls) for name, text in cli.variables.items()}
    passed = {"PATH": path, "PWD": str(workdir), **variables, **given}
    env = build_environment(os.environ, prepared, home, passed)
    return _ended([*prepared.argv], env, workdir, timeout_seconds)


def _ended(argv: list[str], env: Mapping[str, str], workdir: Path, timeout_seconds: float) -> Ended:
    out, err = workdir.with_name("stdout.txt"), workdir.with_name("stderr.txt")
    begun = time.monotonic()
    with out.open("wb") as stdout, err.open("wb") as stderr, open(os.devnull, "rb") as go:
        # Under a supervisor, as in a runtime: a helper that detached itself would go on writing to the home.
        process = subprocess.Popen(
            [sys.executable, "-I", "-S", supervisor.__file__, str(go.fileno()), find_executable(argv[0], env), *argv[1:]],
            env=env,
            cwd=workdir,
            stdin=subprocess.DEVNULL,
            stdout=stdout,
            stderr=stderr,
            pass_fds=[go.fileno()],
            start_new_session=True,
        )
        try:
            exit_code: int | None = process.wait(timeout_seconds)
        except subprocess.TimeoutExpired:
            exit_code = None
        finally:
            process.send_signal(supervisor.BELL)
            process.wait()
    return Ended(exit_code, _text(out), _text(err), time.monotonic() - begun)


def _text(path: Path) -> str:
    return path.read_text(encoding="utf-8", errors="replace")
