"""What each endpoint about tasks is for, takes and answers: rows for the table of the service's description."""

from __future__ import annotations

from typing import Any

from cli import task_shapes as shapes
from proxy.api.description.operation import PAGE, Answer, Operation
from rollout.task_body import TaskBody

ID = {"task_id": "The task's id."}
SUMMARY: dict[str, Any] = {
    "task_id": "bug-7",
    "status": "queued",
    "instruction": "Make the tests pass.",
    "harness": "pi",
    "num_samples": 8,
    "priority": 50,
    "rollouts": {"queued": 8},
    "usable": 0,
    "lacks": None,
    "created_at": 1767225600.0,
    "ended_at": None,
    "callback": None,
    "metadata": {},
}
SUBMITTED = {
    "task_id": "bug-7",
    "instruction": "Make the tests pass.",
    "harness": "pi",
    "num_samples": 8,
    "evaluator": {"kind": "command", "options": {"command": "make test"}},
}
ROLLOUT: dict[str, Any] = {
    "index": 0,
    "status": "running",
    "attempt": 1,
    "node": "node-1",
    "session_id": "bug-7.0.1",
    "calls": None,
    "exit_code": None,
    "verdict": None,
    "failures": [],
    "times": {"queued": 1767225600.0, "preparing": 1767225601.0, "ready": 1767225604.0, "running": 1767225604.5},
    "logs": "node-1:/srv/verbatim-node/logs/bug-7.0.1",
}

TASKS = (
    Operation(
        "post",
        "/tasks",
        "tasks",
        "admin",
        "Submit a task",
        "Its rollouts wait for nodes. A name alone stands for `harness`, `runtime` or `evaluator` objects. The same body under the same "
        "`task_id` again is 200 and changes nothing; another body is 409.",
        {
            201: Answer("submitted", shapes.TaskShape, {**SUMMARY, "task": SUBMITTED}),
            200: Answer("it was submitted before", shapes.TaskShape),
        },
        TaskBody,
        SUBMITTED,
        (408, 409, 413),
    ),
    Operation(
        "get",
        "/tasks",
        "tasks",
        "admin",
        "List tasks",
        "Newest first.",
        {200: Answer("a page", shapes.TaskPage, {"tasks": [SUMMARY], "cursor": None})},
        parameters={**PAGE, "status": "Only these."},
    ),
    Operation(
        "get",
        "/tasks/{task_id}",
        "tasks",
        "admin",
        "Look at a task",
        "Where it stands, and what was submitted.",
        {200: Answer("the task", shapes.TaskShape, {**SUMMARY, "task": SUBMITTED})},
        refusals=(404,),
        parameters=ID,
    ),
    Operation(
        "delete",
        "/tasks/{task_id}",
        "tasks",
        "admin",
        "Cancel a task",
        "At once and for good; rollouts that had ended stay.",
        {
            200: Answer(
                "cancelled", shapes.CancelledTask, {**SUMMARY, "status": "cancelled", "cancelled_now": [0, 1, 2, 3, 4, 5, 6, 7]}
            )
        },
        refusals=(404,),
        parameters=ID,
    ),
    Operation(
        "get",
        "/tasks/{task_id}/rollouts",
        "tasks",
        "admin",
        "The rollouts of a task",
        "In order of their index.",
        {200: Answer("all of them", shapes.Rollouts, {"rollouts": [ROLLOUT]})},
        refusals=(404,),
        parameters=ID,
    ),
    Operation(
        "get",
        "/tasks/{task_id}/events",
        "tasks",
        "admin",
        "Follow a task",
        "Server-sent events from the first, or from behind the header `Last-Event-ID`, up to `task.ended`.",
        {
            200: Answer("the stream", media="text/event-stream"),
            204: Answer("the task has ended, and the reader has everything", media=""),
        },
        refusals=(404,),
        parameters=ID,
    ),
    Operation(
        "get",
        "/nodes",
        "tasks",
        "node",
        "List nodes",
        "With their room, and what waits for which kind of node.",
        {
            200: Answer(
                "the nodes",
                shapes.Nodes,
                {
                    "nodes": [],
                    "queues": [
                        {"priority": 50, "runtimes": ["local"], "cpus": 1.0, "memory_mb": 2048, "labels": {}, "waiting": 8},
                    ],
                },
            )
        },
    ),
)
