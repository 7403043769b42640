"""Kind `diff`: files must have the content that is expected of them.

Options:

    files       path -> the content: a text, or an object as in `options.File`
    absent      paths at which no file may be left
    whitespace  exact (default): byte for byte. trailing: spaces at line ends, blank lines at the file's end and the kind of line
                ends do not count. any: every run of white space counts as one space
    mode        fraction (default): the part of files and absent paths that is right. all: 1.0 when all are, otherwise 0.0
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from difflib import unified_diff
from itertools import islice
from posixpath import join, normpath, relpath

from rollout.evaluators.base import Case, EvaluationFailed, File, Options, Score, of_case, shorten
from rollout.evaluators.command import require_runtime
from rollout.runtimes.base import Runtime, RuntimeFailed
from rollout.runtimes.files import iterate_entries
from rollout.task import EvaluatorSpec, Task

WHITESPACE = ("exact", "trailing", "any")
MODES = ("fraction", "all")
DIFF_LINES = 60
"""Of one file in the feedback."""
COMPARED_CHARS = 200_000
"""Greater texts are not compared line by line for the feedback: that takes time that grows with their square."""


@dataclass(frozen=True, slots=True)
class Wanted:
    files: tuple[File, ...]
    absent: tuple[str, ...]
    whitespace: str
    mode: str


class DiffEvaluator:
    name = "diff"
    needs_runtime = True

    def check(self, spec: EvaluatorSpec, task: Task) -> None:
        _read(Options(self.name, spec.options))

    async def evaluate(self, case: Case) -> Score:
        wanted = of_case(self.name, case, _read)
        paths = [file.path for file in wanted.files] + list(wanted.absent)
        collected = await collect(require_runtime(case), paths)
        return await asyncio.to_thread(_score, wanted, collected)


def _read(options: Options) -> Wanted:
    wanted = Wanted(
        files=options.files("files"),
        absent=options.texts("absent"),
        whitespace=options.choice("whitespace", WHITESPACE),
        mode=options.choice("mode", MODES),
    )
    options.done()
    if not wanted.files and not wanted.absent:
        raise options.refused("files", "is missing, and so is 'absent'")
    return wanted


def _score(wanted: Wanted, collected: Collected) -> Score:
    wrong = [text for file in wanted.files if (text := _difference(file, collected.at(file.path), wanted.whitespace))]
    wrong += [f"{path} should not be there" for path in wanted.absent if collected.below(path)]
    count = len(wanted.files) + len(wanted.absent)
    reward = (count - len(wrong)) / count if wanted.mode == "fraction" else float(not wrong)
    feedback = shorten("\n".join([f"{count - len(wrong)} of {count} paths are as expected.", *wrong]))
    return Score(reward, feedback=feedback, metadata={"right": count - len(wrong), "counted": count})


def _difference(file: File, found: bytes | None, whitespace: str) -> str:
    """What is wrong with what was `found`, in words; empty when it is as expected."""
    if found is None:
        return f"{file.path} is not there, or is no file"
    if normalise(found, whitespace) == normalise(file.content, whitespace):
        return ""
    expected, actual = (content.decode("utf-8", "replace") for content in (file.content, found))
    if len(expected) + len(actual) > COMPARED_CHARS:
        return f"{file.path} differs: {len(file.content)} bytes were expected, {len(found)} are there"
    lines = unified_diff(expected.splitlines(), actual.splitlines(), f"expected {file.path}", file.path, lineterm="")
    return "\n".join(islice(lines, DIFF_LINES)) or f"{file.path} differs in its line ends"


def normalise(content: bytes, whitespace: str) -> bytes:
    """`content` as it is compared: equal ones count as the same."""
    if whitespace == "any":
        return b" ".join(content.split())
    if whitespace == "trailing":
        return b"\n".join(line.rstrip() for line in content.splitlines()).rstrip()
    return content


# Files taken out of a runtime, as contents by path.


BOUND_BYTES = 256 << 20
"""Of what is taken out at once."""


class Collected:
    """What was at some paths of a runtime. Only files proper count: a link that the agent left names something else."""

    def __init__(self, contents: dict[str, bytes], workdir: str) -> None:
        self._contents = contents
        self._workdir = workdir

    def at(self, path: str) -> bytes | None:
        """The content of the file at `path`; None where there is no file."""
        return self._contents.get(name_of(path, self._workdir))

    def below(self, path: str) -> dict[str, bytes]:
        """The file at `path`, or every file below that folder, by name; in order of the names."""
        name = name_of(path, self._workdir)
        return {
            other: content
            for other, content in sorted(self._contents.items())
            if name == "." or other == name or other.startswith(f"{name}/")
        }


async def collect(runtime: Runtime, paths: Sequence[str], bound_bytes: int = BOUND_BYTES) -> Collected:
    """What is at `paths`, absolute or relative to the workdir. Raises `RuntimeFailed`, and `EvaluationFailed` for an archive that
    cannot be read or whose files are together greater than `bound_bytes`."""
    archive = await runtime.download(paths, bound_bytes=bound_bytes)
    return Collected(await asyncio.to_thread(_contents, archive, bound_bytes), runtime.workdir)


def name_of(path: str, workdir: str) -> str:
    """How an archive of a runtime names `path`: relative to the workdir, or without its first slash where it is outside."""
    whole = normpath(join(workdir, path))
    root = normpath(workdir)
    inside = root == "/" or whole == root or whole.startswith(f"{root}/")
    return relpath(whole, root) if inside else whole.lstrip("/")


def _name(entry: str) -> str:
    return normpath(entry).lstrip("/")


def _contents(archive: bytes, bound_bytes: int) -> dict[str, bytes]:
    contents: dict[str, bytes] = {}
    left = bound_bytes
    try:
        for entry, file in iterate_entries(archive):
            # An entry that is another name of an earlier file says of itself that it has no size.
            linked = contents.get(_name(entry.linkname)) if entry.islnk() else None
            if linked is None and not entry.isreg():
                continue
            if entry.issparse():
                raise EvaluationFailed(f"the collected file {entry.name!r} is stored with holes, as no runtime stores it")
            left -= entry.size if linked is None else len(linked)
            if left < 0:
                raise EvaluationFailed(f"the collected files are greater than {bound_bytes} bytes")
            contents[_name(entry.name)] = file.read(entry.size) if linked is None else linked
            if linked is None and len(contents[_name(entry.name)]) != entry.size:
                raise EvaluationFailed(f"the archive of the collected files ends within {entry.name!r}")
    except RuntimeFailed as error:
        raise EvaluationFailed(f"the archive of the collected files cannot be read: {error}") from error
    return contents
