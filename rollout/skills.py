"""Skills of a task, put where its harness looks for them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import PurePosixPath

from rollout.harness_run import HarnessRun
from rollout.preparing import put


async def put_skills(harness: HarnessRun) -> None:
    """Raises `RolloutFailed` for one that cannot be read."""
    folder = PurePosixPath(harness.runtime.home) / harness.harness.skills
    for skill in harness.task.harness.skills:
        await put(replace(skill, path=str(folder / skill.path)), harness.runtime)
