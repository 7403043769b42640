"""The real service with tasks, which knows the kinds `local` and `docker` of runtimes and `command` and `pytest` of evaluators."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import httpx

from cli.rollout_service import add_rollouts
from contract.tasks import EvaluatorSpec, RuntimeSpec, Task
from rollout.evaluators.base import BadEvaluator
from rollout.runtimes.base import BadRuntime
from rollout.task_body import Known
from tests.support.service.running_service import ADMIN, RunningService


class Runtimes:
    def check(self, spec: RuntimeSpec) -> None:
        if spec.kind == "docker" and spec.image is None:
            raise BadRuntime("docker needs an image")


class Evaluators:
    def check(self, spec: EvaluatorSpec, task: Task) -> None:
        if spec.kind == "command" and "command" not in spec.options:
            raise BadEvaluator("options.command is missing")


KNOWN = Known(lambda: ["docker", "local"], lambda name: Runtimes(), lambda: ["command", "pytest"], lambda name: Evaluators())
BODY: dict[str, Any] = {"instruction": "Fix the bug.", "harness": "pi"}


@contextmanager
def serving_tasks(redis_url: str, engine: str | list[str] = "http://127.0.0.1:9", **settings: Any) -> Iterator[RunningService]:
    settings = {"engine_api": "chat", "keepalive_seconds": 0.2, **settings}
    with RunningService(engine, redis_url, adding=[partial(add_rollouts, KNOWN)], **settings) as service:
        yield service


def submit(service: RunningService, code: int = 201, **fields: Any) -> dict[str, Any]:
    answer = service.request("POST", "/tasks", json={**BODY, **fields})
    assert answer.status_code == code, answer.text
    told: dict[str, Any] = answer.json()
    return told


def read_events(service: RunningService, task_id: str, after: str | None = None) -> list[dict[str, Any]]:
    """Every event up to the end of the stream, each with its id."""
    headers = {"Authorization": f"Bearer {ADMIN}"} | ({"Last-Event-ID": after} if after else {})
    told = []
    with httpx.stream("GET", f"{service.url}/tasks/{task_id}/events", headers=headers, timeout=120) as response:
        assert response.status_code == 200, response.read()
        assert response.headers["content-type"].startswith("text/event-stream")
        fields: dict[str, str] = {}
        for line in response.iter_lines():
            if line:
                name, _, value = line.partition(": ")
                fields[name] = value
            elif "data" in fields:
                told.append({"id": fields["id"], **json.loads(fields["data"])})
                assert told[-1]["kind"] == fields["event"]
                fields = {}
    return told
