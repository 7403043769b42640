"""Versions of weights as what changed: digests of every tensor, a root over all of them, and a chain of roots back to an anchor.

An *anchor* is a whole checkpoint with `digests.json`. A *delta* is a folder with `delta.safetensors`: for every tensor that differs from
its base the changed elements, and in the file's metadata its base's folder and root, its own root, and each changed tensor's digest before
and after. Both stand in one directory, `version-<n>`, and a delta's base is a folder beside it.

The invariant: a chain is one of *roots*, sha256 over name, dtype, shape and digest of every tensor, changed or not. Numbers are labels: a
trainer that restarts uses them again, and a rollback gives old contents a new one. So before any data is read, `read_chain` knows whether
the links follow one another, and what every tensor has to be at the end; `fold` yields no tensor that is another.

Elements are compared as integers: 0.0 and -0.0 differ, and a NaN equals itself. Two names with the same bytes before and after, as tied
weights have, are encoded once.
"""

from __future__ import annotations

import hashlib
import json
import re
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from contract.tensor_files import (
    BrokenWeights,
    Header,
    Tensor,
    map_file,
    map_tensors,
    read_header,
    write_file,
)

if TYPE_CHECKING:
    import numpy as np

DELTA, DIGESTS = "delta.safetensors", "digests.json"
DELTA_FORMAT, DIGESTS_FORMAT = "verbatim-delta/1", "verbatim-digests/1"
FARTHEST = 0xFFFF
"""The greatest gap between two entries of a delta; a wider one is bridged by entries that change nothing."""
_FOLDER = re.compile(r"[^/\0]+")


@dataclass(frozen=True, slots=True)
class Stamp:
    """What a tensor is: `digest` is the xxh3-128 of its bytes, in hexadecimal."""

    dtype: str
    shape: tuple[int, ...]
    digest: str


Stamps = Mapping[str, Stamp]
"""Of every tensor of a version, by name."""


@dataclass(frozen=True, slots=True)
class Change:
    """A changed tensor: its digest `before` and `after`, and how many `entries` encode it. `like` names another tensor of the delta whose
    entries it shares, "" if it has its own."""

    before: str
    after: str
    entries: int
    like: str = ""


@dataclass(frozen=True, slots=True)
class DeltaLink:
    """The header of a delta. `base` is the folder of its base."""

    folder: Path
    version: int
    base: Path
    base_root: str
    root: str
    changes: Mapping[str, Change]
    header: Header


@dataclass(frozen=True, slots=True)
class State:
    """A whole version, an anchor or a mirror: its folder, its root, and its tensors' stamps."""

    folder: Path
    version: int
    root: str
    stamps: Stamps


@dataclass(frozen=True, slots=True)
class Chain:
    """An anchor and the deltas that follow it, oldest first. `stamps` and `root` are those of the last."""

    anchor: State
    links: tuple[DeltaLink, ...]
    stamps: Stamps

    @property
    def root(self) -> str:
        return self.links[-1].root if self.links else self.anchor.root

    @property
    def version(self) -> int:
        return self.links[-1].version if self.links else self.anchor.version

    @property
    def folders(self) -> tuple[Path, ...]:
        return (self.anchor.folder, *(link.folder for link in self.links))

    def behind(self, root: str) -> tuple[DeltaLink, ...] | None:
        """The links that lead from `root` to the end; None if the chain does not pass it."""
        roots = [self.anchor.root, *(link.root for link in self.links)]
        return self.links[roots.index(root) :] if root in roots else None


@dataclass(frozen=True, slots=True)
class WeightDelta:
    """A delta before it is written: entries by tensor, their changes, and the stamps of the new version."""

    entries: Mapping[str, bytes]
    changes: Mapping[str, Change]
    stamps: Stamps

    @property
    def size(self) -> int:
        """Of the entries, in bytes."""
        return sum(map(len, self.entries.values()))


def stamp(tensor: Tensor) -> Stamp:
    """Raises BrokenWeights where xxhash is not installed, as in an environment that was made for an engine."""
    try:
        import xxhash
    except ModuleNotFoundError as error:
        raise BrokenWeights("digests of weights need the package xxhash: pip install xxhash in this environment") from error
    return Stamp(tensor.dtype, tensor.shape, xxhash.xxh3_128(tensor.data.view("u1").data).hexdigest())


def root_of(stamps: Stamps) -> str:
    """The same for the same tensors, in whatever order; 64 hexadecimal digits."""
    listed = sorted([name, each.dtype, list(each.shape), each.digest] for name, each in stamps.items())
    return hashlib.sha256(json.dumps(listed, separators=(",", ":")).encode()).hexdigest()


def encode_changes(before: np.ndarray[Any, Any], after: np.ndarray[Any, Any]) -> tuple[bytes, int]:
    """The changed elements and the number of entries: gaps of 16 bits and old xor new, byte plane by byte plane, deflated.

    A delta's bytes of a bfloat16 tensor in which 1 % of the elements got random bits are 1.6 % of the tensor's."""
    import numpy as np

    changed = np.flatnonzero(before != after)
    distances = np.diff(changed, prepend=-1) - 1
    bridges = distances // (FARTHEST + 1)
    places = np.arange(changed.size) + np.cumsum(bridges)
    count = changed.size + int(bridges.sum())
    gaps, flips = np.full(count, FARTHEST, "<u2"), np.zeros(count, before.dtype)
    gaps[places], flips[places] = distances % (FARTHEST + 1), before[changed] ^ after[changed]
    planes = (np.ascontiguousarray(each.view("u1").reshape(count, each.itemsize).T).tobytes() for each in (gaps, flips))
    return zlib.compress(b"".join(planes), 1), count


def apply_changes(before: np.ndarray[Any, Any], encoded: bytes, count: int) -> np.ndarray[Any, Any]:
    """A copy with the changes made; made twice, they undo themselves. Raises BrokenWeights for entries that no tensor of that size has."""
    import numpy as np

    size = count * (2 + before.itemsize)
    try:
        inflater = zlib.decompressobj()
        data = np.frombuffer(inflater.decompress(encoded, size + 1), "u1")
    except zlib.error as error:
        raise BrokenWeights(str(error)) from error
    if data.size != size or not inflater.eof or inflater.unused_data:
        raise BrokenWeights(f"its {count} entries do not have {size} bytes")
    gaps, flips = (
        np.ascontiguousarray(part.reshape(width, count).T).view(f"<u{width}").reshape(count)
        for part, width in ((data[: 2 * count], 2), (data[2 * count :], before.itemsize))
    )
    places = np.cumsum(gaps.astype("i8") + 1) - 1
    if count and places[-1] >= before.size:
        raise BrokenWeights(f"it changes element {places[-1]} of {before.size}")
    after = before.copy()
    after[places] ^= flips
    return after


def encode_delta(
    before: Mapping[str, Tensor], stamps: Stamps, after: Mapping[str, Tensor], *, most_bytes: int
) -> WeightDelta | None:
    """What changed from `before`, of which `stamps` are. None if a delta cannot tell or would not pay: another set of names, another dtype
    or shape of one, or more than `most_bytes` of entries."""
    if {name: (each.dtype, each.shape) for name, each in after.items()} != {
        name: (each.dtype, each.shape) for name, each in stamps.items()
    }:
        return None
    entries, changes, new, left = dict[str, bytes](), dict[str, Change](), dict(stamps), most_bytes
    same: dict[tuple[str, Stamp], str] = {}
    for name, tensor in after.items():
        new[name] = stamp(tensor)
        if new[name] == stamps[name]:
            continue
        before_digest, after_digest = stamps[name].digest, new[name].digest
        if first := same.get((before_digest, new[name])):
            changes[name] = replace(changes[first], like=first)
            continue
        entries[name], count = encode_changes(before[name].data, tensor.data)
        changes[name] = Change(before_digest, after_digest, count)
        same[(before_digest, new[name])] = name
        if (left := left - len(entries[name])) < 0:
            return None
    return WeightDelta(entries, changes, new)


def write_delta(folder: Path, delta: WeightDelta, version: int, base: State) -> None:
    """Writes `delta.safetensors` into the folder, for its place beside its base's. Raises OSError."""
    import numpy as np

    tensors = {name: Tensor("U8", (len(data),), np.frombuffer(data, "u1")) for name, data in delta.entries.items()}
    changes = {
        name: [change.before, change.after, change.entries, *([change.like] if change.like else [])]
        for name, change in delta.changes.items()
    }
    told = {"version": str(version), "base": base.folder.name, "base_root": base.root, "root": root_of(delta.stamps)}
    sizes = {name: (tensor.dtype, tensor.shape) for name, tensor in tensors.items()}
    write_file(
        folder / DELTA, sizes, tensors.items(), format=DELTA_FORMAT, **told, changes=json.dumps(changes, separators=(",", ":"))
    )


def write_digests(folder: Path, stamps: Stamps, version: int) -> State:
    """Makes the whole checkpoint in the folder an anchor. Raises OSError."""
    state = State(folder, version, root_of(stamps), stamps)
    listed = {name: [each.dtype, list(each.shape), each.digest] for name, each in stamps.items()}
    told = {"format": DIGESTS_FORMAT, "version": version, "root": state.root, "tensors": listed}
    (folder / DIGESTS).write_text(json.dumps(told))
    return state


def is_delta(folder: Path) -> bool:
    return (folder / DELTA).is_file()


def has_digests(folder: Path) -> bool:
    return (folder / DIGESTS).is_file()


def read_digests(folder: Path) -> State:
    """Raises BrokenWeights unless the folder's digests are whole and its root is theirs."""
    file = folder / DIGESTS
    try:
        told = json.loads(file.read_text())
        if told["format"] != DIGESTS_FORMAT:
            raise BrokenWeights(f"{file} is of the format {told['format']}, which is not known here")
        stamps = {name: Stamp(dtype, tuple(shape), digest) for name, (dtype, shape, digest) in told["tensors"].items()}
        state = State(folder, int(told["version"]), told["root"], stamps)
    except OSError as error:
        if not folder.is_dir():
            raise BrokenWeights(f"{folder} is no folder") from error
        told = f"it holds no {DELTA}, and its {DIGESTS} cannot be read: {error.strerror}"
        raise BrokenWeights(f"{folder} is neither a delta nor an anchor: {told}") from error
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        if isinstance(error, BrokenWeights):
            raise
        raise BrokenWeights(f"{file} is damaged: {error!r}") from error
    if root_of(stamps) != state.root:
        raise BrokenWeights(f"{file} is damaged: its digests are not those of its root {state.root[:12]}")
    return state


def read_link(folder: Path) -> DeltaLink:
    """Raises BrokenWeights unless the folder's delta is whole, as far as its length and header tell."""
    file = folder / DELTA
    header = read_header(file)
    told = header.metadata
    try:
        if told["format"] != DELTA_FORMAT:
            raise BrokenWeights(f"{file} is of the format {told['format']}, which is not known here")
        if not _FOLDER.fullmatch(told["base"]) or told["base"] in (".", ".."):
            raise BrokenWeights(f"{file} names {told['base']!r} as its base, which is no folder beside it")
        listed = json.loads(told["changes"]).items()
        changes = {name: Change(before, after, int(entries), *like) for name, (before, after, entries, *like) in listed}
        base = folder.parent / told["base"]
        link = DeltaLink(folder, int(told["version"]), base, told["base_root"], told["root"], changes, header)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        if isinstance(error, BrokenWeights):
            raise
        raise BrokenWeights(f"{file} is damaged: {error!r}") from error
    if header.places.keys() != {name for name, change in changes.items() if not change.like}:
        raise BrokenWeights(f"{file} is damaged: it does not hold the tensors that it names")
    if folder.name != f"version-{link.version}":
        # Two links that changed places, or one that stands twice, could be a chain, of other weights than the folder is named for.
        raise BrokenWeights(f"{folder} holds version {link.version}, which belongs into version-{link.version}")
    return link


def list_bases(folder: Path) -> list[Path]:
    """The folders that a delta needs beside its own, its base first and its anchor last; none for a checkpoint. Only headers are read, and
    whether the last one exists is not looked at. Raises BrokenWeights."""
    bases: list[Path] = []
    while is_delta(folder):
        folder = read_link(folder).base
        if folder in bases:
            raise BrokenWeights(f"{folder} follows itself")
        bases.append(folder)
    return bases


def read_chain(folder: Path) -> Chain:
    """The chain that ends with the version in the folder. Reads headers and digests alone.

    Raises BrokenWeights naming the link that is missing, damaged, repeated, or follows another version than the one it names."""
    links: list[DeltaLink] = []
    while is_delta(folder):
        links.insert(0, read_link(folder))
        if links[0].base in [link.folder for link in links]:
            raise BrokenWeights(f"{folder} follows {links[0].base.name}, which follows it")
        folder = links[0].base
        if not folder.is_dir():
            raise BrokenWeights(f"{folder} is missing, which {links[0].folder} follows")
    anchor = read_digests(folder)
    stamps, root = anchor.stamps, anchor.root
    for link in links:
        stamps, root = follow(stamps, root, link), link.root
    return Chain(anchor, tuple(links), stamps)


def follow(stamps: Stamps, root: str, link: DeltaLink) -> Stamps:
    """The stamps after the link. Raises BrokenWeights unless it follows that root and leads to its own."""
    if link.base_root != root:
        raise BrokenWeights(f"{link.folder} follows the root {link.base_root[:12]}, and {link.base.name} has {root[:12]}")
    after = dict(stamps)
    for name, change in link.changes.items():
        if name not in after or after[name].digest != change.before:
            raise BrokenWeights(f"{link.folder}: {name} has another base")
        after[name] = replace(after[name], digest=change.after)
    if root_of(after) != link.root:
        raise BrokenWeights(f"{link.folder} is damaged: its digests are not those of its root {link.root[:12]}")
    return after


def fold(base: Mapping[str, Tensor], links: tuple[DeltaLink, ...], stamps: Stamps) -> Iterator[tuple[str, Tensor]]:
    """Every tensor after the links, one at a time and in order of name; `stamps` are those of the end. Raises BrokenWeights naming the
    first tensor that is not what its stamp says."""
    files = [map_file(link.folder / DELTA, link.header) for link in links]
    for name in sorted(stamps):
        if name not in base:
            raise BrokenWeights(f"the base lacks {name}")
        tensor = base[name]
        for link, entries in zip(links, files, strict=True):
            if (change := link.changes.get(name)) is not None:
                tensor = _change(tensor, link, name, change, entries)
        check(name, tensor, stamps[name], f"after {links[-1].folder}" if links else "in its folder")
        yield name, tensor


def _change(tensor: Tensor, link: DeltaLink, name: str, change: Change, entries: Mapping[str, Tensor]) -> Tensor:
    try:
        encoded = entries[change.like or name].data.tobytes()
        return replace(tensor, data=apply_changes(tensor.data, encoded, change.entries))
    except (BrokenWeights, KeyError, ValueError, OverflowError, MemoryError) as error:
        raise BrokenWeights(f"{link.folder}: {name} is damaged: {error}") from error


def check(name: str, tensor: Tensor, wanted: Stamp, where: str) -> None:
    """Raises BrokenWeights if the tensor is not what its stamp says."""
    if (found := stamp(tensor)) != wanted:
        told = "bytes" if (found.dtype, found.shape) == (wanted.dtype, wanted.shape) else f"dtype or shape ({found.dtype})"
        raise BrokenWeights(f"{name} does not have the {told} that were published, {where}")


def verify(state: State) -> None:
    """Raises BrokenWeights naming the first tensor in the state's folder that is not the published one."""
    tensors = map_tensors(state.folder)
    if unknown := sorted(tensors.keys() - state.stamps.keys()):
        raise BrokenWeights(f"{state.folder} holds {unknown[0]}, of which its digests know nothing")
    for name, wanted in state.stamps.items():
        if name not in tensors:
            raise BrokenWeights(f"{state.folder} lacks {name}")
        check(name, tensors[name], wanted, f"in {state.folder}")


def write_folded(folder: Path, base: Mapping[str, Tensor], links: tuple[DeltaLink, ...], stamps: Stamps, version: int) -> State:
    """Writes the version after the links as a whole checkpoint with digests, and verifies what is in the file.

    Raises BrokenWeights, and OSError from a full disk."""
    sizes = {name: (stamps[name].dtype, stamps[name].shape) for name in sorted(stamps)}
    write_file(folder / "model.safetensors", sizes, fold(base, links, stamps), format="pt")
    state = write_digests(folder, stamps, version)
    verify(state)
    return state
