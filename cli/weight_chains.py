"""`verbatim weights chain`, `verify`, `fold` and `prune`: versions on disk, whole ones and what changed since."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from cli.options import AsJson, ServiceUrl
from cli.refusal import CommandError

if TYPE_CHECKING:
    from contract.deltas import Chain, State
    from contract.peer_deltas import PeerChain

Folder = Annotated[Path, typer.Argument(metavar="PATH", help="The folder of a version: a delta's, or an anchor's.")]
Base = Annotated[
    Path | None,
    typer.Option(
        "--base", metavar="CHECKPOINT", help="Of slime, miles or SkyRL: the checkpoint that the engines started with."
    ),
]


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


def verify_chain(path: Folder, base: Base = None) -> None:
    """Verify every tensor of a version against its digest, folding the chain in memory. Exit code 1 if one is not what was published.

    \b
    verbatim weights verify /shared/weights/version-12
    """
    from contract.deltas import fold
    from contract.peer_deltas import fold_peer_chain
    from contract.tensor_files import BrokenWeights, map_tensors

    try:
        if (peers := load_peer_chain(path, base)) is not None:
            tensors = sum(1 for _ in fold_peer_chain(peers))
            changed = len({name for delta in peers.deltas for name in delta.changes})
            typer.echo(
                f"version {peers.deltas[-1].version}: {changed} of {tensors} tensors changed, to those that were published"
            )
            return
        chain = load_chain(path)
        tensors = sum(1 for _ in fold(map_tensors(chain.anchor.folder), chain.links, chain.stamps))
    except BrokenWeights as error:
        raise CommandError(str(error)) from error
    typer.echo(f"version {chain.version}: {tensors} tensors are those that were published, root {chain.root}")


def fold_chain(
    path: Folder,
    out: Annotated[Path, typer.Option("--out", metavar="FOLDER", help="The folder to write, which must not exist.")],
    base: Base = None,
) -> None:
    """Write a version as a whole checkpoint with digests, and with the configuration and tokenizer of its anchor.

    \b
    verbatim weights fold /shared/weights/version-12 --out exported
    """
    from contract.tensor_files import BrokenWeights

    if out.exists():
        raise CommandError(f"{out} exists: name a folder that does not")
    unfinished = out.absolute().with_name(f".{out.name}.writing")
    shutil.rmtree(unfinished, ignore_errors=True)
    try:
        unfinished.mkdir(parents=True)
        state = _write_whole(path, base, unfinished)
        unfinished.rename(out)
    except (BrokenWeights, CommandError, OSError) as error:
        shutil.rmtree(unfinished, ignore_errors=True)
        raise CommandError(str(error)) from error
    typer.echo(f"version {state.version} is in {out}, root {state.root}")


def _write_whole(path: Path, base: Path | None, folder: Path) -> State:
    from contract.deltas import write_folded
    from contract.peer_deltas import write_peer_version
    from contract.tensor_files import map_tensors

    if (peers := load_peer_chain(path, base)) is not None:
        _copy_configuration(peers.base, folder)
        return write_peer_version(folder, peers)
    chain = load_chain(path)
    _copy_configuration(chain.anchor.folder, folder)
    return write_folded(folder, map_tensors(chain.anchor.folder), chain.links, chain.stamps, chain.version)


def _copy_configuration(source: Path, folder: Path) -> None:
    from contract.deltas import DIGESTS
    from contract.tensor_files import INDEX

    for file in source.iterdir() if source.is_dir() else ():
        if file.is_file() and file.suffix != ".safetensors" and file.name not in (INDEX, DIGESTS):
            shutil.copyfile(file, folder / file.name)


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
    left = sum(1 for folder in directory.glob("version-*") if folder.is_dir())
    typer.echo(f"{len(removed)} folders were removed, {left} stay: the last ones, and those that they or the service need")


def load_chain(path: Path) -> Chain:
    """Raises `CommandError` naming what of the chain is missing or damaged."""
    from contract.deltas import read_chain
    from contract.tensor_files import BrokenWeights

    try:
        return read_chain(path.absolute())
    except BrokenWeights as error:
        raise CommandError(str(error)) from error


def load_peer_chain(path: Path, base: Path | None) -> PeerChain | None:
    """None if the folder holds no delta of slime's, miles' or SkyRL's. Raises `CommandError` naming what of the chain is missing."""
    from contract.peer_deltas import name_peer, read_peer_chain
    from contract.tensor_files import BrokenWeights

    try:
        if name_peer(path) is not None:
            return read_peer_chain(path.absolute(), base)
    except BrokenWeights as error:
        raise CommandError(str(error)) from error
    if base is not None:
        raise CommandError(f"--base goes with deltas of slime, miles or SkyRL, and {path} holds none")
    return None


def measure(folder: Path) -> int:
    """Bytes of its weights."""
    return sum(file.stat().st_size for file in folder.glob("*.safetensors"))
