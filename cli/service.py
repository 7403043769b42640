"""A service from start to stop: the socket, the store, the tokens, then one process or several until told to stop."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from difflib import get_close_matches
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from pydantic import SecretStr
from rich.console import Console
from rich.panel import Panel
from rich.table import Table

from cli.refusal import Refusal
from cli.serving.server import listen, raise_descriptor_limit, raise_on_stop_signals, run_server, url_of
from cli.serving.tls import certificate
from cli.serving.workers import Workers
from proxy.auth import mint_token, tokens_in
from proxy.errors import StoreUnavailable
from proxy.settings import Settings
from proxy.store.connection import StoreConnection
from proxy.store.embedded import EmbeddedRedis, StoreStartError
from rollout.sweeper import RolloutSettings

if TYPE_CHECKING:
    from proxy.settings import Settings


log = logging.getLogger(__name__)

SHORT_TOKEN = 16
"""Characters below which a token is warned of."""
ALIKE = 0.92
"""From which likeness on a name is taken for a misspelt one."""


def run(settings: Settings, workers: int, log_level: str) -> None:
    """Serve until SIGTERM or Ctrl-C, then return with everything stopped. Raises `Refusal` when it cannot start."""
    raise_on_stop_signals()
    raise_descriptor_limit()
    for name, meant in misspelt(os.environ):
        log.warning("%s is no setting and changes nothing: is %s meant?", name, meant)
    certificate(settings)
    warn_of_weak_tokens(settings)
    with ExitStack() as stack:
        listeners = [stack.enter_context(listen(settings.host, port, flag)) for port, flag in ports_of(settings)]
        redis_url, stop_redis = stack.enter_context(opened(settings))
        ports: list[int] = [listener.getsockname()[1] for listener in listeners]
        found = {"redis": redis_url, "port": ports[0], "control_port": ports[1] if len(ports) > 1 else None}
        complete = with_tokens(settings).model_copy(update=found)
        urls = [url_of(listener, tls=settings.tls_cert is not None) for listener in listeners]
        on_ready = partial(show, settings, complete, urls[0], urls[-1])
        if workers == 1:
            run_server(complete, listeners, on_ready, on_force=stop_redis)
        else:
            Workers(complete, listeners, workers, log_level).run(on_ready, on_force=stop_redis)
        # Stopping Redis takes milliseconds; an impatient Ctrl-C must not leave it behind.
        signal.signal(signal.SIGINT, signal.SIG_IGN)


def ports_of(settings: Settings) -> list[tuple[int, str]]:
    """The ports to listen on, each with its flag: the harness side's first, then the control side's where that has one of its own."""
    own = [] if settings.control_port is None else [(settings.control_port, "--control-port")]
    return [(settings.port, "--port"), *own]


def with_tokens(settings: Settings) -> Settings:
    """`settings` with a token generated for each role that has none, unless it is open."""
    if settings.open:
        return settings
    admin = settings.admin_token or settings.admin_tokens or settings.admin_token_file
    trainer = settings.trainer_token or settings.trainer_tokens or settings.trainer_token_file
    generated = {
        "admin_token": settings.admin_token if admin else SecretStr(mint_token()),
        "trainer_token": settings.trainer_token if trainer else SecretStr(mint_token()),
    }
    return settings.model_copy(update=generated)


def warn_of_weak_tokens(settings: Settings) -> None:
    """Say so when a token could be guessed, or when another role's opens all that an admin's does."""
    admin = _secrets(settings.admin_token, settings.admin_tokens, settings.admin_token_file)
    trainer = _secrets(settings.trainer_token, settings.trainer_tokens, settings.trainer_token_file)
    node = _secrets(settings.node_token, settings.node_tokens, settings.node_token_file)
    for role, secrets in (("an admin", admin), ("a trainer", trainer), ("a node", node)):
        if any(len(secret) < SHORT_TOKEN for secret in secrets):
            log.warning("%s token has fewer than %d characters and may be guessed", role, SHORT_TOKEN)
        if role != "an admin" and admin & secrets:
            log.warning("an admin token is also %s token: who has it is the admin", role)


def misspelt(names: Iterable[str]) -> list[tuple[str, str]]:
    """Those of `names` that are no setting of the service but nearly one, each with that one."""
    settings = [f"VERBATIM_{name.upper()}" for of in (Settings, RolloutSettings) for name in of.model_fields]
    strange = sorted(name for name in names if name.startswith("VERBATIM_") and name not in settings)
    return [(name, near[0]) for name in strange if (near := get_close_matches(name, settings, n=1, cutoff=ALIKE))]


def _secrets(one: SecretStr | None, more: list[SecretStr], file: Path | None) -> set[str]:
    given = {token.get_secret_value() for token in (one, *more) if token}
    return given | set(tokens_in(file) if file else ())


# What a person sees when the service is up: where it is, what it uses, how to get in, how to begin.


def show(given: Settings, effective: Settings, url: str, control_url: str) -> None:
    """Print the facts of a started service to stdout; the two URLs differ where the control side has a port of its own.
    Tokens are shown only when they were generated: `given` lacks them."""
    console = Console()
    url = (effective.public_url or url).rstrip("/")
    own = effective.control_port is not None
    control_url = control_url if own else url
    rows = {
        "base URL": url,
        **({"control URL": control_url} if own else {}),
        "pages": f"{control_url}/ui",
        "engines": ", ".join(effective.engine) + f" ({effective.engine_api})",
        "data": str(given.data_dir.resolve()) if not given.redis else "in the Redis given",
        "admin token": _token(given, effective, "admin"),
        "trainer token": _token(given, effective, "trainer"),
    }
    if console.is_terminal:
        console.print(Panel(_table(rows), title="verbatim is serving", title_align="left", expand=False))
    else:
        for name, value in rows.items():
            console.print(f"{name}: {value}", soft_wrap=True, markup=False, highlight=False)
    for line in _first_steps(control_url, given, effective):
        console.print(line, soft_wrap=True, markup=False, highlight=False)


def _token(given: Settings, effective: Settings, role: str) -> str:
    """The token when it was generated, otherwise where it comes from."""
    if given.open:
        return "none needed: open to every program on this machine"
    variable = f"VERBATIM_{role.upper()}_TOKEN"
    sources = {variable: f"{role}_token", f"{variable}S": f"{role}_tokens", f"{variable}_FILE": f"{role}_token_file"}
    used = [name for name, field in sources.items() if getattr(given, field)]
    return f"from {', '.join(used)}" if used else getattr(effective, f"{role}_token").get_secret_value()


def _table(rows: dict[str, str]) -> Table:
    table = Table.grid(padding=(0, 2))
    table.add_column(style="bold", no_wrap=True)
    table.add_column(overflow="fold")
    for name, value in rows.items():
        table.add_row(name, value)
    return table


def _first_steps(url: str, given: Settings, effective: Settings) -> list[str]:
    return [
        "A session for one agent run; give the agent its base_urls.openai and api_key:",
        f"  curl -s -X POST {url}/sessions {_authorization(given, effective)}\\",
        "    -H 'Content-Type: application/json' -d '{\"session_id\": \"first\"}'",
    ]


def _authorization(given: Settings, effective: Settings) -> str:
    """The header for a shell, empty where none is needed."""
    if given.open:
        return ""
    if effective.admin_token and not given.admin_token:
        return f"-H 'Authorization: Bearer {effective.admin_token.get_secret_value()}' "
    if not given.admin_token and given.admin_token_file:
        return f'-H "Authorization: Bearer $(grep -m1 "^[^#]" {given.admin_token_file})" '
    return '-H "Authorization: Bearer $VERBATIM_ADMIN_TOKEN" '


# The Redis of a service: somebody else's, asked whether it is there, or an embedded one of our own.


@contextmanager
def opened(settings: Settings) -> Iterator[tuple[str, Callable[[], None]]]:
    """The URL of a Redis that answers, and what stops it at once when it is ours. Ours stops when the block ends.

    Raises `Refusal` when there is none, or when the data directory is not ours to use.
    """
    if settings.redis:
        if settings.fsync == "always":
            raise Refusal("--fsync is the embedded Redis's: a Redis of your own has `appendfsync always`", exit_code=2)
        _ask(settings, settings.redis)
        yield settings.redis, _leave_alone
        return
    if settings.redis_wait_replicas or settings.redis_wait_aof:
        raise Refusal(
            "the embedded Redis has no replicas and no WAITAOF: leave VERBATIM_REDIS_WAIT_REPLICAS and VERBATIM_REDIS_WAIT_AOF "
            "out; --fsync always answers nothing that is not on its disk",
            exit_code=2,
        )
    embedded = EmbeddedRedis(settings.data_dir, settings.fsync)
    try:
        try:
            url = embedded.start()
        except StoreStartError as error:
            raise Refusal(error.message) from error
        yield url, embedded.stop
    finally:
        embedded.stop()


def _ask(settings: Settings, url: str) -> None:
    async def ping() -> None:
        connection = StoreConnection.to(settings, url)
        try:
            try:
                await connection.ping()
            except StoreUnavailable as error:
                # Started beside its Redis, a service may be the first of the two.
                if settings.redis_retry_seconds:
                    log.warning("%s; waiting up to %g s for it", error.message, settings.redis_retry_seconds)
                await connection.ping(patient=True)
        finally:
            await connection.close()

    try:
        asyncio.run(ping())
    except StoreUnavailable as error:
        raise Refusal(f"{error.message}; start it, correct --redis, or leave --redis out for an embedded one") from error
    except ValueError as error:
        raise Refusal(f"--redis is no Redis URL: {error}", exit_code=2) from error


def _leave_alone() -> None:
    """Another's Redis is not ours to stop."""
