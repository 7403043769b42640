"""`verbatim tasks`: submit tasks from a file, watch, list, show and cancel them."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any
from urllib.parse import quote

import typer

from cli.options import SERVICE, AsJson, Limit, RunName, ServiceUrl, TasksFile, Wait, Where
from cli.refusal import CommandError

if TYPE_CHECKING:
    from cli.control import CommandClient, ServerEvent

app = typer.Typer(
    no_args_is_help=True,
    help="Import, submit, watch, list, show and cancel tasks. A task is an instruction that nodes attempt num_samples times; "
    f"verbatim tasks submit --help lists its fields. {SERVICE}",
)

POLL_SECONDS = 1.0
SILENCE_SECONDS = 60.0
"""A watched stream without even a keep-alive for this long counts as broken."""
AWAY_SECONDS = 60.0
"""How long to retry a service that does not answer."""
SHOWN = 5
OVER = ("completed", "cancelled")

TaskId = Annotated[str, typer.Argument(metavar="TASK", help="The task's id.")]


@app.command("submit", short_help="Submit tasks from a file.")
def submit(
    file: TasksFile,
    run: RunName = None,
    wait: Wait = False,
    url: ServiceUrl = None,
) -> None:
    """Submit tasks, and print their ids.

    A line needs at least {"instruction": "Fix the failing test.", "harness": "pi"}. Other fields: task_id (makes submitting the
    same line again a no-op), num_samples, model, sampling, runtime ({"kind", "image", "cpus", "memory_mb", "network"}), prepare
    (a list of {"upload": {"path", "text" or "base64" or "source"}} and {"exec": "make deps"}), environment, evaluator ({"kind",
    "options"}), budgets ({"agent_seconds", "prepare_seconds", "evaluation_seconds", "total_seconds", "max_calls",
    "max_completion_tokens", "max_total_tokens"}), priority (0 to 100), labels, early_stop_usable_samples, max_attempts, group
    ({"policy", "minimum", "zero_variance", "max_quarantined_share"}), echo_policy, fork ({"session_id", "until",
    "on_divergence", "tokens_per_second"}), lookahead ({"n", "choose", "model", "url", "roles"}), callback_url, metadata, run
    (a line that names none is of --run).

    If the service refuses lines, the others are still submitted, and the command ends with the reasons and their line numbers.

    \b
    verbatim tasks submit tasks.jsonl --wait
    echo '{"instruction": "Fix the failing test.", "harness": "pi"}' | verbatim tasks submit -
    """
    from rich.console import Console

    from cli.control import CommandClient

    default = {} if run is None else {"run": run}
    bodies = [(number, {**default, **body}) for number, body in read_bodies(file)]
    control, screen = CommandClient(url), Console(stderr=True)
    try:
        submitted, refusals = _submit_all(control, bodies, screen)
        if wait and submitted:
            wait_for_end(control, submitted, screen)
    except KeyboardInterrupt as interrupt:
        raise CommandError(
            "no longer waiting; the tasks continue (verbatim tasks cancel stops them)", exit_code=130
        ) from interrupt
    if refusals:
        raise CommandError(describe_refusals(refusals, len(bodies)))


def describe_refusals(refusals: Mapping[str, Sequence[int]], submitted: int) -> str:
    """One sentence on the reasons, each with the numbers of its lines."""
    reasons = [f"line{'s' if len(lines) > 1 else ''} {list_lines(lines)}: {reason}" for reason, lines in refusals.items()]
    more = f"; and {len(reasons) - SHOWN} more reasons" if len(reasons) > SHOWN else ""
    count = sum(map(len, refusals.values()))
    return f"{count} of {submitted} tasks were refused: " + "; ".join(reasons[:SHOWN]) + more


def list_lines(numbers: Sequence[int]) -> str:
    """Ascending numbers with their ranges joined: "1-3, 7"."""
    ranges: list[list[int]] = []
    for number in numbers:
        if ranges and number == ranges[-1][-1] + 1:
            ranges[-1][1:] = [number]
        else:
            ranges.append([number])
    return ", ".join("-".join(map(str, each)) for each in ranges)


@app.command("watch", short_help="Follow a task's events, rewards and feedback.")
def watch(task_id: TaskId, url: ServiceUrl = None, as_json: AsJson = False) -> None:
    """Print a task's events from its start until it ends, with the reward and feedback of each rollout.

    \b
    verbatim tasks watch bug-7
    """
    from cli.control import CommandClient
    from cli.feedback import remove_controls

    control = CommandClient(url)
    # Before waiting for events, so that a wrong address or token is reported at once.
    control.get(_path(task_id))
    for event in _follow_events(control, task_id):
        if as_json:
            typer.echo(json.dumps({"kind": event.kind, **event.data}))
            continue
        at = time.strftime("%H:%M:%S", time.localtime(event.data["at"]))
        values = " ".join(f"{name}={value}" for name, value in event.data.items() if name not in ("at", "kind", "status"))
        typer.echo(
            f"{at} {event.kind:<20} {remove_controls(values)}"
            + (f" {event.data['status']}" if event.kind == "task.ended" else "")
        )
        if event.data.get("reward") is not None:
            _print_feedback_of(control, task_id, event.data)


def _print_feedback_of(control: CommandClient, task_id: str, rollout: dict[str, Any]) -> None:
    """The beginning of the evaluator's feedback on a rollout that has ended."""
    from cli.control import RequestFailed
    from cli.feedback import FIRST_LINES, print_feedback, read_feedback
    from cli.sessions import path_of
    from cli.tables import standard_output
    from contract.attempts import AttemptId

    session_id = AttemptId(task_id, rollout["index"], rollout["attempt"]).session_id
    # The session may have been deleted since.
    with suppress(RequestFailed):
        if feedback := read_feedback(control.get(path_of(session_id))):
            rest = f"verbatim sessions show {session_id}"
            print_feedback(
                standard_output(), f"         reward of {session_id}:", rollout["reward"], feedback, FIRST_LINES, rest
            )


@app.command("cancel", short_help="Cancel tasks.")
def cancel(
    task_ids: Annotated[list[str] | None, typer.Argument(metavar="TASK...", help="Ids of tasks.")] = None,
    url: ServiceUrl = None,
) -> None:
    """Cancel tasks. Their unfinished rollouts stop and do not count; finished ones are unchanged.

    \b
    verbatim tasks cancel bug-7 bug-8
    """
    from cli.control import CommandClient, RequestFailed

    if not task_ids:
        raise CommandError("name the tasks to cancel", exit_code=2)
    control, refusals = CommandClient(url), []
    for task_id in task_ids:
        try:
            answer = control.delete(_path(task_id))
        except RequestFailed as failed:
            if failed.status is None:
                raise
            refusals.append(str(failed))
            continue
        count = len(answer["cancelled_now"])
        typer.echo(f"{task_id}: {count} {'rollout' if count == 1 else 'rollouts'} cancelled; the task is {answer['status']}")
    if refusals:
        raise CommandError("; ".join(refusals))


@app.command("list", short_help="List tasks, newest first.")
def list_(
    where: Where = None,
    limit: Limit = 50,
    url: ServiceUrl = None,
    as_json: AsJson = False,
) -> None:
    """List tasks, newest first.

    --where takes status (queued, running, completed, cancelled), run, q (a text in id, instruction or harness), after and before.

    \b
    verbatim tasks list --where status=running
    """
    from cli.control import CommandClient
    from cli.tables import print_listing, tasks_table

    answer = CommandClient(url).get("/tasks", where=where, limit=limit)
    print_listing(answer["tasks"], tasks_table, as_json, limit if answer["cursor"] else None)


@app.command("show", short_help="Show a task, its rollouts and their feedback.")
def show(task_id: TaskId, url: ServiceUrl = None, as_json: AsJson = False) -> None:
    """Show one task: its status, its rollouts with their rewards and feedback, and why attempts failed.

    \b
    verbatim tasks show bug-7
    """
    from cli.control import CommandClient
    from cli.feedback import FIRST_LINES, print_feedback
    from cli.tables import callback_line, failures_table, print_json, rollouts_table, standard_output, tasks_table

    control = CommandClient(url)
    task = control.get(_path(task_id))
    rollouts = control.get(_path(task_id, "/rollouts"))["rollouts"]
    if as_json:
        print_json({"task": task, "rollouts": rollouts})
        return
    console = standard_output()
    console.print(tasks_table([task]))
    if waits := _explain_wait(control, task):
        console.print(f"waiting: {waits}", markup=False)
    console.print(rollouts_table(rollouts))
    for rollout in rollouts:
        if (verdict := rollout["verdict"] or {}).get("feedback"):
            name = rollout["session_id"]
            rest = f"verbatim sessions show {name}" if name else f"verbatim tasks show {task_id} --json"
            print_feedback(
                console, f"rollout {rollout['index']}: reward", verdict["reward"], verdict["feedback"], FIRST_LINES, rest
            )
    if any(rollout["failures"] or (rollout["verdict"] or {}).get("failure") for rollout in rollouts):
        console.print(failures_table(rollouts))
    if task["callback"]:
        console.print(callback_line(task["callback"]), markup=False)


def _explain_wait(control: CommandClient, task: dict[str, Any]) -> str | None:
    """What the task's rollouts need before they can start, as far as known."""
    lacks: str | None = task["lacks"]
    if lacks or task["status"] != "queued":
        return lacks
    return "for a node with capacity" if control.get("/nodes")["nodes"] else "for a node; verbatim node starts one"


def read_bodies(file: str) -> list[tuple[int, dict[str, Any]]]:
    """The line number and task of each non-empty line. Raises `CommandError`, also if there is none."""
    found = [(number, _body(file, number, line)) for number, line in enumerate(_lines(file), 1) if line.strip()]
    if not found:
        name = "standard input" if file == "-" else file
        raise CommandError(f"there are no tasks in {name}: each is one line of JSON (verbatim tasks submit --help)")
    return found


def _body(file: str, number: int, line: str) -> dict[str, Any]:
    try:
        body = json.loads(line)
    except ValueError as error:
        # The column alone: the parser's own line number, always 1, would be taken for one of the file's.
        where = f" at character {error.colno}" if isinstance(error, json.JSONDecodeError) else ""
        raise CommandError(f"line {number} of {file} is not JSON{where}: {getattr(error, 'msg', error)}") from error
    if not isinstance(body, dict):
        raise CommandError(f"line {number} of {file} is not a JSON object")
    return body


def _lines(file: str) -> list[str]:
    try:
        text = sys.stdin.buffer.read() if file == "-" else Path(file).read_bytes()
        return text.decode().split("\n")
    except OSError as error:
        raise CommandError(f"{file} cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise CommandError(f"{file} is not UTF-8: {error}") from error


def _submit_all(
    control: CommandClient, bodies: list[tuple[int, dict[str, Any]]], screen: Any
) -> tuple[list[dict[str, Any]], dict[str, list[int]]]:
    """The submitted tasks, their ids printed, and why the service refused others: reason -> numbers of lines. Raises `CommandError` if the
    service does not answer or the command is interrupted."""
    from rich.progress import track

    from cli.control import RequestFailed

    submitted: list[dict[str, Any]] = []
    refusals: dict[str, list[int]] = {}
    number = 0
    try:
        for number, body in track(bodies, "submitting", console=screen, transient=True, disable=not screen.is_terminal):
            try:
                submitted.append(control.post("/tasks", body))
            except RequestFailed as failed:
                if not failed.is_final:
                    raise
                refusals.setdefault(str(failed), []).append(number)
    except (CommandError, KeyboardInterrupt) as broken:
        why, code = ("interrupted", 130) if isinstance(broken, KeyboardInterrupt) else (str(broken), 1)
        if submitted:
            _report(submitted, screen)
            why = f"it broke off at line {number}, which may have been submitted; the lines after it were not: {why}"
        raise CommandError(why, exit_code=code) from broken
    _report(submitted, screen)
    return submitted, refusals


def _report(submitted: list[dict[str, Any]], screen: Any) -> None:
    for task in submitted:
        typer.echo(task["task_id"])
    screen.print(f"{len(submitted)} {'task' if len(submitted) == 1 else 'tasks'} submitted", markup=False)


class RetryClock:
    """Decides how long to retry a service that does not answer."""

    def __init__(self) -> None:
        self._away_since: float | None = None

    def reset(self) -> None:
        self._away_since = None

    def wait(self, refusal: CommandError) -> None:
        """Return when to retry. Raises `refusal` if a retry cannot help or has not helped for AWAY_SECONDS."""
        from cli.control import RequestFailed

        now = time.monotonic()
        self._away_since = self._away_since or now
        if (isinstance(refusal, RequestFailed) and refusal.is_final) or now - self._away_since > AWAY_SECONDS:
            raise refusal
        time.sleep(POLL_SECONDS)


def wait_for_end(control: CommandClient, tasks: list[dict[str, Any]], screen: Any) -> None:
    """Return when every task has ended. Prints a table of their states, also when interrupted."""
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    from cli.tables import count_ended, tasks_table

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    total = sum(task["num_samples"] for task in tasks)
    states = {task["task_id"]: task for task in tasks}
    try:
        with Progress(*columns, console=screen, transient=True, disable=not screen.is_terminal) as progress:
            bar = progress.add_task("rollouts", total=total)
            for state in _follow(control, states):
                states[state["task_id"]] = state
                usable = sum(state["usable"] for state in states.values())
                done = sum(count_ended(state) for state in states.values())
                begun = any(state["status"] != "queued" for state in states.values())
                description = f"rollouts, {usable} usable" if begun else "rollouts waiting for a node"
                progress.update(bar, completed=done, description=description)
    finally:
        screen.print(tasks_table(states.values()))


def _follow(control: CommandClient, states: Mapping[str, dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """Poll the tasks that have not ended until all have; the caller updates `states`."""
    patience = RetryClock()
    while unfinished := [name for name, state in states.items() if state["status"] not in OVER]:
        for name in unfinished:
            try:
                state = control.get(_path(name))
            except CommandError as refusal:
                patience.wait(refusal)
                continue
            patience.reset()
            yield state
        time.sleep(POLL_SECONDS)


def _follow_events(control: CommandClient, task_id: str) -> Iterable[ServerEvent]:
    """The task's events up to its end, reconnecting as needed."""
    after, patience = None, RetryClock()
    while True:
        try:
            for event in control.stream_events(_path(task_id, "/events"), after, silence_seconds=SILENCE_SECONDS):
                after = event.id
                patience.reset()
                yield event
                if event.kind == "task.ended":
                    return
        except CommandError as refusal:
            patience.wait(refusal)
        time.sleep(POLL_SECONDS)


def _path(task_id: str, part: str = "") -> str:
    return f"/tasks/{quote(task_id, safe='')}{part}"
