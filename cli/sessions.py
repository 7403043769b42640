"""`verbatim sessions`, `verbatim view` and `verbatim dead-letters`: the sessions of a running service and its undeliverable groups."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Callable, Iterator
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any
from urllib.parse import quote

import typer

from cli.options import (
    SERVICE,
    AsJson,
    GroupId,
    GroupSize,
    Limit,
    NewSessionId,
    Reward,
    RunName,
    ServiceUrl,
    SessionId,
    TaskId,
    Where,
)
from cli.refusal import CommandError

if TYPE_CHECKING:
    from rich.table import Table

    from cli.control import CommandClient


app = typer.Typer(no_args_is_help=True, help=f"Open, list, show, reward and close sessions. {SERVICE}")


@app.command("list", short_help="List sessions, newest first.")
def list_sessions(
    where: Where = None,
    limit: Limit = 50,
    url: ServiceUrl = None,
    as_json: AsJson = False,
) -> None:
    """List sessions, newest first.

    --where takes status (open, closing, completed, failed, timeout, cancelled), run, group, task, label, flag, policy, version, loss
    ("tokens lost", "in quarantine", incomplete, truncated, "nothing trained"), at_least and at_most (of the reward), after and before
    (ISO times), and q: a text in ids, metadata, feedback or error.

    \b
    verbatim sessions list --where status=open --limit 10
    verbatim sessions list --where run=grpo-3 --where loss="tokens lost"
    verbatim sessions list --where flag=good --json | jq '.[].reward'
    """
    from cli.control import CommandClient
    from cli.tables import print_listing

    answer = CommandClient(url).get("/sessions", where=where, limit=limit)
    print_listing(answer["sessions"], sessions_table, as_json, limit if answer.get("cursor") else None)


@app.command("show", short_help="Show a session, its reward and feedback.")
def show(session_id: SessionId, url: ServiceUrl = None, as_json: AsJson = False) -> None:
    """Show one session: its state, its reward with the evaluator's feedback, its calls, and the accounting of its sampled tokens.

    \b
    verbatim sessions show first
    """
    from cli.control import CommandClient
    from cli.feedback import print_reward, remove_controls
    from cli.tables import print_json, standard_output

    control, path = CommandClient(url), path_of(session_id)
    session = control.get(path)
    calls = list_calls(control, session_id)
    exported = control.get(f"{path}/trajectories")
    rows, accounting = exported["trajectories"], exported["accounting"]
    if as_json:
        kept = [{name: value for name, value in call.items() if name not in CALL_ARRAYS} for call in calls]
        print_json({**session, "calls": kept, "trajectories": len(rows), "accounting": accounting})
        return
    console = standard_output()
    console.print(sessions_table([session]))
    if session.get("error"):
        console.print(f"error: {remove_controls(session['error'])}", markup=False, highlight=False, soft_wrap=True)
    for name in ("flag", "note"):
        if session[name]:
            console.print(f"{name}: {remove_controls(session[name])}", markup=False, highlight=False, soft_wrap=True)
    print_reward(console, session)
    console.print(calls_table(calls))
    console.print(accounting_line(len(rows), accounting))


@app.command("open", short_help="Open a session for an agent.")
def open_(
    session_id: NewSessionId = None,
    task_id: TaskId = None,
    group_id: GroupId = None,
    group_size: GroupSize = None,
    run: RunName = None,
    metadata: Annotated[str | None, typer.Option(metavar="JSON", help="An object that is kept with the session.")] = None,
    url: ServiceUrl = None,
    as_json: AsJson = False,
) -> None:
    """Open a session and print what an agent needs: its key and its base URLs, of which it takes one.

    It stays open until verbatim sessions close. verbatim env prints a known harness's own settings instead, and verbatim run
    opens, runs and closes in one.

    \b
    verbatim sessions open --session-id first --group-id task-7 --group-size 4
    key=$(verbatim sessions open --json | jq -r .api_key)
    """
    from cli.control import CommandClient
    from cli.tables import print_json

    fields: dict[str, Any] = {"session_id": session_id, "task_id": task_id, "group_id": group_id, "group_size": group_size}
    fields["run"] = run
    fields["metadata"] = None if metadata is None else _parse_object("--metadata", metadata)
    opened = CommandClient(url).post("/sessions", {name: value for name, value in fields.items() if value is not None})
    if as_json:
        print_json(opened)
        return
    names = {"session": opened["session_id"], "key": opened["api_key"], **opened["base_urls"]}
    for name, value in names.items():
        typer.echo(f"{name + ':':<11}{value}")


NUMBERS = {"ignore_unknown_options": True}
"""Lets a negative reward be an argument."""


@app.command("reward", short_help="Set a session's reward.", context_settings=NUMBERS)
def reward(
    session_id: SessionId,
    value: Annotated[float, typer.Argument(metavar="REWARD", help="A finite number.")],
    feedback: Annotated[
        str | None, typer.Option(metavar="TEXT", help="Why: shown wherever the session is. - reads standard input.")
    ] = None,
    call: Annotated[
        list[str] | None, typer.Option(metavar="ID=X", help="The reward of one call's own row. Repeatable.")
    ] = None,
    branch: Annotated[
        list[str] | None, typer.Option(metavar="ID=X", help="The reward of the branch that ends in this call. Repeatable.")
    ] = None,
    url: ServiceUrl = None,
) -> None:
    """Set a session's reward. Until its group is delivered, it can be changed.

    \b
    verbatim sessions reward first 1
    verbatim sessions reward first -0.5 --feedback "3 passed, 1 failed: IIII is not IV"
    """
    from cli.control import CommandClient

    body: dict[str, Any] = {"reward": _check_finite("REWARD", value)}
    body |= {"per_call": _parse_rewards("--call", call)} if call else {}
    body |= {"per_branch": _parse_rewards("--branch", branch)} if branch else {}
    if feedback is not None:
        body["metadata"] = {"feedback": typer.get_text_stream("stdin").read() if feedback == "-" else feedback}
    CommandClient(url).post(f"{path_of(session_id)}/reward", body)
    typer.echo(f"session {session_id}: reward {value:g}")


class Status(StrEnum):
    COMPLETED = "completed"
    FAILED = "failed"
    TIMEOUT = "timeout"
    CANCELLED = "cancelled"


@app.command("flag", short_help="Put a flag and a note on a session.")
def flag(
    session_id: SessionId,
    name: Annotated[
        str, typer.Argument(metavar="[FLAG]", help="A word to choose sessions by. None: takes flag and note away.")
    ] = "",
    note: Annotated[str, typer.Option(metavar="TEXT", help="Shown on its page, and exported.")] = "",
    url: ServiceUrl = None,
) -> None:
    """Put a flag and a note on a session, in place of those it has. verbatim export --flag chooses by it.

    \b
    verbatim sessions flag first good --note "finds the cause before it edits"
    verbatim export --flag good --out reviewed
    """
    from cli.control import CommandClient

    CommandClient(url).put(f"{path_of(session_id)}/review", {"flag": name, "note": note})
    typer.echo(f"session {session_id}: {f'flag {name}' if name else 'no flag'}{', with a note' if note else ''}")


@app.command("close", short_help="Close a session.")
def close(
    session_id: SessionId,
    status: Annotated[Status, typer.Option(help="How it ended.")] = Status.COMPLETED,
    reward: Reward = None,
    error: Annotated[str | None, typer.Option(metavar="TEXT", help="What went wrong.")] = None,
    url: ServiceUrl = None,
) -> None:
    """Close a session: its calls are refused from now on, and a trainer gets its rows once it has a reward.

    \b
    verbatim sessions close first --reward 1
    verbatim sessions close first --status failed --error "the agent crashed"
    """
    from cli.control import CommandClient

    body = {"status": status.value, "error": error, "reward": None if reward is None else _check_finite("--reward", reward)}
    control = CommandClient(url)
    control.post(f"{path_of(session_id)}/close", {name: given for name, given in body.items() if given is not None})
    closed = control.get(path_of(session_id))
    earned = (
        f"reward {closed['reward']:g}" if closed["reward"] is not None else "no reward yet: verbatim sessions reward sets it"
    )
    typer.echo(f"session {session_id} {closed['status']}: {closed['calls']} calls, {earned}")


def _check_finite(name: str, value: float) -> float:
    if not math.isfinite(value):
        raise CommandError(f"{name} {value} is invalid: pass a finite number", exit_code=2)
    return value


def _parse_rewards(flag: str, given: list[str]) -> dict[str, float]:
    """Rewards by call id. Raises `CommandError` (exit code 2)."""
    rewards = {}
    for item in given:
        call_id, _, number = item.rpartition("=")
        try:
            rewards[call_id] = _check_finite(flag, float(number))
        except ValueError as error:
            raise CommandError(f"{flag} {item!r} is not ID=NUMBER", exit_code=2) from error
        if not call_id:
            raise CommandError(f"{flag} {item!r} is not ID=NUMBER", exit_code=2)
    return rewards


def _parse_object(flag: str, text: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except ValueError as error:
        raise CommandError(f"{flag} is not JSON: {error}", exit_code=2) from error
    if not isinstance(value, dict):
        raise CommandError(f"{flag} is not a JSON object", exit_code=2)
    return value


CALL_ARRAYS = ("prompt_ids", "completion_ids", "logprobs", "messages", "reply")
"""Left out of a session's JSON: GET /sessions/ID/calls has them."""


def path_of(session_id: str) -> str:
    return f"/sessions/{quote(session_id, safe='')}"


def list_calls(control: CommandClient, session_id: str) -> list[dict[str, Any]]:
    """Every call of the session."""
    calls: list[dict[str, Any]] = []
    cursor = None
    while True:
        page = control.get(f"{path_of(session_id)}/calls", cursor=cursor)
        calls += page["calls"]
        cursor = page.get("cursor")
        if cursor is None:
            return calls


def sessions_table(sessions: list[dict[str, Any]]) -> Table:
    from rich.table import Column

    from cli.tables import as_cell, format_time, make_table

    session_id = Column("session", no_wrap=True, overflow="fold")
    table = make_table(
        session_id, Column("status", no_wrap=True), "calls", "reward", "tokens", "run", "group", "task", "created"
    )
    for session in sessions:
        table.add_row(
            session["session_id"],
            session["status"],
            str(session["calls"]),
            "" if session.get("reward") is None else f"{session['reward']:g}",
            _sampled(session.get("accounting")),
            session["run"],
            as_cell(session.get("group_id")),
            as_cell(session.get("task_id")),
            format_time(session["created_at"]),
        )
    return table


def _sampled(accounting: dict[str, Any] | None) -> str:
    """The sampled tokens, and those that are quarantined; "" while they are not counted."""
    if accounting is None:
        return ""
    quarantined = sum(accounting["quarantined"].values())
    return f"{accounting['sampled_tokens']}" + (f" ({quarantined} quarantined)" if quarantined else "")


def calls_table(calls: list[dict[str, Any]]) -> Table:
    from cli.tables import make_table

    table = make_table("call", "parent", "status", "finish", "prompt", "completion", "weights", "seconds", "engine")
    for call in calls:
        table.add_row(
            call["call_id"],
            call.get("parent_id") or "",
            call["status"],
            call.get("finish_reason") or "",
            str(len(call.get("prompt_ids") or ())),
            str(len(call.get("completion_ids") or ())),
            ", ".join(str(version) for version, _, _ in call.get("weight_versions") or ()),
            f"{call.get('engine_seconds') or 0:.2f}",
            call.get("api") or "",
        )
    return table


def accounting_line(rows: int, accounting: dict[str, Any]) -> str:
    """The equation sampled = exported + quarantined, with the reasons."""
    quarantined = accounting["quarantined"]
    line = (
        f"{accounting['sampled_tokens']} tokens sampled = {accounting['exported_tokens']} exported in {rows} trajectories + "
        f"{sum(item['tokens'] for item in quarantined)} quarantined"
    )
    reasons = sorted({item["reason"] for item in quarantined})
    line = f"{line} ({', '.join(reasons)})" if reasons else line
    replayed = accounting.get("replayed_tokens")
    return f"{line}; {replayed} replayed from other sessions" if replayed else line


def count_roles(rows: list[dict[str, Any]]) -> str:
    """The number of rows of each role, listing inferred roles and rows that train nothing separately."""
    found = Counter((row["role"], row.get("role_source"), any(row["loss_mask"])) for row in rows)
    counts = []
    for (role, source, trained), count in sorted(found.items(), key=lambda item: -item[1]):
        notes = ["inferred"] if source == "inferred" and role != "main" else []
        notes += [] if trained else ["not trained"]
        counts.append(f"{count} {role}" + (f" ({', '.join(notes)})" if notes else ""))
    return ", ".join(counts)


def view(
    session_id: SessionId,
    out: Annotated[Path | None, typer.Option(metavar="FILE", help="Where to write it. Default: SESSION.html.")] = None,
    url: ServiceUrl = None,
) -> None:
    """Save a session's page as one HTML file: reward, feedback, the conversation, and every token with its logprob and weights.

    \b
    verbatim view first --out first.html
    """
    from cli.control import CommandClient

    page = CommandClient(url).fetch(f"/ui/sessions/{quote(session_id, safe='')}/download/page.html").content
    target = out or Path(f"{session_id}.html")
    try:
        target.write_bytes(page)
    except OSError as error:
        raise CommandError(f"{target} cannot be written: {error.strerror}") from error
    typer.echo(target)


dead_letters = typer.Typer(
    no_args_is_help=True,
    help=f"Groups no longer delivered because they were delivered too often, are unreadable, or never became complete. {SERVICE}",
)

PAGE = 1000

Letters = Annotated[list[str] | None, typer.Argument(metavar="[LETTER]", help="Ids of dead letters, or of their groups.")]
Reason = Annotated[str | None, typer.Option(metavar="TEXT", help="Only letters whose reason contains this text; '' is in all.")]


@dead_letters.command("list")
def list_(
    reason: Reason = None,
    limit: Limit = 50,
    url: ServiceUrl = None,
    as_json: AsJson = False,
) -> None:
    """List dead letters with their reasons, newest first.

    \b
    verbatim dead-letters list --reason incomplete
    """
    from itertools import islice

    from cli.control import CommandClient
    from cli.tables import print_listing

    found = list(islice(list_letters(CommandClient(url), reason), limit + 1))
    print_listing(found[:limit], letters_table, as_json, limit if len(found) > limit else None)


@dead_letters.command("retry")
def retry(names: Letters = None, reason: Reason = None, url: ServiceUrl = None) -> None:
    """Deliver groups again, with their delivery count reset; an incomplete group waits for its members again.

    \b
    verbatim dead-letters retry --reason "too often"
    """
    from cli.control import CommandClient

    control = CommandClient(url)
    _apply(control, names, reason, "delivered again", lambda path: control.post(f"{path}/retry", {}))


@dead_letters.command("drop")
def drop(names: Letters = None, reason: Reason = None, url: ServiceUrl = None) -> None:
    """Remove groups from the list for good. Their sessions stay until they are deleted.

    \b
    verbatim dead-letters drop --reason unreadable
    """
    from cli.control import CommandClient

    control = CommandClient(url)
    _apply(control, names, reason, "dropped", control.delete)


def list_letters(control: CommandClient, reason: str | None) -> Iterator[dict[str, Any]]:
    """Every dead letter whose reason contains `reason`, newest first."""
    cursor = None
    while True:
        page = control.get("/batches/dead", cursor=cursor, limit=PAGE, reason=reason)
        yield from page["dead_letters"]
        cursor = page["cursor"]
        if cursor is None:
            return


def letters_table(found: list[dict[str, Any]]) -> Table:
    from cli.tables import as_cell, format_time, make_table

    table = make_table("letter", "sessions", "deliveries", "died", "reason")
    for letter in found:
        counts = str(len(letter["session_ids"])), str(letter["deliveries"])
        table.add_row(as_cell(letter["letter_id"]), *counts, format_time(letter["died_at"]), as_cell(letter["reason"]))
    return table


def _apply(
    control: CommandClient,
    names: list[str] | None,
    reason: str | None,
    done: str,
    act: Callable[[str], dict[str, Any]],
) -> None:
    """Call `act` on the path of each selected letter and report. Raises `CommandError` if some failed."""
    from rich.console import Console
    from rich.progress import track

    selected, screen = _select(control, names, reason), Console(stderr=True)
    refusals: list[str] = []
    count = 0
    for name in track(selected, "dead letters", console=screen, transient=True, disable=not screen.is_terminal):
        try:
            count += len(act(f"/batches/dead/{quote(name, safe='')}")["letters"])
        except CommandError as refusal:
            refusals.append(str(refusal))
    Console().print(f"{count} {'letter' if count == 1 else 'letters'} {done}")
    if refusals:
        raise CommandError("; ".join(refusals[:5]) + (f"; and {len(refusals) - 5} more" if len(refusals) > 5 else ""))


def _select(control: CommandClient, names: list[str] | None, reason: str | None) -> list[str]:
    """The letters to act on, all listed first because `act` changes the list."""
    if bool(names) == (reason is not None):
        raise CommandError("name the letters, or choose them with --reason TEXT, '' for all", exit_code=2)
    return names or [letter["letter_id"] for letter in list_letters(control, reason or None)]
