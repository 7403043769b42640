"""One table as one file, Parquet or JSON lines: there whole, under its name, or not at all."""

from __future__ import annotations

import base64
import hashlib
import json
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np

from proxy.archive.schema import TABLES, arrow_schema
from proxy.archive.tables import Row

Format = Literal["parquet", "jsonl"]
FORMATS: tuple[str, ...] = get_args(Format)

ROW_GROUP_ROWS = 256
"""Readers of Parquet take a row group at a time: a long session's row has megabytes."""


def write_table(path: Path, table: str, rows: Sequence[Row]) -> dict[str, Any]:
    """Write `rows` to `path`, whose suffix is the format: `{name, bytes, sha256}`."""
    write = _write_parquet if path.suffix == ".parquet" else _write_jsonl
    return write_whole(path, lambda temporary: write(temporary, table, rows))


def write_whole(path: Path, write: Callable[[Path], None]) -> dict[str, Any]:
    """What `write` makes, under `path` only once all of it is on disk: `{name, bytes, sha256}`."""
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


def read_table(path: Path, table: str, columns: Sequence[str] | None = None) -> list[Row]:
    """The rows of a file that `write_table` wrote, or these columns of them."""
    if path.suffix == ".parquet":
        import pyarrow.parquet as pq

        rows: list[Row] = pq.read_table(path, columns=columns).to_pylist()
        return rows
    return list(_read_jsonl(path, table, columns or list(TABLES[table])))


def digest_of(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _write_parquet(path: Path, table: str, rows: Sequence[Row]) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    made = pa.Table.from_pylist(list(rows), schema=arrow_schema(table))
    pq.write_table(made, path, compression="zstd", row_group_size=ROW_GROUP_ROWS)


def _write_jsonl(path: Path, table: str, rows: Sequence[Row]) -> None:
    columns = TABLES[table]
    with path.open("w", encoding="utf-8") as file:
        for row in rows:
            file.write(json.dumps({name: _as_json(row[name]) for name in columns}) + "\n")


def _as_json(value: Any) -> Any:
    if isinstance(value, np.ndarray):
        return value.tolist()
    return base64.b64encode(value).decode() if isinstance(value, bytes) else value


def _read_jsonl(path: Path, table: str, columns: Sequence[str]) -> Iterator[Row]:
    binary = [name for name in columns if TABLES[table][name] == "binary"]
    with path.open(encoding="utf-8") as file:
        for line in file:
            row = json.loads(line)
            yield {name: row[name] for name in columns} | {name: base64.b64decode(row[name]) for name in binary}


def _sync_folder(folder: Path) -> None:
    """A rename is on disk once its folder is."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
