"""`verbatim tasks`: submit tasks from a file, watch them, cancel them, look at what became of them."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any
from urllib.parse import quote

import typer

from cli.refusal import Refusal

if TYPE_CHECKING:
    from cli.control import Control, ServerEvent

app = typer.Typer(
    no_args_is_help=True,
    help="Tasks of a running service (VERBATIM_URL, VERBATIM_ADMIN_TOKEN): each is an instruction that nodes attempt as often as it "
    "says. What may stand in a task: verbatim tasks submit --help.",
)

POLL_SECONDS = 1.0
SILENCE_SECONDS = 60.0
"""Without even a keep-alive, after which a watched line counts as broken."""
AWAY_SECONDS = 60.0
"""What a service that is away in between has for coming back."""
SHOWN = 5
OVER = ("completed", "cancelled")

TaskId = Annotated[str, typer.Argument(metavar="TASK", help="The task's id.")]


@app.command("submit")
def submit(
    file: Annotated[str, typer.Argument(metavar="FILE", help="A file with one task per line as JSON; - reads standard input.")],
    wait: Annotated[bool, typer.Option("--wait", help="Come back when every task has ended, with a table of how.")] = False,
) -> None:
    """Submit tasks, and print their ids.

    A line is at least {"instruction": "Fix the failing test.", "harness": "pi"}. Further fields: task_id (submitting the same line
    again then changes nothing), num_samples, model, sampling, runtime ({"kind", "image", "cpus", "memory_mb", "network"}), prepare
    (a list of {"upload": {"path", "text" or "base64" or "source"}} and {"exec": "make deps"}), environment, evaluator ({"kind",
    "options"}), budgets ({"agent_seconds", "prepare_seconds", "evaluation_seconds", "total_seconds", "max_calls",
    "max_completion_tokens", "max_total_tokens"}), priority (0 to 100), labels, early_stop_usable_samples, max_attempts, group
    ({"policy", "minimum", "zero_variance", "max_quarantined_share"}), echo_policy, callback_url, metadata.

    Lines that the service refuses are named with the reason, and the others are submitted all the same.
    """
    from rich.console import Console

    from cli.control import Control

    bodies = bodies_of(file)
    control, screen = Control(), Console(stderr=True)
    try:
        with control.kept_open():
            told, refusals = _submitted(control, bodies, screen)
            if wait and told:
                _wait(control, told, screen)
    except KeyboardInterrupt as interrupt:
        going_on = "no longer waiting; the tasks go on (verbatim tasks cancel ends them)"
        raise Refusal(going_on, exit_code=130) from interrupt
    if refusals:
        more = f"; and {len(refusals) - SHOWN} more" if len(refusals) > SHOWN else ""
        raise Refusal(f"{len(refusals)} of {len(bodies)} tasks were refused: " + "; ".join(refusals[:SHOWN]) + more)


@app.command("watch")
def watch(task_id: TaskId) -> None:
    """Print what happens to a task from its beginning on, line by line, until it has ended."""
    from cli.control import Control

    for event in _events(Control(), task_id):
        at = time.strftime("%H:%M:%S", time.localtime(event.data["at"]))
        told = " ".join(f"{name}={value}" for name, value in event.data.items() if name not in ("at", "kind", "status"))
        typer.echo(f"{at} {event.kind:<20} {told}" + (f" {event.data['status']}" if event.kind == "task.ended" else ""))


@app.command("cancel")
def cancel(task_ids: Annotated[list[str] | None, typer.Argument(metavar="TASK...", help="Ids of tasks.")] = None) -> None:
    """Cancel tasks: no rollout of theirs goes on or counts from now on. What has ended stays as it is."""
    from cli.control import Control, Declined

    if not task_ids:
        raise Refusal("name the tasks to cancel", exit_code=2)
    control, refusals = Control(), []
    with control.kept_open():
        for task_id in task_ids:
            try:
                answer = control.delete(_path(task_id))
            except Declined as declined:
                refusals.append(str(declined))
                continue
            count = len(answer["cancelled_now"])
            typer.echo(
                f"{task_id}: {count} {'rollout' if count == 1 else 'rollouts'} cancelled; the task is {answer['status']}"
            )
    if refusals:
        raise Refusal("; ".join(refusals))


@app.command("ls")
def ls(
    status: Annotated[
        str | None, typer.Option(metavar="STATUS", help="Only these: queued, running, completed or cancelled.")
    ] = None,
    limit: Annotated[int, typer.Option(metavar="N", min=1, max=1000, help="At most so many, the newest.")] = 50,
) -> None:
    """List tasks, newest first."""
    from cli.control import Control
    from cli.tables import standard_output, tasks_table

    answer = Control().get("/tasks", status=status, limit=limit)
    console = standard_output()
    console.print(tasks_table(answer["tasks"]))
    if answer["cursor"]:
        console.print(f"There are more: raise --limit above {limit}.")


@app.command("show")
def show(task_id: TaskId) -> None:
    """Show one task: where it stands, each rollout, and why attempts failed."""
    from cli.control import Control
    from cli.tables import callback_line, failures_table, rollouts_table, standard_output, tasks_table

    control, console = Control(), standard_output()
    task = control.get(_path(task_id))
    rollouts = control.get(_path(task_id, "/rollouts"))["rollouts"]
    console.print(tasks_table([task]))
    if waits := _waited_for(control, task):
        console.print(f"waits: {waits}", markup=False)
    console.print(rollouts_table(rollouts))
    if any(rollout["failures"] or (rollout["verdict"] or {}).get("failure") for rollout in rollouts):
        console.print(failures_table(rollouts))
    if task["callback"]:
        console.print(callback_line(task["callback"]), markup=False)


def _waited_for(control: Control, task: dict[str, Any]) -> str | None:
    """What rollouts of the task cannot begin without, as far as anybody knows."""
    # A service of an earlier build does not say what it lacks.
    if task.get("lacks") or task["status"] != "queued":
        return task.get("lacks")
    return "for a node with room" if control.get("/nodes")["nodes"] else "there is no node; verbatim node starts one"


def bodies_of(file: str) -> list[tuple[int, dict[str, Any]]]:
    """Number and task of each line that is not empty. Raises `Refusal` before anything is submitted, also where there is none."""
    found = [(number, _body(file, number, line)) for number, line in enumerate(_lines(file), 1) if line.strip()]
    if not found:
        name = "standard input" if file == "-" else file
        raise Refusal(f"there are no tasks in {name}: each is one line of JSON (verbatim tasks submit --help)")
    return found


def _body(file: str, number: int, line: str) -> dict[str, Any]:
    try:
        body = json.loads(line)
    except ValueError as error:
        # Within the line: a number of lines of its own would be taken for one of the file's.
        where = f" at character {error.colno}" if isinstance(error, json.JSONDecodeError) else ""
        raise Refusal(f"line {number} of {file} is no JSON{where}: {getattr(error, 'msg', error)}") from error
    if not isinstance(body, dict):
        raise Refusal(f"line {number} of {file} is no JSON object")
    return body


def _lines(file: str) -> list[str]:
    try:
        text = sys.stdin.buffer.read() if file == "-" else Path(file).read_bytes()
        return text.decode().split("\n")
    except OSError as error:
        raise Refusal(f"{file} cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise Refusal(f"{file} is not UTF-8: {error}") from error


def _submitted(
    control: Control, bodies: list[tuple[int, dict[str, Any]]], screen: Any
) -> tuple[list[dict[str, Any]], list[str]]:
    """The tasks as the service has them, their ids printed, and what it said against lines. Raises `Refusal` when it cannot be asked,
    and where it is interrupted."""
    from rich.progress import track

    from cli.control import Declined

    told: list[dict[str, Any]] = []
    refusals, number = [], 0
    try:
        for number, body in track(bodies, "submitting", console=screen, transient=True, disable=not screen.is_terminal):
            try:
                told.append(control.post("/tasks", body))
            except Declined as declined:
                if declined.status >= 500:
                    raise
                refusals.append(f"line {number}: {declined}")
    except (Refusal, KeyboardInterrupt) as broken:
        why, code = ("interrupted", 130) if isinstance(broken, KeyboardInterrupt) else (str(broken), 1)
        if told:
            _tell(told, screen)
            why = f"it broke off at line {number}, which may have been submitted or not, as those behind it were not: {why}"
        raise Refusal(why, exit_code=code) from broken
    _tell(told, screen)
    return told, refusals


def _tell(told: list[dict[str, Any]], screen: Any) -> None:
    for answer in told:
        typer.echo(answer["task_id"])
    screen.print(f"{len(told)} {'task' if len(told) == 1 else 'tasks'} submitted", markup=False)


class Patience:
    """With a service that may be away for a while."""

    def __init__(self) -> None:
        self._away_since: float | None = None

    def answered(self) -> None:
        self._away_since = None

    def bear(self, refusal: Refusal) -> None:
        """Returns when it is to be asked again. Raises `refusal` where that does not help, or has not for AWAY_SECONDS."""
        from cli.control import Declined

        now = time.monotonic()
        self._away_since = self._away_since or now
        if (isinstance(refusal, Declined) and refusal.status < 500) or now - self._away_since > AWAY_SECONDS:
            raise refusal
        time.sleep(POLL_SECONDS)


def _wait(control: Control, tasks: list[dict[str, Any]], screen: Any) -> None:
    """Returns when every task has ended. However it ends, a table says how they stand."""
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    from cli.tables import ended, tasks_table

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    total = sum(task["num_samples"] for task in tasks)
    states = {task["task_id"]: task for task in tasks}
    try:
        with Progress(*columns, console=screen, transient=True, disable=not screen.is_terminal) as progress:
            bar = progress.add_task("rollouts", total=total)
            for state in _followed(control, states):
                states[state["task_id"]] = state
                usable = sum(state["usable"] for state in states.values())
                done = sum(ended(state) for state in states.values())
                begun = any(state["status"] != "queued" for state in states.values())
                said = f"rollouts, {usable} usable" if begun else "rollouts wait for a node"
                progress.update(bar, completed=done, description=said)
    finally:
        screen.print(tasks_table(states.values()))


def _followed(control: Control, states: Mapping[str, dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """Each task that has not ended, again and again, until all have; the caller keeps `states` up to date."""
    patience = Patience()
    while going := [name for name, state in states.items() if state["status"] not in OVER]:
        for name in going:
            try:
                state = control.get(_path(name))
            except Refusal as refusal:
                patience.bear(refusal)
                continue
            patience.answered()
            yield state
        time.sleep(POLL_SECONDS)


def _events(control: Control, task_id: str) -> Iterable[ServerEvent]:
    """Every event up to the task's end, over as many connections as it takes."""
    after, patience = None, Patience()
    while True:
        try:
            for event in control.events(_path(task_id, "/events"), after, silence_seconds=SILENCE_SECONDS):
                after = event.id
                patience.answered()
                yield event
                if event.kind == "task.ended":
                    return
        except Refusal as refusal:
            patience.bear(refusal)
        time.sleep(POLL_SECONDS)


def _path(task_id: str, part: str = "") -> str:
    return f"/tasks/{quote(task_id, safe='')}{part}"
