"""`verbatim fork`: attempt a recorded session's task again from one of its calls."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any
from urllib.parse import quote

import typer

from cli.options import SAMPLES, ServiceUrl, SessionId, Wait
from cli.refusal import CommandError

if TYPE_CHECKING:
    from cli.control import CommandClient


def fork(
    session_id: SessionId,
    at: Annotated[
        str,
        typer.Option("--at", metavar="CALL", help="The pivot: a call's id, or how many recorded requests to replay before it."),
    ],
    samples: Annotated[int, SAMPLES] = 4,
    on_divergence: Annotated[
        str, typer.Option("--on-divergence", metavar="live|fail", help="Sample or refuse a request that was not recorded.")
    ] = "live",
    task_file: Annotated[
        str | None,
        typer.Option(
            "--task", metavar="FILE", help="The session's task, as it was submitted: needed if it uploads files, and has ended."
        ),
    ] = None,
    wait: Wait = False,
    url: ServiceUrl = None,
) -> None:
    """Run a session's task again from one of its calls, and print the new task's id.

    Each fork runs the same harness on the same task, in a fresh runtime. It gets the recorded replies as far as the call, from which the
    model samples. The forks are a group of their own, with the evaluator's rewards.

    \b
    verbatim fork bug-7.0.1 --at 01a209b327e1aabbccddeeff --samples 8 --wait
    verbatim fork bug-7.0.1 --at 3
    """
    from rich.console import Console

    from cli.control import CommandClient
    from cli.tasks import wait_for_end

    control = CommandClient(url)
    body = _find_task(control, session_id, task_file)
    pivot: str | int = int(at) if at.isdecimal() and len(at) < _ID_LENGTH else at
    replay = {"session_id": session_id, "until": pivot, "on_divergence": on_divergence}
    submitted = control.post("/tasks", {**body, "num_samples": samples, "fork": replay})
    typer.echo(submitted["task_id"])
    if wait:
        try:
            wait_for_end(control, [submitted], Console(stderr=True))
        except KeyboardInterrupt as interrupt:
            raise CommandError(
                "no longer waiting; the forks continue (verbatim tasks cancel stops them)", exit_code=130
            ) from interrupt


_ID_LENGTH = 24
"""Digits of a call's id."""
_OF_THE_GROUP = ("task_id", "num_samples", "early_stop_usable_samples", "fork")
"""Fields that are not those of the session's task."""


def _find_task(control: CommandClient, session_id: str, file: str | None) -> dict[str, Any]:
    """The body of the session's task without what is its group's. Raises `CommandError`."""
    from cli.sessions import path_of
    from cli.tasks import read_bodies

    task_id = control.get(path_of(session_id))["task_id"]
    if file is not None:
        bodies = [body for _, body in read_bodies(file)]
        fitting = [body for body in bodies if body.get("task_id") == task_id] or (bodies if len(bodies) == 1 else [])
        if not fitting:
            raise CommandError(f"{file} has no task {task_id}")
        body = fitting[0]
    elif task_id is None:
        raise CommandError(f"session {session_id} is of no task: give one with --task, or open its forks with POST /sessions")
    else:
        body = control.get(f"/tasks/{quote(task_id, safe='')}")["task"]
        if _leaves_out_uploads(body):
            raise CommandError(
                f"task {task_id} uploads files, whose contents the service shows no more: give its line with --task"
            )
    group = {name: value for name, value in (body.get("group") or {}).items() if name != "minimum"}
    return {name: value for name, value in {**body, "group": group}.items() if name not in _OF_THE_GROUP}


def _leaves_out_uploads(value: Any) -> bool:
    """Whether an upload in the body lacks its content: the service shows its size instead."""
    if isinstance(value, dict):
        upload = value.get("upload")
        if isinstance(upload, dict) and not any(upload.get(name) is not None for name in ("text", "base64", "source")):
            return True
        return any(map(_leaves_out_uploads, value.values()))
    return isinstance(value, list) and any(map(_leaves_out_uploads, value))
