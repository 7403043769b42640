"""`verbatim serve`: read the settings (flags, then environment, then defaults) and run the service."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Container, Iterator
from contextlib import contextmanager
from functools import cached_property
from typing import TYPE_CHECKING, Annotated, Any, Literal, get_args, get_origin

import typer
from typer.core import TyperCommand

from cli.options import LogLevel
from cli.refusal import CommandError
from reconstruct.extras import how_to_install

if TYPE_CHECKING:
    from pydantic_settings import SettingsError

    from proxy.settings import Settings


SECRET = ("admin_token", "trainer_token", "node_token", "engine_api_key", "redis")
"""Settings whose values are never printed."""


def serve(
    workers: Annotated[
        int,
        typer.Option(
            metavar="N",
            min=1,
            help="Processes that share the ports and one Redis. One process uses one CPU core; add more when that core is full.",
        ),
    ] = 1,
    log_level: LogLevel = "info",
    **flags: Any,
) -> None:
    """Serve harnesses and trainers until Ctrl-C or SIGTERM.

    \b
    verbatim serve --engine http://127.0.0.1:8000
    verbatim serve --engine http://gpu1:8000 --engine http://gpu2:8000 --redis redis://redis:6379/0 --host 0.0.0.0 --workers 4

    Every setting has an environment variable (--engine-api is VERBATIM_ENGINE_API; VERBATIM_ENGINE is a JSON list); a flag wins.
    VERBATIM_ADMIN_TOKEN and VERBATIM_TRAINER_TOKEN set the two tokens, VERBATIM_ADMIN_TOKEN_FILE and
    VERBATIM_TRAINER_TOKEN_FILE name files of them; without either they are generated and printed once. VERBATIM_NODE_TOKEN (or
    _FILE) gives nodes a token of their own with fewer rights than the admin's. VERBATIM_ENGINE_API_KEY (or _FILE) is sent to the
    engines.

    The first Ctrl-C lets calls in flight finish for VERBATIM_DRAIN_SECONDS (20), then cuts and records them; a second one
    exits at once.
    """
    with _say_what_is_missing():
        from cli import service
        from cli.serving import logs

    settings = read_settings({name: None if value in (False, []) else value for name, value in flags.items()})
    logs.configure(log_level, settings.log_format)
    service.run(settings, workers, log_level)


@contextmanager
def _say_what_is_missing() -> Iterator[None]:
    try:
        yield
    except ModuleNotFoundError as error:
        raise CommandError(f"the service is not installed ({error.name} is missing): {how_to_install('proxy')}") from error


class ServeCommand(TyperCommand):
    """`serve` with a flag for each setting that is marked as one. They are made when first looked at: the other commands load nothing
    of the service."""

    @cached_property
    def _whole(self) -> Any:
        alone = typer.Typer(rich_markup_mode=None, add_completion=False)
        alone.command()(_add_flags(serve))
        return typer.main.get_command(alone)

    @property
    def params(self) -> Any:
        return self._whole.params

    @params.setter
    def params(self, _: Any) -> None:
        """Those of the function's own signature, which `_whole` has, too."""

    def invoke(self, ctx: Any) -> Any:
        return self._whole.invoke(ctx)


def _add_flags(command: Callable[..., None]) -> Callable[..., None]:
    """`command`, whose last parameter takes the flags, with each of them in its signature."""
    *own, rest = inspect.signature(command, eval_str=True).parameters.values()
    made = [inspect.Parameter(name, rest.KEYWORD_ONLY, annotation=each, default=None) for name, each in _list_flags()]

    def run(**given: Any) -> None:
        command(**given)

    run.__doc__ = command.__doc__
    run.__signature__ = inspect.Signature([*made, *(each.replace(kind=rest.KEYWORD_ONLY) for each in own)])  # type: ignore[attr-defined]
    return run


def _list_flags() -> Iterator[tuple[str, Any]]:
    """Each flagged setting's name, and its option's type. pydantic reads the values: text is enough here."""
    with _say_what_is_missing():
        from proxy.settings import Flag, Settings
    marked = {name: mark for name, field in Settings.model_fields.items() for mark in field.metadata if isinstance(mark, Flag)}
    for name, mark in marked.items():
        field = Settings.model_fields[name]
        values = "|".join(map(str, get_args(field.annotation))) if get_origin(field.annotation) is Literal else None
        kind = bool if field.annotation is bool else list[str] if get_origin(field.annotation) is list else str
        named = re.sub(r"`(\w+)`", lambda found: _name_setting(found[1], marked), " ".join((field.description or "").split()))
        default = field.get_default(call_default_factory=True)
        text = named if default is None or default is False or default == [] else f"{named} Default: {default}."
        repeated = f"{text} Repeatable." if kind == list[str] else text
        option = typer.Option(f"--{name.replace('_', '-')}", metavar=mark.metavar or values, help=repeated)
        yield name, Annotated[kind | None, option]


def _name_setting(name: str, flags: Container[str]) -> str:
    return f"--{name.replace('_', '-')}" if name in flags else f"VERBATIM_{name.upper()}"


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
    part = [each for each in problem["loc"][1:] if isinstance(each, str)]
    if name in SECRET:
        return f"{variable}{'_FILE' if part == ['file'] else ''} is invalid: {reason}"
    return f"{given_by} {str(problem['input'])!r} is invalid: {': '.join([*part, reason])}"


def engine_url(text: str) -> str:
    """`text` without a trailing slash or /v1. Raises `CommandError` (exit code 2) if it is not an engine's URL."""
    from proxy.engine.pool.membership import parse_engine

    try:
        return str(parse_engine(text))
    except ValueError as error:
        named = "" if "@" in text else f" {text!r}"
        hint = ": VERBATIM_ENGINE_API_KEY is sent to the engines" if "@" in text else ""
        raise CommandError(f"--engine{named} is invalid: {error}{hint}", exit_code=2) from error
