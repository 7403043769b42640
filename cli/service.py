"""A service from start to stop: the socket, the store, the tokens, then one process or several until told to stop."""

from __future__ import annotations

import logging
import os
import signal
from collections.abc import Iterable
from contextlib import ExitStack
from difflib import get_close_matches
from functools import partial
from pathlib import Path

from pydantic import SecretStr

from cli.banner import show
from cli.descriptors import raise_descriptor_limit
from cli.listener import listen, url_of
from cli.server import raise_on_stop_signals, run_server
from cli.store import opened
from cli.tls import certificate
from cli.workers import Workers
from proxy.settings import Settings
from proxy.token_file import tokens_in
from proxy.tokens import mint_token
from rollout.settings import RolloutSettings

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
