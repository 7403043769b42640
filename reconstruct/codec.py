"""Records as bytes: one `encode`, one `decode`, one `DecodeError`.

A record is a msgpack array whose first item is the schema version, and the CRC-32 of it: a flipped bit in an id or a logprob
would otherwise be trained unseen. Ids are little-endian int32, logprobs little-endian float32, message texts zlib-compressed
JSON where that is shorter. A version once released stays readable: a new field means a new version and a branch in `decode`;
the golden bytes in tests/reconstruct/golden hold that.

Version 2 is version 1 with the call's details behind it, version 3 is version 2, its details or null, with the source of its role
behind them. A call is written as the earliest version that tells all of it, which earlier builds read as well: as version 1 where it
has no details, and as 1 or 2 where its role's source is what those versions meant: inferred for main, else declared.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Iterable
from dataclasses import replace
from types import NoneType
from typing import Any

import msgpack
import numpy as np
from numpy.typing import NDArray

from reconstruct.errors import DecodeError
from reconstruct.records import DECLARED, INFERRED, Call, CallDetails, Ids, Logprobs, Node, Sampling, Span

SCHEMA_VERSION = 3
"""The newest that this build reads; it reads all before, too."""

_COMPRESS_FROM_BYTES = 128
"""Below this zlib's header eats the gain."""

_CRC_BYTES = 4

_SURROGATES = "surrogatepass"
"""Texts of a harness may hold lone surrogates, which plain UTF-8 refuses."""


def encode(call: Call) -> bytes:
    """`call` as the bytes of one record."""
    version, behind = _version_of(call)
    packed: bytes = msgpack.packb(
        (
            version,
            call.call_id,
            call.session_id,
            _node_fields(call.node),
            call.dialect,
            call.api,
            call.status,
            call.role,
            call.agent,
            call.finish_reason,
            call.stop_reason,
            _sampling_fields(call.sampling),
            call.root_key,
            call.fingerprint,
            call.reply_fingerprint,
            call.message_count,
            call.messages_from,
            _squeeze(call.messages),
            _squeeze(call.reply),
            _squeeze(call.preamble),
            call.digest,
            call.projection,
            call.replica,
            call.started_at,
            call.engine_seconds,
            call.own_seconds,
            call.trainable,
            call.quarantine_reason,
            dict(call.marks),
            *behind,
        ),
        unicode_errors=_SURROGATES,
    )
    return packed + _crc(packed)


def _version_of(call: Call) -> tuple[int, tuple[Any, ...]]:
    """The earliest version that tells all of the call, and what that has behind the fields of version 1."""
    details = None if call.node.details is None else encode_details(call.node.details)
    if call.role_source != _source_before_3(call.role):
        return 3, (details, call.role_source)
    return (1, ()) if details is None else (2, (details,))


def decode(data: bytes) -> Call:
    """The call that `encode` packed.

    Raises DecodeError for anything else: truncated or changed bytes, another format, a schema version of a newer build.
    """
    packed = data[:-_CRC_BYTES]
    if _crc(packed) != data[-_CRC_BYTES:]:
        raise DecodeError(f"a record of {len(data)} bytes is damaged: its checksum is not that of its bytes")
    try:
        fields = msgpack.unpackb(packed, use_list=True, strict_map_key=False, unicode_errors=_SURROGATES)
    except (ValueError, TypeError, msgpack.UnpackException) as error:
        raise DecodeError(f"a record of {len(data)} bytes is not msgpack: {error}") from error
    if not isinstance(fields, list) or not fields:
        raise DecodeError(f"a record is a msgpack array, not {type(fields).__name__}")
    version = fields[0]
    if type(version) is not int or not 1 <= version <= SCHEMA_VERSION:
        raise DecodeError(f"schema version {version!r} is unknown to this build (it reads up to {SCHEMA_VERSION})")
    try:
        return _DECODERS[version](fields)
    except DecodeError:
        raise
    except (ValueError, TypeError, IndexError, KeyError, zlib.error) as error:
        raise DecodeError(f"a version-{version} record is damaged: {error}") from error


def _decode_v3(fields: list[Any]) -> Call:
    *before, details, role_source = fields
    _require((role_source,), str)
    call = _decode_v1(before) if details is None else _decode_v2([*before, details])
    return replace(call, role_source=role_source)


def _decode_v2(fields: list[Any]) -> Call:
    *before, details = fields
    call = _decode_v1(before)
    return replace(call, node=replace(call.node, details=decode_details(details)))


def _decode_v1(fields: list[Any]) -> Call:
    (
        _,
        call_id,
        session_id,
        node,
        dialect,
        api,
        status,
        role,
        agent,
        finish_reason,
        stop_reason,
        sampling,
        root_key,
        fingerprint,
        reply_fingerprint,
        message_count,
        messages_from,
        messages,
        reply,
        preamble,
        digest,
        projection,
        replica,
        started_at,
        engine_seconds,
        own_seconds,
        trainable,
        quarantine_reason,
        marks,
    ) = fields
    texts = (call_id, session_id, dialect, api, status, role, agent, finish_reason, projection, replica, quarantine_reason)
    _require(texts, str)
    _require((root_key, fingerprint, reply_fingerprint, digest), bytes)
    _require((message_count, messages_from), int)
    _require((started_at, engine_seconds, own_seconds), float, int)
    _require((stop_reason,), NoneType, str, int)
    _require((trainable,), bool)
    _require((marks,), dict)
    _require((*marks, *marks.values()), str)
    return Call(
        call_id=call_id,
        session_id=session_id,
        node=_node(node),
        dialect=dialect,
        api=api,
        status=status,
        role=role,
        agent=agent,
        finish_reason=finish_reason,
        stop_reason=stop_reason,
        sampling=_sampling(sampling),
        root_key=root_key,
        fingerprint=fingerprint,
        reply_fingerprint=reply_fingerprint,
        message_count=message_count,
        messages_from=messages_from,
        messages=_swell(messages),
        reply=_swell(reply),
        preamble=_swell(preamble),
        digest=digest,
        projection=projection,
        replica=replica,
        started_at=started_at,
        engine_seconds=engine_seconds,
        own_seconds=own_seconds,
        trainable=trainable,
        quarantine_reason=quarantine_reason,
        marks=marks,
        role_source=_source_before_3(role),
    )


_DECODERS = {1: _decode_v1, 2: _decode_v2, 3: _decode_v3}


def _source_before_3(role: str) -> str:
    """A role other than main left its call out of training, or named an agent: those of earlier builds are taken at their word."""
    return INFERRED if role == "main" else DECLARED


def _require(values: Iterable[Any], *types: type) -> None:
    """Raise TypeError for a value of another type: a call must not come back that breaks whoever sorts or adds it up."""
    for value in values:
        if type(value) not in types:
            raise TypeError(f"{value!r} is not {' or '.join(kind.__name__ for kind in types)}")


def _node_fields(node: Node) -> tuple[Any, ...]:
    return (
        node.parent_id,
        node.branch_reason,
        node.base_id,
        node.base_length,
        node.delta_ids.astype("<i4", copy=False).tobytes(),
        node.completion_ids.astype("<i4", copy=False).tobytes(),
        node.logprobs.astype("<f4", copy=False).tobytes(),
        tuple((span.version, span.start, span.end) for span in node.spans),
    )


def _node(fields: list[Any]) -> Node:
    parent_id, branch_reason, base_id, base_length, delta_ids, completion_ids, logprobs, spans = fields
    _require((parent_id, branch_reason, base_id), NoneType, str)
    _require((base_length, *(number for span in spans for number in span)), int)
    return Node(
        parent_id=parent_id,
        branch_reason=branch_reason,
        base_id=base_id,
        base_length=base_length,
        delta_ids=_ids(delta_ids),
        completion_ids=_ids(completion_ids),
        logprobs=_logprobs(logprobs),
        spans=tuple(Span(*span) for span in spans),
    )


def _ids(data: bytes) -> Ids:
    return np.frombuffer(data, dtype="<i4")


def _logprobs(data: bytes) -> Logprobs:
    return np.frombuffer(data, dtype="<f4")


def _sampling_fields(sampling: Sampling) -> tuple[Any, ...]:
    return (
        sampling.temperature,
        sampling.top_p,
        sampling.top_k,
        sampling.seed,
        sampling.max_tokens,
        sampling.stop,
        sampling.logprob_mode,
        dict(sampling.extra),
    )


def _sampling(fields: list[Any]) -> Sampling:
    temperature, top_p, top_k, seed, max_tokens, stop, logprob_mode, extra = fields
    return Sampling(temperature, top_p, top_k, seed, max_tokens, tuple(stop), logprob_mode, extra)


def _crc(packed: bytes) -> bytes:
    return zlib.crc32(packed).to_bytes(_CRC_BYTES, "little")


def _squeeze(text: bytes) -> bytes:
    """A marker byte and the text, deflated where that is shorter."""
    if len(text) >= _COMPRESS_FROM_BYTES:
        deflated = zlib.compress(text, 1)
        if len(deflated) < len(text):
            return b"z" + deflated
    return b"r" + text


def _swell(data: bytes) -> bytes:
    marker, body = data[:1], data[1:]
    if marker == b"z":
        return zlib.decompress(body)
    if marker == b"r":
        return body
    raise DecodeError(f"unknown text encoding {marker!r}")


# A call's details as the fields of a record: each array as its shape and its little-endian bytes, None for one that there is not.


_TOP_IDS, _LOGPROBS, _EXPERTS = ("<i4",), ("<f4",), ("<u1", "<u2")
"""The types that an array may have: the number of its bytes tells which."""


def encode_details(details: CallDetails) -> tuple[Any, ...]:
    return (
        _packed(details.top_token_ids),
        _packed(details.top_logprobs),
        _packed(details.prompt_logprobs),
        _packed(details.routed_experts),
        details.routed_from,
    )


def decode_details(fields: Any) -> CallDetails:
    """The details that `details_fields` wrote. Raises TypeError or ValueError for anything else."""
    top_token_ids, top_logprobs, prompt_logprobs, routed_experts, routed_from = fields
    if type(routed_from) is not int or routed_from < 0:
        raise TypeError(f"{routed_from!r} is no position")
    return CallDetails(
        _array(top_token_ids, 2, _TOP_IDS),
        _array(top_logprobs, 2, _LOGPROBS),
        _array(prompt_logprobs, 1, _LOGPROBS),
        _array(routed_experts, 3, _EXPERTS),
        routed_from,
    )


def _packed(array: NDArray[Any] | None) -> tuple[tuple[int, ...], bytes] | None:
    if array is None:
        return None
    return array.shape, array.astype(array.dtype.newbyteorder("<"), copy=False).tobytes()


def _array(packed: Any, dimensions: int, types: tuple[str, ...]) -> NDArray[Any] | None:
    if packed is None:
        return None
    shape, data = packed
    if type(data) is not bytes or len(shape) != dimensions or any(type(size) is not int or size < 0 for size in shape):
        raise TypeError(f"{packed!r} is no array of {dimensions} dimensions")
    for dtype in types:
        if len(data) == math.prod(shape) * np.dtype(dtype).itemsize:
            return np.frombuffer(data, dtype=dtype).reshape(shape)
    raise ValueError(f"{len(data)} bytes are no array of the shape {shape}")
