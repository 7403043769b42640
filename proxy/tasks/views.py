"""Tasks and rollouts as the control API shows them."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from contract.attempts import RolloutState
from contract.tasks import OUTLINE, Task
from proxy.api.requests import read_adapter
from proxy.store.tasks.values import TaskState


def render_summary(state: TaskState) -> dict[str, Any]:
    """A task in a list."""
    task, counts = state.task, state.counts
    return {
        "task_id": task.task_id,
        "status": state.status,
        "instruction": task.instruction,
        "harness": task.harness.name,
        "num_samples": task.num_samples,
        "priority": task.priority,
        "rollouts": dict(counts.by_status),
        "usable": counts.usable,
        "lacks": state.lacks,
        "created_at": state.created_at,
        "ended_at": state.ended_at,
        "callback": None if state.callback is None else asdict(state.callback),
        "metadata": dict(task.metadata),
    }


def render_task(state: TaskState) -> dict[str, Any]:
    """A task by itself: `task` is the body it was submitted with, defaults filled in, with lengths in place of uploads."""
    return render_summary(state) | {"task": dump_outline(state.task)}


def dump_outline(task: Task) -> dict[str, Any]:
    """The task's JSON body with defaults filled in; of an upload only its length."""
    body: dict[str, Any] = read_adapter(Task).dump_python(task, mode="json", by_alias=True, context=OUTLINE)
    return body


def render_rollout(state: RolloutState) -> dict[str, Any]:
    """The rollout as a `RolloutView`."""
    view = asdict(state)
    if state.verdict is not None:
        view["verdict"]["usable"] = state.verdict.usable
    return view
