"""Tar archives that anyone may have made: bounded reading, and the check that nothing in them leads out."""

from __future__ import annotations

import gzip
import io
import posixpath
import tarfile
import zlib
from collections.abc import Iterator, Set
from typing import IO, cast

from rollout.runtimes.base import RuntimeFailed

GZIP = b"\x1f\x8b"
"""What a gzip stream begins with."""
HEADER_BYTES, ENTRIES, UNPACKED_BYTES, PATH_BYTES = 1 << 17, 1_000_000, 16 << 30, 4096
"""The most an archive may have: headers of one entry, entries, bytes once unpacked, bytes of a name."""
_FULL = (b"No space left on device", b"Disk quota exceeded", b"File too large", b"File size limit exceeded", b": Wrote only")


def check_archive(archive: bytes) -> None:
    """Raises `RuntimeFailed` as `iterate_entries` does, for a device, and for an entry that leads out of the folder it is unpacked in: by
    its name, or because it is at or below a link, wherever that leads, which no archive of a real folder has. A link itself may lead
    anywhere: an agent's files are full of links to the system's programs, and inside the runtime they lead to the runtime's own files."""
    links: set[str] = set()
    for entry, _ in iterate_entries(archive):
        path = posixpath.normpath(entry.name)
        if _leads_out(entry.name, links) or (entry.islnk() and _leads_out(entry.linkname, links)):
            raise RuntimeFailed(
                f"the archive's entry {entry.name!r} leads out of the folder it is unpacked in, or through a link"
            )
        if (path in links and not entry.issym()) or (path == "." and not entry.isdir()):
            raise RuntimeFailed(
                f"the archive's entry {entry.name!r} takes the place of a link, or of the folder it is unpacked in"
            )
        if entry.isdev() and not entry.isfifo():
            raise RuntimeFailed(f"the archive's entry {entry.name!r} is a device")
        if entry.issym() or (entry.islnk() and posixpath.normpath(entry.linkname) in links):
            links.add(path)


def iterate_entries(archive: bytes) -> Iterator[tuple[tarfile.TarInfo, IO[bytes]]]:
    """The entries of a tar archive, plain or gzip, each with a file positioned at its content. Holds no more of the archive than one
    entry's headers. Raises `RuntimeFailed` if it is not an archive, and for more than `ENTRIES` or `UNPACKED_BYTES`."""
    try:
        whole = io.BytesIO(archive)
        file = cast(IO[bytes], gzip.GzipFile(fileobj=whole) if archive.startswith(GZIP) else whole)
        headers = _BoundedHeaders(file)
        with tarfile.open(fileobj=cast(IO[bytes], headers), mode="r:") as tar:
            for _ in range(ENTRIES):
                if (entry := tar.next()) is None:
                    return
                # tarfile would keep every entry it has read.
                tar.members = []  # type: ignore[attr-defined]
                _check_entry(entry)
                file.seek(entry.offset_data)
                yield entry, file
                headers.next_entry()
            raise RuntimeFailed(f"the archive has more than {ENTRIES} entries")
    except (tarfile.TarError, EOFError, OSError, zlib.error) as error:
        raise RuntimeFailed(f"the archive cannot be read: {error}") from error


def _check_entry(entry: tarfile.TarInfo) -> None:
    if not 0 <= entry.offset_data + entry.size <= UNPACKED_BYTES or entry.size < 0:
        raise RuntimeFailed(f"the archive unpacks to more than {UNPACKED_BYTES} bytes")
    if len(entry.name) > PATH_BYTES or len(entry.linkname) > PATH_BYTES:
        raise RuntimeFailed(f"the archive's entry {entry.name[:100]!r}... has a name of more than {PATH_BYTES} bytes")


class _BoundedHeaders:
    """The file that tarfile reads headers from, seeking over contents. One entry's headers may take `HEADER_BYTES`: tarfile holds them
    whole, and an archive of a megabyte can describe a gigabyte."""

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


def _leads_out(name: str, links: Set[str]) -> bool:
    """Whether it leaves the archive's root, or goes through one of the `links`, which are normalized paths."""
    if name.startswith("/") or ".." in name.split("/"):
        return True
    path = posixpath.normpath(name)
    return bool(links) and any(path[:at] in links for at, letter in enumerate(path) if letter == "/")


class GzipSink:
    """Compresses a stream, up to `bound_bytes` of the result."""

    def __init__(self, bound_bytes: int) -> None:
        self._bound_bytes = bound_bytes
        self._deflate = zlib.compressobj(1, wbits=31)
        self._parts = bytearray()
        self._empty = True

    def feed(self, data: bytes) -> None:
        self._empty = False
        self._add(self._deflate.compress(data))

    def get_tail(self) -> bytes:
        return b""

    def finish(self) -> bytes:
        """The compressed stream; for an empty one, an archive of nothing."""
        if self._empty:
            self.feed(bytes(tarfile.RECORDSIZE))
        self._add(self._deflate.flush())
        return bytes(self._parts)

    def _add(self, data: bytes) -> None:
        self._parts += data
        if len(self._parts) > self._bound_bytes:
            self._parts.clear()
            raise RuntimeFailed(f"the archive exceeds {self._bound_bytes} bytes")


def is_disk_full_message(stderr: bytes) -> bool:
    """Whether a command reported that there was no room."""
    return any(words in stderr for words in _FULL)
