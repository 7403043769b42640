"""A task folder in Harbor's format on a node whose runtimes are containers: from its files to what a trainer is given."""

from __future__ import annotations

import re
import shutil
import sys
from dataclasses import replace
from pathlib import Path

from contract.tasks import Exec, HarnessSpec, Task, Upload
from rollout.attempts import node_prefix
from rollout.task_sources import harbor_task
from tests import ROOT
from tests.support.runtimes.rollout_nodes import ASK, World
from tests.support.runtimes.runtime_places import Place, contained
from tests.support.service.running_service import TRAINER

FOLDER = ROOT / "tests/support/runtimes/formats/harbor_slugify"
NOT_ALL = "s/tr 'A-Z' 'a-z' | //"
"""Without it great letters go: one of four answers is right."""


def harbor(place: Place, folder: Path, task_id: str, change: str) -> Task:
    """The folder's own solution, changed, is what the agent does; the image has nothing of the folder in it."""
    copied = Path(shutil.copytree(FOLDER, folder / task_id))
    config = copied / "task.toml"
    config.write_text(re.sub(r"\n\[\[environment.mcp_servers.*", "\n", config.read_text(), flags=re.DOTALL))
    given = harbor_task(copied, HarnessSpec("shell"), task_id=task_id, image=place.spec.image, variables={"OWNER": "us"})
    ask = ASK.replace(sys.executable, "python3")
    titles = Upload("titles.txt", (FOLDER / "environment" / "titles.txt").read_bytes())
    solution = Upload("/tmp/solve.sh", (FOLDER / "solution" / "solve.sh").read_bytes())
    prepare = (titles, solution, Exec(f'sed -i "{change}" /tmp/solve.sh'))
    done = f'{ask}\ntest "$PWD $OWNER" = "/app us" && sh /tmp/solve.sh'
    return replace(given, instruction=done, prepare=prepare, runtime=replace(given.runtime, cpus=0.5))


async def test_a_harbor_task_becomes_rows_with_its_verifiers_reward(world: World, tmp_path: Path) -> None:
    place = contained(tmp_path)
    tasks = [harbor(place, tmp_path, "all", ""), harbor(place, tmp_path, "part", NOT_ALL)]
    for task in tasks:
        await world.submit(task)
    async with world.node(kinds={"docker": place.kind}):
        (whole,), (part,) = [await world.ended(task) for task in tasks]
    assert (whole.status, whole.verdict.reward) == ("completed", 1.0), whole.verdict
    assert (part.status, part.verdict.reward) == ("completed", 0.25), part.verdict
    leased = world.service.request("POST", "/batches/lease", TRAINER, json={"max_groups": 2}).json()
    rewards = {row["session_id"]: row["reward"] for group in leased["groups"] for row in group["trajectories"]}
    assert rewards == {"all.0.1": 1.0, "part.0.1": 0.25}
    assert await place.kind.sweep(node_prefix("n", world.service.url)) == 0, "no container is left"
