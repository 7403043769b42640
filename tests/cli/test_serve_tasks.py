"""`verbatim serve` takes tasks: the kinds it knows are those there are."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable
from pathlib import Path

from tests.support.service.scripted_service import ScriptedService, json_answer, serving
from tests.support.service.verbatim_process import ADMIN, Serving, verbatim

SECONDS = 240.0


def asking(running: Serving) -> Callable[..., subprocess.CompletedProcess[str]]:
    where = {"VERBATIM_URL": running.url, "VERBATIM_ADMIN_TOKEN": ADMIN, "COLUMNS": "200"}
    return lambda *args: verbatim("tasks", *args, timeout_seconds=SECONDS, **where)


def test_a_served_app_takes_tasks_tells_of_them_and_refuses_what_there_is_not(tmp_path: Path) -> None:
    file = tmp_path / "tasks.jsonl"
    good = {"task_id": "a", "instruction": "Fix it.", "harness": "pi", "runtime": "local", "num_samples": 2}
    with serving(ScriptedService()) as receiver:
        receiver.script("POST /done", json_answer({}))
        good["callback_url"] = f"{receiver.url}/done"
        judged = {**good, "task_id": "b", "evaluator": {"kind": "command", "options": {"command": "make check"}}}
        wrong = [{**good, "runtime": "cloud"}, {**good, "evaluator": "oracle"}]
        file.write_text("\n".join(json.dumps(body) for body in (good, judged, *wrong)))
        with Serving("--engine", "http://127.0.0.1:9", data_dir=tmp_path / "data") as running:
            tasks = asking(running)
            done = tasks("submit", str(file))
            assert done.stdout == "a\nb\n", done.stderr
            assert (
                "there is no runtime 'cloud': choose one of" in done.stderr and "there is no evaluator 'oracle'" in done.stderr
            )
            assert "2 rollouts cancelled" in tasks("cancel", "a").stdout
            assert "task.ended" in tasks("watch", "a").stdout
            receiver.wait_for(lambda: receiver.paths() == ["/done"], SECONDS)
