"""`verbatim doctor`: what works here, and what to do about what does not."""

from __future__ import annotations

import asyncio
import logging
import os
import platform
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from email.utils import parsedate_to_datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from cli.checks import EXTRAS, Check, check_disks, check_harness, check_readable, check_runtimes, print_checks
from cli.engine_access import PROBE_SECONDS, check_engine, open_engine_client
from cli.options import AsJson, OfRun, ServiceUrl, find_missing, installed_version
from cli.refusal import CommandError
from cli.training import check_training
from reconstruct.extras import how_to_install

if TYPE_CHECKING:
    from cli.control import CommandClient

REPLACE = "install a current valkey-server or redis-server"
INTERPRETERS = ("python3", "node", "sh")
"""A harness whose command is one of these is a script in its own definition: nothing to install."""
UNREADABLE = "a sample of one token could not be read"
"""How the reason begins of an engine that answers and is down; it ends with the way out."""
MOST_SKEW_SECONDS = 5.0
"""A `Date` header is a second coarse, and a busy service may answer late."""


def doctor(
    url: ServiceUrl = None,
    engine: Annotated[
        list[str] | None, typer.Option(metavar="URL", help="Also check this engine, as seen from here. Repeatable.")
    ] = None,
    redis: Annotated[
        str | None,
        typer.Option(envvar="VERBATIM_REDIS", metavar="URL", help="Also check this Redis, as seen from here."),
    ] = None,
    run: OfRun = None,
    as_json: AsJson = False,
) -> None:
    """Check what a service, its engines, a node and this machine need: each line is ok, a note, or what to fix.

    Of a running service it also looks at the last hundred sessions, and says what is lost to training and why.
    Without one it checks this machine alone. The exit code is 1 if something has to be fixed.

    \b
    verbatim doctor
    verbatim doctor --engine http://127.0.0.1:8000 --redis redis://127.0.0.1:6379
    verbatim doctor --json | jq '.[] | select(.state == "fix")'
    """
    from rich.console import Console

    from cli.tables import print_json

    # Libraries warn of what a check reports anyway.
    logging.disable(logging.WARNING)
    checks = [check_version(), *check_extras(), *check_service(url, run)]
    checks += check_engines(engine or ())
    if redis:
        checks += asyncio.run(check_redis(redis))
    elif not find_missing(EXTRAS["proxy"]):
        checks.append(check_embedded_store())
    checks += [*check_node_parts(), *check_disks(Path(os.environ.get("VERBATIM_DATA_DIR") or "verbatim-data"))]
    if as_json:
        print_json([{"about": c.about, "state": c.state, "found": c.found, "advice": c.advice or None} for c in checks])
    else:
        print_checks(Console(), checks)
    if wrong := [check.about for check in checks if check.state == "fix"]:
        raise CommandError(f"to fix: {', '.join(dict.fromkeys(wrong))}")


def check_version() -> Check:
    machine = f"Python {platform.python_version()}, {platform.system()} {platform.machine()}, {os.cpu_count()} CPUs"
    return Check("verbatim", "ok", f"{installed_version()}, {machine}")


def check_extras() -> Iterator[Check]:
    """The optional packages: which are needed depends on what runs on this machine."""
    purposes = {
        "proxy": "verbatim serve",
        "rollout": "verbatim node and generate",
        "archive": "Parquet files",
        "trainer": "tensors and weight pushes",
    }
    there = [extra for extra, modules in EXTRAS.items() if not find_missing(modules)]
    if there:
        yield Check("packages", "ok", f"extras {', '.join(there)}")
    for extra in (extra for extra in EXTRAS if extra not in there):
        missing = ", ".join(find_missing(EXTRAS[extra]))
        yield Check("packages", "note", f"{purposes[extra]}: {missing} not installed", how_to_install(extra))


def check_service(url: str | None, run: str | None = None) -> Iterator[Check]:
    """The service, its clock, its store, its engines, its nodes, and what its last sessions are worth to a trainer."""
    from cli.control import CommandClient, RequestFailed

    is_there = False
    try:
        # Probes need no token, so that a missing one is not taken for a missing service.
        control = CommandClient(url, token="none")
        answer = control.check_health()
        is_there = True
        yield Check("service", "ok", control.url)
        yield from _check_clock(answer.headers.get("date"))
        control = CommandClient(url)
        engines = control.get("/engines")
    except CommandError as refusal:
        if isinstance(refusal, RequestFailed) and refusal.status is None:
            advice = "start it with verbatim serve, or name it with --url or VERBATIM_URL"
            yield Check("service", "note", str(refusal).partition(" (")[0].partition(": ")[0], advice)
        else:
            is_refused = not isinstance(refusal, RequestFailed) or refusal.status == 401
            yield Check("token" if is_there and is_refused else "service", "fix", str(refusal))
        return
    yield Check("token", "ok", "the service knows it as an admin's")
    yield from _check_store(control)
    yield from _check_replicas(engines)
    yield from _check_nodes(control)
    yield from check_training(control, run)


def _check_clock(date: str | None) -> Iterator[Check]:
    if date is None:
        return
    skew = parsedate_to_datetime(date).timestamp() - time.time()
    if abs(skew) > MOST_SKEW_SECONDS:
        advice = "let both machines set theirs by NTP"
        yield Check("clock", "fix", f"the service's clock is {abs(skew):.0f} s {'ahead' if skew > 0 else 'behind'}", advice)
    else:
        yield Check("clock", "ok", "the service's agrees with this machine's")


def _check_store(control: CommandClient) -> Iterator[Check]:
    from cli.control import RequestFailed

    try:
        notes = control.get("/readyz").get("notes", ())
        yield Check("redis", "ok", "the service's answers")
        # Engines have lines of their own.
        yield from (Check("redis", "note", note) for note in notes if not note.startswith("engine "))
    except RequestFailed as failed:
        # It names engines, too, which have lines of their own.
        reasons = [part for part in str(failed).split("; ") if not part.startswith("no engine serves")]
        if reasons and "readyz answered" not in reasons[0]:
            yield Check("redis", "fix", "; ".join(reasons), "start it, or correct --redis of verbatim serve")
        else:
            yield Check("redis", "ok", "the service's answers")


def _check_replicas(engines: dict[str, Any]) -> Iterator[Check]:
    if not engines["replicas"]:
        yield Check("engine", "fix", "the service knows none", "verbatim engines add URL")
    for replica in engines["replicas"]:
        about = f"engine {replica['name']}"
        if replica["status"] in ("down", "stalled"):
            found, advice = replica["reason"] or "down", "start it, or verbatim engines remove it"
            if replica["status"] == "stalled":
                advice = "look at its log, restart it"
            if found.startswith(UNREADABLE):
                found, _, advice = found.rpartition("; ")
            yield Check(about, "fix", found, advice)
            continue
        weights = "unknown" if replica["weight_version"] is None else replica["weight_version"]
        found = f"{replica['status']}, {', '.join(replica['models'])}, {replica['description']}, weights {weights}"
        if replica["api"] == "token" and not replica["plugin"]:
            advice = "a call takes one request with VLLM_PLUGINS=verbatim in the engine's environment"
            yield Check(about, "note", found, advice)
        else:
            yield Check(about, "ok" if replica["status"] == "serving" else "note", found)
        yield from (Check(about, "note", note) for note in replica["notes"])


def _check_nodes(control: CommandClient) -> Iterator[Check]:
    nodes = control.get("/nodes")["nodes"]
    if not nodes:
        yield Check("nodes", "note", "none takes rollouts", "submitted tasks wait until verbatim node runs somewhere")
    for node in nodes:
        state = "draining" if node["draining"] else f"last seen {node['silent_seconds']:.0f} s ago"
        yield Check(f"node {node['name']}", "ok", f"{', '.join(node['runtimes'])}, {state}")


def check_engines(engines: Sequence[str]) -> list[Check]:
    """Engines, asked directly. One that does not answer is to be fixed."""
    if not engines:
        return []
    with open_engine_client(PROBE_SECONDS) as client:
        checks = [check_engine(engine, client) for engine in engines]
    return [replace(check, state="fix") if check.state == "note" else check for check in checks]


async def check_redis(url: str) -> list[Check]:
    """A Redis, asked directly: whether it takes records, its version, whether it keeps what it holds, whether it evicts, and its clock."""
    if find_missing(EXTRAS["proxy"]):
        return [Check("redis", "note", f"{url} was not checked", how_to_install("proxy"))]
    from proxy.errors import StoreUnavailable
    from proxy.store.connection import StoreConnection

    try:
        connection = StoreConnection(url)
    except ValueError as error:
        return [Check("redis", "fix", f"--redis is not a Redis URL: {error}")]
    try:
        await connection.ping()
    except StoreUnavailable as error:
        await connection.close()
        return [Check("redis", "fix", f"{error.message.rstrip('.')}; start it or correct --redis")]
    try:
        servers = await connection.read_info()
        checks = [check for info in servers for check in _judge_redis(info)]
        return [*checks, *(Check("redis", "note", note) for note in await connection.check())]
    except StoreUnavailable as error:
        return [Check("redis", "fix", error.message)]
    finally:
        await connection.close()


def check_embedded_store() -> Check:
    """The server that a service without `--redis` runs on this machine."""
    from proxy.store.programs import StoreStartError, choose_program

    try:
        program = choose_program()
    except StoreStartError as error:
        return Check("store", "note", "no Redis and no Valkey here for a service without --redis", error.message)
    found = f"a service without --redis runs on {program.name}"
    if program.holes:
        return Check("store", "note", f"{found}, which has known holes: {program.holes}", f"{REPLACE}, before its next start")
    return Check("store", "ok", found)


def _judge_redis(info: Mapping[str, Any]) -> Iterator[Check]:
    from proxy.store.programs import OLDEST, describe_holes, read_product

    product, version = read_product(info)
    limit = info["maxmemory_human"] if info.get("maxmemory") else "no limit"
    if tuple(int(part) for part in version.split(".")[:2]) < OLDEST:
        yield Check("redis", "fix", f"version {version}", "it must be 6.2 or newer")
    else:
        yield Check("redis", "ok", f"{product} version {version}, {info['used_memory_human']} used of {limit}")
    if holes := describe_holes(info):
        yield Check("redis", "note", holes, REPLACE)
    if not info.get("aof_enabled"):
        yield Check("redis", "note", "no append-only file", "records are lost when it dies: set appendonly yes")
    if info.get("maxmemory") and info.get("maxmemory_policy") != "noeviction":
        yield Check("redis", "fix", f"maxmemory-policy {info['maxmemory_policy']}", "it deletes records: set it to noeviction")
    if "server_time_usec" in info and abs(ahead := info["server_time_usec"] / 1e6 - time.time()) > MOST_SKEW_SECONDS:
        found = f"Redis' clock is {abs(ahead):.0f} s {'ahead' if ahead > 0 else 'behind'}"
        yield Check("clock", "note", found, "leases go by Redis' clock alone, but logs will not agree")


def check_node_parts() -> Iterator[Check]:
    """What rollouts on this machine need: a kind of runtime, and harnesses."""
    from rollout.harnesses import catalogue
    from rollout.harnesses.prepared import HarnessError

    if not find_missing(EXTRAS["rollout"]):
        from rollout.runtimes.base import BadRuntime
        from rollout.runtimes.settings import read_environment

        try:
            yield from asyncio.run(check_runtimes())
            yield from check_readable(read_environment())
        except BadRuntime as error:
            yield Check("runtimes", "fix", str(error))
    absent = []
    try:
        for name in catalogue.names():
            definition = catalogue.load(name)
            if definition.takes_command or definition.argv[0] in INTERPRETERS:
                continue
            if (check := check_harness(definition)) is not None:
                yield check
            else:
                absent.append(name)
    except HarnessError as error:
        yield Check("harnesses", "fix", str(error))
    if absent:
        yield Check("harnesses", "note", f"not installed here: {', '.join(absent)}", "a node installs what a task needs")
