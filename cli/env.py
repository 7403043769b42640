"""`verbatim env`: a session for a harness that is started by other means: its variables, files and command."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from cli.harness_options import HarnessName, ModelName, ServiceUrl, SessionId
from cli.refusal import Refusal

if TYPE_CHECKING:
    from cli.opened_session import OpenedSession
    from rollout.harnesses.definition import Harness

FORMATS = ("shell", "json")


def env(
    harness: HarnessName,
    session_id: SessionId = None,
    model: ModelName = None,
    home: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR",
            help="Write the harness's files into DIR, which is made if needed, and print it as HOME. Not your own home: files "
            "of the same name are replaced. Left out: the files are printed.",
        ),
    ] = None,
    output: Annotated[
        str, typer.Option("--format", metavar="shell|json", help="shell: lines for eval. json: one object with everything.")
    ] = "shell",
    url: ServiceUrl = None,
) -> None:
    """Open a session and print what a harness needs to use it.

    For harnesses that verbatim run cannot start: in a container, on another machine, from a script of yours. The session stays
    open until it is closed with POST /sessions/ID/close. VERBATIM_ADMIN_TOKEN must be the token of the service.

    \b
    eval "$(verbatim env --harness shell)"; python my_agent.py
    (eval "$(verbatim env --harness codex --home /tmp/h1)"; codex exec "Fix the failing test")
    verbatim env --harness qwen-code --format json > session.json

    What is printed holds the session's key. The text {prompt} stands where the task goes.
    """
    from cli.control import Control
    from cli.opened_session import chosen, open_session

    definition = chosen(harness)
    if output not in FORMATS:
        raise Refusal(f"--format cannot be {output!r}: choose one of {', '.join(FORMATS)}", exit_code=2)
    if home is not None and home.resolve() == Path.home().resolve():
        raise Refusal(f"--home {home} is your own home, whose files would be replaced: name another folder", exit_code=2)
    session = open_session(Control(url), definition, session_id=session_id)
    try:
        given = describe(definition, session, model, home)
    except BaseException as error:
        # Ctrl-C too: nobody was told of the session, so nobody else would close it.
        session.close("failed", error=f"verbatim env broke off: {error}")
        raise
    typer.echo(json.dumps(given, indent=2) if output == "json" else as_shell(given, session))


def describe(definition: Harness, session: OpenedSession, model: str | None, home: Path | None) -> dict[str, Any]:
    """Everything the harness needs, as one JSON object; its files are written when there is a `home`."""
    from rollout.harnesses.errors import HarnessError
    from rollout.harnesses.surroundings import home_variables

    model = model or (session.first_model() if definition.takes_model else "")
    place = home.absolute() if home is not None else Path.home()
    prepared = definition.prepared(session.endpoint, model, ["{prompt}"], place)
    if home is not None:
        try:
            prepared.write(place)
        except (OSError, HarnessError) as error:
            raise Refusal(f"--home {home}: {error}") from error
    return {
        "harness": definition.name,
        "session_id": session.session_id,
        "api_key": session.endpoint.api_key,
        "base_urls": dict(session.endpoint.base_urls),
        "model": model,
        "home": None if home is None else str(place),
        "env": {**({} if home is None else home_variables(place)), **prepared.env},
        "unset": list(prepared.unset),
        "files": dict(prepared.files),
        "argv": list(prepared.argv),
    }


def as_shell(given: dict[str, Any], session: OpenedSession) -> str:
    """Lines for a POSIX shell. Each command ends with a semicolon and comments come last, so that an eval without quotes, which
    joins the lines, still does the same."""
    lines = [f"unset {name};" for name in given["unset"]]
    lines += [f"export {name}={shlex.quote(value)};" for name, value in given["env"].items()]
    lines += [f"# session {given['session_id']} of {given['harness']}; close it afterwards with"]
    lines += [f'#   curl -X POST {session.control.url}{session.path}/close -H "Authorization: Bearer $VERBATIM_ADMIN_TOKEN" \\']
    lines += ['#     -d \'{"status": "completed", "reward": 1.0}\'']
    lines += [f"# start it with: {shlex.join(given['argv'])}"]
    if given["files"] and given["home"] is None:
        lines += ["# these files must be in its home; --home DIR writes them:"]
        for path, text in given["files"].items():
            lines += [f"# ~/{path}", *(f"#   {line}".rstrip() for line in text.splitlines())]
    return "\n".join(lines)
