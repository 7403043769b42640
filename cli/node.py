"""`verbatim node`: takes rollouts and runs them on this machine."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import socket
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated
from urllib.parse import urlsplit

import httpx
import typer

from cli.refusal import Refusal
from cli.run import ServiceUrl, check_installed

if TYPE_CHECKING:
    from cli.control import Control
    from proxy.store.connection import StoreConnection
    from rollout.node import NodeSettings
    from rollout.runtimes.base import Route, RuntimeKind
    from rollout.stages import Slots
    from rollout.steps import NodeParts


log = logging.getLogger(__name__)

NEEDS = ("msgspec", "pydantic", "redis")
REDIS_SECONDS = 10.0
"""How long a command of the store is offered again while Redis restarts or fails over."""


def node(
    url: ServiceUrl = None,
    harness_url: Annotated[
        str | None,
        typer.Option(
            envvar="VERBATIM_HARNESS_URL",
            metavar="URL",
            help="Where harnesses call the service, if its control side has a port of its own (--control-port). Default: --url.",
        ),
    ] = None,
    redis: Annotated[
        str | None, typer.Option(envvar="VERBATIM_REDIS", metavar="URL", help="The Redis of the service, where tasks wait.")
    ] = None,
    name: Annotated[
        str | None,
        typer.Option(
            envvar="VERBATIM_NODE_NAME", help="Stays the same over restarts, and no two have it. Default: this host's."
        ),
    ] = None,
    labels: Annotated[
        list[str] | None, typer.Option("--label", metavar="NAME=VALUE", help="What tasks may ask of a node. Repeatable.")
    ] = None,
    prepare: Annotated[int, typer.Option(min=1, help="Runtimes that are made ready at once.")] = 2,
    ready: Annotated[
        int, typer.Option(min=0, help="Prepared rollouts that wait for a run slot. 0: each is prepared in its run slot.")
    ] = 2,
    run: Annotated[int, typer.Option(min=1, help="Harnesses that work at once.")] = 4,
    evaluate: Annotated[int, typer.Option(min=1, help="Evaluations at once.")] = 2,
    cpus: Annotated[
        float | None, typer.Option(min=0.001, help="CPUs that rollouts may take up in all. Default: this machine's.")
    ] = None,
    memory_mb: Annotated[
        int | None, typer.Option(min=1, help="Memory that rollouts may take up in all. Default: nine tenths of this machine's.")
    ] = None,
    runtimes: Annotated[
        list[str] | None,
        typer.Option("--runtime", metavar="KIND", help="Only these kinds. Default: all that this machine has."),
    ] = None,
    data_dir: Annotated[
        Path, typer.Option(envvar="VERBATIM_NODE_DIR", metavar="DIR", help="Logs of rollouts, and what runtimes keep.")
    ] = Path("verbatim-node"),
    lease_seconds: Annotated[
        float, typer.Option(min=1.0, help="Without a sign of life for so long the node loses its rollouts to others.")
    ] = 30.0,
    drain_seconds: Annotated[
        float, typer.Option(min=0.0, help="What running rollouts have for ending after SIGTERM.")
    ] = 3600.0,
    log_level: Annotated[str, typer.Option(help="debug, info, warning or error.")] = "info",
    log_format: Annotated[
        str,
        typer.Option(envvar="VERBATIM_LOG_FORMAT", metavar="human|json", help="Lines for people, or one JSON object per line."),
    ] = "human",
) -> None:
    """Take rollouts of submitted tasks and run them on this machine.

    Any number of nodes work on one service. A node needs the service's URL and VERBATIM_NODE_TOKEN (or VERBATIM_ADMIN_TOKEN), and
    its Redis: where the service has an embedded one, unix://DATA_DIR/redis.sock on the same machine.

    \b
    verbatim node --redis redis://redis:6379 --url http://proxy:8700 --run 16 --ready 4
    verbatim node --redis unix:///srv/verbatim-data/redis.sock --label gpu=no --runtime docker

    The first SIGTERM or Ctrl-C lets running rollouts end, for --drain-seconds, and puts the others back; a second one stops all.
    """
    check_installed("node", NEEDS, "rollout")
    from cli.control import ADMIN, NODE, Control
    from cli.serving import logs
    from rollout.node import NodeSettings
    from rollout.stages import Slots

    logs.configure(log_level, log_format)
    if not redis:
        hint = "where it has one of its own, unix://DATA_DIR/redis.sock on its machine"
        raise Refusal(f"no --redis given: it is where the service keeps its tasks; {hint}", exit_code=2)
    settings = NodeSettings(
        labels=labels_of(labels or []),
        cpus=cpus or float(len(os.sched_getaffinity(0))),
        memory_mb=memory_mb or own_memory_mb(),
        lease_seconds=lease_seconds,
        drain_seconds=drain_seconds,
    )
    control = Control(url, variables=(NODE, ADMIN))
    slots = Slots(prepare, ready, run, evaluate)
    where = (harness_url or control.url).rstrip("/")
    asyncio.run(
        _serve(
            control,
            where,
            redis,
            name or socket.gethostname(),
            settings,
            slots,
            data_dir,
            runtimes or [],
        )
    )


def labels_of(given: list[str]) -> Mapping[str, str]:
    """Raises `Refusal` (exit code 2)."""
    labels = {}
    for item in given:
        name, equals, value = item.partition("=")
        if not name or not equals:
            raise Refusal(f"--label {item!r} is not NAME=VALUE", exit_code=2)
        labels[name] = value
    return labels


def own_memory_mb() -> int:
    return int(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") * 0.9) >> 20


async def _serve(
    control: Control,
    harness_url: str,
    redis: str,
    name: str,
    settings: NodeSettings,
    slots: Slots,
    data_dir: Path,
    wanted: list[str],
) -> None:
    from cli.rollout_service import RolloutConnection
    from rollout.sessions import Judge, Sessions
    from rollout.stages import Capacity, Stages
    from rollout.steps import NodeParts
    from rollout.store.work import WorkStore

    route = route_of(harness_url, "--url" if harness_url == control.url else "--harness-url")
    kinds = await kinds_here(wanted)
    logs = logs_folder(data_dir)
    connection = await connected(redis)
    sessions = Sessions(control.url, control.token)
    parts = NodeParts(
        name=name,
        url=harness_url,
        route=route,
        work=WorkStore(RolloutConnection(connection)),
        sessions=sessions,
        judge=Judge(sessions, harness_url),
        stages=Stages(slots, Capacity(settings.cpus, settings.memory_mb)),
        kinds=kinds,
        logs=logs,
    )
    try:
        await let_in(control)
        await _run(parts, settings, control)
    finally:
        await sessions.close()
        await connection.close()


async def _run(parts: NodeParts, settings: NodeSettings, control: Control) -> None:
    """Returns when the node was told to end and has."""
    from rollout.node import Node

    node = Node(parts, settings)
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, node.drain)
    typer.echo(
        f"node {parts.name}: takes rollouts of {control.url} with {', '.join(sorted(parts.kinds))}; logs in {parts.logs}",
        err=True,
    )
    for kind in parts.kinds.values():
        log.info("runtimes of kind %s: %s", kind.name, kind.describe_limits())
    looking = asyncio.create_task(seen(control, parts.name))
    try:
        await node.run()
    finally:
        looking.cancel()
        await asyncio.wait([looking])


async def kinds_here(wanted: list[str]) -> dict[str, RuntimeKind]:
    """The wanted kinds of runtimes, or all that this machine has. Raises `Refusal` when one that is wanted is not there, or none is."""
    from rollout.runtimes import catalogue
    from rollout.runtimes.base import BadRuntime

    kinds: dict[str, RuntimeKind] = {}
    lacking = []
    for name in wanted or catalogue.list_names():
        try:
            kind = catalogue.load(name)
        except BadRuntime as error:
            raise Refusal(str(error), exit_code=2) from error
        if (why := await kind.probe()) is None:
            kinds[name] = kind
        else:
            lacking.append(f"{name}: {why}")
    if not kinds or (wanted and lacking):
        raise Refusal(f"this machine lacks what its runtimes need: {'; '.join(lacking)}")
    return kinds


async def connected(redis: str) -> StoreConnection:
    """Raises `Refusal` when there is no Redis that answers."""
    from proxy.errors import StoreUnavailable
    from proxy.store.connection import StoreConnection

    try:
        connection = StoreConnection(redis, patience_seconds=REDIS_SECONDS)
    except ValueError as error:
        raise Refusal(f"--redis is no Redis URL: {error}", exit_code=2) from error
    try:
        await connection.ping(patient=True)
    except StoreUnavailable as error:
        await connection.close()
        raise Refusal(f"{error.message.rstrip('.')}; start it or correct --redis") from error
    return connection


def route_of(url: str, flag: str) -> Route:
    """Raises `Refusal` (exit code 2)."""
    from rollout.runtimes.base import Route

    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise Refusal(f"{flag} {url!r} is no http or https URL", exit_code=2)
    return Route(parts.hostname, parts.port or (443 if parts.scheme == "https" else 80))


def logs_folder(data_dir: Path) -> Path:
    """Raises `Refusal`."""
    folder = data_dir.absolute() / "logs"
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise Refusal(f"the data directory {data_dir} is not writable: {error}") from error
    return folder


# What a node makes sure of, since it would spoil rollouts or wait for ever: that the service knows its token, and reads its Redis.


LOOK_SECONDS = 1.0
PASSING = (httpx.NetworkError, httpx.TimeoutException, httpx.RemoteProtocolError)
"""What stands between the node and a service that is not there yet, or no more."""
UNSEEN_SECONDS = 20.0
"""After which a node that the service does not list says so."""


async def let_in(control: Control) -> None:
    """Returns once the service has answered with this token; one that is away is waited for. Raises `Refusal` when it answers
    otherwise: every rollout that the node took would fail, until its attempts are used up."""
    told = ""
    while True:
        try:
            await asyncio.to_thread(control.get, "/nodes")
            return
        except Refusal as refusal:
            if not _may_pass(refusal):
                raise
            if str(refusal) != told:
                told = str(refusal)
                log.warning("nothing is taken yet: %s", told)
        await asyncio.sleep(LOOK_SECONDS)


async def seen(control: Control, name: str, patience_seconds: float = UNSEEN_SECONDS) -> None:
    """Returns once the service lists the node. Until then tasks that are submitted there do not come to it, which is logged, once."""
    loop = asyncio.get_running_loop()
    until, told = loop.time() + patience_seconds, False
    while True:
        try:
            if any(node["name"] == name for node in (await asyncio.to_thread(control.get, "/nodes"))["nodes"]):
                return
        except Refusal:
            # Who needs the service says so.
            until = loop.time() + patience_seconds
        if not told and loop.time() > until:
            told = True
            log.warning("%s does not see this node, so none of its tasks comes here: is --redis the one it uses?", control.url)
        await asyncio.sleep(LOOK_SECONDS)


def _may_pass(refusal: Refusal) -> bool:
    from cli.control import Declined, HeldBack

    if isinstance(refusal, Declined):
        return refusal.status >= httpx.codes.INTERNAL_SERVER_ERROR
    return isinstance(refusal, HeldBack) or isinstance(refusal.__cause__, PASSING)
