"""What a generation needs, checked before anything starts: its runtimes and every harness once in each, readable paths, disks, engines.

A harness that is missing or cannot be installed would fail every attempt for the same reason."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Sequence
from uuid import uuid4

from cli.checks import Check, check_disks, check_readable, check_runtimes
from cli.control import CommandClient
from cli.engine_access import PROBE_SECONDS, check_engine, open_engine_client
from cli.generation.attempts import Input
from cli.generation.folder import GenerationFolder
from cli.serving.own_service import NODE_NAME
from contract.attempts import AttemptId
from contract.tasks import RuntimeSpec, Task
from rollout.attempts import RolloutFailed, node_prefix, runtime_name
from rollout.harnesses.catalogue import find_definition
from rollout.logs import AttemptLogs
from rollout.runtimes import catalogue
from rollout.runtimes.base import ProxyAddress, RuntimeFailed
from rollout.runtimes.settings import read_environment
from rollout.steps import HarnessRun, install_harness, remove

NOWHERE = ProxyAddress("127.0.0.1", 9)
"""No model is called."""


def list_kinds(inputs: Sequence[Input]) -> list[str]:
    """The kinds of runtimes that their harnesses and evaluators need."""
    return sorted({kind for each in inputs for kind in _kinds_of(each)})


def _kinds_of(task: Input) -> set[str]:
    evaluator = task.body.get("evaluator")
    given = [task.body.get("runtime"), evaluator.get("runtime") if isinstance(evaluator, dict) else None]
    kinds = {one if isinstance(one, str) else one.get("kind", RuntimeSpec().kind) for one in given if one}
    return kinds or {RuntimeSpec().kind}


async def check_own_node(
    inputs: Sequence[Input],
    engines: Sequence[str],
    folder: GenerationFolder,
    say: Callable[[str], object],
) -> list[Check]:
    """For a service and a node of the generation's own. An engine that does not answer yet is only noted: it is waited for."""
    wanted = {each.body.get("model") for each in inputs}
    with open_engine_client(PROBE_SECONDS) as client:
        checks = [check_engine(engine, client, wanted) for engine in engines]
    checks += [*check_disks(folder.path), *check_readable(read_environment())]
    runtimes = await check_runtimes(list_kinds(inputs))
    working = [each.about.split()[-1] for each in runtimes if each.state != "fix"]
    return [*checks, *runtimes, *await _check_harnesses(inputs, working, folder, say)]


def check_nodes(inputs: Sequence[Input], control: CommandClient) -> list[Check]:
    """For a running service. Nodes may start later, so a kind of runtime that none offers is only noted. Raises `Refusal`."""
    nodes = control.get("/nodes")["nodes"]
    checks = [Check("service", "ok", control.url)]
    for kind in list_kinds(inputs):
        names = [node["name"] for node in nodes if kind in node["runtimes"] and not node["draining"]]
        if names:
            checks.append(Check(f"runtime {kind}", "ok", f"on {len(names)} nodes: {', '.join(names[:5])}"))
        else:
            checks.append(
                Check(f"runtime {kind}", "note", "no node offers it", "attempts wait until verbatim node runs somewhere")
            )
    return checks


async def _check_harnesses(
    inputs: Sequence[Input], kinds: Sequence[str], folder: GenerationFolder, say: Callable[[str], object]
) -> list[Check]:
    """Install each input's harness in a runtime of its kind. Not tried are harnesses that run the task's own command, and inputs whose
    prepare steps may bring the harness."""
    checks = []
    tried = set()
    for each in inputs:
        task = each.parse()
        key = (repr(task.harness), task.runtime.kind)
        if key in tried or task.runtime.kind not in kinds:
            continue
        about = f"harness {task.harness.name}"
        if find_definition(task.harness).takes_command:
            checks.append(Check(about, "ok", "runs each task's own command"))
        elif task.prepare:
            continue
        else:
            say(f"looking for {task.harness.name} in a runtime of kind {task.runtime.kind}")
            checks.append(await _try_harness(each.number, task, folder))
        tried.add(key)
    return checks


async def _try_harness(line: int, task: Task, folder: GenerationFolder) -> Check:
    about = f"harness {task.harness.name}"
    try:
        await _install(task, folder)
    except (RolloutFailed, RuntimeFailed) as error:
        return Check(about, "fix", f"line {line}: {error}", _advise(task))
    return Check(about, "ok", f"there in a runtime of kind {task.runtime.kind}")


def _advise(task: Task) -> str:
    """What to do if the harness is on this machine but invisible in its sandbox."""
    found = shutil.which(find_definition(task.harness).argv[0])
    if found is None or task.runtime.kind != "local":
        return ""
    return f"this machine has {found}: name what it needs in VERBATIM_LOCAL_READABLE, and its folder in VERBATIM_LOCAL_PATH"


async def _install(task: Task, folder: GenerationFolder) -> None:
    trial = AttemptId(f"trial-{uuid4().hex[:12]}", 0, 1)
    logs = AttemptLogs(NODE_NAME, folder.data / "trial", trial)
    logs.make()
    # The node's own prefix: it removes what a killed trial leaves.
    prefix = node_prefix(NODE_NAME, folder.id)
    kind, definition = catalogue.load(task.runtime.kind), find_definition(task.harness)
    installed = await install_harness(kind, task, definition, runtime_name(prefix, trial, "i"), NOWHERE, logs)
    runtime = kind.make(installed.spec, runtime_name(prefix, trial, "r"), NOWHERE)
    await runtime.start()
    try:
        await HarnessRun(definition, task, runtime, logs, installed.failure).install()
    finally:
        await remove(runtime)
