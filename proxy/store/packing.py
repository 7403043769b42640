"""The small values of the store as msgpack, each behind a schema version.

A value written by a newer build than this one raises `StoredValueError` instead of being half understood.
"""

from __future__ import annotations

from typing import Any, TypeVar

import msgspec

SCHEMA = 1
T = TypeVar("T")


class StoredValueError(Exception):
    """A value in the store that this build cannot read."""


def pack(value: Any) -> bytes:
    return msgspec.msgpack.encode(value)


def unpack(blob: bytes, kind: type[T]) -> T:
    try:
        return msgspec.msgpack.decode(blob, type=kind)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise StoredValueError(f"a stored {getattr(kind, '__name__', kind)} cannot be read: {error}") from error


def pack_versioned(value: Any) -> bytes:
    """`[schema, value]`."""
    return pack((SCHEMA, value))


def unpack_versioned(blob: bytes, kind: type[T]) -> T:
    schema, raw = unpack(blob, tuple[int, msgspec.Raw])
    if schema != SCHEMA:
        raise StoredValueError(f"a stored {kind.__name__} has schema {schema}; this build reads {SCHEMA}")
    return unpack(bytes(raw), kind)
