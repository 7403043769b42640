"""Tasks from Harbor and Terminal-Bench task folders, and from rows of SWE-bench data sets.

Harbor folders (task.toml, instruction.md, environment/, tests/test.sh) are read as Harbor 0.25 reads them (`harbor.models.task.config`).
Unsupported features are refused by name: several steps, compose files, Windows, accelerators, other users, allow-lists of hosts, and
a verifier in a separate environment. Artifacts are not collected, as the verdict does not depend on them. Images are not built: a
folder with only a Dockerfile needs `image`.

Terminal-Bench folders (task.yaml, docker-compose.yaml, run-tests.sh, tests/) are read as terminal-bench 0.2.18 reads them
(`terminal_bench.handlers.trial_handler`, `terminal_bench.harness`), and become tasks of the evaluator `harbor`. Refused by name are several
services, settings of the service beyond its image, other parsers than pytest's, and tests in the agent's own shell.
"""

from __future__ import annotations

import base64
import os
import re
import tomllib
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from contract.tasks import Budgets, EvaluatorSpec, Exec, HarnessSpec, McpServer, Network, RuntimeSpec, Task, Upload
from rollout.evaluators.swebench import FIELDS

DEFAULT_AGENT_SECONDS = 1800.0
DEFAULT_VERIFIER_SECONDS = 600.0
SPARE_SECONDS = 60.0
"""Added to the verifier's time in the evaluation's budget, for uploading the tests."""

_TEMPLATE = re.compile(r"\$\{([^}:]+)(?::-(.*))?\}")
_WORKDIR = re.compile(r"^\s*WORKDIR\s+(\S+)\s*$", re.IGNORECASE | re.MULTILINE)
_NETWORKS: dict[str, Network] = {"public": "full", "no-network": "proxy"}


class BadTaskFolder(Exception):
    """The folder is not a task, or not one that can run here. Names the folder and the reason."""


def _read_file(folder: Path, path: Path) -> tuple[bytes, int]:
    """Content and mode of a file of the folder: the one way in which any is read. What the file says is shown to an agent, so no link may
    make it another of the machine's. Raises `BadTaskFolder`."""
    try:
        real = path.resolve(strict=True)
        if not real.is_relative_to(folder.resolve()):
            raise BadTaskFolder(f"{path} leads out of the task's folder")
        if not real.is_file():
            raise BadTaskFolder(f"{path} is not a file")
        with open(os.open(real, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC), "rb") as file:
            return file.read(), os.fstat(file.fileno()).st_mode
    except (OSError, RuntimeError) as error:
        raise BadTaskFolder(f"{path} cannot be read: {error}") from error


def _read_text(folder: Path, name: str) -> str:
    try:
        return _read_file(folder, folder / name)[0].decode()
    except UnicodeDecodeError as error:
        raise BadTaskFolder(f"{folder}/{name} cannot be read: {error}") from error


HARBOR_WORKDIR = "/app"
HARBOR_PLACES = ["/app", "/logs", "/solution", "/tests"]
"""Folders that tasks and verifiers of Harbor's take for granted."""


def harbor_task(
    folder: Path,
    harness: HarnessSpec,
    *,
    task_id: str | None = None,
    image: str | None = None,
    runtime_kind: str = "docker",
    variables: Mapping[str, str] | None = None,
    **fields: Any,
) -> Task:
    """The task of `folder`. `image` overrides the folder's; `variables` are the values of `${NAME}`; `fields` are further fields of `Task`.
    With the runtime kind `local` nothing is built: the node's own programs are there, and the files beside the Dockerfile in the workdir.
    Raises `BadTaskFolder`."""
    config = _read_config(folder)
    environment, verifier = config.get("environment", {}), config.get("verifier", {})
    _refuse(folder, config)
    seconds = float(verifier.get("timeout_sec", DEFAULT_VERIFIER_SECONDS))
    network = _read_network(folder, environment, "public")
    options: dict[str, Any] = {
        "tests": _read_tests(folder),
        "env": _resolve(folder, verifier.get("env", {}), variables or {}),
        "timeout_seconds": seconds,
        "network": _read_network(folder, verifier, network),
    }
    runtime = _read_runtime(folder, config, image, runtime_kind, network)
    if (runtime.network, options["network"]) == ("full", "proxy"):
        raise BadTaskFolder(
            f"{folder} keeps its verifier from a network that its agent has: that cannot be had in one container"
        )
    task = Task(
        task_id=task_id or _derive_task_id(folder, config),
        instruction=_read_text(folder, "instruction.md"),
        harness=replace(harness, mcp_servers=(*harness.mcp_servers, *_read_mcp_servers(folder, environment))),
        evaluator=EvaluatorSpec("harbor", options, fresh_runtime=False),
        runtime=runtime,
        prepare=(*(_upload_context(folder) if runtime.kind == "local" else ()), *_wait_until_healthy(environment)),
        environment=_resolve(folder, environment.get("env", {}), variables or {}),
        budgets=_set_budgets(config, seconds),
        metadata={"harbor": {"task": config.get("task", {}).get("name", folder.name), **config.get("metadata", {})}},
    )
    return replace(task, **fields)


def _read_config(folder: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(_read_text(folder, "task.toml"))
    except tomllib.TOMLDecodeError as error:
        raise BadTaskFolder(f"{folder}/task.toml: {error}") from error


def _refuse(folder: Path, config: Mapping[str, Any]) -> None:
    environment, verifier, agent = (config.get(name, {}) for name in ("environment", "verifier", "agent"))
    unsupported = {
        "several steps": config.get("steps"),
        "a docker-compose.yaml": (folder / "environment" / "docker-compose.yaml").exists(),
        "a trajectory.json, from which its agent goes on": (folder / "trajectory.json").exists(),
        "environment.os other than linux": str(environment.get("os", "linux")).lower() != "linux",
        "accelerators": environment.get("gpus") or environment.get("tpu"),
        "environment.skills_dir": environment.get("skills_dir"),
        "a verifier in a separate environment": verifier.get("environment") or verifier.get("environment_mode") == "separate",
        "verifier.collect": verifier.get("collect"),
        "verifier.user or agent.user": verifier.get("user") or agent.get("user"),
    }
    if found := [what for what, there in unsupported.items() if there]:
        raise BadTaskFolder(f"{folder} has {', and '.join(found)}: that cannot be run here")


def _read_tests(folder: Path) -> dict[str, Any]:
    """The files of `tests/`, as the evaluator's option takes them."""
    root = folder / "tests"
    if not (root / "test.sh").is_file():
        raise BadTaskFolder(f"{folder} has no tests/test.sh")
    files: dict[str, Any] = {}
    for path in sorted(root.rglob("*")):
        if not path.is_dir() or path.is_symlink():
            files[path.relative_to(root).as_posix()] = _read_content(folder, path)
    return files


def _read_content(folder: Path, path: Path) -> dict[str, Any]:
    content, mode = _read_file(folder, path)
    executable = bool(mode & 0o111)
    try:
        return {"text": content.decode(), "executable": executable}
    except UnicodeDecodeError:
        return {"base64": base64.b64encode(content).decode(), "executable": executable}


def _resolve(folder: Path, values: Mapping[str, Any], variables: Mapping[str, str]) -> dict[str, str]:
    """Replace values that are exactly `${NAME}` or `${NAME:-default}`."""
    resolved = {}
    for name, value in values.items():
        found = _TEMPLATE.fullmatch(str(value))
        if found and found[1] not in variables and found[2] is None:
            raise BadTaskFolder(f"{folder} needs the variable {found[1]}, which was not given")
        resolved[name] = variables.get(found[1], found[2] or "") if found else str(value)
    return resolved


def _derive_task_id(folder: Path, config: Mapping[str, Any]) -> str:
    name = str(config.get("task", {}).get("name", folder.resolve().name))
    return re.sub(r"[^A-Za-z0-9._-]+", "-", name).strip("-_.")[:100] or "harbor"


def _read_network(folder: Path, section: Mapping[str, Any], default: str) -> Network:
    """From a section's network_mode, or allow_internet in older tasks."""
    mode = section.get("network_mode")
    if mode is None and section.get("allow_internet") is not None:
        mode = "public" if section["allow_internet"] else "no-network"
    if mode is None:
        return "full" if default in ("public", "full") else "proxy"
    if mode not in _NETWORKS:
        raise BadTaskFolder(f"{folder}: the network mode {mode!r} cannot be had here: public and no-network can")
    return _NETWORKS[mode]


def _read_runtime(folder: Path, config: Mapping[str, Any], image: str | None, kind: str, network: Network) -> RuntimeSpec:
    environment = config.get("environment", {})
    workdir = environment.get("workdir") or _find_workdir(folder)
    options: dict[str, Any] = {}
    if kind == "local":
        if image:
            raise BadTaskFolder(f"{folder}: a local runtime has no image ({image}): leave it out")
        workdir, options = workdir or HARBOR_WORKDIR, {"places": HARBOR_PLACES}
    elif not (image := image or environment.get("docker_image")):
        raise BadTaskFolder(f"{folder} names no docker_image: build its environment/Dockerfile and give the image's name")
    return RuntimeSpec(
        kind=kind,
        image=image,
        options=options,
        cpus=float(environment.get("cpus") or 1),
        memory_mb=int(environment.get("memory_mb") or _parse_megabytes(environment.get("memory")) or 2048),
        disk_mb=environment.get("storage_mb") or _parse_megabytes(environment.get("storage")),
        network=_read_network(folder, config.get("agent", {}), network),
        workdir=workdir,
    )


def _upload_context(folder: Path) -> tuple[Upload, ...]:
    """What a Dockerfile could copy, into the workdir."""
    root = folder / "environment"
    files = sorted(path for path in root.rglob("*") if not path.is_dir() and path != root / "Dockerfile")
    uploads = []
    for path in files:
        content, mode = _read_file(folder, path)
        uploads.append(Upload(path.relative_to(root).as_posix(), content, mode=mode & 0o777))
    return tuple(uploads)


def _parse_megabytes(size: str | None) -> int | None:
    """From a size as older tasks write it: 2G, 512M."""
    if size is None:
        return None
    found = re.fullmatch(r"([\d.]+)\s*([GMK])B?", size.strip().upper())
    if found is None:
        raise BadTaskFolder(f"{size!r} is no size: 2G and 512M are")
    return int(float(found[1]) * {"G": 1024, "M": 1, "K": 1 / 1024}[found[2]])


def _find_workdir(folder: Path, dockerfile: str = "environment/Dockerfile") -> str | None:
    """The image's working directory; None if the Dockerfile does not give it as a plain absolute path."""
    path = folder / dockerfile
    found = _WORKDIR.findall(_read_text(folder, dockerfile)) if path.exists() else []
    return found[-1] if found and found[-1].startswith("/") and "$" not in found[-1] else None


def _read_mcp_servers(folder: Path, environment: Mapping[str, Any]) -> tuple[McpServer, ...]:
    servers = []
    for server in environment.get("mcp_servers", []):
        if server.get("headers"):
            raise BadTaskFolder(f"{folder}: the headers of the MCP server {server.get('name')!r} cannot be passed on")
        command = (server["command"], *server.get("args", [])) if server.get("command") else ()
        servers.append(McpServer(server["name"], command=command, url=server.get("url")))
    return tuple(servers)


def _wait_until_healthy(environment: Mapping[str, Any]) -> tuple[Exec, ...]:
    """A prepare step that waits until the environment is healthy."""
    check = environment.get("healthcheck")
    if not check:
        return ()
    retries, pause = int(check.get("retries", 3)), float(check.get("interval_sec", 5.0))
    start = float(check.get("start_period_sec", 0.0))
    tries = retries + int(start // pause if pause else 0)
    line = f"n=0; until ({check['command']}); do n=$((n+1)); [ $n -ge {tries} ] && exit 1; sleep {pause:g}; done"
    return (Exec(line, timeout_seconds=tries * (pause + float(check.get("timeout_sec", 30.0)))),)


def _set_budgets(config: Mapping[str, Any], verifier_seconds: float) -> Budgets:
    agent = float(config.get("agent", {}).get("timeout_sec") or DEFAULT_AGENT_SECONDS)
    evaluation = verifier_seconds + SPARE_SECONDS
    return Budgets(agent=agent, evaluation=evaluation, total=Budgets().prepare + agent + evaluation)


# Terminal-Bench


TERMINAL_AGENT_SECONDS = 360.0
TERMINAL_TEST_SECONDS = 60.0
RUN_TESTS = "run-tests.sh"

TERMINAL_SCRIPT = """#!/bin/bash
# Terminal-Bench's verdict: every test of pytest's summary passed, was skipped, or failed as expected; without a summary none did.
TEST_DIR=$(cd "$(dirname "$0")" && pwd)
export TEST_DIR
log=$(mktemp)
bash "$TEST_DIR/run-tests.sh" 2>&1 | tee "$log"
summary=$(sed -n '/=\\+ *short test summary info *=\\+/I,$p' "$log")
reward=1
if [ -z "$summary" ]; then echo "the tests printed no short test summary"; reward=0; fi
if printf '%s\\n' "$summary" | grep -Eq '^(FAILED|ERROR|XPASS):? '; then reward=0; fi
echo $reward > /logs/verifier/reward.txt
"""

_SERVICE_FIELDS = {"build", "image", "container_name", "command", "environment", "volumes", "working_dir", "deploy"}
_OWN_VARIABLE = re.compile(r"\$\{T_BENCH_\w+\}")


def terminal_bench_task(
    folder: Path,
    harness: HarnessSpec,
    *,
    task_id: str | None = None,
    image: str | None = None,
    runtime_kind: str = "docker",
    **fields: Any,
) -> Task:
    """The task of `folder`. `image` is what its Dockerfile builds; `fields` are further fields of `Task`. Raises `BadTaskFolder`."""
    config, service = _read_yaml(folder, "task.yaml"), _read_service(folder)
    _refuse_terminal(folder, config, service)
    image = image or _plain(service.get("image"))
    if not image:
        raise BadTaskFolder(f"{folder} names no image: build its Dockerfile and give the image's name")
    variables = _read_variables(service.get("environment") or {})
    test_seconds = float(config.get("max_test_timeout_sec") or TERMINAL_TEST_SECONDS)
    options: dict[str, Any] = {
        "tests": {**_read_terminal_tests(folder), "test.sh": {"text": TERMINAL_SCRIPT, "executable": True}},
        "env": variables,
        "timeout_seconds": test_seconds,
        "timeout_reward": 0.0,
        "network": "full",
    }
    limits = (service.get("deploy") or {}).get("resources", {}).get("limits", {})
    agent_seconds = float(config.get("max_agent_timeout_sec") or TERMINAL_AGENT_SECONDS)
    evaluation_seconds = test_seconds + SPARE_SECONDS
    about = {name: config[name] for name in ("difficulty", "category", "tags") if config.get(name)}
    task = Task(
        task_id=task_id or re.sub(r"[^A-Za-z0-9._-]+", "-", folder.resolve().name).strip("-_.")[:100] or "terminal-bench",
        instruction=config["instruction"],
        harness=harness,
        evaluator=EvaluatorSpec("harbor", options, fresh_runtime=False),
        runtime=RuntimeSpec(
            kind=runtime_kind,
            image=image,
            cpus=float(limits.get("cpus") or 1),
            memory_mb=_parse_megabytes(_plain(limits.get("memory"))) or 2048,
            network="full",
            workdir=_plain(service.get("working_dir")) or _find_workdir(folder, "Dockerfile"),
        ),
        environment=variables,
        budgets=Budgets(
            agent=agent_seconds,
            evaluation=evaluation_seconds,
            total=Budgets().prepare + agent_seconds + evaluation_seconds,
        ),
        metadata={"terminal_bench": {"task": folder.resolve().name, **about}},
    )
    return replace(task, **fields)


def _read_yaml(folder: Path, name: str) -> dict[str, Any]:
    import yaml

    try:
        found = yaml.safe_load(_read_text(folder, name))
    except yaml.YAMLError as error:
        raise BadTaskFolder(f"{folder}/{name} cannot be read: {error}") from error
    if not isinstance(found, dict):
        raise BadTaskFolder(f"{folder}/{name} is not a mapping")
    return found


def _read_service(folder: Path) -> dict[str, Any]:
    """The container that the agent works in; an empty one if the folder has no compose file."""
    if not (folder / "docker-compose.yaml").exists():
        return {}
    services = _read_yaml(folder, "docker-compose.yaml").get("services") or {}
    if len(services) != 1:
        raise BadTaskFolder(f"{folder} has {len(services)} services: that cannot be run here")
    (service,) = services.values()
    return dict(service or {})


def _refuse_terminal(folder: Path, config: Mapping[str, Any], service: Mapping[str, Any]) -> None:
    volumes = [volume for volume in service.get("volumes") or () if not _OWN_VARIABLE.match(str(volume))]
    unsupported = {
        "no instruction": not isinstance(config.get("instruction"), str) or not config["instruction"].strip(),
        f"parser_name {config.get('parser_name')}": config.get("parser_name") not in (None, "pytest"),
        "run_tests_in_same_shell": config.get("run_tests_in_same_shell"),
        f"a service with {', '.join(sorted(service.keys() - _SERVICE_FIELDS))}": service.keys() - _SERVICE_FIELDS,
        "volumes of its own": volumes,
        f"no {RUN_TESTS}": not (folder / RUN_TESTS).is_file(),
    }
    if found := [what for what, there in unsupported.items() if there]:
        raise BadTaskFolder(f"{folder} has {', and '.join(found)}: that cannot be run here")


def _read_terminal_tests(folder: Path) -> dict[str, Any]:
    """The contents of `tests/` and the script beside it, together in one folder as in Terminal-Bench."""
    root = folder / "tests"
    paths = {
        path.relative_to(root).as_posix(): path for path in sorted(root.rglob("*")) if path.is_symlink() or not path.is_dir()
    }
    return {name: _read_content(folder, path) for name, path in {**paths, RUN_TESTS: folder / RUN_TESTS}.items()}


def _plain(value: Any) -> str | None:
    """The value, unless Terminal-Bench would fill in one of its own."""
    return None if value is None or "${" in str(value) else str(value)


def _read_variables(given: Any) -> dict[str, str]:
    """From either form of a service's `environment`, without Terminal-Bench's own."""
    pairs = given.items() if isinstance(given, Mapping) else (str(each).partition("=")[::2] for each in given)
    return {str(name): str(value) for name, value in pairs if not _OWN_VARIABLE.search(str(value))}


# SWE-bench: a row as `datasets.load_dataset("SWE-bench/SWE-bench_Verified", split="test")` yields it, with image and eval script since
# swebench 5. Only what grading needs goes into the task: the reference patch stays out.


REPOSITORY = "/testbed"
RESULT = "/agent-result"
"""Where the agent's repository is put in the fresh runtime, beside the image's."""

INSTRUCTION = """The repository in {repository} has the problem described below. Change its code so that the problem is solved. Do not
change its tests; others will be run.

{problem_statement}"""

BUDGETS = Budgets(agent=3600.0, evaluation=1860.0, total=9000.0)
"""The swebench package gives tests 1800 seconds."""


class BadInstance(Exception):
    """The row lacks columns. Names the row and the columns."""


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
    """The task of `instance`. `runtime` gives all but image and workdir; `instruction` has {repository} and {problem_statement}; `mode` is
    the evaluator's option; `fields` are further fields of `Task`. Raises `BadInstance`."""
    missing = [name for name in ("problem_statement", *FIELDS) if instance.get(name) in (None, "")]
    if missing:
        raise BadInstance(f"the row {instance.get('instance_id')!r} lacks {', '.join(missing)}: rows of swebench 5 have them")
    place = runtime or RuntimeSpec(kind=runtime_kind, cpus=2.0, memory_mb=8192)
    agent_runtime = replace(place, image=instance["image"], workdir=REPOSITORY)
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
            runtime=replace(agent_runtime, workdir=RESULT, network="full"),
        ),
        runtime=agent_runtime,
        budgets=BUDGETS,
        metadata={"swebench": {name: instance[name] for name in ("instance_id", "repo", "version")}},
    )
    return replace(task, **fields)
