"""`verbatim audit`: a session's tree, the reason of each branch, its token accounting, and whether its logprobs are right."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from cli.options import AsJson, Builder, ServiceUrl, SessionId
from cli.refusal import CommandError
from reconstruct.extras import how_to_install

if TYPE_CHECKING:
    from rich.table import Table
    from rich.tree import Tree

    from reconstruct.trajectory import Trajectory
    from trainer_client.batch import Batch
    from trainer_client.media import MediaFiles
    from trainer_client.recompute import Difference
    from trainer_client.vision import Vision

TOLERANCE = 1e-4
TREE_TOKENS = 4096
"""Distinct tokens of one tree, unless a row is longer: its mask takes four bytes per pair of them."""


def audit(
    session_id: SessionId,
    model: Annotated[
        list[str] | None,
        typer.Option(
            metavar="[VERSION=]PATH",
            help="A transformers checkpoint to recompute every raw logprob of a trained token with; with VERSION= only the "
            "tokens sampled under those weights. Repeatable. Needs torch and transformers.",
        ),
    ] = None,
    trees: Annotated[
        bool,
        typer.Option(
            "--trees",
            help="Compute every prefix that rows share once. For models whose layers all attend to the whole context.",
        ),
    ] = False,
    builder: Builder = "merged",
    tolerance: Annotated[float, typer.Option(metavar="X", help="The largest accepted difference.")] = TOLERANCE,
    url: ServiceUrl = None,
    as_json: AsJson = False,
) -> None:
    """Show a session's tree, its reward with the evaluator's feedback, its token accounting and, with a model, the error of its logprobs.

    The exit code is 1 if sampled tokens are unaccounted for or a logprob is off by more than the tolerance. Compare with an engine
    that runs in float32: in bfloat16 the engine and transformers differ by about 0.03.

    \b
    verbatim audit first
    verbatim audit first --json | jq .accounting
    verbatim audit first --model /models/base --model 3=/weights/version-3 --trees
    """
    from rich.console import Console

    from cli.control import CommandClient
    from cli.sessions import list_calls, path_of

    control, path = CommandClient(url), path_of(session_id)
    session = control.get(path)
    calls = list_calls(control, session_id)
    exported = control.get(f"{path}/trajectories", builder=builder)
    if not as_json:
        show(session, calls, exported)
    differences: dict[str, Difference] = {}
    rows: list[Trajectory] = []
    if model:
        from trainer_client.media import MediaFiles
        from trainer_client.wire import decode_trajectory

        rows = [decode_trajectory(row) for row in exported["trajectories"]]
        media = MediaFiles.of(rows, lambda owner, digest: control.fetch(f"{path_of(owner)}/media/{digest}").content)
        differences = recompute_logprobs(rows, model, media=media, trees=trees)
    problems = accounting_problems(exported["accounting"]) + logprob_problems(differences, tolerance)
    if as_json:
        print_report(session, calls, exported, differences, problems)
    elif differences:
        console = Console()
        console.print(differences_table(differences))
        for line in left_out_lines(rows):
            console.print(line)
    if problems:
        raise CommandError("; ".join(problems))


def show(session: dict[str, Any], calls: list[dict[str, Any]], exported: dict[str, Any]) -> None:
    from rich.console import Console

    from cli.feedback import print_reward
    from cli.sessions import accounting_line

    console = Console()
    console.print(session_tree(session["session_id"], calls, exported["accounting"]))
    for line in branch_lines(calls):
        console.print(line)
    print_reward(console, session)
    console.print(accounting_line(len(exported["trajectories"]), exported["accounting"]))


def print_report(
    session: dict[str, Any],
    calls: list[dict[str, Any]],
    exported: dict[str, Any],
    differences: dict[str, Difference],
    problems: list[str],
) -> None:
    """All of it as JSON; of a call its place in the tree and its counts."""
    from dataclasses import asdict

    from cli.tables import print_json

    reasons = {item["call_id"]: item["reason"] for item in exported["accounting"]["quarantined"]}
    kept = ("call_id", "parent_id", "branch_reason", "role", "status", "finish_reason", "weight_versions", "projection")
    tree = [
        {name: call.get(name) for name in kept}
        | {"prompt_tokens": len(call["prompt_ids"]), "completion_tokens": len(call["completion_ids"])}
        | {"quarantined": reasons.get(call["call_id"])}
        for call in calls
    ]
    # JSON has no NaN.
    logprobs = {
        name: {key: None if value != value else value for key, value in asdict(difference).items()}
        for name, difference in differences.items()
    }
    rows = [{"trajectory_id": row["trajectory_id"], "call_ids": row["call_ids"]} for row in exported["trajectories"]]
    report = {"session": session, "calls": tree, "rows": rows, "accounting": exported["accounting"]}
    print_json({**report, "logprobs": logprobs, "problems": problems})


def session_tree(session_id: str, calls: list[dict[str, Any]], accounting: dict[str, Any]) -> Tree:
    """The calls below their parents in the order they were recorded, quarantined ones with the reason."""
    from rich.tree import Tree

    reasons = {item["call_id"]: item["reason"] for item in accounting["quarantined"]}
    root = Tree(f"session {session_id}: {len(calls)} calls")
    places: dict[str | None, Tree] = {None: root}
    for call in calls:
        # A continuation has the depth of its parent: only branches indent.
        parent = places.get(call["parent_id"], root)
        child = parent if call["parent_id"] and not call["branch_reason"] else parent.add(_headline(call))
        line = _line(call, reasons.get(call["call_id"]))
        places[call["call_id"]] = child
        child.add(line)
    return root


def _headline(call: dict[str, Any]) -> str:
    return f"[bold]{call['branch_reason'] or 'root'}[/bold] {call['role'] or ''}".rstrip()


def _line(call: dict[str, Any], reason: str | None) -> str:
    from rich.markup import escape

    from cli.feedback import remove_controls

    versions = ", ".join(str(span[0]) for span in call["weight_versions"]) or "?"
    text = remove_controls(((call.get("reply") or {}).get("content") or "").strip().replace("\n", " "))
    line = f"{call['call_id']}  {len(call['prompt_ids'])} + {len(call['completion_ids'])} tokens, weights {versions}"
    line += f", {call['finish_reason'] or call['status']}"
    if call.get("projection") not in (None, "", "exact"):
        line += f", replayed: {call['projection']}"
    if reason:
        line += f"  [red]quarantined: {reason}[/red]"
    return line + (f"  [dim]{escape(text[:60])}[/dim]" if text else "")


def branch_lines(calls: list[dict[str, Any]]) -> list[str]:
    counted = Counter(call["branch_reason"] for call in calls if call["branch_reason"])
    return [f"{count} x {reason}: {MEANINGS.get(reason, 'see the documentation')}" for reason, count in counted.most_common()]


MEANINGS = {
    "new_root": "different tools, model, template kwargs or first messages: nothing to continue",
    "repeated": "the same request again: a retry or another sample",
    "edited": "the harness continued an earlier request with a reply it had changed; the changed reply is prompt",
    "forked": "another continuation of the same reply",
    "thinking_dropped": "the chat template drops earlier thinking",
    "history_rewritten": "the chat template now renders earlier turns, or parts of the reply, elsewhere or differently",
    "turn_end_differs": "the model asked for another turn than the one that followed",
    "turn_end_unknown": "the template's turn end was not found after the reply",
    "retokenized": "the engine rendered the history to ids other than those sampled",
    "stop_dropped": "a text prompt continues a reply without the stop token that ended it",
    "text_unproven": "a text prompt continues a reply, but not provably from the same ids",
}


def accounting_problems(accounting: dict[str, Any]) -> list[str]:
    quarantined = sum(item["tokens"] for item in accounting["quarantined"])
    if accounting["sampled_tokens"] == accounting["exported_tokens"] + quarantined:
        return []
    return [
        f"{accounting['sampled_tokens']} sampled is not {accounting['exported_tokens']} exported + {quarantined} quarantined"
    ]


def logprob_problems(differences: dict[str, Difference], tolerance: float) -> list[str]:
    return [
        f"{name}: a logprob is off by {difference.largest:.3g} (row {difference.trajectory_id}, token {difference.position})"
        for name, difference in differences.items()
        # Not ">": NaN must not pass.
        if not difference.largest <= tolerance
    ]


def recompute_logprobs(
    rows: list[Trajectory], models: list[str], *, media: MediaFiles | None = None, trees: bool = False
) -> dict[str, Difference]:
    """For each `--model`, the difference between the stored logprobs and that model's. `media`: the images of the rows."""
    try:
        import torch  # noqa: F401
        import transformers  # noqa: F401
    except ImportError as error:
        raise CommandError(f"--model needs torch and transformers: {how_to_install('trainer')} transformers") from error

    from trainer_client.errors import UnseenImages, VisionMismatch
    from trainer_client.recompute import load_model

    batch = _join_rows(rows, media)
    differences = {}
    for given in models:
        version, path = _split_version(given)
        try:
            loaded, vision = load_model(path)
        except (OSError, ValueError) as error:
            raise CommandError(
                f"{path} is not a model that transformers can load: {error}{explain_lack(Path(path))}"
            ) from error
        try:
            if trees:
                differences[given] = _compare_trees(loaded, batch, version, vision)
            else:
                differences[given] = _compare_rows(loaded, batch, version, vision, path)
        except UnseenImages as error:
            raise CommandError(f"the session has images, and {path} is a model that sees none") from error
        except VisionMismatch as error:
            raise CommandError(str(error)) from error
    return differences


def left_out_lines(rows: list[Trajectory]) -> list[str]:
    """How many trained tokens have a logprob that no model gives back, and why."""
    left = Counter[str]()
    for row in rows:
        for span in row.logprob_modes:
            left[span.mode] += span.end - span.start
    return [f"{left[mode]} tokens are not compared: {reason}" for mode, reason in LEFT_OUT.items() if left[mode]]


LEFT_OUT = {
    "masked": "a grammar or a list of words masked others before their logprobs were taken",
    "processed": "their logprobs were taken after temperature and truncation",
    "unknown": "nothing says what their logprobs were taken from; see VERBATIM_ENGINE_LOGPROB_MODES",
}


def explain_lack(folder: Path) -> str:
    """What to do about a folder that a trainer published as weights alone; otherwise nothing."""
    if not folder.is_dir() or (folder / "config.json").exists() or not any(folder.glob("*.safetensors")):
        return ""
    return "; it has weights alone: publish them with config=model.config, or copy the model's config.json there"


def _join_rows(rows: list[Trajectory], media: MediaFiles | None) -> Batch:
    from trainer_client.batch import Batch
    from trainer_client.wire import Group

    return Batch([Group("", tuple(rows))], 0, weight_versions={row.policy: 0 for row in rows}, media=media)


def _compare_rows(model: Any, batch: Batch, version: int | None, vision: Vision | None, path: str) -> Difference:
    from rich.progress import track

    from trainer_client.recompute import Difference, compare

    total = Difference()
    for row in track(batch.rows, description=f"recomputing with {path}", transient=True):
        total += compare(model, [row], version=version, vision=vision, media=batch.media)
    return total


def _compare_trees(model: Any, batch: Batch, version: int | None, vision: Vision | None) -> Difference:
    from trainer_client.recompute import compare_trees

    budget = max([TREE_TOKENS, *(len(row.token_ids) for row in batch.rows)])
    return compare_trees(model, batch, budget, version=version, vision=vision)


def _split_version(given: str) -> tuple[int | None, str]:
    version, separator, path = given.partition("=")
    return (int(version), path) if separator and version.isdecimal() else (None, given)


def differences_table(differences: dict[str, Difference]) -> Table:
    from rich.table import Table

    table = Table("model", "tokens", "largest |stored - recomputed|", "mean")
    for name, difference in differences.items():
        table.add_row(name, str(difference.tokens), f"{difference.largest:.2e}", f"{difference.mean:.2e}")
    return table
