"""A service from start to stop: open the sockets and the store, generate tokens, then serve in one process or several."""

from __future__ import annotations

import asyncio
import logging
import os
import re
import signal
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from difflib import get_close_matches
from functools import partial
from typing import Any

from pydantic import SecretStr
from rich.console import Console
from rich.panel import Panel
from rich.table import Table

from cli.refusal import CommandError
from cli.serving.server import listen, make_url, raise_descriptor_limit, raise_on_stop_signals, run_server
from cli.serving.tls import load_certificate
from cli.serving.workers import Workers
from proxy.auth import Role, mint_token
from proxy.errors import StoreUnavailable
from proxy.memory import find_session_bytes
from proxy.settings import GivenToken, RedisWait, Settings, list_variables
from proxy.store.connection import StoreConnection
from proxy.store.embedded import EmbeddedRedis, StoreStartError
from proxy.store.service import NewerStore, check_level
from proxy.tasks.sweeper import RolloutSettings

log = logging.getLogger(__name__)

SHORT_TOKEN = 16
"""Warn of tokens with fewer characters."""
SIMILARITY = 0.85
"""Names at least this similar to a setting's are misspellings of it: of those of other parts none is so near."""
OF_OTHERS = re.compile(
    "VERBATIM_(URL|RUN|MIRROR|HARNESS_URL|HARNESSES|CGROUP|INSTALLS_KEPT|NODE_(DIR|NAME)|(LOCAL|CONTAINER|APPTAINER|KUBERNETES|EVALUATOR)_.*)"
)
"""Variables of commands, engines, nodes and runtimes."""
SERVICE_LINK = re.compile(r"VERBATIM_.*(SERVICE_HOST|SERVICE_PORT\w*|PORT(_\d+_(TCP|UDP)\w*)?)")
"""What Kubernetes tells pods of a Service whose name begins so."""


def run(settings: Settings, workers: int, log_level: str) -> None:
    """Serve until SIGTERM or Ctrl-C, then return with everything stopped. Raises `CommandError` if it cannot start."""
    raise_on_stop_signals()
    raise_descriptor_limit()
    for name, near in find_unknown(os.environ):
        log.warning("%s is not a setting and has no effect%s", name, f": did you mean {near}?" if near else "")
    load_certificate(settings)
    warn_of_weak_tokens(settings)
    with ExitStack() as stack:
        listeners = [stack.enter_context(listen(settings.host, port, flag)) for port, flag in list_ports(settings)]
        redis_url, stop_redis = stack.enter_context(open_redis(settings))
        ports: list[int] = [listener.getsockname()[1] for listener in listeners]
        found: dict[str, Any] = {"redis": redis_url, "port": ports[0], "control_port": ports[1] if len(ports) > 1 else None}
        if settings.session_cache_bytes is None:
            found["session_cache_bytes"] = find_session_bytes(workers)
        complete = fill_tokens(settings).model_copy(update=found)
        urls = [make_url(listener, tls=settings.tls_cert is not None) for listener in listeners]
        on_ready = partial(show, settings, complete, urls[0], urls[-1])
        if workers == 1:
            run_server(complete, listeners, on_ready, on_force=stop_redis)
        else:
            Workers(complete, listeners, workers, log_level).run(on_ready, on_force=stop_redis)
        # Stopping Redis takes milliseconds; an impatient Ctrl-C must not leave it behind.
        signal.signal(signal.SIGINT, signal.SIG_IGN)


def list_ports(settings: Settings) -> list[tuple[int, str]]:
    """The ports to listen on with their flags: the harness side's, then the control side's if it has its own."""
    own = [] if settings.control_port is None else [(settings.control_port, "--control-port")]
    return [(settings.port, "--port"), *own]


def fill_tokens(settings: Settings) -> Settings:
    """`settings` with a generated token for each role that has none; unchanged with --open."""
    if settings.open:
        return settings
    given = {"admin_token": settings.admin_token, "trainer_token": settings.trainer_token}
    lacking = {name for name, each in given.items() if not each.token and each.file is None}
    return settings.model_copy(update={name: GivenToken(token=SecretStr(mint_token())) for name in lacking})


def warn_of_weak_tokens(settings: Settings) -> None:
    """Warn of short tokens and of tokens shared with the admin role."""
    admin = set(settings.admin_token.read())
    for role, given in settings.tokens.items():
        secrets, name = set(given.read()), f"{'an' if role is Role.ADMIN else 'a'} {role} token"
        if any(len(secret) < SHORT_TOKEN for secret in secrets):
            log.warning("%s has fewer than %d characters and may be guessed", name, SHORT_TOKEN)
        if role is not Role.ADMIN and admin & secrets:
            log.warning("an admin token is also %s: its holder has admin rights", name)


def find_unknown(names: Iterable[str]) -> list[tuple[str, str]]:
    """The variables of the project that nothing reads, each with the setting of the most similar name, or ""."""
    settings = [name for of in (Settings, RolloutSettings) for each in list_variables(of).values() for name in each]
    strange = sorted(name for name in names if name.startswith("VERBATIM_") and name not in settings)
    nearest = {name: next(iter(get_close_matches(name, settings, n=1, cutoff=SIMILARITY)), "") for name in strange}
    found = {name: near for name, near in nearest.items() if not OF_OTHERS.fullmatch(name)}
    return [(name, near) for name, near in found.items() if near or not SERVICE_LINK.fullmatch(name)]


# The start-up banner


def show(given: Settings, effective: Settings, url: str, control_url: str) -> None:
    """Print the addresses, the tokens and the first steps to stdout. Tokens are printed only if they were generated: `given` lacks
    them. The two URLs differ if the control side has its own port."""
    console = Console()
    url = (effective.public_url or url).rstrip("/")
    own = effective.control_port is not None
    control_url = control_url if own else url
    rows = {
        "base URL": url,
        **({"control URL": control_url} if own else {}),
        "pages": f"{control_url}/ui",
        "engines": ", ".join(effective.engine) + f" ({effective.engine_api})",
        "data": str(given.data_dir.resolve()) if not given.redis else "in the given Redis",
        "admin token": _token(given, effective, Role.ADMIN),
        "trainer token": _token(given, effective, Role.TRAINER),
    }
    if console.is_terminal:
        console.print(Panel(_table(rows), title="verbatim is serving", title_align="left", expand=False))
    else:
        for name, value in rows.items():
            console.print(f"{name}: {value}", soft_wrap=True, markup=False, highlight=False)
    for line in _first_steps(control_url, given, effective):
        console.print(line, soft_wrap=True, markup=False, highlight=False)


def _token(given: Settings, effective: Settings, role: Role) -> str:
    """The token if it was generated, otherwise its source."""
    if given.open:
        return "not needed: open to every program on this machine"
    variable = f"VERBATIM_{role.upper()}_TOKEN"
    own = given.tokens[role]
    used = [name for name, value in ((variable, own.token), (f"{variable}_FILE", own.file)) if value]
    return f"from {', '.join(used)}" if used else effective.tokens[role].read()[0]


def _table(rows: dict[str, str]) -> Table:
    table = Table.grid(padding=(0, 2))
    table.add_column(style="bold", no_wrap=True)
    table.add_column(overflow="fold")
    for name, value in rows.items():
        table.add_row(name, value)
    return table


def _first_steps(url: str, given: Settings, effective: Settings) -> list[str]:
    return [
        "Open a session for one agent run; give the agent its base_urls.openai and api_key:",
        f"  curl -s -X POST {url}/sessions {_authorization(given, effective)}\\",
        "    -H 'Content-Type: application/json' -d '{\"session_id\": \"first\"}'",
    ]


def _authorization(given: Settings, effective: Settings) -> str:
    """The curl option with the token; empty if none is needed."""
    if given.open:
        return ""
    if given.admin_token.token:
        return '-H "Authorization: Bearer $VERBATIM_ADMIN_TOKEN" '
    if given.admin_token.file is not None:
        return f'-H "Authorization: Bearer $(grep -m1 "^[^#]" {given.admin_token.file})" '
    return f"-H 'Authorization: Bearer {effective.admin_token.read()[0]}' "


# The Redis: an external one, which must answer, or an embedded one


@contextmanager
def open_redis(settings: Settings) -> Iterator[tuple[str, Callable[[], None]]]:
    """The URL of a Redis that answers, and a function that stops it if it is embedded. An embedded one stops when the block ends.

    Raises `CommandError` if no Redis answers or the data directory cannot be used.
    """
    if settings.redis:
        if settings.fsync == "always":
            raise CommandError("--fsync is for the embedded Redis: set `appendfsync always` in your own", exit_code=2)
        _check_store(settings, settings.redis)
        yield settings.redis, lambda: None
        return
    if settings.redis_wait != RedisWait():
        raise CommandError(
            "the embedded Redis has no replicas and no WAITAOF: unset VERBATIM_REDIS_WAIT; "
            "--fsync always acknowledges nothing that is not on disk",
            exit_code=2,
        )
    embedded = EmbeddedRedis(settings.data_dir, settings.fsync)
    try:
        try:
            url = embedded.start()
        except StoreStartError as error:
            raise CommandError(error.message) from error
        _check_store(settings, url)
        yield url, embedded.stop
    finally:
        embedded.stop()


def _check_store(settings: Settings, url: str) -> None:
    """Returns when it answers and this build may serve it. Raises `CommandError`."""

    async def ping() -> None:
        connection = StoreConnection.to(settings, url)
        try:
            try:
                await connection.ping()
            except StoreUnavailable as error:
                # A service may start before its Redis.
                if settings.redis_retry_seconds:
                    why = error.message.partition(" does not answer")[2]
                    log.warning("waiting up to %g s for the Redis at %s%s", settings.redis_retry_seconds, connection.place, why)
                await connection.ping(patient=True)
            await check_level(connection)
        finally:
            await connection.close()

    try:
        asyncio.run(ping())
    except NewerStore as error:
        raise CommandError(error.message, exit_code=2) from error
    except StoreUnavailable as error:
        raise CommandError(f"{error.message}; start it, correct --redis, or omit --redis for an embedded one") from error
    except ValueError as error:
        raise CommandError(f"--redis is not a Redis URL: {error}", exit_code=2) from error
