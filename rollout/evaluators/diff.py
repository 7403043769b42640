"""Kind `diff`: the reward is the share of files that have the expected content.

Also here: taking files out of a runtime as contents by path (`collect`), which other kinds use.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from difflib import unified_diff
from itertools import islice
from posixpath import join, normpath, relpath
from typing import Literal, Self

from pydantic import model_validator

from rollout.evaluators.base import Case, EvaluationFailed, File, Files, Options, Score, Texts, shorten
from rollout.evaluators.command import require_runtime
from rollout.runtimes.base import Runtime, RuntimeFailed
from rollout.runtimes.files import iterate_entries
from rollout.task import EvaluatorSpec, Task

DIFF_LINES = 60
"""Of one file in the feedback."""
COMPARED_CHARS = 200_000
"""Longer texts get no line-by-line diff in the feedback: its time grows with their square."""


class DiffOptions(Options):
    kind = "diff"

    files: Files = ()
    """The expected content by path."""
    absent: Texts = ()
    """Paths at which there must be no file."""
    whitespace: Literal["exact", "trailing", "any"] = "exact"
    """exact: byte for byte. trailing: ignore white space at line ends, blank lines at the end of the file and the kind of line ends.
    any: each run of white space counts as one space."""
    mode: Literal["fraction", "all"] = "fraction"
    """fraction: the share of files and absent paths that are right. all: 1.0 when all are, otherwise 0.0."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        if not self.files and not self.absent:
            raise ValueError("option 'files' is missing, and so is 'absent'")
        return self


class DiffEvaluator:
    name = "diff"
    needs_runtime = True

    def check(self, spec: EvaluatorSpec, task: Task) -> None:
        DiffOptions.read(spec.options)

    async def evaluate(self, case: Case) -> Score:
        options = DiffOptions.read_case(case)
        paths = [*(file.path for file in options.files), *options.absent]
        collected = await collect(require_runtime(case), paths)
        return await asyncio.to_thread(_score, options, collected)


def _score(options: DiffOptions, collected: Collected) -> Score:
    wrong = [text for file in options.files if (text := _compare(file, collected.at(file.path), options.whitespace))]
    wrong += [f"{path} should not be there" for path in options.absent if collected.below(path)]
    count = len(options.files) + len(options.absent)
    reward = (count - len(wrong)) / count if options.mode == "fraction" else float(not wrong)
    feedback = shorten("\n".join([f"{count - len(wrong)} of {count} paths are as expected.", *wrong]))
    return Score(reward, feedback=feedback, metadata={"right": count - len(wrong), "counted": count})


def _compare(file: File, found: bytes | None, whitespace: str) -> str:
    """The difference from what was expected, in words; empty if there is none."""
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
    """Contents that count as the same become equal."""
    if whitespace == "any":
        return b" ".join(content.split())
    if whitespace == "trailing":
        return b"\n".join(line.rstrip() for line in content.splitlines()).rstrip()
    return content


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
