"""The tasks of this folder as JSON lines for `POST /tasks`:

    python -m examples.tasks.load --harness pi --num-samples 4 > tasks.jsonl

Each folder has task.toml (instruction and evaluator), repository/ (what the agent gets), hidden/ (what grades it, put in place only
after the agent has ended) and solution/ (files that solve it, which go nowhere).
"""

from __future__ import annotations

import argparse
import base64
import gzip
import io
import json
import tarfile
import tomllib
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parent
HIDDEN = ".hidden"
"""Where the hidden files lie in the runtime that grades."""
REPORT = f"{HIDDEN}/report.xml"
TEST_SECONDS = 120
"""Tests that take longer hang, by the agent's doing: the reward is 0."""
BUDGETS = {"agent_seconds": 900, "evaluation_seconds": 300}


def names() -> list[str]:
    return sorted(path.parent.name for path in FOLDER.glob("*/task.toml"))


def body(name: str, harness: str, **fields: Any) -> dict[str, Any]:
    """What to POST for the task `name`; `fields` are further ones of it."""
    folder = FOLDER / name
    task = tomllib.loads((folder / "task.toml").read_text(encoding="utf-8"))
    return {
        "task_id": name,
        "instruction": task["instruction"].strip(),
        "harness": harness,
        "prepare": [{"upload": {"path": ".", "base64": packed(folder / "repository"), "unpack": True}}],
        "evaluator": evaluator(folder, dict(task["evaluator"])),
        "budgets": BUDGETS,
        "metadata": {"title": task["title"]},
        **fields,
    }


def evaluator(folder: Path, options: dict[str, Any]) -> dict[str, Any]:
    """Kind and options, with the files of hidden/ among them."""
    kind = options.pop("kind")
    hidden = {path.name: path.read_text(encoding="utf-8") for path in sorted((folder / "hidden").iterdir()) if path.is_file()}
    if kind == "pytest":
        hidden["run_tests.py"] = (FOLDER / "run_tests.py").read_text(encoding="utf-8")
        options = {"command": f"python3 {HIDDEN}/run_tests.py {REPORT}", "report": REPORT, **options}
    files = {f"{HIDDEN}/{name}": text for name, text in hidden.items()}
    limits = {"timeout_seconds": TEST_SECONDS, "timeout_reward": 0.0}
    return {"kind": kind, "options": {**options, "remove": [HIDDEN], "files": files, **limits}}


def packed(folder: Path) -> str:
    """A tar.gz, base64: the same bytes for the same files, so that a task submitted again is the same task."""
    held = io.BytesIO()
    with gzip.GzipFile(fileobj=held, mode="wb", mtime=0) as zipped, tarfile.open(fileobj=zipped, mode="w") as tar:
        for path in sorted(folder.rglob("*")):
            if "__pycache__" not in path.parts:
                tar.add(path, arcname=path.relative_to(folder).as_posix(), recursive=False, filter=_anonymous)
    return base64.b64encode(held.getvalue()).decode()


def _anonymous(entry: tarfile.TarInfo) -> tarfile.TarInfo:
    entry.uid = entry.gid = 0
    entry.uname = entry.gname = ""
    entry.mtime = 0
    return entry


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", help="tasks to take; default: all")
    parser.add_argument("--harness", required=True)
    parser.add_argument("--model")
    parser.add_argument("--num-samples", type=int, default=1)
    parser.add_argument("--runtime", default="local", help="local, docker, apptainer or kubernetes")
    parser.add_argument("--image", help="an image with python3, for runtimes that have images")
    parser.add_argument("--prefix", default="", help="goes before the tasks' ids")
    options = parser.parse_args()
    if unknown := sorted({*options.names} - {*names()}):
        parser.error(f"no such task: {', '.join(unknown)}; there are {', '.join(names())}")
    runtime = {"kind": options.runtime, **({"image": options.image} if options.image else {})}
    fields = {"runtime": runtime, "num_samples": options.num_samples, **({"model": options.model} if options.model else {})}
    for name in options.names or names():
        print(json.dumps(body(name, options.harness, **fields, task_id=f"{options.prefix}{name}")))


if __name__ == "__main__":
    main()
