"""`verbatim tasks import`: folders and rows of published sets become lines that a service takes."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests import ROOT
from tests.support.runtimes.swebench_instance import Instance, make_instance
from tests.support.service.running_service import ADMIN, RunningService
from tests.support.service.verbatim_process import verbatim

HARBOR = ROOT / "tests/support/runtimes/formats/harbor_slugify"


def imported(*args: str) -> tuple[subprocess.CompletedProcess[str], list[dict[str, Any]]]:
    done = verbatim("tasks", "import", *args)
    assert "Traceback" not in done.stderr
    return done, [json.loads(line) for line in done.stdout.splitlines()]


def test_folders_of_harbor_become_tasks_and_those_that_cannot_run_are_named(service: RunningService, tmp_path: Path) -> None:
    tasks = tmp_path / "set"
    shutil.copytree(HARBOR, tasks / "easy" / "slugify")
    shutil.copytree(HARBOR, tasks / "hard" / "steps")
    (tasks / "hard" / "steps" / "task.toml").write_text("[[steps]]\nname = 'a'\n")
    given = ("harbor", str(tasks), "--harness", "codex", "--samples", "3", "--model", "policy", "--var", "OWNER=us")
    done, (task,) = imported(*given)
    assert done.returncode == 0, done.stderr
    left_out, counts = done.stderr.splitlines()
    assert left_out.startswith("left out: ") and "hard/steps has several steps: that cannot be run here" in left_out
    assert counts == "1 tasks imported, 1 left out"
    assert (task["task_id"], task["num_samples"], task["model"]) == ("verbatim-slugify", 3, "policy")
    assert (task["harness"]["name"], task["harness"]["mcp_servers"][0]["name"]) == ("codex", "notes")
    out = tmp_path / "tasks.jsonl"
    out.write_text(done.stdout)
    submitted = verbatim("tasks", "submit", str(out), VERBATIM_URL=service.url, VERBATIM_ADMIN_TOKEN=ADMIN)
    assert (submitted.returncode, submitted.stdout) == (0, "verbatim-slugify\n"), submitted.stderr


def test_a_folder_that_has_only_a_dockerfile_gets_the_image_it_is_given(tmp_path: Path) -> None:
    folder = tmp_path / "Hello"
    (folder / "tests").mkdir(parents=True)
    (folder / "task.yaml").write_text("instruction: Say hello.\n")
    (folder / "run-tests.sh").write_text("true\n")
    done, _ = imported("terminal-bench", str(folder), "--harness", "pi")
    assert done.returncode == 1 and "names no image: build its Dockerfile" in done.stderr
    assert done.stderr.splitlines()[-1] == f"verbatim: no task could be imported from {folder}"
    done, (task,) = imported("terminal-bench", str(folder), "--harness", "pi", "--image", "registry/{task}:1")
    assert done.returncode == 0 and task["runtime"]["image"] == "registry/hello:1" and task["evaluator"]["kind"] == "harbor"


@pytest.fixture(scope="module")
def instance(tmp_path_factory: pytest.TempPathFactory) -> Instance:
    return make_instance(tmp_path_factory.mktemp("instance"))


@pytest.mark.parametrize("suffix", ["jsonl", "json", "parquet"])
def test_rows_of_swebench_become_tasks(instance: Instance, tmp_path: Path, suffix: str) -> None:
    rows = [instance.row, {**instance.row, "instance_id": "old", "image": None}, instance.row]
    file = tmp_path / f"rows.{suffix}"
    if suffix == "parquet":
        pq.write_table(pa.Table.from_pylist(rows), file)
    else:
        file.write_text(json.dumps(rows) if suffix == "json" else "".join(json.dumps(row) + "\n" for row in rows))
    done, (task,) = imported("swebench", str(file), "--harness", "pi", "--runtime", "apptainer")
    assert (task["task_id"], task["runtime"]["kind"], task["evaluator"]["kind"]) == (
        rows[0]["instance_id"],
        "apptainer",
        "swebench",
    )
    assert "the row 'old' lacks image: rows of swebench 5 have them" in done.stderr
    assert f"another task is called {task['task_id']}, too" in done.stderr


def test_a_row_may_hold_characters_that_end_lines_elsewhere(instance: Instance, tmp_path: Path) -> None:
    """JSON has U+2028 and U+0085 as they are; the file was refused as broken."""
    file, said = tmp_path / "rows.jsonl", "one\u2028two\x85three"
    file.write_text(json.dumps({**instance.row, "problem_statement": said}, ensure_ascii=False) + "\n", encoding="utf-8")
    _, (task,) = imported("swebench", str(file), "--harness", "pi", "--runtime", "apptainer")
    assert said in task["instruction"]


@pytest.mark.parametrize(
    ("args", "code", "says"),
    [
        (("harbor", "none"), 1, "there is no task at or below none: its folder would hold a task.toml"),
        (("swebench", "none.jsonl"), 1, "none.jsonl cannot be read"),
        (("swebench", "number.json"), 1, "number.json holds no rows"),
        (("harbor", ".", "--harness", "nobodys"), 2, "there is no harness 'nobodys'"),
        (("gymnasium", "."), 2, "gymnasium"),
    ],
)
def test_misuse_gives_one_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, args: tuple[str, ...], code: int, says: str
) -> None:
    (tmp_path / "number.json").write_text("1")
    monkeypatch.chdir(tmp_path)
    done, lines = imported(*args, *(() if "--harness" in args else ("--harness", "pi")))
    assert (done.returncode, lines) == (code, []) and says in done.stderr
