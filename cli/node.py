"""`verbatim node`: take rollouts of submitted tasks and run them on this machine."""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
import signal
import socket
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated
from urllib.parse import urlsplit

import typer

from cli.options import LogLevel, ServiceUrl, check_installed
from cli.refusal import CommandError

if TYPE_CHECKING:
    from cli.control import CommandClient
    from rollout.node import NodeSettings
    from rollout.runtimes.base import ProxyAddress, RuntimeKind
    from rollout.stages import Slots
    from rollout.steps import NodeContext


log = logging.getLogger(__name__)

NEEDS = ("msgspec", "pydantic")


def node(
    url: ServiceUrl = None,
    harness_url: Annotated[
        str | None,
        typer.Option(
            envvar="VERBATIM_HARNESS_URL",
            metavar="URL",
            help="Where harnesses call the service, if its control side has a separate port (--control-port). Default: --url.",
        ),
    ] = None,
    name: Annotated[
        str | None,
        typer.Option(
            envvar="VERBATIM_NODE_NAME", metavar="NAME", help="Unique, and stable across restarts. Default: the host name."
        ),
    ] = None,
    labels: Annotated[
        list[str] | None, typer.Option("--label", metavar="NAME=VALUE", help="A label that tasks can require. Repeatable.")
    ] = None,
    prepare: Annotated[int, typer.Option(metavar="N", min=1, help="Runtimes prepared in parallel.")] = 2,
    ready: Annotated[
        int, typer.Option(metavar="N", min=0, help="Prepared rollouts in the warm pool. 0: each is prepared in its run slot.")
    ] = 2,
    run: Annotated[int, typer.Option(metavar="N", min=1, help="Harnesses in parallel.")] = 4,
    evaluate: Annotated[int, typer.Option(metavar="N", min=1, help="Evaluations in parallel.")] = 2,
    cpus: Annotated[
        float | None, typer.Option(metavar="N", min=0.001, help="CPUs for all rollouts together. Default: this machine's.")
    ] = None,
    memory_mb: Annotated[
        int | None, typer.Option(metavar="MB", min=1, help="Memory for all rollouts together. Default: 90 % of this machine's.")
    ] = None,
    service: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="What tells this service from others, if its URL differs from start to start: a node removes what an earlier node of "
            "its name and service left. Default: the URL.",
        ),
    ] = None,
    runtimes: Annotated[
        list[str] | None,
        typer.Option(
            "--runtime", metavar="KIND", help="Offer only this kind of runtime. Repeatable. Default: all that work here."
        ),
    ] = None,
    data_dir: Annotated[
        Path, typer.Option(envvar="VERBATIM_NODE_DIR", metavar="DIR", help="Rollout logs and runtime caches.")
    ] = Path("verbatim-node"),
    lease_seconds: Annotated[
        float, typer.Option(metavar="SECONDS", min=1.0, help="A node silent for this long loses its rollouts to others.")
    ] = 30.0,
    drain_seconds: Annotated[
        float, typer.Option(metavar="SECONDS", min=0.0, help="How long running rollouts may continue after SIGTERM.")
    ] = 3600.0,
    log_mb: Annotated[
        int, typer.Option(metavar="MB", min=1, help="Logs of ended rollouts beyond this are removed, the oldest first.")
    ] = 8192,
    log_level: LogLevel = "info",
) -> None:
    """Take rollouts of submitted tasks and run them on this machine.

    A service can have any number of nodes. A node needs the service's URL and VERBATIM_NODE_TOKEN (or VERBATIM_ADMIN_TOKEN), and nothing
    else of it.

    \b
    verbatim node --url http://proxy:8700 --run 16 --ready 4
    verbatim node --label gpu=no --runtime docker

    The first SIGTERM or Ctrl-C lets running rollouts finish within --drain-seconds and returns the others to the queue; a second
    one stops them all. VERBATIM_LOG_FORMAT=json logs one JSON object per line.
    """
    check_installed("node", NEEDS, "rollout")
    from cli.control import ADMIN, NODE, CommandClient
    from cli.serving import logs
    from rollout.node import NodeSettings
    from rollout.stages import Slots

    logs.configure(log_level, os.environ.get("VERBATIM_LOG_FORMAT") or "human")
    settings = NodeSettings(
        labels=parse_labels(labels or []),
        cpus=cpus or float(len(os.sched_getaffinity(0))),
        memory_mb=memory_mb or measure_memory_mb(),
        lease_seconds=lease_seconds,
        drain_seconds=drain_seconds,
        log_mb=log_mb,
    )
    control = CommandClient(url, variables=(NODE, ADMIN))
    slots = Slots(prepare, ready, run, evaluate)
    where = (harness_url or control.url).rstrip("/")
    asyncio.run(
        _serve(
            control,
            where,
            name or socket.gethostname(),
            service or where,
            settings,
            slots,
            data_dir,
            runtimes or [],
        )
    )


def parse_labels(given: list[str]) -> Mapping[str, str]:
    """Raises `CommandError` (exit code 2)."""
    labels = {}
    for item in given:
        name, equals, value = item.partition("=")
        if not name or not equals:
            raise CommandError(f"--label {item!r} is not NAME=VALUE", exit_code=2)
        labels[name] = value
    return labels


def measure_memory_mb() -> int:
    return int(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") * 0.9) >> 20


async def _serve(
    control: CommandClient,
    harness_url: str,
    name: str,
    service: str,
    settings: NodeSettings,
    slots: Slots,
    data_dir: Path,
    wanted: list[str],
) -> None:
    from contract.client import AsyncServiceClient
    from rollout.attempts import node_prefix
    from rollout.attempts_client import AttemptsClient
    from rollout.evaluators import catalogue as evaluators
    from rollout.harnesses import catalogue as harnesses
    from rollout.judge import Judge
    from rollout.stages import Capacity, Stages
    from rollout.steps import NodeContext

    proxy = parse_proxy(harness_url, "--url" if harness_url == control.url else "--harness-url")
    kinds = await find_kinds(wanted)
    evaluators.plugins().load_all()
    harnesses.load_built_in()
    logs, key = make_logs_folder(data_dir), read_key(data_dir)
    await await_admission(control)
    async with AsyncServiceClient(control.url, control.token) as http:
        attempts = AttemptsClient(http, name, key)
        parts = NodeContext(
            name=name,
            prefix=node_prefix(name, service),
            url=harness_url,
            proxy=proxy,
            attempts=attempts,
            judge=Judge(attempts, harness_url),
            stages=Stages(slots, Capacity(settings.cpus, settings.memory_mb)),
            kinds=kinds,
            logs=logs,
        )
        await _run(parts, settings, control)


async def _run(parts: NodeContext, settings: NodeSettings, control: CommandClient) -> None:
    """Run until the node is stopped and has drained."""
    from rollout.node import RolloutNode

    node = RolloutNode(parts, settings)
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, node.drain)
    typer.echo(
        f"node {parts.name}: takes rollouts of {control.url} with {', '.join(sorted(parts.kinds))}; logs in {parts.logs}",
        err=True,
    )
    for kind in parts.kinds.values():
        log.info("runtimes of kind %s: %s", kind.name, kind.describe_limits())
    await node.run()


async def find_kinds(wanted: list[str]) -> dict[str, RuntimeKind]:
    """The wanted kinds of runtimes, or all that work on this machine. Raises `CommandError` if a wanted one is missing, or all are."""
    from rollout.runtimes import catalogue
    from rollout.runtimes.base import BadRuntime

    kinds: dict[str, RuntimeKind] = {}
    lacking = []
    for name in wanted or catalogue.plugins().load_all():
        try:
            kind = catalogue.load(name)
        except BadRuntime as error:
            raise CommandError(str(error), exit_code=2) from error
        if (why := await kind.probe()) is None:
            kinds[name] = kind
        else:
            lacking.append(f"{name}: {why}")
    if not kinds or (wanted and lacking):
        raise CommandError(f"this machine lacks what its runtimes need: {'; '.join(lacking)}")
    return kinds


def parse_proxy(url: str, flag: str) -> ProxyAddress:
    """Raises `CommandError` (exit code 2)."""
    from rollout.runtimes.base import ProxyAddress

    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise CommandError(f"{flag} {url!r} is not an http or https URL", exit_code=2)
    return ProxyAddress(parts.hostname, parts.port or (443 if parts.scheme == "https" else 80))


def make_logs_folder(data_dir: Path) -> Path:
    """Raises `CommandError`."""
    folder = Path(os.path.abspath(data_dir)) / "logs"
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise CommandError(f"the data directory {data_dir} is not writable: {error}") from error
    return folder


def read_key(data_dir: Path) -> str:
    """The secret that shows the service who uses the node's name, made at the first start. Raises `CommandError`."""
    path = data_dir / "node.key"
    try:
        if not path.exists():
            # Never half written, wherever this process is killed.
            made = path.with_suffix(f".{os.getpid()}")
            made.touch(0o600)
            made.write_text(secrets.token_hex(32))
            made.replace(path)
        return path.read_text()
    except OSError as error:
        raise CommandError(f"the node's key {path} cannot be read: {error}") from error


LOOK_SECONDS = 1.0


async def await_admission(control: CommandClient) -> None:
    """Wait until the service accepts the token. Raises `CommandError` if it rejects it: every rollout that the node took would fail until
    its attempts are used up."""
    logged = ""
    while True:
        try:
            await asyncio.to_thread(control.get, "/nodes")
            return
        except CommandError as refusal:
            if not _may_pass(refusal):
                raise
            if str(refusal) != logged:
                logged = str(refusal)
                log.warning("no rollouts are taken yet: %s", logged)
        await asyncio.sleep(LOOK_SECONDS)


def _may_pass(refusal: CommandError) -> bool:
    from cli.control import RequestFailed

    return isinstance(refusal, RequestFailed) and not refusal.is_final
