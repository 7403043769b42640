"""What the service adds to an engine of one's own, and where it spends the time.

python -m benchmarks.own_engine --engine http://127.0.0.1:8000
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Annotated

import httpx
import typer
from rich.console import Console

from benchmarks.own_engine_passes import Bench, Bounds, LoadShape
from cli.control import CommandClient
from cli.refusal import CommandError
from cli.serve import engine_url
from cli.serving.own_service import OwnService
from cli.stop_signals import StopSignals

PROBE_SECONDS = 10.0


def bench(
    engine: Annotated[
        str, typer.Option(metavar="URL", help="The engine to call directly: a server of /v1/chat/completions, without a key.")
    ],
    url: Annotated[
        str | None,
        typer.Option(metavar="URL", help="A running service of this engine; VERBATIM_ADMIN_TOKEN. Default: start one."),
    ] = None,
    model: Annotated[str | None, typer.Option(metavar="M", help="The model to request. Default: the engine's first.")] = None,
    calls: Annotated[int, typer.Option(metavar="N", min=1, help="Calls to each target: the engine, and the service.")] = 100,
    seconds: Annotated[float, typer.Option(metavar="S", min=1, help="Time limit per target.")] = 60.0,
    connections: Annotated[int, typer.Option(metavar="C", min=1, help="Parallel calls, each in its own session.")] = 4,
    prompt: Annotated[int, typer.Option(metavar="N", min=1, help="Words per prompt: about as many tokens.")] = 1000,
    tokens: Annotated[int, typer.Option(metavar="N", min=1, help="Maximum tokens to sample per call.")] = 128,
    whole: Annotated[bool, typer.Option("--whole", help="Request whole replies instead of streams.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print only the figures, as JSON.")] = False,
) -> None:
    """Call an engine directly and through the service, alternating, and report the difference and where it comes from.

    \b
    python -m benchmarks.own_engine --engine http://127.0.0.1:8000
    python -m benchmarks.own_engine --engine http://127.0.0.1:8000 --url http://127.0.0.1:8700 --connections 32 --calls 1000 --json

    Its sessions are deleted at the end, so no trainer sees them. Ctrl-C ends it and reports what was measured so far.
    """
    where = engine_url(engine)
    request = LoadShape(first_model(where, model), prompt, tokens, not whole)
    with StopSignals() as stop, _service(where, url, stop) as control:
        report = Bench(where, control, request, Bounds(calls, seconds, connections), stop).run()
    if as_json:
        typer.echo(json.dumps(report.data(), indent=2))
    else:
        report.show(Console())
    silent = [tally for tally in report.ways.values() if not tally.calls]
    failure = next((tally.failure for tally in silent if tally.failure), "")
    if failure or len(silent) == len(report.ways):
        raise CommandError(failure or "stopped before any call was answered")


def first_model(engine: str, wanted: str | None) -> str:
    """`wanted`, or the first model that the engine lists. Raises `CommandError`, also if the engine does not answer."""
    models = f"{engine}/v1/models"
    try:
        answer = httpx.get(models, timeout=PROBE_SECONDS)
        return wanted or str(answer.raise_for_status().json()["data"][0]["id"])
    except httpx.HTTPStatusError as error:
        raise CommandError(
            f"{models} answered {error.response.status_code}: is that an engine? If it only lacks this route: --model"
        ) from error
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        raise CommandError(f"no engine at {engine}: {error}") from error
    except (ValueError, KeyError, IndexError, TypeError) as error:
        raise CommandError(f"{models} names no model: is that an engine? If it only lacks this route: --model") from error


@contextmanager
def _service(engine: str, url: str | None, stop: StopSignals) -> Iterator[CommandClient]:
    """The service at `url`, or one that runs as long as the block. Raises `CommandError`."""
    if url is not None:
        yield CommandClient(url)
        return
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="verbatim-bench-", ignore_cleanup_errors=True)))
        own = stack.enter_context(OwnService([engine], folder / "data", folder / "logs", stop.wait, _tell))
        yield CommandClient(own.url, own.token)


def _tell(line: str) -> None:
    typer.echo(line, err=True)


if __name__ == "__main__":
    app = typer.Typer(add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None)
    app.command()(bench)
    try:
        app()
    except CommandError as refusal:
        print(refusal, file=sys.stderr)
        sys.exit(refusal.exit_code)
