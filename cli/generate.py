"""`verbatim generate`: sample the tasks of a file until enough attempts pass; write the accepted ones as Parquet and chat messages."""

from __future__ import annotations

import asyncio
from contextlib import ExitStack
from pathlib import Path
from typing import Annotated, Any

import typer

from cli.checks import EXTRAS
from cli.options import HARNESS, MODEL, RUNTIME, SAMPLES, RunName, ServiceUrl, TasksFile, check_installed
from cli.refusal import CommandError
from cli.stop_signals import StopSignals

NEEDS = ("simpleeval", "pydantic", "msgspec", "pyarrow")
AT_ONCE = 4


def generate(
    file: TasksFile,
    out: Annotated[Path, typer.Option(metavar="DIR", help="Where the files go. Repeat the command to continue there.")],
    harness: Annotated[str | None, HARNESS] = None,
    engine: Annotated[
        list[str] | None,
        typer.Option(
            metavar="URL",
            help="Start a service and a node for this engine, in place of the service at --url. Repeatable, for replicas of the model.",
        ),
    ] = None,
    url: ServiceUrl = None,
    accept: Annotated[
        str, typer.Option(metavar="EXPR", help="Over reward, status, calls, tokens, seconds, attempt and metadata.")
    ] = "reward > 0",
    samples: Annotated[int, SAMPLES] = 1,
    want: Annotated[
        int | None,
        typer.Option(
            metavar="K", min=1, help="Stop at K accepted attempts per task and keep the best K. Default: stop at one, keep all."
        ),
    ] = None,
    max_samples: Annotated[
        int | None, typer.Option(metavar="M", min=1, help="Attempts per task in all. Default: --samples, which is one round.")
    ] = None,
    model: Annotated[str | None, MODEL] = None,
    runtime: Annotated[str | None, RUNTIME] = None,
    run: RunName = None,
    at_once: Annotated[
        int | None, typer.Option(metavar="N", min=1, help="Harnesses at once, with --engine. Default: 4.")
    ] = None,
) -> None:
    """Sample the tasks of a file until enough attempts pass, and write the accepted ones.

    --harness, --model and --runtime replace what the lines name.

    Best of eight: --samples 8 --want 1. Rejection sampling: --max-samples 16 --want 1. DIR gets accepted/ (Parquet, one row per
    trajectory, with tokens, text and logprobs), chat.jsonl (the same rows as chat messages; also what an engine without token ids
    replied), rollouts.jsonl (every attempt, and why it was not accepted), and a data card: datasets.load_dataset reads DIR.

    \b
    verbatim generate tasks.jsonl --harness pi --engine http://127.0.0.1:8000 --accept 'reward > 0' --out solved
    verbatim generate tasks.jsonl --engine https://api.example.com --model large --out distilled
    verbatim generate tasks.jsonl --url http://proxy:8700 --samples 4 --want 2 --max-samples 16 --out solved

    First it prints what the tasks need, and ends if something is missing. It ends early, too, if the first attempts all fail for
    the same reason. Ctrl-C stops it and writes what was accepted so far; repeat the command to continue. The exit code is 1 if
    nothing was accepted.
    """
    check_flags(engine, url, at_once, samples, want, max_samples)
    if engine:
        check_installed("generate --engine", (*NEEDS, *EXTRAS["proxy"]), "proxy,rollout,archive")
    check_installed("generate", NEEDS, "rollout,archive")
    from cli.archive_api import ArchiveApi
    from cli.generation.attempts import Accept, Overrides, RoundPlan, read_inputs
    from cli.generation.folder import GenerationFolder
    from cli.generation.needs import check_nodes, check_own_node, list_kinds
    from cli.generation.rounds import Generation
    from cli.generation.screen import Screen
    from cli.generation.texts import Detokenizer
    from cli.tasks import read_bodies

    rule = Accept(accept)
    inputs = read_inputs(read_bodies(file), Overrides(harness, model, runtime, run), rule)
    limits = RoundPlan(samples, max_samples or samples, want)
    settings: dict[str, Any] = {"--harness": harness, "--model": model, "--runtime": runtime, "--accept": accept}
    settings |= {"--samples": samples, "--want": want, "--max-samples": limits.most}
    with StopSignals() as stop, GenerationFolder(out, settings) as folder:
        why = "stopped; repeat the command to continue"
        try:
            with ExitStack() as stack:
                screen = stack.enter_context(Screen())
                if not engine:
                    api, wait = ArchiveApi(url), stop.wait
                    screen.report_needs(check_nodes(inputs, api))
                else:
                    screen.report_needs(asyncio.run(check_own_node(inputs, engine, folder, screen.say)))
                    from cli.serving.own_service import OwnService

                    kinds, most = list_kinds(inputs), at_once or AT_ONCE
                    own = OwnService(engine, folder.data, folder.logs, stop.wait, screen.say, most, kinds, folder.id)
                    stack.enter_context(own)
                    api, wait = ArchiveApi(own.url, own.token), own.wait
                stack.enter_context(api)
                texts = stack.enter_context(Detokenizer(api.get("/engines")["replicas"]))
                Generation(api, folder, inputs, limits, rule, screen, wait, texts.decode).run()
        except CommandError as refusal:
            if stop.number is None:
                raise
            why = str(refusal)
    if stop.number is not None:
        raise CommandError(why, exit_code=128 + stop.number)


def check_flags(
    engine: list[str] | None, url: str | None, at_once: int | None, samples: int, want: int | None, max_samples: int | None
) -> None:
    """Raises `CommandError` (exit code 2)."""
    if engine and url:
        raise CommandError("pass either --engine, to start a service, or --url, to use a running one", exit_code=2)
    if not engine and at_once is not None:
        raise CommandError(
            "--at-once configures the node that --engine starts; a running service's have their own", exit_code=2
        )
    most = max_samples or samples
    if most < samples:
        raise CommandError(f"--max-samples {most} is less than --samples {samples}", exit_code=2)
    if want is not None and want > most:
        raise CommandError(f"--want {want} is more than the {most} attempts allowed: raise --max-samples", exit_code=2)
