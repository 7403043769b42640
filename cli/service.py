"""A service from start to stop: the socket, the store, the tokens, then one process or several until told to stop."""

from __future__ import annotations

import signal
from functools import partial
from typing import TYPE_CHECKING

from pydantic import SecretStr

from cli.banner import show
from cli.listener import listen, url_of
from cli.server import raise_on_stop_signals, run_server
from cli.store import opened
from cli.workers import Workers
from proxy.auth import mint_token

if TYPE_CHECKING:
    from proxy.settings import Settings


def run(settings: Settings, workers: int, log_level: str) -> None:
    """Serve until SIGTERM or Ctrl-C, then return with everything stopped. Raises `Refusal` when it cannot start."""
    raise_on_stop_signals()
    listener = listen(settings.host, settings.port)
    with listener, opened(settings) as (redis_url, stop_redis):
        complete = with_tokens(settings).model_copy(update={"redis": redis_url})
        on_ready = partial(show, settings, complete, url_of(listener))
        if workers == 1:
            run_server(complete, listener, on_ready, on_force=stop_redis)
        else:
            Workers(complete, listener, workers, log_level).run(on_ready, on_force=stop_redis)
        # Stopping Redis takes milliseconds; an impatient Ctrl-C must not leave it behind.
        signal.signal(signal.SIGINT, signal.SIG_IGN)


def with_tokens(settings: Settings) -> Settings:
    """`settings` with the tokens that were not set generated."""
    return settings.model_copy(
        update={
            "admin_token": settings.admin_token or SecretStr(mint_token()),
            "trainer_token": settings.trainer_token or SecretStr(mint_token()),
        }
    )
