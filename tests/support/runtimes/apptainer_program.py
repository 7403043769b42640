"""A command line like apptainer's, as far as runtimes use it: `python apptainer_program.py STATE_FOLDER ARGV...`.

It takes the options that apptainer documents and no others, writes every call down, and makes each instance a `bwrap_container` with the
binds and the network it was asked for, in which commands really run. Every command in an instance is a call, so what only starting and
stopping need is imported there."""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import sys
from collections.abc import Coroutine
from pathlib import Path
from typing import Any

from tests.support.runtimes.bwrap_words import ENV, entering, filtered, view

FIRST = """
import signal, sys
signal.signal(signal.SIGCHLD, signal.SIG_IGN)
signal.signal(signal.SIGTERM, lambda *_: sys.exit())
while True:
    signal.pause()
"""
"""As the first process of an instance does, it waits for what is left to it."""


def parsed(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="apptainer", allow_abbrev=False)
    parser.add_argument("--silent", action="store_true")
    actions = parser.add_subparsers(dest="action", required=True)
    execute = actions.add_parser("exec", allow_abbrev=False)
    execute.add_argument("--cleanenv", action="store_true")
    execute.add_argument("--pwd")
    execute.add_argument("--env", action="append", default=[])
    execute.add_argument("image")
    execute.add_argument("argv", nargs=argparse.REMAINDER)
    instance = actions.add_parser("instance", allow_abbrev=False).add_subparsers(dest="what", required=True)
    listed = instance.add_parser("list", allow_abbrev=False)
    listed.add_argument("--json", action="store_true")
    stop = instance.add_parser("stop", allow_abbrev=False)
    stop.add_argument("--force", action="store_true")
    stop.add_argument("name")
    start = instance.add_parser("start", allow_abbrev=False)
    for flag in ("userns", "fakeroot", "containall", "cleanenv", "net", "writable-tmpfs"):
        start.add_argument(f"--{flag}", action="store_true")
    for option in (
        "no-mount",
        "security",
        "home",
        "workdir",
        "overlay",
        "cpus",
        "memory",
        "memory-swap",
        "pids-limit",
        "network",
    ):
        start.add_argument(f"--{option}")
    start.add_argument("--bind", action="append", default=[])
    start.add_argument("image")
    start.add_argument("name")
    return parser.parse_args(argv)


def fatal(message: str) -> int:
    sys.stderr.write(f"FATAL:   {message}\n")
    return 255


async def started(state: Path, told: argparse.Namespace) -> int:
    from contract.tasks import RuntimeSpec
    from rollout.runtimes.local.resources import Resources, find_hierarchies
    from tests.support.runtimes.bwrap_container import Container

    calls = _find_filter(told.security)
    if (state / told.name).exists():
        return fatal(f"instance {told.name} already exists")
    if told.image.startswith("missing"):
        return fatal(f"could not open image {told.image}: no such file or directory")
    if told.network and not told.net:
        return fatal("--network takes --net")
    binds = {}
    for source, inside, *_ in (each.split(":") for each in (*told.bind, told.home)):
        binds[inside] = source
    for name, inside in (("tmp", "/tmp"), ("var_tmp", "/var/tmp")):
        binds[inside] = f"{told.workdir}/{name}"
        os.mkdir(binds[inside])
    where = find_hierarchies(None)
    limits = Resources(RuntimeSpec(cpus=2.0, memory_mb=int(told.memory) >> 20), told.name, where)
    limits.make()
    container = Container(lambda: limits.hold(os.getpid()), before=filtered(calls))
    await container.start(
        ["--unshare-user", *view(binds, network=told.network != "none")], ["python3", "-c", FIRST], stays=True
    )
    groups = [str(each.folder / told.name) for each in where]
    entry = {"instance": told.name, "pid": container.pid, "img": told.image, "groups": groups, "calls": calls.hex()}
    (state / told.name).write_text(json.dumps(entry))
    return 0


def executed(state: Path, told: argparse.Namespace) -> None:
    """Becomes the command."""
    name = told.image.removeprefix("instance://")
    if not (state / name).exists():
        sys.exit(fatal(f"no instance found with name {name}"))
    entry = json.loads((state / name).read_text())
    for group in entry["groups"]:
        Path(group, "cgroup.procs").write_text(str(os.getpid()))
    own = {"APPTAINER_NAME": name, "APPTAINER_BIND": "/of/the/node", "SINGULARITY_CONTAINER": "/of/the/node"}
    env = {**ENV, **own, "HOME": "/home/agent", **dict(each.split("=", 1) for each in told.env)}
    os.execve(
        shutil.which("nsenter") or "nsenter",
        [*entering(entry["pid"], "--user", "--preserve-credentials"), *filtered(bytes.fromhex(entry["calls"])), *told.argv],
        env,
    )


def _find_filter(security: str) -> bytes:
    """The program that holds the same as the profile, which must be the project's own."""
    from rollout.runtimes import seccomp

    how, _, path = security.partition(":")
    assert (how, Path(path).read_text()) == ("seccomp", seccomp.render_profile(clone3=True))
    machine = seccomp.find_machine()
    assert machine is not None
    return seccomp.compile_filter(machine, shared_memory=True)


async def stopped(state: Path, name: str) -> int:
    if not (state / name).exists():
        return fatal(f"no instance found with name {name}")
    import asyncio

    from rollout.runtimes.local.resources import remove_groups
    from rollout.runtimes.processes import find_parent

    entry = json.loads((state / name).read_text())
    os.kill(entry["pid"], signal.SIGKILL)
    while find_parent(entry["pid"]) is not None:
        await asyncio.sleep(0.01)
    await remove_groups(Path(group) for group in entry["groups"])
    (state / name).unlink()
    return 0


def main() -> int:
    state, told = Path(sys.argv[1]), parsed(sys.argv[2:])
    with (state.parent / "calls").open("a") as calls:
        calls.write(json.dumps(sys.argv[2:]) + "\n")
    if told.action == "exec":
        executed(state, told)
    if told.what == "start":
        return _run(_then_leave(started(state, told)))
    if told.what == "stop":
        return _run(stopped(state, told.name))
    sys.stdout.write(json.dumps({"instances": [json.loads(each.read_text()) for each in sorted(state.iterdir())]}))
    return 0


def _run(what: Coroutine[Any, Any, int]) -> int:
    import asyncio
    import site

    # Left out at the start (-S) for the calls that run a command.
    site.main()

    return asyncio.run(what)


async def _then_leave(what: Coroutine[Any, Any, int]) -> int:
    """Leaves at once: an event loop that ends would end its processes."""
    code = await what
    sys.stderr.flush()
    os._exit(code)


if __name__ == "__main__":
    sys.exit(main())
