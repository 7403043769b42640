"""`verbatim bench`: what the service adds to a user's own engine, and where it spends the time."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import httpx
import typer

from cli.refusal import Refusal
from cli.run import check_installed
from cli.stop_signals import StopSignals

if TYPE_CHECKING:
    from cli.control import Control

NEEDS = ("aiohttp", "msgspec", "prometheus_client", "pydantic")
PROBE_SECONDS = 10.0


def bench(
    engine: Annotated[str, typer.Option(metavar="URL", help="The engine, asked directly: a server of /v1/chat/completions.")],
    url: Annotated[
        str | None,
        typer.Option(
            metavar="URL", help="A service that runs before this engine; VERBATIM_ADMIN_TOKEN. Default: one is started."
        ),
    ] = None,
    model: Annotated[str | None, typer.Option(metavar="M", help="The model to ask for. Default: the engine's first.")] = None,
    calls: Annotated[int, typer.Option(metavar="N", min=1, help="Calls on each of the two ways.")] = 100,
    seconds: Annotated[float, typer.Option(metavar="S", min=1, help="The most that each way may take.")] = 60.0,
    connections: Annotated[int, typer.Option(metavar="C", min=1, help="Calls at once, each over a session of its own.")] = 4,
    prompt: Annotated[int, typer.Option(metavar="N", min=1, help="Words of a prompt: about as many tokens.")] = 1000,
    tokens: Annotated[int, typer.Option(metavar="N", min=1, help="Tokens to sample, at most.")] = 128,
    whole: Annotated[bool, typer.Option("--whole", help="Ask for whole answers instead of streams.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the figures as JSON and nothing else.")] = False,
) -> None:
    """Ask an engine directly and through the service, in turn, and say what the difference is and where it comes from.

    \b
    verbatim bench --engine http://127.0.0.1:8000
    verbatim bench --engine http://127.0.0.1:8000 --url http://127.0.0.1:8700 --connections 32 --calls 1000 --json

    The sessions it opens are deleted when it ends: no trainer sees them. Ctrl-C ends it with what was measured by then.
    """
    check_installed("bench", NEEDS, "proxy")
    from rich.console import Console

    from cli.benching.measurement import Asked, Bench, Bounds
    from cli.serve import engine_url

    where = engine_url(engine)
    asked = Asked(first_model(where, model), prompt, tokens, not whole)
    with StopSignals() as stop, _service(where, url, stop) as control:
        report = Bench(where, control, asked, Bounds(calls, seconds, connections), stop).run()
    if as_json:
        typer.echo(json.dumps(report.data(), indent=2))
    else:
        report.show(Console())
    silent = [tally for tally in report.ways.values() if not tally.calls]
    failure = next((tally.failure for tally in silent if tally.failure), "")
    if failure or len(silent) == len(report.ways):
        raise Refusal(failure or "stopped before a call was answered")


def first_model(engine: str, wanted: str | None) -> str:
    """The model wanted, or else the first that the engine names. Raises `Refusal`, also where nobody answers."""
    asked = f"{engine}/v1/models"
    try:
        answer = httpx.get(asked, timeout=PROBE_SECONDS)
        return wanted or str(answer.raise_for_status().json()["data"][0]["id"])
    except httpx.HTTPStatusError as error:
        raise Refusal(
            f"{asked} answered {error.response.status_code}: is that an engine? If it only lacks this route: --model"
        ) from error
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        raise Refusal(f"no engine at {engine}: {error}") from error
    except (ValueError, KeyError, IndexError, TypeError) as error:
        raise Refusal(f"{asked} names no model: is that an engine? If it only lacks this route: --model") from error


@contextmanager
def _service(engine: str, url: str | None, stop: StopSignals) -> Iterator[Control]:
    """The service at `url`, or one started for as long as the block runs. Raises `Refusal`."""
    from cli.control import Control
    from cli.generation.own_service import OwnService

    if url is not None:
        yield Control(url)
        return
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="verbatim-bench-", ignore_cleanup_errors=True)))
        own = stack.enter_context(OwnService([engine], folder / "data", folder / "logs", 0, (), stop.wait, _tell))
        yield Control(own.url, own.token)


def _tell(line: str) -> None:
    typer.echo(line, err=True)
