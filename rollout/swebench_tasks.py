"""Rows of SWE-bench data sets as tasks.

A row is what `datasets.load_dataset("SWE-bench/SWE-bench_Verified", split="test")` yields, or the package's own task repositories: since
swebench 5 it carries its image and its eval script. Of the row only what grading needs goes into the task: the reference patch stays
where it is.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from rollout.evaluators.swebench import FIELDS
from rollout.task import Budgets, EvaluatorSpec, HarnessSpec, RuntimeSpec, Task

REPOSITORY = "/testbed"
RESULT = "/agent-result"
"""Where the agent's repository is put in the fresh runtime, beside the image's own."""

INSTRUCTION = """The repository in {repository} has the problem described below. Change its code so that the problem is solved. Do not
change its tests; others will be run.

{problem_statement}"""

BUDGETS = Budgets(agent=3600.0, evaluation=1860.0, total=9000.0)
"""The package gives tests 1800 seconds."""


class BadInstance(Exception):
    """The row lacks what a task needs. Names the row and the columns."""


def swebench_task(
    instance: Mapping[str, Any],
    harness: HarnessSpec,
    *,
    task_id: str | None = None,
    runtime_kind: str = "docker",
    runtime: RuntimeSpec | None = None,
    instruction: str = INSTRUCTION,
    mode: str = "resolved",
    **fields: Any,
) -> Task:
    """The task of `instance`. `runtime` gives everything but image and workdir; `instruction` has {repository} and {problem_statement};
    `mode` is the evaluator's; `fields` are further fields of `Task`. Raises `BadInstance`."""
    missing = [name for name in ("problem_statement", *FIELDS) if instance.get(name) in (None, "")]
    if missing:
        raise BadInstance(f"the row {instance.get('instance_id')!r} lacks {', '.join(missing)}: rows of swebench 5 have them")
    place = runtime or RuntimeSpec(kind=runtime_kind, cpus=2.0, memory_mb=8192)
    agents = replace(place, image=instance["image"], workdir=REPOSITORY)
    statement = instruction.replace("{repository}", REPOSITORY)
    kept = {name: instance[name] for name in FIELDS}
    if instance.get("image_assets"):
        kept["image_assets"] = instance["image_assets"]
    task = Task(
        task_id=task_id or instance["instance_id"],
        instruction=statement.replace("{problem_statement}", instance["problem_statement"]),
        harness=harness,
        evaluator=EvaluatorSpec(
            "swebench",
            {"instance": kept, "mode": mode, "repository": REPOSITORY, "result": RESULT},
            runtime=replace(agents, workdir=RESULT, network="full"),
        ),
        runtime=agents,
        budgets=BUDGETS,
        metadata={"swebench": {name: instance[name] for name in ("instance_id", "repo", "version")}},
    )
    return replace(task, **fields)
