"""A folder of archived sessions: numbered parts, and a manifest that lists the complete ones.

    manifest.json  sessions-000000.parquet  records-000000.parquet  trajectories-000000.parquet  sessions-000001.parquet  …

A part is written file by file, each there whole or not at all, and counts once the manifest, replaced last, lists it. The next writer
removes what a killed one left unlisted. A session is in the folder once (`ArchiveWriter.holds`), and so is an image, in the part of the
first session that has it. A lock on the folder admits one writer at a time.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import IO, Any, Self

from proxy.archive.tables import (
    SCHEMA,
    SCHEMA_VERSION,
    TABLES,
    ArchivedSession,
    Rewards,
    Row,
    arrow_schema,
    rewards_of,
    rows_of,
    session_of,
)

MANIFEST = "manifest.json"
LOCK = ".lock"
PART_BYTES = 32 * 2**20
"""Size at which a part is written. A writer needs a few times this memory, or that of one larger session."""
PART_SESSIONS = 1000
ROW_GROUP_ROWS = 256
"""Readers of Parquet load a whole row group, and a long session's row has megabytes."""

Key = tuple[str, float]
KNOWN_COLUMNS = ["session_id", "created_at", "reward", "per_call", "per_branch", "scored"]


class ArchiveError(Exception):
    """The folder cannot be read or written."""


class FolderBusy(ArchiveError):
    """Another process is writing to the folder."""


class ArchiveReader:
    """The parts that the manifest of `folder` lists. Raises ArchiveError when there is none, or one that this build does not read."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        manifest = read_manifest(folder)
        if manifest is None:
            raise ArchiveError(f"{folder} holds no archive: it has no {MANIFEST}")
        self.manifest = manifest
        self.parts: list[dict[str, Any]] = manifest["parts"]
        self._images: dict[str, int] | None = None

    def sessions(self) -> Iterator[ArchivedSession]:
        """Every session without its trajectories, read part by part. Raises ArchiveError for a missing or changed file."""
        for part in self.parts:
            records, scores = (self._group(part, table) for table in ("records", "scores"))
            for row in self._rows(part, "sessions"):
                name = row["session_id"]
                yield session_of(row, records.get(name, ()), scores.get(name, ()), self._load_media(row))

    def rows(self, table: str, columns: Sequence[str] | None = None) -> Iterator[Row]:
        """The rows of one table, or only these columns of them. Raises as `sessions`."""
        for part in self.parts:
            yield from self._rows(part, table, columns)

    def find(self, session_id: str) -> ArchivedSession | None:
        """The session of that id, the one archived last if there were several. Raises as `sessions`."""
        for part in reversed(self.parts):
            rows = [row for row in self._rows(part, "sessions") if row["session_id"] == session_id]
            if rows:
                records, scores = (self._group(part, table).get(session_id, ()) for table in ("records", "scores"))
                last = max(rows, key=lambda row: row["created_at"])
                return session_of(last, records, scores, self._load_media(last))
        return None

    def _group(self, part: dict[str, Any], table: str) -> dict[str, list[Row]]:
        """The rows of a table by session."""
        grouped: dict[str, list[Row]] = {}
        for row in self._rows(part, table):
            grouped.setdefault(row["session_id"], []).append(row)
        return grouped

    def _load_media(self, session: Row) -> dict[str, bytes]:
        """The session's images, from whichever parts have them."""
        wanted = set(session["media"])
        if wanted and self._images is None:
            listed = ((at, read_digests(self.folder, part)) for at, part in enumerate(self.parts))
            self._images = {digest: at for at, digests in listed for digest in digests}
        found: dict[str, bytes] = {}
        for at in sorted({(self._images or {}).get(digest, -1) for digest in wanted} - {-1}):
            rows = self._rows(self.parts[at], "media")
            found |= {row["digest"]: row["data"] for row in rows if row["digest"] in wanted}
        if lost := wanted - found.keys():
            raise ArchiveError(f"{self.folder} lacks the image {min(lost)} of session {session['session_id']}")
        return found

    def _rows(self, part: dict[str, Any], table: str, columns: Sequence[str] | None = None) -> list[Row]:
        entry = part["files"].get(table)
        if entry is None:
            return []
        path = self.folder / entry["name"]
        if not path.is_file() or digest_of(path) != entry["sha256"]:
            raise ArchiveError(f"{path} is missing or was changed: its checksum is not the one in {MANIFEST}")
        return read_table(path, columns)


class KnownSessions:
    """The sessions in a folder, by their keys, with the hash of their rewards, and the digests of its images, about a
    hundred bytes each. Reads each part once."""

    def __init__(self) -> None:
        self._forget()

    def _forget(self) -> None:
        self.images: set[str] = set()
        self._rewards: dict[Key, int] = {}
        self._parts: set[str] = set()

    def read(self, folder: Path, parts: Sequence[dict[str, Any]]) -> None:
        if self._parts - {part["files"]["sessions"]["sha256"] for part in parts}:
            # The folder was moved away: what its parts hold is not in the one that took its place.
            self._forget()
        for part in parts:
            if part["files"]["sessions"]["sha256"] not in self._parts:
                path = folder / part["files"]["sessions"]["name"]
                rows = read_table(path, KNOWN_COLUMNS)
                rewards = {(row["session_id"], row["created_at"]): rewards_of(row) for row in rows}
                self.add(part, rewards, read_digests(folder, part))

    def add(self, part: dict[str, Any], rewards: Mapping[Key, Rewards], images: Iterable[str]) -> None:
        self._parts.add(part["files"]["sessions"]["sha256"])
        self._rewards |= {key: hash(given) for key, given in rewards.items()}
        self.images.update(images)

    def __contains__(self, key: Key) -> bool:
        return key in self._rewards

    def __len__(self) -> int:
        return len(self._rewards)

    def list_ids(self) -> set[str]:
        return {session_id for session_id, _ in self._rewards}

    def has_rewards(self, key: Key, rewards: Rewards) -> bool:
        """Whether the session is in the folder with these rewards."""
        return self._rewards.get(key) == hash(rewards)


class ArchiveWriter:
    """Adds sessions to `folder`, which it creates if missing; use it in a `with` block. Raises FolderBusy while another process writes,
    and ArchiveError when the folder holds an archive of another builder."""

    def __init__(self, folder: Path, *, builder: str = "merged", known: KnownSessions | None = None) -> None:
        self.folder = folder
        self.builder = builder
        self.known = known if known is not None else KnownSessions()
        self._waiting: dict[Key, ArchivedSession] = {}
        self._waiting_bytes = 0
        self._lock: IO[str]

    def __enter__(self) -> Self:
        self.folder.mkdir(parents=True, exist_ok=True)
        self._lock = _lock(self.folder)
        try:
            self.manifest = self._load_manifest()
            self._clear_leftovers()
            self.known.read(self.folder, self.manifest["parts"])
        except BaseException:
            # Ctrl-C in `verbatim export` too: without `__exit__` the folder would stay locked.
            self._lock.close()
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        self._lock.close()

    def holds(self, key: Key) -> bool:
        return key in self.known or key in self._waiting

    def is_outdated(self, state: Mapping[str, Any]) -> bool:
        """Whether the folder holds the session with other rewards or scores than it has in `state`, as in `GET /sessions/{id}`."""
        key = state["session_id"], state["created_at"]
        return key in self.known and not self.known.has_rewards(key, rewards_of(state))

    @property
    def full(self) -> bool:
        """Whether the waiting sessions make a part."""
        return self._waiting_bytes >= PART_BYTES or len(self._waiting) >= PART_SESSIONS

    def add(self, session: ArchivedSession) -> None:
        """Queues the session for the next part, unless the folder holds it."""
        if not self.holds(session.key):
            self._waiting[session.key] = session
            self._waiting_bytes += session.size_bytes

    def flush(self) -> int:
        """Writes the waiting sessions as one more part, listed when this returns. Returns how many they were."""
        written = len(self._waiting)
        if not written:
            return 0
        part = self._write_part(list(self._waiting.values()))
        self._replace_manifest({"complete": False, "parts": [*self.manifest["parts"], part]})
        rewards = {key: session.rewards for key, session in self._waiting.items()}
        self.known.add(part, rewards, (digest for session in self._waiting.values() for digest in session.media))
        self._waiting, self._waiting_bytes = {}, 0
        return written

    def finish(self, filters: dict[str, Any]) -> None:
        """Writes the last part, and the manifest that declares the export of `filters` complete."""
        self.flush()
        self._replace_manifest({"complete": True, "filters": filters})

    def _write_part(self, sessions: list[ArchivedSession]) -> dict[str, Any]:
        number = f"{len(self.manifest['parts']):06d}"
        rows: dict[str, list[Row]] = {table: [] for table in TABLES}
        for session in sessions:
            for table, made in rows_of(session).items():
                rows[table] += made
        new = {row["digest"]: row for row in rows["media"] if row["digest"] not in self.known.images}
        rows["media"] = list(new.values())
        files = {
            table: write_table(self.folder / f"{table}-{number}.parquet", table, made) for table, made in rows.items() if made
        }
        counts = {table: len(made) for table, made in rows.items()}
        return {"name": number, **counts, "tokens": sum(len(row["token_ids"]) for row in rows["trajectories"]), "files": files}

    def _replace_manifest(self, changes: dict[str, Any]) -> None:
        self.manifest = {**self.manifest, **changes, "updated_at": time.time()}
        text = json.dumps(self.manifest, indent=1) + "\n"
        write_whole(self.folder / MANIFEST, lambda path: path.write_text(text, encoding="utf-8"))

    def _load_manifest(self) -> dict[str, Any]:
        manifest = read_manifest(self.folder)
        if manifest is None:
            now = time.time()
            start = {"schema": SCHEMA, "schema_version": SCHEMA_VERSION, "builder": self.builder}
            return {**start, "complete": False, "created_at": now, "updated_at": now, "filters": {}, "parts": []}
        if manifest["builder"] != self.builder:
            raise ArchiveError(f"{self.folder} holds an archive whose builder is {manifest['builder']}, not {self.builder}")
        return manifest

    def _clear_leftovers(self) -> None:
        following = [f"{table}-{len(self.manifest['parts']):06d}.parquet" for table in TABLES]
        for name in following:
            (self.folder / name).unlink(missing_ok=True)
        for name in (MANIFEST, *following):
            for path in self.folder.glob(f".{name}.*.part"):
                path.unlink()


def read_manifest(folder: Path) -> dict[str, Any] | None:
    """The manifest of the archive in `folder`, None when there is none. Raises ArchiveError for an unreadable or foreign one."""
    try:
        manifest = json.loads((folder / MANIFEST).read_text())
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise ArchiveError(f"{folder / MANIFEST} cannot be read: {error}") from error
    if not isinstance(manifest, dict) or manifest.get("schema") != SCHEMA:
        raise ArchiveError(f"{folder / MANIFEST} is not the manifest of an archive of sessions")
    version = manifest.get("schema_version")
    if version != SCHEMA_VERSION:
        raise ArchiveError(f"{folder} holds an archive of schema version {version}; this build reads {SCHEMA_VERSION}")
    return manifest


def read_digests(folder: Path, part: dict[str, Any]) -> set[str]:
    """Those of the images in the part."""
    entry = part["files"].get("media")
    return set() if entry is None else {row["digest"] for row in read_table(folder / entry["name"], ["digest"])}


def _lock(folder: Path) -> IO[str]:
    lock = (folder / LOCK).open("a")
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        lock.close()
        raise FolderBusy(f"another process is writing to {folder}") from error
    return lock


def write_table(path: Path, table: str, rows: Sequence[Row]) -> dict[str, Any]:
    """Writes `rows` to `path`. Returns `{name, bytes, sha256}`."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    made = pa.Table.from_pylist(list(rows), schema=arrow_schema(table))
    return write_whole(path, lambda at: pq.write_table(made, at, compression="zstd", row_group_size=ROW_GROUP_ROWS))


def write_whole(path: Path, write: Callable[[Path], object]) -> dict[str, Any]:
    """Puts the file that `write` makes at `path` once all of it is on disk. Returns `{name, bytes, sha256}`."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        write(temporary)
        with temporary.open("rb+") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
            os.fsync(file.fileno())
        size = temporary.stat().st_size
        temporary.replace(path)
    finally:
        with suppress(FileNotFoundError):
            temporary.unlink()
    _sync_folder(path.parent)
    return {"name": path.name, "bytes": size, "sha256": digest}


def read_table(path: Path, columns: Sequence[str] | None = None) -> list[Row]:
    """The rows of a file that `write_table` wrote, or only these columns."""
    import pyarrow.parquet as pq

    rows: list[Row] = pq.read_table(path, columns=columns).to_pylist()
    return rows


def digest_of(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _sync_folder(folder: Path) -> None:
    """A rename is durable once its folder is synced."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
