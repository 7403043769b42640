"""`verbatim env`: the variables, files and command of a harness that is started by other means."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import Annotated, Any

import typer

from cli.options import HARNESS, MODEL, AsJson, NewSessionId, RunName, ServiceUrl
from cli.refusal import CommandError
from cli.run import RunSession, find_model, load_harness, open_session
from rollout.harnesses.definition import Harness
from rollout.harnesses.prepared import HarnessError, home_variables


def env(
    harness: Annotated[str, HARNESS],
    session_id: NewSessionId = None,
    run: RunName = None,
    model: Annotated[str | None, MODEL] = None,
    home: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR",
            help="Write the harness's files into DIR, created if needed, and print it as HOME. Not your own home: files "
            "of the same name are replaced. Default: print the files.",
        ),
    ] = None,
    url: ServiceUrl = None,
    as_json: AsJson = False,
) -> None:
    """Open a session and print a harness's settings for it.

    For harnesses that verbatim run cannot start: in a container, on another machine, from your own script. The session stays
    open until verbatim sessions close. VERBATIM_ADMIN_TOKEN must be the token of the service.

    \b
    eval "$(verbatim env --harness shell)"; python my_agent.py
    (eval "$(verbatim env --harness codex --home /tmp/h1)"; codex exec "Fix the failing test")
    verbatim env --harness qwen-code --json > session.json

    The output contains the session's key. {prompt} marks the place of the task.
    """
    from cli.control import CommandClient

    definition = load_harness(harness)
    if home is not None and home.resolve() == Path.home().resolve():
        raise CommandError(f"--home {home} is your own home, whose files would be replaced: choose another folder", exit_code=2)
    session = open_session(CommandClient(url), definition, session_id=session_id, run=run)
    try:
        given = describe(definition, session, model, home)
    except BaseException as error:
        # Also on Ctrl-C: nothing else would close the session.
        session.close("failed", error=f"verbatim env broke off: {error}")
        raise
    typer.echo(json.dumps(given, indent=2) if as_json else render_shell(given, session))


def describe(definition: Harness, session: RunSession, model: str | None, home: Path | None) -> dict[str, Any]:
    """The harness's settings as one JSON object; its files are written if there is a `home`."""
    model, limits = find_model(definition, session, model)
    place = home.absolute() if home is not None else Path.home()
    try:
        prepared = definition.prepare(session.endpoint, model, ["{prompt}"], place, limits=limits)
    except HarnessError as error:
        raise CommandError(str(error)) from error
    if home is not None:
        try:
            prepared.write(place)
        except (OSError, HarnessError) as error:
            raise CommandError(f"--home {home}: {error}") from error
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


def render_shell(given: dict[str, Any], session: RunSession) -> str:
    """Lines for a POSIX shell. Commands end with a semicolon and comments come last, so that an eval without quotes, which joins the
    lines, works as well."""
    lines = [f"unset {name};" for name in given["unset"]]
    lines += [f"export {name}={shlex.quote(value)};" for name, value in given["env"].items()]
    lines += [f"# session {given['session_id']} of {given['harness']}; close it afterwards with"]
    lines += [f"#   verbatim sessions close {shlex.quote(given['session_id'])} --url {session.control.url} --reward 1"]
    lines += [f"# start it with: {shlex.join(given['argv'])}"]
    if given["files"] and given["home"] is None:
        lines += ["# these files must be in its home; --home DIR writes them:"]
        for path, text in given["files"].items():
            lines += [f"# ~/{path}", *(f"#   {line}".rstrip() for line in text.splitlines())]
    return "\n".join(lines)
