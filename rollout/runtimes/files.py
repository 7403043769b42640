"""Files of a runtime, written and read by commands inside it: what a path or a link leads to is then never outside.

The runtime needs `sh`, `mkdir`, `rm`, `cat`, `chmod`, and for archives `tar` (GNU's or busybox's) with `gzip`.
"""

from __future__ import annotations

import asyncio
import gzip
import io
import posixpath
import tarfile
import zlib
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence, Set
from pathlib import PurePosixPath
from typing import IO, cast

from rollout.runtimes.base import DiskFull, Executed, RuntimeFailed
from rollout.runtimes.command import Limits

TIMEOUT_SECONDS = 600.0
"""For one file or archive."""
_FULL = (b"No space left on device", b"Disk quota exceeded", b"File too large", b"File size limit exceeded", b": Wrote only")
_FILE_TOO_LARGE = 128 + 25
_GZIP = b"\x1f\x8b"
HEADER_BYTES, ENTRIES, UNPACKED_BYTES, PATH_BYTES = 1 << 17, 1_000_000, 16 << 30, 4096
"""Of an archive, at most: what describes one entry, their number, all of it unpacked, and a name."""

_UPLOAD = 'mkdir -p "$1" && rm -f "$2" && (umask 077; cat > "$2") && chmod "$3" "$2"'
_UNPACK = 'mkdir -p "$1" && exec tar "$2" - -C "$1"'
_DOWNLOAD = """
cd "$1" || exit 2
shift
for path in "$@"; do
    shift
    if [ -e "$path" ] || [ -L "$path" ]; then set -- "$@" "$path"; fi
done
[ $# = 0 ] || { chmod -R u+rX -- "$@" 2> /dev/null; exec tar -cf - -- "$@"; }
"""
"""Files that their owner may not read either would be no archive at all: they are made readable first."""


class FilesByCommand(ABC):
    """What a `Runtime` has for its files, for every kind in which commands can be run."""

    workdir: str

    @abstractmethod
    async def _in_files(self, argv: Sequence[str], stdin: bytes, limits: Limits) -> Executed:
        """What argv did, run in the runtime with nothing of the task's own."""

    async def upload(self, path: str, content: bytes, *, mode: int = 0o644) -> None:
        target = self._absolute(path)
        argv = ("sh", "-c", _UPLOAD, "upload", posixpath.dirname(target), target, f"{mode:o}")
        _check(f"{path} cannot be written", await self._in_files(argv, content, Limits(TIMEOUT_SECONDS)))

    async def unpack(self, path: str, archive: bytes) -> None:
        await asyncio.to_thread(check_archive, archive)
        flags = "-xzof" if archive.startswith(_GZIP) else "-xof"
        argv = ("sh", "-c", _UNPACK, "unpack", self._absolute(path), flags)
        _check(f"the archive cannot be unpacked at {path}", await self._in_files(argv, archive, Limits(TIMEOUT_SECONDS)))

    async def download(self, paths: Sequence[str], *, bound_bytes: int) -> bytes:
        names = [self._named(path) for path in paths]
        sink = Gzipped(bound_bytes)
        argv = ("sh", "-c", _DOWNLOAD, "download", self.workdir, *names)
        done = await self._in_files(argv, b"", Limits(TIMEOUT_SECONDS, stdout=sink))
        # 1 is tar's word for a file that changed while it was read.
        if done.exit_code != 1:
            _check(f"{', '.join(paths)} cannot be read", done)
        return sink.whole()

    def _absolute(self, path: str) -> str:
        if "\0" in path or not path:
            raise RuntimeFailed(f"{path!r} is not a path")
        return posixpath.normpath(posixpath.join(self.workdir, path))

    def _named(self, path: str) -> str:
        """As tar is to be told: relative where it is below the workdir."""
        absolute = PurePosixPath(self._absolute(path))
        if absolute.is_relative_to(self.workdir):
            return str(absolute.relative_to(self.workdir))
        return str(absolute)


class Gzipped:
    """Takes a stream and keeps it compressed, up to `bound_bytes`."""

    def __init__(self, bound_bytes: int) -> None:
        self._bound_bytes = bound_bytes
        self._deflate = zlib.compressobj(1, wbits=31)
        self._parts = bytearray()
        self._empty = True

    def feed(self, data: bytes) -> None:
        self._empty = False
        self._add(self._deflate.compress(data))

    def kept(self) -> bytes:
        return b""

    def whole(self) -> bytes:
        """An empty stream is an archive of nothing."""
        if self._empty:
            self.feed(bytes(tarfile.RECORDSIZE))
        self._add(self._deflate.flush())
        return bytes(self._parts)

    def _add(self, data: bytes) -> None:
        self._parts += data
        if len(self._parts) > self._bound_bytes:
            self._parts.clear()
            raise RuntimeFailed(f"the archive is greater than {self._bound_bytes} bytes")


class _Headers:
    """An archive's bytes for tarfile, which reads what describes an entry and seeks over what is in it. Of the first no more may come for
    one entry than `HEADER_BYTES`: tarfile holds it all, and an archive of a megabyte can describe a gigabyte."""

    def __init__(self, file: IO[bytes]) -> None:
        self._file = file
        self._left = HEADER_BYTES

    def next_entry(self) -> None:
        self._left = HEADER_BYTES

    def read(self, size: int = -1) -> bytes:
        if not 0 <= size <= self._left:
            raise RuntimeFailed(f"an entry of the archive has more than {HEADER_BYTES} bytes of headers")
        self._left -= size
        return self._file.read(size)

    def seek(self, offset: int, whence: int = 0) -> int:
        return self._file.seek(offset, whence)

    def tell(self) -> int:
        return self._file.tell()


def entries(archive: bytes) -> Iterator[tuple[tarfile.TarInfo, IO[bytes]]]:
    """What is in a tar archive, plain or gzip, one entry after the other, with a file that stands at its content. The archive may be made
    by anyone: what is held of it is what one entry's headers may be. Raises `RuntimeFailed` when it is no archive, and for more than
    `ENTRIES` or `UNPACKED_BYTES`."""
    try:
        whole = io.BytesIO(archive)
        file = cast(IO[bytes], gzip.GzipFile(fileobj=whole) if archive.startswith(_GZIP) else whole)
        headers = _Headers(file)
        with tarfile.open(fileobj=cast(IO[bytes], headers), mode="r:") as opened:
            for _ in range(ENTRIES):
                if (entry := opened.next()) is None:
                    return
                # What it has read it would keep.
                opened.members = []  # type: ignore[attr-defined]
                if not 0 <= entry.offset_data + entry.size <= UNPACKED_BYTES or entry.size < 0:
                    raise RuntimeFailed(f"the archive is greater than {UNPACKED_BYTES} bytes when it is unpacked")
                if len(entry.name) > PATH_BYTES or len(entry.linkname) > PATH_BYTES:
                    raise RuntimeFailed(
                        f"the archive's entry {entry.name[:100]!r}... has a name of more than {PATH_BYTES} bytes"
                    )
                file.seek(entry.offset_data)
                yield entry, file
                headers.next_entry()
            raise RuntimeFailed(f"the archive has more than {ENTRIES} entries")
    except (tarfile.TarError, EOFError, OSError, zlib.error) as error:
        raise RuntimeFailed(f"the archive cannot be read: {error}") from error


def check_archive(archive: bytes) -> None:
    """Raises `RuntimeFailed` as `entries` does, when an entry leads out of the folder it is unpacked in, by its name or through a link, and
    when one is a device. A link itself may name any place: what an agent leaves is full of links to the system's programs, and in the
    runtime they lead to the runtime's own files."""
    outward: set[str] = set()
    for entry, _ in entries(archive):
        if _leads_out(entry.name, outward) or (entry.islnk() and _leads_out(entry.linkname, outward)):
            raise RuntimeFailed(f"the archive's entry {entry.name!r} leads out of where it is unpacked")
        if entry.isdev() and not entry.isfifo():
            raise RuntimeFailed(f"the archive's entry {entry.name!r} is a device")
        if entry.issym() and _leads_out(_target(entry), outward):
            outward.add(posixpath.normpath(entry.name))


def _target(link: tarfile.TarInfo) -> str:
    """Where a symbolic link leads, from the archive's root."""
    return posixpath.normpath(posixpath.join(posixpath.dirname(link.name), link.linkname))


def _leads_out(name: str, outward: Set[str]) -> bool:
    """Whether it does from the archive's root, also through one of the links of `outward`, which are normal paths."""
    if name.startswith("/") or ".." in name.split("/"):
        return True
    path = posixpath.normpath(name)
    return bool(outward) and any(path[:at] in outward for at, letter in enumerate(path) if letter == "/")


def is_full(stderr: bytes) -> bool:
    """Whether a command said that there was no room."""
    return any(words in stderr for words in _FULL)


def _check(what: str, done: Executed) -> None:
    if done.exit_code == 0:
        return
    told = done.stderr.decode(errors="replace").strip() or f"exit code {done.exit_code}"
    if done.timed_out:
        told = f"it took more than {TIMEOUT_SECONDS:g} seconds"
    full = done.exit_code == _FILE_TOO_LARGE or is_full(done.stderr)
    raise (DiskFull if full else RuntimeFailed)(f"{what}: {told}")
