"""`verbatim generate`: the tasks of a file are attempted until enough attempts are accepted; those become Parquet and chat messages."""

from __future__ import annotations

import asyncio
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from cli.refusal import Refusal
from cli.run import check_installed
from cli.stop_signals import StopSignals

if TYPE_CHECKING:
    from cli.generation.attempts import Accept, Attempt, Input, Limits
    from cli.generation.folder import GenerationFolder
    from cli.generation.rounds import GenerationApi
    from cli.generation.screen import Screen

NEEDS = ("simpleeval", "pydantic", "msgspec", "pyarrow")
AT_ONCE = 4


def generate(
    tasks: Annotated[str, typer.Option(metavar="FILE", help="One task per line as JSON, as verbatim tasks submit takes them.")],
    out: Annotated[Path, typer.Option(metavar="DIR", help="Where the files go. The same command goes on with what is there.")],
    harness: Annotated[
        str | None, typer.Option(metavar="NAME", help="Name or .toml file of a harness. Default: the one each line names.")
    ] = None,
    engine: Annotated[
        list[str] | None,
        typer.Option(metavar="URL", help="Start a service and a node for it. Repeat it for every replica of the model."),
    ] = None,
    url: Annotated[
        str | None, typer.Option(metavar="URL", help="Use this service instead, with the nodes it has; VERBATIM_ADMIN_TOKEN.")
    ] = None,
    accept: Annotated[
        str, typer.Option(metavar="EXPR", help="Over reward, status, calls, tokens, seconds, attempt and metadata.")
    ] = "reward > 0",
    samples: Annotated[int, typer.Option(metavar="N", min=1, help="Attempts at a task at once.")] = 1,
    want: Annotated[
        int | None,
        typer.Option(
            metavar="K", min=1, help="Accepted attempts a task needs; the best K are kept. Default: one, and all are."
        ),
    ] = None,
    max_samples: Annotated[
        int | None, typer.Option(metavar="M", min=1, help="Attempts at a task in all. Default: --samples, so one round.")
    ] = None,
    model: Annotated[str | None, typer.Option(metavar="M", help="The model to ask for. Default: as each line says.")] = None,
    runtime: Annotated[
        str | None, typer.Option(metavar="KIND", help="Where harnesses run. Default: as each line says, or local.")
    ] = None,
    run: Annotated[int | None, typer.Option(metavar="N", min=1, help="Harnesses at once, with --engine. Default: 4.")] = None,
) -> None:
    """Attempt the tasks of a file until enough attempts are accepted, and write those down.

    Best of eight: --samples 8 --want 1. Rejection sampling: --max-samples 16 --want 1. DIR gets accepted/ (Parquet, one row per
    trajectory, tokens and logprobs included), chat.jsonl (the same rows as chat messages), and rollouts.jsonl (every attempt, with
    why it was not accepted).

    \b
    verbatim generate --tasks tasks.jsonl --harness pi --engine http://127.0.0.1:8000 --accept 'reward > 0' --out solved
    verbatim generate --tasks tasks.jsonl --url http://proxy:8700 --samples 4 --want 2 --max-samples 16 --out solved

    Ctrl-C stops it and keeps what was accepted by then; the same command goes on. The exit code is 1 where nothing was accepted.
    """
    check_flags(engine, url, run, samples, want, max_samples)
    check_installed("generate", NEEDS, "proxy,rollout,archive")
    from cli.generation.attempts import Accept, Limits, Over, read
    from cli.generation.folder import GenerationFolder
    from cli.tasks import bodies_of

    accepted = Accept(accept)
    inputs = read(bodies_of(tasks), Over(harness, model, runtime), accepted)
    limits = Limits(samples, max_samples or samples, want)
    settings: dict[str, Any] = {"--harness": harness, "--model": model, "--runtime": runtime, "--accept": accept}
    settings |= {"--samples": samples, "--want": want, "--max-samples": limits.most}
    with StopSignals() as stop, GenerationFolder(out, settings) as folder:
        generation = Generated(folder, inputs, limits, accepted, stop)
        why = "stopped; the same command goes on from here"
        try:
            generation.run(engine or [], url, run or AT_ONCE)
        except Refusal as refusal:
            if stop.number is None:
                raise
            why = str(refusal)
    if stop.number is not None:
        raise Refusal(why, exit_code=128 + stop.number)


def check_flags(
    engine: list[str] | None, url: str | None, run: int | None, samples: int, want: int | None, max_samples: int | None
) -> None:
    """Raises `Refusal` (exit code 2)."""
    if bool(engine) == bool(url):
        raise Refusal("give either --engine, for a service of its own, or --url, for one that runs", exit_code=2)
    if url and run is not None:
        raise Refusal("--run is about the node that --engine starts; with --url the nodes have their own", exit_code=2)
    most = max_samples or samples
    if most < samples:
        raise Refusal(f"--max-samples {most} is less than --samples {samples}", exit_code=2)
    if want is not None and want > most:
        raise Refusal(f"--want {want} of at most {most} attempts cannot be: raise --max-samples", exit_code=2)


class Generated:
    """One run of the command, everything given checked."""

    def __init__(
        self, folder: GenerationFolder, inputs: list[Input], limits: Limits, accept: Accept, stop: StopSignals
    ) -> None:
        self._folder = folder
        self._inputs = inputs
        self._limits = limits
        self._accept = accept
        self._stop = stop

    def run(self, engines: list[str], url: str | None, at_once: int) -> None:
        """Raises `Refusal`. What was accepted by then is written down however it ends."""
        from cli.generation.own_service import OwnService
        from cli.generation.rounds import GenerationApi
        from cli.generation.screen import Screen
        from cli.generation.trial import try_harnesses

        with ExitStack() as stack:
            screen = stack.enter_context(Screen())
            if url is None:
                kinds = sorted({kind for given in self._inputs for kind in kinds_of(given.body)})
                data, logs = self._folder.data, self._folder.logs
                asyncio.run(try_harnesses(self._inputs, kinds, data / "trial", screen.say))
                own = stack.enter_context(OwnService(engines, data, logs, at_once, kinds, self._stop.wait, screen.say))
                api = stack.enter_context(GenerationApi(own.url, own.token))
                self._attempt(api, screen, own.check)
            else:
                self._attempt(stack.enter_context(GenerationApi(url)), screen, lambda: None)

    def _attempt(self, api: GenerationApi, screen: Screen, check: Any) -> None:
        from cli.generation.rounds import Rounds
        from cli.generation.screen import Totals, failure_lines

        def keep(attempt: Attempt) -> bool:
            if self._folder.holds(attempt.session_id or ""):
                return True
            session = api.session(attempt.session_id or "", "merged")
            if session is None:
                screen.say(f"session {attempt.session_id} was accepted, but is gone")
                return False
            self._folder.keep(session)
            return True

        def stopped(seconds: float) -> bool:
            check()
            return self._stop.wait(seconds)

        rounds = Rounds(api, self._folder.id, self._inputs, self._limits, self._accept, keep)
        complete = False
        try:
            complete = rounds.run(screen, stopped)
            if not complete:
                screen.say("stopping: what was accepted is written down, and what was started ends")
        finally:
            conversations, truncated = self._folder.settle(rounds.ways, complete=complete)
            for line in failure_lines(rounds.ways):
                screen.say(line)
            screen.say(Totals(rounds.ways).sentence())
            screen.say(f"{conversations} conversations in {self._folder.path / 'chat.jsonl'}")
            if truncated:
                reasons = ", ".join(f"{count} by {reason}" for reason, count in sorted(truncated.items()))
                screen.say(
                    f"{truncated.total()} of {conversations} conversations are truncated ({reasons}): see `truncated` in each line"
                )
        if complete and not conversations:
            raise Refusal(f"no attempt was accepted; {self._folder.path / 'rollouts.jsonl'} says of each why not")


def kinds_of(body: dict[str, Any]) -> set[str]:
    """The kinds of runtimes that a task needs."""
    from rollout.task import RuntimeSpec

    evaluator = body.get("evaluator")
    given = [body.get("runtime"), evaluator.get("runtime") if isinstance(evaluator, dict) else None]
    named = {one if isinstance(one, str) else one.get("kind", RuntimeSpec().kind) for one in given if one}
    return named or {RuntimeSpec().kind}
