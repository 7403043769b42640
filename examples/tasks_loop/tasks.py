"""A corridor as a task: the agent is a script in a sandbox, and what it leaves is graded there by another."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parent
CORRIDOR = FOLDER.parent / "demo" / "environment.py"


def task_id(step: int, number: int) -> str:
    """The id of a step's task; the first number is 0."""
    return f"step-{step}-{number}"


def task(task_id: str, doors: Sequence[str], rollouts: int) -> dict[str, Any]:
    """What to POST to /tasks. Its rollouts are one group, which does not wait for any that failed."""
    files = {".hidden/grade.py": FOLDER / "grade.py", ".hidden/environment.py": CORRIDOR}
    hidden = {name: path.read_text() for name, path in files.items()}
    grading = {"command": f"python3 .hidden/grade.py {' '.join(doors)}", "reward": "json", "files": hidden}
    return {
        "task_id": task_id,
        "instruction": f"python3 agent.py {' '.join(doors)}",
        "harness": "shell",
        "model": "policy",
        "num_samples": rollouts,
        # The stored logprobs are then exactly those of the policy that sampled.
        "sampling": {"temperature": 1.0, "top_p": 1.0, "top_k": -1},
        "prepare": [_upload("agent.py", FOLDER / "agent.py"), _upload("environment.py", CORRIDOR)],
        # An agent mostly waits for the model.
        "runtime": {"kind": "local", "cpus": 0.1, "memory_mb": 256},
        "evaluator": {"kind": "command", "fresh_runtime": False, "options": grading},
        "group": {"policy": "allow_partial", "minimum": 1, "zero_variance": "keep"},
    }


def _upload(name: str, path: Path) -> dict[str, Any]:
    return {"upload": {"path": name, "text": path.read_text()}}
