"""Files taken out of a runtime, as contents by path."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from posixpath import join, normpath, relpath

from rollout.evaluators.base import EvaluationFailed
from rollout.runtimes.base import Runtime, RuntimeFailed
from rollout.runtimes.files import iterate_entries

BOUND_BYTES = 256 << 20
"""The most that is collected at once."""


class Collected:
    """Files of a runtime by path. Links count as absent: a link that the agent left names something else."""

    def __init__(self, contents: dict[str, bytes], workdir: str) -> None:
        self._contents = contents
        self._workdir = workdir

    def at(self, path: str) -> bytes | None:
        """The content of the file at `path`; None where there is no file."""
        return self._contents.get(name_of(path, self._workdir))

    def below(self, path: str) -> dict[str, bytes]:
        """The file at `path`, or every file below that folder, sorted by name."""
        name = name_of(path, self._workdir)
        return {
            other: content
            for other, content in sorted(self._contents.items())
            if name == "." or other == name or other.startswith(f"{name}/")
        }


async def collect(runtime: Runtime, paths: Sequence[str], bound_bytes: int = BOUND_BYTES) -> Collected:
    """The files at `paths`, absolute or relative to the workdir. Raises `RuntimeFailed`, and `EvaluationFailed` for an unreadable
    archive or files larger than `bound_bytes` in total."""
    archive = await runtime.download(paths, bound_bytes=bound_bytes)
    return Collected(await asyncio.to_thread(_read_archive, archive, bound_bytes), runtime.workdir)


def name_of(path: str, workdir: str) -> str:
    """The name of `path` in an archive of a runtime: relative to the workdir, or without its leading slash if it is outside."""
    whole = normpath(join(workdir, path))
    root = normpath(workdir)
    inside = root == "/" or whole == root or whole.startswith(f"{root}/")
    return relpath(whole, root) if inside else whole.lstrip("/")


def _read_archive(archive: bytes, bound_bytes: int) -> dict[str, bytes]:
    def name_entry(name: str) -> str:
        return normpath(name).lstrip("/")

    contents: dict[str, bytes] = {}
    left = bound_bytes
    try:
        for entry, file in iterate_entries(archive):
            # A hard link to an earlier file is stored with size 0.
            linked = contents.get(name_entry(entry.linkname)) if entry.islnk() else None
            if linked is None and not entry.isreg():
                continue
            if entry.issparse():
                raise EvaluationFailed(f"the collected file {entry.name!r} is stored with holes, as no runtime stores it")
            left -= entry.size if linked is None else len(linked)
            if left < 0:
                raise EvaluationFailed(f"the collected files are greater than {bound_bytes} bytes")
            content = file.read(entry.size) if linked is None else linked
            if linked is None and len(content) != entry.size:
                raise EvaluationFailed(f"the archive of the collected files ends within {entry.name!r}")
            contents[name_entry(entry.name)] = content
    except RuntimeFailed as error:
        raise EvaluationFailed(f"the archive of the collected files cannot be read: {error}") from error
    return contents
