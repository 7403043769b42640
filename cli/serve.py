"""`verbatim serve`: read the settings (flags, then environment, then defaults) and run the service."""

from __future__ import annotations

import re
from collections.abc import Container
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from cli.refusal import CommandError
from reconstruct.extras import how_to_install

if TYPE_CHECKING:
    from pydantic_settings import SettingsError

    from proxy.settings import Settings


SECRET = (
    "admin_token",
    "trainer_token",
    "node_token",
    "admin_tokens",
    "trainer_tokens",
    "node_tokens",
    "engine_api_key",
    "redis",
)
"""Settings whose values are never printed."""


def serve(
    engine: Annotated[
        list[str] | None,
        typer.Option(
            metavar="URL",
            help="Base URL of an engine, for example http://127.0.0.1:8000. Repeat it for every replica of the same model. "
            "NAME=URL makes it a replica of the policy NAME; dns://NAME:PORT tracks all addresses of a DNS name. "
            "An engine may start later: until then calls get 503 and /readyz says what is missing.",
        ),
    ] = None,
    engine_api: Annotated[
        str | None,
        typer.Option(
            metavar="auto|token|completions|sglang|chat",
            help="How to talk to the engines. token: vLLM since 0.24, since 0.30 with --enable-scale-out; token ids in "
            "and out, with a weight version per token (0.32) or call. completions: an older vLLM's /v1/completions with ids; "
            "sglang: SGLang's /generate; both need --renderer. chat: any server of /v1/chat/completions. auto (default): probe each one.",
        ),
    ] = None,
    engine_api_key_file: Annotated[
        Path | None, typer.Option(metavar="FILE", help="File with the engines' API key; or set VERBATIM_ENGINE_API_KEY.")
    ] = None,
    renderer: Annotated[
        str | None,
        typer.Option(
            metavar="MODEL",
            help="Hugging Face name or folder of the model whose chat template the service renders, for engines that take token ids "
            "but no messages. VERBATIM_RENDERER_OPTIONS chooses the renderer if the name does not.",
        ),
    ] = None,
    redis: Annotated[
        str | None,
        typer.Option(
            metavar="URL",
            help="redis://host:port/0 of a Redis 6.2 or newer, shared by all processes that serve the same sessions; "
            "redis+cluster://host:port,host:port for a Redis Cluster, redis+sentinel://host:port,host:port/service for a "
            "master under Sentinel, rediss for TLS. Default: an embedded redis-server that starts and stops with the service.",
        ),
    ] = None,
    data_dir: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR",
            help="Where the embedded Redis keeps its append-only file; sessions survive a restart with the same DIR. "
            "One service per DIR. Default: ./verbatim-data.",
        ),
    ] = None,
    fsync: Annotated[
        str | None,
        typer.Option(
            metavar="everysec|always",
            help="When the embedded Redis syncs to disk. everysec (default) can lose a second of data on a power failure, "
            "or two if Redis is killed while the disk is slow; always loses nothing and is slower.",
        ),
    ] = None,
    host: Annotated[
        str | None,
        typer.Option(metavar="HOST", help="Address to listen on. Default: 127.0.0.1; 0.0.0.0 accepts other machines."),
    ] = None,
    port: Annotated[
        int | None,
        typer.Option(metavar="PORT", help="Port to listen on. Default: 8700; 0 picks a free one and prints it."),
    ] = None,
    control_port: Annotated[
        int | None,
        typer.Option(
            metavar="PORT",
            help="A separate port for the control side: sessions, batches, weights, tasks, pages and metrics. --port then serves "
            "only harnesses and probes. 0 picks a free one. Default: both sides share --port.",
        ),
    ] = None,
    workers: Annotated[
        int,
        typer.Option(
            metavar="N",
            min=1,
            help="Processes that share the ports and one Redis. One process uses one CPU core; add more when that core is full.",
        ),
    ] = 1,
    tls_cert: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", help="Serve HTTPS with this PEM certificate chain. Renewals are picked up without a restart."
        ),
    ] = None,
    tls_key: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="The certificate's unencrypted PEM key."),
    ] = None,
    open_mode: Annotated[
        bool,
        typer.Option(
            "--open",
            help="Accept every program on this machine without a token or key. Only with a loopback --host.",
        ),
    ] = False,
    thinking: Annotated[
        str | None,
        typer.Option(
            metavar="template|retain",
            help="What to do if the chat template drops earlier thinking at a new user turn. template (default): start a new "
            "training row there, as the deployed model would see it. retain: keep the sampled thinking in context.",
        ),
    ] = None,
    log_level: Annotated[
        str,
        typer.Option(metavar="debug|info|warning|error", help="The least severe level to log to stderr."),
    ] = "info",
    log_format: Annotated[
        str | None,
        typer.Option(metavar="human|json", help="Lines for people (default), or one JSON object per line."),
    ] = None,
    log_calls: Annotated[
        bool,
        typer.Option("--log-calls", help="Log one line per call: session, outcome and duration, never its content."),
    ] = False,
) -> None:
    """Serve harnesses and trainers until Ctrl-C or SIGTERM.

    \b
    verbatim serve --engine http://127.0.0.1:8000
    verbatim serve --engine http://gpu1:8000 --engine http://gpu2:8000 --redis redis://redis:6379/0 --host 0.0.0.0 --workers 4

    Every flag has an environment variable (--engine-api is VERBATIM_ENGINE_API; VERBATIM_ENGINE is a JSON list); the flag wins.
    VERBATIM_ADMIN_TOKEN and VERBATIM_TRAINER_TOKEN set the two tokens, VERBATIM_ADMIN_TOKEN_FILE and
    VERBATIM_TRAINER_TOKEN_FILE name files of them; without either they are generated and printed once. VERBATIM_NODE_TOKEN (or
    _FILE) gives nodes a token of their own with fewer rights than the admin's.

    The first Ctrl-C lets calls in flight finish for VERBATIM_DRAIN_SECONDS (20), then cuts and records them; a second one
    exits at once.
    """
    try:
        from cli import service
        from cli.serving import logs
    except ModuleNotFoundError as error:
        raise CommandError(f"the service is not installed ({error.name} is missing): {how_to_install('proxy')}") from error

    flags = {
        "engine": engine or None,
        "engine_api": engine_api,
        "engine_api_key_file": engine_api_key_file,
        "renderer": renderer,
        "redis": redis,
        "data_dir": data_dir,
        "fsync": fsync,
        "host": host,
        "port": port,
        "control_port": control_port,
        "tls_cert": tls_cert,
        "tls_key": tls_key,
        "open": open_mode or None,
        "thinking": thinking,
        "log_format": log_format,
        "log_calls": log_calls or None,
    }
    settings = read_settings(flags)
    logs.configure(log_level, settings.log_format)
    service.run(settings, workers, log_level)


def read_settings(flags: dict[str, Any]) -> Settings:
    """The settings with `flags`, by their names, over the environment; None: not given. Raises `CommandError` (exit code 2) that names the
    variable, and the flag if there is one."""
    from pydantic import ValidationError
    from pydantic_settings import SettingsError

    from proxy.settings import Settings

    try:
        settings = Settings(**{name: value for name, value in flags.items() if value is not None})
    except ValidationError as error:
        raise CommandError(_explain(error.errors()[0], flags), exit_code=2) from error
    except SettingsError as error:
        raise CommandError(_explain_json(error), exit_code=2) from error
    if not settings.engine and "engine" not in settings.model_fields_set:
        raise CommandError(
            "no engine given: pass --engine URL, or set VERBATIM_ENGINE to a JSON list of URLs, [] if they are added later",
            exit_code=2,
        )
    return settings.model_copy(update={"engine": [engine_url(url) for url in settings.engine]})


def _explain_json(error: SettingsError) -> str:
    found = re.search(r'field "(\w+)"', str(error))
    name = found[1] if found else ""
    hint = "; a list of one URL is '[\"http://host:8000\"]'" if name == "engine" else ""
    return f"VERBATIM_{name.upper()} is not JSON, the format of lists and tables: {error.__cause__ or error}{hint}"


def _explain(problem: Any, flags: Container[str]) -> str:
    name = str(problem["loc"][0])
    variable = "VERBATIM_" + name.upper()
    given_by = f"--{name.replace('_', '-')} (or {variable})" if name in flags else variable
    reason = problem["msg"].removeprefix("Value error, ")
    reason = reason[:1].lower() + reason[1:]
    if name in SECRET:
        return f"{variable} is invalid: {reason}"
    return f"{given_by} {str(problem['input'])!r} is invalid: {reason}"


def engine_url(text: str) -> str:
    """`text` without a trailing slash or /v1. Raises `CommandError` (exit code 2) if it is not an engine's URL."""
    from proxy.engine.pool.membership import parse_engine

    try:
        return str(parse_engine(text))
    except ValueError as error:
        named = "" if "@" in text else f" {text!r}"
        hint = ": VERBATIM_ENGINE_API_KEY is sent to the engines" if "@" in text else ""
        raise CommandError(f"--engine{named} is invalid: {error}{hint}", exit_code=2) from error
