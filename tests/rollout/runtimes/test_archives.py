"""Archives that an agent made of its own, whose `tar` may be any program: reading one costs the node no more than a bound."""

from __future__ import annotations

import gzip
import io
import os
import subprocess
import tarfile
import tempfile
import tracemalloc
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from rollout.evaluators.base import EvaluationFailed
from rollout.evaluators.collected import _read_archive
from rollout.runtimes import files
from rollout.runtimes.base import RuntimeFailed
from rollout.runtimes.files import HEADER_BYTES, check_archive

GREAT = 8 << 20


def header(name: str, kind: bytes, size: int, linked: str = "") -> bytes:
    member = tarfile.TarInfo(name)
    member.type, member.size, member.linkname = kind, size, linked
    return member.tobuf(tarfile.GNU_FORMAT)


def padded(content: bytes) -> bytes:
    return content + bytes(-len(content) % 512)


def pax(**fields: str) -> bytes:
    """A header that describes the next entry."""
    lines = b""
    for name, value in fields.items():
        rest = f" {name}={value}\n".encode()
        size = len(rest) + len(str(len(rest) + len(str(len(rest)))))
        lines += b"%d" % size + rest
    return header("x", tarfile.XHDTYPE, len(lines)) + padded(lines)


END = bytes(1024)
FILE = header("file", tarfile.REGTYPE, 4) + padded(b"text")
SPARSE = header("sparse", tarfile.GNUTYPE_SPARSE, 0)
EXTENDED = bytes(504) + b"\1" + bytes(7)
HOSTILE: dict[str, Callable[[], bytes]] = {
    "a header of an entry that is great": lambda: pax(comment="x" * GREAT) + FILE,
    "a header of all entries that is great": lambda: pax(comment="x" * GREAT).replace(b"x\0", b"g\0", 1) + FILE,
    "a long name": lambda: header("././@LongLink", tarfile.GNUTYPE_LONGNAME, GREAT) + b"n" * GREAT + FILE,
    "headers of headers": lambda: pax(comment="x") * 10_000 + FILE,
    "a file of many holes": lambda: SPARSE[:482] + b"\1" + SPARSE[483:] + EXTENDED * (GREAT // 512) + FILE,
    "a size that is none": lambda: pax(size="-512") + FILE,
    "a size beyond every disk": lambda: pax(size=str(1 << 62)) + FILE,
    "a name that is no path": lambda: pax(path="a/" * 3000 + "a") + FILE,
}


@pytest.mark.parametrize("what", HOSTILE)
def test_an_archive_that_would_cost_more_than_it_may_is_refused(what: str) -> None:
    """4.7 MB took a gigabyte of the node's memory."""
    archive = gzip.compress(HOSTILE[what]() + END, 1)
    tracemalloc.start()
    try:
        with pytest.raises(RuntimeFailed, match=r"archive"):
            check_archive(archive)
        with pytest.raises(EvaluationFailed, match=r"archive"):
            _read_archive(archive, 1 << 30)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 16 * HEADER_BYTES


def test_entries_are_forgotten_and_so_are_headers_of_all_that_follow() -> None:
    """5,000 entries, each with 2 KiB of headers."""
    one = pax(comment="x" * 1400) + FILE
    archive = gzip.compress(one * 5_000 + END, 1)
    tracemalloc.start()
    try:
        check_archive(archive)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 16 * HEADER_BYTES


def test_there_are_bounds_on_entries_and_on_all_that_is_unpacked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "ENTRIES", 3)
    check_archive(FILE * 2 + END)
    with pytest.raises(RuntimeFailed, match="more than 3 entries"):
        check_archive(FILE * 4 + END)
    monkeypatch.setattr(files, "UNPACKED_BYTES", 1 << 20)
    great = header("great", tarfile.REGTYPE, 1 << 20) + bytes(1 << 20)
    with pytest.raises(RuntimeFailed, match="unpacks to more than 1048576 bytes"):
        check_archive(gzip.compress(great + END))


@pytest.mark.parametrize("format", [tarfile.GNU_FORMAT, tarfile.PAX_FORMAT, tarfile.USTAR_FORMAT])
def test_what_programs_make_is_read_as_it_is(format: int) -> None:
    """Long names, a name in Unicode, a hard link, an empty file, one greater than what headers may be."""
    contents = {"a" * 90 + "/" + "b" * 90: b"long", "empty": b"", "great": bytes(range(256)) * 2048}
    contents |= {"\u00fc": b"u"} if format != tarfile.USTAR_FORMAT else {}
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:gz", format=format) as made:
        for name, content in contents.items():
            member = tarfile.TarInfo(name)
            member.size = len(content)
            made.addfile(member, io.BytesIO(content))
        link = tarfile.TarInfo("linked")
        link.type, link.linkname = tarfile.LNKTYPE, "great"
        made.addfile(link)
    for archive in (buffer.getvalue(), gzip.decompress(buffer.getvalue())):
        check_archive(archive)
        assert _read_archive(archive, 1 << 30) == {**contents, "linked": contents["great"]}


# What an entry may do to the rest of the machine


Entry = tuple[str, bytes, str]
"""Name, type, what it links to."""
PARTS = st.sampled_from(["a", "b", "c", ".", ""])
NAMES = st.lists(PARTS, min_size=1, max_size=3).map("/".join).filter(lambda name: name.strip("./") != "")
TARGETS = st.one_of(NAMES, st.sampled_from(["..", "../..", "../outside", "../../outside", "OUTSIDE", "OUTSIDE/kept", "."]))
TYPES = st.sampled_from([tarfile.REGTYPE, tarfile.DIRTYPE, tarfile.SYMTYPE, tarfile.LNKTYPE])
ENTRIES = st.lists(st.tuples(NAMES, TYPES, TARGETS), min_size=1, max_size=6)


def made_of(entries: Sequence[Entry], outside: str) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", format=tarfile.GNU_FORMAT) as opened:
        for name, kind, linked in entries:
            member = tarfile.TarInfo(name)
            member.type, member.mode = kind, 0o755
            member.linkname = linked.replace("OUTSIDE", outside) if kind in (tarfile.SYMTYPE, tarfile.LNKTYPE) else ""
            member.size = 3 if kind == tarfile.REGTYPE else 0
            opened.addfile(member, io.BytesIO(b"new"))
    return buffer.getvalue()


def extract_carelessly(archive: bytes, folder: Path) -> None:
    """As the most trusting program would: through every link that is there."""
    with tarfile.open(fileobj=io.BytesIO(archive)) as opened:
        for entry in opened:
            path = folder / entry.name
            with suppress(OSError):
                if not entry.isdir():
                    path.parent.mkdir(parents=True, exist_ok=True)
                if entry.isdir():
                    path.mkdir(parents=True, exist_ok=True)
                elif entry.issym():
                    path.symlink_to(entry.linkname)
                elif entry.islnk():
                    os.link(folder / entry.linkname, path, follow_symlinks=False)
                else:
                    path.write_bytes(b"new")


def extract_by_tar(archive: bytes, folder: Path) -> None:
    """As the runtime does."""
    subprocess.run(["tar", "-xof", "-", "-C", str(folder)], input=archive, capture_output=True, check=False)


def see(folder: Path, but: Path) -> dict[str, tuple[int, bytes]]:
    """Every file below the folder, without what is below `but`: its number of links and content."""
    found: dict[str, tuple[int, bytes]] = {}
    for path in folder.rglob("*"):
        if not path.is_relative_to(but):
            found[str(path)] = (path.lstat().st_nlink, path.read_bytes() if path.is_file() else b"")
    return found


@given(ENTRIES)
@example([("b", tarfile.SYMTYPE, "OUTSIDE"), ("a", tarfile.SYMTYPE, "b"), ("a/x", tarfile.REGTYPE, "")])
@example([("b", tarfile.SYMTYPE, ".."), ("a", tarfile.LNKTYPE, "b"), ("a/x", tarfile.REGTYPE, "")])
@example([("a", tarfile.SYMTYPE, "OUTSIDE/kept"), ("a", tarfile.REGTYPE, "")])
@example([("b", tarfile.SYMTYPE, "OUTSIDE"), ("a", tarfile.LNKTYPE, "b/kept"), ("a", tarfile.REGTYPE, "")])
@settings(max_examples=400, deadline=None)
def test_what_is_accepted_changes_nothing_outside_whoever_unpacks_it(entries: Sequence[Entry]) -> None:
    """A link to a link was believed: `b` to another folder, `a` to `b`, and `a/x` was written there."""
    for extract in (extract_carelessly, extract_by_tar):
        with tempfile.TemporaryDirectory() as top:
            outside, folder = Path(top, "outside"), Path(top, "in", "unpacked")
            outside.mkdir()
            folder.mkdir(parents=True)
            (outside / "kept").write_bytes(b"old")
            archive = made_of(entries, str(outside))
            before = see(Path(top), folder)
            try:
                check_archive(archive)
            except RuntimeFailed:
                return
            extract(archive, folder)
            after = see(Path(top), folder)
            # A folder's number of links counts the folders in it.
            assert {path: seen for path, seen in after.items() if Path(path) != folder.parent} == {
                path: seen for path, seen in before.items() if Path(path) != folder.parent
            }


@given(ENTRIES)
@settings(max_examples=100, deadline=None)
def test_what_tar_makes_of_a_folder_is_accepted_wherever_its_links_lead(entries: Sequence[Entry]) -> None:
    with tempfile.TemporaryDirectory() as top:
        extract_carelessly(made_of([each for each in entries if ".." not in each[2]], "/etc"), Path(top))
        made = subprocess.run(["tar", "-C", top, "-cf", "-", "."], capture_output=True, check=True)
        check_archive(made.stdout)
