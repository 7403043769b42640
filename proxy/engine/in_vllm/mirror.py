"""The mirror: a whole, verified copy of the current version on the engine's machine, from which its engines load.

One folder per host and model, named by VERBATIM_MIRROR in the engine's environment; workers and engines share it under a lock. A new
version is built beside the old one, from it where the chain leads on from its root and else from the anchor; each tensor is verified in
the file that was written, and one symlink is swapped. A crash at any moment leaves the old copy or the new one. While both stand, it takes
twice the model. A copy that an engine still reads is not removed.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import secrets
import shutil
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from contract.deltas import DIGESTS, Chain, DeltaLink, State, read_digests, verify, write_folded
from contract.tensor_files import BrokenWeights, map_tensors

CURRENT, LOCK, BUILDING = "current", "lock", "building"


class Copy:
    """A version in the mirror, which stays there until it is released, or this object is gone."""

    def __init__(self, state: State) -> None:
        self.state = state
        descriptor = os.open(state.folder / DIGESTS, os.O_RDONLY)
        self.release = weakref.finalize(self, os.close, descriptor)
        fcntl.flock(descriptor, fcntl.LOCK_SH)


class Mirror:
    def __init__(self, place: Path) -> None:
        self._place = place

    def advance(self, chain: Chain) -> Copy:
        """The verified copy of the chain's last version, made if the mirror holds another one. Waits while another process makes it.

        Raises BrokenWeights with the mirror as it was, except that a damaged copy is dropped: then the next call begins at the anchor."""
        try:
            self._place.mkdir(parents=True, exist_ok=True)
            with self._lock():
                return self._advance(chain)
        except OSError as error:
            raise BrokenWeights(f"the mirror in {self._place} cannot be written: {error}") from error

    @contextmanager
    def _lock(self) -> Iterator[None]:
        with (self._place / LOCK).open("wb") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            yield

    def _advance(self, chain: Chain) -> Copy:
        current = self._read_current()
        links = chain.behind(current.root) if current else None
        try:
            if current is not None and links == ():
                verify(current)
                return self._keep_only(current)
            base = current.folder if current is not None and links is not None else chain.anchor.folder
            state = self._build(base, chain, chain.links if links is None else links)
        except BrokenWeights:
            if current is not None:
                self._drop_if_damaged(current)
            raise
        return self._swap(state)

    def _read_current(self) -> State | None:
        with contextlib.suppress(BrokenWeights):
            return read_digests((self._place / CURRENT).resolve())
        return None

    def _build(self, base: Path, chain: Chain, links: tuple[DeltaLink, ...]) -> State:
        building = self._place / BUILDING
        shutil.rmtree(building, ignore_errors=True)
        building.mkdir()
        try:
            return write_folded(building, map_tensors(base), links, chain.stamps, chain.version)
        except BaseException:
            shutil.rmtree(building, ignore_errors=True)
            raise

    def _swap(self, built: State) -> Copy:
        # A name of its own: a copy of the same root may be there, and damaged.
        folder = self._place / f"{built.root[:16]}-{secrets.token_hex(4)}"
        built.folder.rename(folder)
        link = self._place / f"{CURRENT}.new"
        link.unlink(missing_ok=True)
        link.symlink_to(folder.name)
        link.replace(self._place / CURRENT)
        return self._keep_only(State(folder, built.version, built.root, built.stamps))

    def _keep_only(self, current: State) -> Copy:
        """Removes what nobody reads, also what a process left that was killed before it had done so."""
        copy = Copy(current)
        for other in self._place.iterdir():
            if other.is_dir() and not other.is_symlink() and other.name != current.folder.name:
                _remove_unread(other)
        return copy

    def _drop_if_damaged(self, current: State) -> None:
        try:
            verify(current)
        except BrokenWeights:
            (self._place / CURRENT).unlink(missing_ok=True)


def _remove_unread(folder: Path) -> None:
    with contextlib.suppress(OSError):
        if (folder / DIGESTS).exists():
            with (folder / DIGESTS).open("rb") as file:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        shutil.rmtree(folder)
