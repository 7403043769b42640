"""`verbatim weights chain`, `verify`, `fold` and `prune`: versions on disk, whole ones and what changed since."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from cli.options import AsJson, ServiceUrl
from cli.refusal import CommandError

if TYPE_CHECKING:
    from contract.deltas import Chain

Folder = Annotated[Path, typer.Argument(metavar="PATH", help="The folder of a version: a delta's, or an anchor's.")]


def show_chain(path: Folder, as_json: AsJson = False) -> None:
    """Show what a version is made of: its anchor and the deltas after it, with their roots. Reads headers alone.

    \b
    verbatim weights chain /shared/weights/version-12
    """
    from cli.tables import as_cell, make_table, print_json, standard_output

    chain = load_chain(path)
    states = [(chain.anchor.folder, chain.anchor.version, chain.anchor.root, "full", len(chain.anchor.stamps))]
    states += [(link.folder, link.version, link.root, "delta", len(link.changes)) for link in chain.links]
    rows = [
        {"version": version, "kind": kind, "tensors": tensors, "bytes": measure(folder), "root": root, "path": str(folder)}
        for folder, version, root, kind, tensors in states
    ]
    if as_json:
        print_json(rows)
        return
    table = make_table("version", "kind", "tensors", "bytes", "root", "path")
    for row in rows:
        table.add_row(*(as_cell(str(row[name])[:16] if name == "root" else str(row[name])) for name in row))
    standard_output().print(table)


def verify_chain(path: Folder) -> None:
    """Verify every tensor of a version against its digest, folding the chain in memory. Exit code 1 if one is not what was published.

    \b
    verbatim weights verify /shared/weights/version-12
    """
    from contract.deltas import fold
    from contract.tensor_files import BrokenWeights, map_tensors

    chain = load_chain(path)
    try:
        tensors = sum(1 for _ in fold(map_tensors(chain.anchor.folder), chain.links, chain.stamps))
    except BrokenWeights as error:
        raise CommandError(str(error)) from error
    typer.echo(f"version {chain.version}: {tensors} tensors are those that were published, root {chain.root}")


def fold_chain(
    path: Folder,
    out: Annotated[Path, typer.Option("--out", metavar="FOLDER", help="The folder to write, which must not exist.")],
) -> None:
    """Write a version as a whole checkpoint, with the configuration and tokenizer of its anchor.

    \b
    verbatim weights fold /shared/weights/version-12 --out exported
    """
    from contract.deltas import DIGESTS, write_folded
    from contract.tensor_files import INDEX, BrokenWeights, map_tensors

    chain = load_chain(path)
    if out.exists():
        raise CommandError(f"{out} exists: name a folder that does not")
    unfinished = out.absolute().with_name(f".{out.name}.writing")
    shutil.rmtree(unfinished, ignore_errors=True)
    try:
        unfinished.mkdir(parents=True)
        for file in chain.anchor.folder.iterdir():
            if file.is_file() and file.suffix != ".safetensors" and file.name not in (INDEX, DIGESTS):
                shutil.copyfile(file, unfinished / file.name)
        write_folded(unfinished, map_tensors(chain.anchor.folder), chain.links, chain.stamps, chain.version)
        unfinished.rename(out)
    except (BrokenWeights, OSError) as error:
        shutil.rmtree(unfinished, ignore_errors=True)
        raise CommandError(str(error)) from error
    typer.echo(f"version {chain.version} is in {out}, root {chain.root}")


def prune(
    directory: Annotated[Path, typer.Argument(metavar="DIRECTORY", help="The folder of the version-<n> folders.")],
    keep_last: Annotated[int, typer.Option("--keep-last", metavar="N", min=1, help="Keep this many of the newest versions.")],
    url: ServiceUrl = None,
) -> None:
    """Remove old versions. Those that the service may still give to an engine stay, and those on which one that stays is built.

    \b
    verbatim weights prune /shared/weights --keep-last 3
    """
    from cli.control import CommandClient
    from trainer_client.publish import checkpoints_in_use, prune_versions

    if not directory.is_dir():
        raise CommandError(f"{directory} is not a folder")
    status = CommandClient(url).get("/weights")
    newest = max(int(line["current"]["version"]) for line in (status, *status["models"].values()))
    removed = prune_versions(directory, newest, keep_last, in_use=checkpoints_in_use(status))
    for folder in removed:
        typer.echo(f"removed {folder}")
    typer.echo(f"{len(removed)} folders were removed")


def load_chain(path: Path) -> Chain:
    """Raises `CommandError` naming what of the chain is missing or damaged."""
    from contract.deltas import read_chain
    from contract.tensor_files import BrokenWeights

    try:
        return read_chain(path.absolute())
    except BrokenWeights as error:
        raise CommandError(str(error)) from error


def measure(folder: Path) -> int:
    """Bytes of its weights."""
    return sum(file.stat().st_size for file in folder.glob("*.safetensors"))
