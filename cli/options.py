"""Options that many commands share, and what is installed: this version, and optional packages."""

from __future__ import annotations

from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from typing import Annotated

import typer

from cli.refusal import CommandError
from reconstruct.extras import how_to_install

ServiceUrl = Annotated[
    str | None, typer.Option("--url", metavar="URL", help="The service. Default: VERBATIM_URL, or http://127.0.0.1:8700.")
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]
SessionId = Annotated[str, typer.Argument(metavar="SESSION", help="The session's id.")]
TaskId = Annotated[str | None, typer.Option("--task-id", metavar="ID", help="The task that the session attempts.")]
GroupId = Annotated[str | None, typer.Option("--group-id", metavar="ID", help="The group of attempts that a trainer compares.")]
GroupSize = Annotated[
    int | None, typer.Option("--group-size", metavar="N", min=1, help="How many sessions complete the group. Needs --group-id.")
]
RunName = Annotated[
    str | None,
    typer.Option("--run", envvar="VERBATIM_RUN", metavar="NAME", help="The training run it belongs to. Default: default."),
]
OfRun = Annotated[str | None, typer.Option("--run", metavar="NAME", help="Only the sessions of this run.")]
Where = Annotated[
    list[str] | None,
    typer.Option("--where", metavar="NAME=VALUE", help="Only those with, for instance, status=running. Repeatable."),
]
OfGroup = Annotated[str | None, typer.Option("--group", metavar="ID", help="Only the sessions of this group.")]
Limit = Annotated[int, typer.Option("--limit", metavar="N", min=1, max=1000, help="How many to show, newest first.")]
TasksFile = Annotated[str, typer.Argument(metavar="FILE", help="One task per line as JSON; - reads standard input.")]
Reward = Annotated[float | None, typer.Option("--reward", metavar="X", help="The reward to close the session with.")]
Wait = Annotated[bool, typer.Option("--wait", help="Wait until all of them have ended, then print a table.")]
Builder = Annotated[str, typer.Option("--builder", metavar="NAME", help="merged (one row per branch) or per_call.")]
LogLevel = Annotated[
    str, typer.Option("--log-level", metavar="debug|info|warning|error", help="The least severe level to log.")
]
NewSessionId = Annotated[str | None, typer.Option("--session-id", metavar="ID", help="The new session's id. Default: random.")]

HARNESS = typer.Option(
    "--harness",
    metavar="NAME",
    help="aider, claude-code, cline, codex, continue, copilot-cli, droid, gemini-cli, gptme, kilo, kimi-cli, llm, mini-swe-agent, "
    "mistral-vibe, openai-agents, opencode, openhands, pi, qwen-code, shell, a definition in the folder VERBATIM_HARNESSES, or the "
    "path of a .toml file.",
)
SAMPLES = typer.Option("--samples", metavar="N", min=1, help="Attempts per task, run in parallel.")
MODEL = typer.Option("--model", metavar="M", help="The model to request. Default: the service's choice.")
RUNTIME = typer.Option(
    "--runtime", metavar="KIND", help="Where harnesses run: local, docker, apptainer, kubernetes or your own kind."
)
"""What commands say of what they run, or of the tasks that they make or read, each with a default of its own."""

SERVICE = "Service: --url or VERBATIM_URL; token: VERBATIM_ADMIN_TOKEN, or a file of it in VERBATIM_ADMIN_TOKEN_FILE."
"""For the help of groups of commands."""


def installed_version() -> str:
    """The distribution's version; "from source" if it is not installed."""
    try:
        return version("verbatim-rl")
    except PackageNotFoundError:
        return "from source"


def check_installed(command: str, modules: Sequence[str], extras: str) -> None:
    """Raises `CommandError` that names the missing modules and the extras that install them."""
    if missing := find_missing(modules):
        raise CommandError(f"verbatim {command} needs {', '.join(missing)}: {how_to_install(extras)}")


def find_missing(modules: Sequence[str]) -> list[str]:
    """Those of `modules` that are not installed."""
    return [name for name in modules if not _is_installed(name)]


def _is_installed(module: str) -> bool:
    try:
        return find_spec(module) is not None
    except (ImportError, ValueError):
        return False
