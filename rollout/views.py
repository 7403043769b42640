"""Tasks, rollouts and nodes as the API shows them. Fields are named one by one: one that comes to be is not shown by itself."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from rollout.attempts import RolloutState, Verdict
from rollout.failures import FailureRecord
from rollout.store.base import Callback, Event, NodeState, TaskState
from rollout.task import Budgets, EvaluatorSpec, Exec, HarnessSpec, PrepareStep, Task, Upload


def summary_as_wire(state: TaskState) -> dict[str, Any]:
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
        "callback": callback_as_wire(state.callback),
        "metadata": dict(task.metadata),
    }


def task_as_wire(state: TaskState) -> dict[str, Any]:
    """A task by itself: with `task`, the body it was submitted with, defaults filled in; of uploads only how long they are."""
    return summary_as_wire(state) | {"task": body_as_wire(state.task)}


def body_as_wire(task: Task) -> dict[str, Any]:
    return {
        "task_id": task.task_id,
        "instruction": task.instruction,
        "harness": _harness(task.harness),
        "evaluator": None if task.evaluator is None else _evaluator(task.evaluator),
        "num_samples": task.num_samples,
        "model": task.model,
        "sampling": dict(task.sampling),
        "runtime": asdict(task.runtime),
        "prepare": [_step(step) for step in task.prepare],
        "environment": dict(task.environment),
        "budgets": _budgets(task.budgets),
        "priority": task.priority,
        "labels": dict(task.labels),
        "early_stop_usable_samples": task.usable_samples,
        "max_attempts": task.max_attempts,
        "on_lost_node": task.on_lost_node,
        "on_agent_timeout": task.on_agent_timeout,
        "agent_timeout_reward": task.agent_timeout_reward,
        "group": asdict(task.group),
        "echo_policy": task.echo_policy,
        "callback_url": task.callback_url,
        "metadata": dict(task.metadata),
    }


def rollout_as_wire(state: RolloutState) -> dict[str, Any]:
    return {
        "index": state.index,
        "status": state.status,
        "attempt": state.attempt,
        "node": state.node,
        "session_id": state.session_id,
        "calls": state.calls,
        "exit_code": state.exit_code,
        "verdict": _verdict(state.verdict),
        "failures": [_failure(failure) for failure in state.failures],
        "times": dict(state.times),
        "logs": state.logs,
    }


def event_as_wire(event: Event) -> dict[str, Any]:
    return {"kind": event.kind, "at": event.at, **event.data}


def node_as_wire(state: NodeState) -> dict[str, Any]:
    return asdict(state)


def callback_as_wire(callback: Callback | None) -> dict[str, Any] | None:
    return None if callback is None else asdict(callback)


def _verdict(verdict: Verdict | None) -> dict[str, Any] | None:
    if verdict is None:
        return None
    return {
        "status": verdict.status,
        "reward": verdict.reward,
        "per_call": dict(verdict.per_call),
        "per_branch": dict(verdict.per_branch),
        "feedback": verdict.feedback,
        "metadata": dict(verdict.metadata),
        "failure": None if verdict.failure is None else _failure(verdict.failure),
        "usable": verdict.usable,
    }


def _failure(record: FailureRecord) -> dict[str, str]:
    return {"failure": record.failure.value, "message": record.message, "look": record.look}


def _harness(harness: HarnessSpec) -> dict[str, Any]:
    return {
        "name": harness.name,
        "definition": harness.definition,
        "env": dict(harness.env),
        "mcp_servers": [asdict(server) for server in harness.mcp_servers],
        "skills": [_upload(skill) for skill in harness.skills],
        "install": harness.install,
    }


def _evaluator(evaluator: EvaluatorSpec) -> dict[str, Any]:
    return {
        "kind": evaluator.kind,
        "options": dict(evaluator.options),
        "fresh_runtime": evaluator.fresh_runtime,
        "runtime": None if evaluator.runtime is None else asdict(evaluator.runtime),
        "prepare": [_step(step) for step in evaluator.prepare],
        "collect": list(evaluator.collect),
    }


def _budgets(budgets: Budgets) -> Mapping[str, float | None]:
    return {name if name.startswith("max_") else f"{name}_seconds": most for name, most in asdict(budgets).items()}


def _step(step: PrepareStep) -> dict[str, Any]:
    return {"exec": asdict(step)} if isinstance(step, Exec) else {"upload": _upload(step)}


def _upload(upload: Upload) -> dict[str, Any]:
    held = {"source": upload.source} if upload.content is None else {"bytes": len(upload.content)}
    return {"path": upload.path, **held, "mode": f"{upload.mode:04o}", "unpack": upload.unpack}
