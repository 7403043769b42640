"""Records as bytes: one `encode`, one `decode`, one `DecodeError`.

A record is a msgpack array that starts with the schema version, followed by its CRC-32: otherwise a flipped bit in an id or a logprob
would be trained unnoticed. Ids are little-endian int32, logprobs little-endian float32, message texts JSON, zlib-compressed if that
is shorter. A new field needs a new version; the golden bytes in tests/reconstruct/golden test this.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Iterable
from types import NoneType
from typing import Any

import msgpack
import numpy as np
from numpy.typing import NDArray

from reconstruct.details import CallDetails
from reconstruct.errors import DecodeError
from reconstruct.media import Media
from reconstruct.records import Call, Ids, Logprobs, Node, Sampling
from reconstruct.spans import ModeSpan, Span

SCHEMA_VERSION = 6
"""The version that this build writes and reads."""

_COMPRESS_FROM_BYTES = 128
"""Shorter texts gain nothing from zlib."""

_CRC_BYTES = 4

_SURROGATES = "surrogatepass"
"""Texts of harnesses may contain lone surrogates, which strict UTF-8 rejects."""


def encode(call: Call) -> bytes:
    """The call as a record."""
    node = call.node
    packed: bytes = msgpack.packb(
        (
            SCHEMA_VERSION,
            call.call_id,
            call.session_id,
            _node_fields(node),
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
            _compress(call.messages),
            _compress(call.reply),
            _compress(call.preamble),
            call.digest,
            call.projection,
            call.replica,
            call.started_at,
            call.engine_seconds,
            call.own_seconds,
            call.trainable,
            call.quarantine_reason,
            dict(call.marks),
            None if node.details is None else encode_details(node.details),
            call.role_source,
            [(bytes.fromhex(each.digest), each.kind, each.start, each.length) for each in node.media],
            call.engine_tool_call_ids,
            [(span.mode, span.start, span.end) for span in node.modes],
        ),
        unicode_errors=_SURROGATES,
    )
    return packed + _crc(packed)


def decode(data: bytes) -> Call:
    """The call of a record.

    Raises DecodeError for anything else: truncated or changed bytes, another format, another schema version.
    """
    packed = data[:-_CRC_BYTES]
    if _crc(packed) != data[-_CRC_BYTES:]:
        raise DecodeError(f"a record of {len(data)} bytes is damaged: its checksum does not match")
    try:
        fields = msgpack.unpackb(packed, use_list=True, strict_map_key=False, unicode_errors=_SURROGATES)
    except (ValueError, TypeError, msgpack.UnpackException) as error:
        raise DecodeError(f"a record of {len(data)} bytes is not msgpack: {error}") from error
    if not isinstance(fields, list) or not fields:
        raise DecodeError(f"a record is a msgpack array, not {type(fields).__name__}")
    version = fields[0]
    if type(version) is not int or version != SCHEMA_VERSION:
        raise DecodeError(f"schema version {version!r} is unknown to this build, which reads {SCHEMA_VERSION}")
    try:
        return _decode_fields(fields)
    except DecodeError:
        raise
    except (ValueError, TypeError, IndexError, KeyError, zlib.error) as error:
        raise DecodeError(f"a version-{version} record is damaged: {error}") from error


def _decode_fields(fields: list[Any]) -> Call:
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
        details,
        role_source,
        media,
        engine_tool_call_ids,
        modes,
    ) = fields
    *parameters, extra = sampling
    texts = (call_id, session_id, dialect, api, status, role, agent, finish_reason, projection, replica, quarantine_reason)
    _require((engine_tool_call_ids,), list)
    _require((*texts, role_source, *engine_tool_call_ids), str)
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
        node=_node(node, details, media, modes),
        dialect=dialect,
        api=api,
        status=status,
        role=role,
        agent=agent,
        finish_reason=finish_reason,
        stop_reason=stop_reason,
        sampling=_sampling(parameters, extra),
        root_key=root_key,
        fingerprint=fingerprint,
        reply_fingerprint=reply_fingerprint,
        message_count=message_count,
        messages_from=messages_from,
        messages=_decompress(messages),
        reply=_decompress(reply),
        preamble=_decompress(preamble),
        digest=digest,
        projection=projection,
        replica=replica,
        started_at=started_at,
        engine_seconds=engine_seconds,
        own_seconds=own_seconds,
        trainable=trainable,
        quarantine_reason=quarantine_reason,
        marks=marks,
        role_source=role_source,
        engine_tool_call_ids=tuple(engine_tool_call_ids),
    )


def _require(values: Iterable[Any], *types: type) -> None:
    """Raise TypeError for a value of another type, which would break later sorting or arithmetic."""
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
        [(span.version, span.start, span.end) for span in node.spans],
    )


def _node(fields: list[Any], details: Any, media: list[Any], modes: list[Any]) -> Node:
    parent_id, branch_reason, base_id, base_length, delta_ids, completion_ids, logprobs, spans = fields
    _require((parent_id, branch_reason, base_id), NoneType, str)
    _require((base_length, *(number for span in spans for number in span)), int)
    _require((media, modes), list)
    return Node(
        parent_id=parent_id,
        branch_reason=branch_reason,
        base_id=base_id,
        base_length=base_length,
        delta_ids=_ids(delta_ids),
        completion_ids=_ids(completion_ids),
        logprobs=_logprobs(logprobs),
        spans=tuple(Span(*span) for span in spans),
        modes=tuple(_mode(*each) for each in modes),
        details=None if details is None else decode_details(details),
        media=tuple(_media(*each) for each in media),
    )


def _mode(mode: str, start: int, end: int) -> ModeSpan:
    _require((mode,), str)
    _require((start, end), int)
    return ModeSpan(mode, start, end)


def _media(digest: bytes, kind: str, start: int, length: int) -> Media:
    _require((digest,), bytes)
    _require((kind,), str)
    _require((start, length), int)
    return Media(digest.hex(), kind, start, length)


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
        dict(sampling.extra),
    )


def _sampling(parameters: list[Any], extra: dict[Any, Any]) -> Sampling:
    temperature, top_p, top_k, seed, max_tokens, stop = parameters
    return Sampling(temperature, top_p, top_k, seed, max_tokens, tuple(stop), extra)


def _crc(packed: bytes) -> bytes:
    return zlib.crc32(packed).to_bytes(_CRC_BYTES, "little")


def _compress(text: bytes) -> bytes:
    """A marker byte and the text, deflated if that is shorter."""
    if len(text) >= _COMPRESS_FROM_BYTES:
        deflated = zlib.compress(text, 1)
        if len(deflated) < len(text):
            return b"z" + deflated
    return b"r" + text


def _decompress(data: bytes) -> bytes:
    marker, body = data[:1], data[1:]
    if marker == b"z":
        return zlib.decompress(body)
    if marker == b"r":
        return body
    raise DecodeError(f"unknown text encoding {marker!r}")


# Details: each array as its shape and its little-endian bytes, or None


_TOP_IDS, _LOGPROBS, _EXPERTS = ("<i4",), ("<f4",), ("<u1", "<u2")
"""The possible dtypes of an array, distinguished by its number of bytes."""


def encode_details(details: CallDetails) -> tuple[Any, ...]:
    return (
        _pack(details.top_token_ids),
        _pack(details.top_logprobs),
        _pack(details.prompt_logprobs),
        _pack(details.routed_experts),
        details.routed_from,
    )


def decode_details(fields: Any) -> CallDetails:
    """Raises TypeError or ValueError for fields that `encode_details` did not write."""
    top_token_ids, top_logprobs, prompt_logprobs, routed_experts, routed_from = fields
    if type(routed_from) is not int or routed_from < 0:
        raise TypeError(f"{routed_from!r} is not a position")
    return CallDetails(
        _array(top_token_ids, 2, _TOP_IDS),
        _array(top_logprobs, 2, _LOGPROBS),
        _array(prompt_logprobs, 1, _LOGPROBS),
        _array(routed_experts, 3, _EXPERTS),
        routed_from,
    )


def _pack(array: NDArray[Any] | None) -> tuple[tuple[int, ...], bytes] | None:
    if array is None:
        return None
    return array.shape, array.astype(array.dtype.newbyteorder("<"), copy=False).tobytes()


def _array(packed: Any, dimensions: int, types: tuple[str, ...]) -> NDArray[Any] | None:
    if packed is None:
        return None
    shape, data = packed
    if type(data) is not bytes or len(shape) != dimensions or any(type(size) is not int or size < 0 for size in shape):
        raise TypeError(f"{packed!r} is not an array of {dimensions} dimensions")
    for dtype in types:
        if len(data) == math.prod(shape) * np.dtype(dtype).itemsize:
            return np.frombuffer(data, dtype=dtype).reshape(shape)
    raise ValueError(f"{len(data)} bytes are not an array of shape {shape}")
