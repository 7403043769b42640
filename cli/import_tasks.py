"""`verbatim tasks import`: published task sets as tasks, one line of JSON each."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator, Mapping
from enum import StrEnum
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from cli.options import HARNESS, MODEL, RUNTIME, SAMPLES, check_installed, find_missing
from cli.refusal import CommandError
from cli.run import parse_variables
from reconstruct.extras import how_to_install

if TYPE_CHECKING:
    from contract.tasks import Task

NEEDS = ("pydantic", "simpleeval", "yaml")


class TaskSet(StrEnum):
    HARBOR = "harbor"
    SWEBENCH = "swebench"
    TERMINAL_BENCH = "terminal-bench"


MARKS = {TaskSet.HARBOR: "task.toml", TaskSet.TERMINAL_BENCH: "task.yaml"}
"""The file by which a task's folder is known."""


def import_tasks(
    kind: Annotated[TaskSet, typer.Argument(metavar="harbor|swebench|terminal-bench", help="The form that the tasks are in.")],
    path: Annotated[
        Path,
        typer.Argument(
            metavar="PATH",
            help="A task's folder, or one that holds such folders at any depth (Terminal-Bench 2 is in Harbor's form); for "
            "swebench a .jsonl, .json or .parquet file of rows, as swebench 5 has them.",
        ),
    ],
    harness: Annotated[str, HARNESS],
    image: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="The container image, for folders that have only a Dockerfile; {task} stands for the folder's name. Images are "
            "not built here.",
        ),
    ] = None,
    runtime: Annotated[str, RUNTIME] = "docker",
    samples: Annotated[int, SAMPLES] = 1,
    model: Annotated[str | None, MODEL] = None,
    var: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME[=VALUE]", help="The value of ${NAME} in Harbor's folders. Repeatable."),
    ] = None,
) -> None:
    """Turn published tasks into lines for verbatim tasks submit and verbatim generate, on standard output.

    A task that cannot run here is left out and named with the reason. The exit code is 1 if none is left.

    \b
    verbatim tasks import harbor terminal-bench-2/tasks --harness mini-swe-agent --samples 8 > tasks.jsonl
    verbatim tasks import terminal-bench original-tasks --harness codex --image registry.local/tb/{task}:1 > tasks.jsonl
    verbatim tasks import swebench verified.parquet --harness pi | verbatim tasks submit -
    """
    check_installed("tasks import", NEEDS, "rollout")
    from cli.generation.attempts import KNOWN, make_harness
    from rollout.task import dump_given
    from rollout.task_body import BadTask, read_task
    from rollout.task_sources import BadInstance, BadTaskFolder

    chosen = make_harness(harness)
    more = {"num_samples": samples, "model": model}
    lines: dict[str, str] = {}
    left_out = []
    for name, make in _list_sources(kind, path, image, runtime, parse_variables(var or [])):
        try:
            body = dump_given(make(**more))
            # What the folder adds to the harness, such as tool servers, stays.
            body["harness"] = {**body["harness"], **chosen}
            line = json.dumps(body)
            task = read_task(line.encode(), KNOWN)[0]
            if task.task_id in lines:
                raise BadTask(f"another task is called {task.task_id}, too", "task_id")
        except (BadInstance, BadTaskFolder) as error:
            left_out.append(str(error))
        except BadTask as error:
            left_out.append(f"{name}: {error.message}")
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            left_out.append(f"{name} is not in the form of {kind.value}: {type(error).__name__}: {error}")
        else:
            lines[task.task_id] = line
    for reason in left_out:
        typer.echo(f"left out: {reason}", err=True)
    sys.stdout.writelines(f"{line}\n" for line in lines.values())
    typer.echo(f"{len(lines)} tasks imported, {len(left_out)} left out", err=True)
    if not lines:
        raise CommandError(f"no task could be imported from {path}")


Make = Callable[..., "Task"]


def _list_sources(
    kind: TaskSet, path: Path, image: str | None, runtime: str, variables: Mapping[str, str]
) -> Iterator[tuple[str, Make]]:
    """The name of each task, and what makes it from further fields. Raises `CommandError`."""
    from contract.tasks import HarnessSpec
    from rollout.task_sources import harbor_task, swebench_task, terminal_bench_task

    harness = HarnessSpec("shell")  # replaced in the body: a definition of the user's own is passed on as it is
    if kind is TaskSet.SWEBENCH:
        for row in _read_rows(path):
            name = str(row.get("instance_id"))
            yield name, partial(swebench_task, row, harness, runtime_kind=runtime)
        return
    for folder in _find_folders(path, MARKS[kind]):
        own = None if image is None else image.replace("{task}", folder.resolve().name.lower())
        if kind is TaskSet.HARBOR:
            yield str(folder), partial(harbor_task, folder, harness, image=own, runtime_kind=runtime, variables=variables)
        else:
            yield str(folder), partial(terminal_bench_task, folder, harness, image=own, runtime_kind=runtime)


def _find_folders(path: Path, mark: str) -> list[Path]:
    """The folders at or below `path` that hold the file `mark`. Raises `CommandError` if there are none."""
    if (path / mark).is_file():
        return [path]
    found = sorted(file.parent for file in path.rglob(mark)) if path.is_dir() else []
    if not found:
        raise CommandError(f"there is no task at or below {path}: its folder would hold a {mark}")
    return found


def _read_rows(path: Path) -> list[dict[str, Any]]:
    """The rows of a data set's file. Raises `CommandError`."""
    try:
        if path.suffix == ".parquet":
            if find_missing(("pyarrow",)):
                raise CommandError(f"{path} is in Parquet, which needs pyarrow: {how_to_install('archive')}")
            import pyarrow.parquet as pq

            rows: Any = pq.read_table(path).to_pylist()
        else:
            text = path.read_text(encoding="utf-8")
            rows = (
                # Not splitlines(), which also ends a line at characters that JSON strings hold as they are, such as U+2028.
                [json.loads(line) for line in text.split("\n") if line.strip()] if path.suffix == ".jsonl" else json.loads(text)
            )
    except (OSError, ValueError) as error:
        raise CommandError(f"{path} cannot be read: {error}") from error
    if not isinstance(rows, list) or not all(isinstance(row, dict) for row in rows):
        raise CommandError(f"{path} holds no rows: it must be a list of objects")
    return rows
