"""`verbatim score`: have a closed session scored, and wait for it."""

from __future__ import annotations

import time
from typing import Annotated

import typer

from cli.options import AsJson, ServiceUrl, SessionId
from cli.refusal import CommandError

LOOK_SECONDS = 1.0


def score(
    session_id: SessionId,
    scorer: Annotated[str, typer.Option(metavar="NAME", help="A scorer of the service's VERBATIM_SCORERS.")],
    url: ServiceUrl = None,
    as_json: AsJson = False,
) -> None:
    """Ask a scorer, a teacher for example, for the logprobs of what a closed session sampled, and wait until it has answered.

    Calls that have a score keep it.

    \b
    verbatim score first --scorer teacher
    """
    from cli.control import CommandClient
    from cli.sessions import path_of
    from cli.tables import print_json

    control, path = CommandClient(url), f"{path_of(session_id)}/scores"
    none = {"state": "none", "calls": 0, "tokens": 0, "error": ""}
    told = control.post(path, {"scorer": scorer})["scorers"].get(scorer, none)
    while told["state"] == "queued":
        time.sleep(LOOK_SECONDS)
        told = control.get(path)["scorers"].get(scorer, none)
    if as_json:
        print_json(told)
    if told["state"] == "failed":
        raise CommandError(f"session {session_id} is not scored by {scorer}: {told['error']}")
    if not as_json:
        typer.echo(f"session {session_id}: {told['tokens']} tokens of {told['calls']} calls scored by {scorer}")
