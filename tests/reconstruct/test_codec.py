"""The codec: a record comes back as it went in, old records stay readable, and damage is always a DecodeError."""

from __future__ import annotations

import zlib
from dataclasses import fields, is_dataclass, replace
from pathlib import Path
from types import NoneType
from typing import Any

import msgpack
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from reconstruct.codec import SCHEMA_VERSION, decode, encode
from reconstruct.details import CallDetails
from reconstruct.errors import DecodeError, IdOutOfRange
from reconstruct.media import Media
from reconstruct.records import Call, Node, Sampling, pack_ids, pack_logprobs
from reconstruct.spans import ModeSpan, Span
from tests.support.sessions.calls import call

GOLDEN = Path(__file__).with_name("golden")

GOLDEN_DETAILS = CallDetails(
    top_token_ids=np.array([[7, 3], [151643, -1], [2, 9]], dtype=np.int32),
    top_logprobs=np.array([[-0.5, -1.5], [-1.25, np.nan], [0.0, -9999.0]], dtype=np.float32),
    prompt_logprobs=np.array([np.nan, -2.5], dtype=np.float32),
    routed_experts=np.array([[[0, 255]], [[3, 4]], [[1, 2]], [[9, 8]], [[7, 6]]], dtype=np.uint8),
    routed_from=2,
)

GOLDEN_CALL = Call(
    call_id="c2",
    session_id="s-golden",
    node=Node(
        parent_id="c1",
        branch_reason="edited",
        base_id="c1",
        base_length=3,
        delta_ids=pack_ids([5, 6]),
        completion_ids=pack_ids([7, 151643, 2]),
        logprobs=pack_logprobs([-0.5, -1.25, 0.0]),
        spans=(Span(4, 0, 2), Span(5, 2, 3)),
        modes=(ModeSpan("raw", 0, 1), ModeSpan("masked", 1, 3)),
        details=GOLDEN_DETAILS,
        media=(Media(bytes(range(32)).hex(), "image", 0, 2),),
    ),
    dialect="messages",
    api="chat",
    status="finished",
    role="subagent",
    agent="explore",
    finish_reason="stop",
    stop_reason="</done>",
    sampling=Sampling(
        temperature=0.7,
        top_p=0.9,
        top_k=20,
        seed=11,
        max_tokens=256,
        stop=("</done>", "\n\n"),
        extra={"min_p": 0.05, "logit_bias": {"5": 1.5}},
    ),
    root_key=bytes(range(16)),
    fingerprint=bytes(range(16, 32)),
    reply_fingerprint=bytes(range(32, 48)),
    message_count=5,
    messages_from=3,
    messages=('[{"role":"tool","content":"' + "über " * 40 + '"}]').encode(),
    reply=b'{"role":"assistant","content":"fish"}',
    preamble=b"",
    digest=bytes(range(48, 64)),
    projection="arguments,trimmed",
    replica="http://127.0.0.1:8000",
    started_at=1760000000.5,
    engine_seconds=0.75,
    own_seconds=0.001953125,
    trainable=False,
    quarantine_reason="superseded",
    marks={"retry": "2"},
    role_source="rule",
    engine_tool_call_ids=("functions.lookup:0", "0a1b2c3d4"),
)


def plain(value: Any) -> Any:
    """`value` with dataclasses as dicts and arrays as bytes with their dtype, so that NaN equals NaN."""
    if is_dataclass(value):
        return {field.name: plain(getattr(value, field.name)) for field in fields(value)}
    if isinstance(value, np.ndarray):
        return (value.dtype.str, value.shape, value.tobytes())
    if isinstance(value, tuple):
        return tuple(plain(item) for item in value)
    return value


def sealed(packed: bytes) -> bytes:
    """`packed` with the checksum that a record ends in."""
    return packed + zlib.crc32(packed).to_bytes(4, "little")


def test_a_record_is_read_from_its_bytes() -> None:
    golden = bytes.fromhex((GOLDEN / "call-v6.hex").read_text())
    assert plain(decode(golden)) == plain(GOLDEN_CALL)


def test_a_record_is_written_to_the_byte() -> None:
    """Texts of under 128 bytes are stored as they are; the deflated one depends on the zlib at hand and is left out."""
    golden = bytes.fromhex((GOLDEN / "small-call-v6.hex").read_text())
    assert encode(replace(GOLDEN_CALL, messages=b"[]")) == golden


texts = st.text(max_size=20)
any_text = st.text(st.characters(exclude_categories=()), max_size=20)
"""Lone surrogates included."""
blobs = st.binary(max_size=40) | st.builds(lambda size: b"[" + b'"again",' * size, st.integers(0, 40))
counts = st.integers(0, 2**31 - 1)
numbers = st.floats(allow_nan=False)
ids = st.lists(st.integers(-(2**31), 2**31 - 1), max_size=8).map(pack_ids)
logprobs = st.lists(st.floats(width=32) | st.none(), max_size=8).map(pack_logprobs)
names = st.none() | any_text


@given(st.lists(st.integers(-(2**31), 2**31 - 1), max_size=8), st.lists(st.floats(-1e30, 1e30) | st.none(), max_size=8))
def test_lists_are_packed_to_the_bytes_that_numpy_makes_of_them(ids: list[int], logprobs: list[float | None]) -> None:
    assert pack_ids(ids).tobytes() == np.array(ids, dtype=np.int32).tobytes()
    assert pack_logprobs(logprobs).tobytes() == np.array(logprobs, dtype=np.float32).tobytes()
    assert not pack_ids(ids).flags.writeable and not pack_logprobs(logprobs).flags.writeable


@pytest.mark.parametrize("bad", [2**31, -(2**31) - 1, 1.5, 1.0, "1", None, [1]])
def test_what_is_no_integer_of_32_bits_is_packed_as_no_id(bad: Any) -> None:
    """numpy makes 1 of 1.5 and of "1"."""
    with pytest.raises(IdOutOfRange, match="32 bits"):
        pack_ids([1, bad])


@st.composite
def arrays(draw: st.DrawFn, dtype: str, dimensions: int) -> Any:
    """None, or a read-only array of small sizes, zero among them."""
    shape = draw(st.lists(st.integers(0, 3), min_size=dimensions, max_size=dimensions))
    item = np.dtype(dtype).itemsize
    data = draw(st.binary(min_size=int(np.prod(shape)) * item, max_size=int(np.prod(shape)) * item))
    return draw(st.sampled_from([None, np.frombuffer(data, dtype=dtype).reshape(shape)]))


all_details = st.builds(
    CallDetails,
    top_token_ids=arrays("<i4", 2),
    top_logprobs=arrays("<f4", 2),
    prompt_logprobs=arrays("<f4", 1),
    routed_experts=arrays("|u1", 3) | arrays("<u2", 3).filter(lambda array: array is None or array.size > 0),
    routed_from=counts,
)
json_values = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | numbers | any_text,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(any_text | st.integers(0, 9), inner, max_size=3),
    max_leaves=5,
)
nodes = st.builds(
    Node,
    parent_id=names,
    branch_reason=names,
    base_id=names,
    base_length=counts,
    delta_ids=ids,
    completion_ids=ids,
    logprobs=logprobs,
    spans=st.lists(st.builds(Span, counts, counts, counts), max_size=3).map(tuple),
    modes=st.lists(st.builds(ModeSpan, any_text, counts, counts), max_size=3).map(tuple),
    details=st.none() | all_details,
    media=st.lists(st.builds(Media, st.binary(max_size=40).map(bytes.hex), any_text, counts, counts), max_size=3).map(tuple),
)
samplings = st.builds(
    Sampling,
    temperature=st.none() | numbers,
    top_p=st.none() | numbers,
    top_k=st.none() | st.integers(-1, 2**31),
    seed=st.none() | st.integers(-(2**63), 2**63 - 1),
    max_tokens=st.none() | counts,
    stop=st.lists(any_text, max_size=3).map(tuple),
    extra=st.dictionaries(any_text, json_values, max_size=3),
)
records = st.builds(
    Call,
    **dict.fromkeys(("call_id", "session_id", "dialect", "api", "status", "role", "agent", "finish_reason"), any_text),
    **dict.fromkeys(("projection", "replica", "quarantine_reason", "role_source"), any_text),
    **dict.fromkeys(("root_key", "fingerprint", "reply_fingerprint", "messages", "reply", "preamble", "digest"), blobs),
    **dict.fromkeys(("message_count", "messages_from"), counts),
    **dict.fromkeys(("started_at", "engine_seconds", "own_seconds"), numbers),
    node=nodes,
    stop_reason=st.none() | any_text | counts,
    sampling=samplings,
    trainable=st.booleans(),
)


@given(records)
def test_every_field_comes_back_as_it_went_in(record: Call) -> None:
    assert plain(decode(encode(record))) == plain(record)


def test_a_missing_logprob_comes_back_as_missing_and_an_empty_reply_as_empty() -> None:
    """
    c1  1 | 7 8 9   logprobs -0.5, none, -inf
    c2  1 |         nothing said
    """
    back = decode(encode(call("c1", delta=[1], said=[7, 8, 9], logprobs=[-0.5, None, float("-inf")])))
    assert np.isnan(back.node.logprobs).tolist() == [False, True, False]
    assert back.node.logprobs[2] == -np.inf
    silent = decode(encode(call("c2", delta=[1])))
    assert (silent.node.completion_ids.tolist(), silent.node.logprobs.tolist(), silent.node.spans) == ([], [], ())


def test_decoded_arrays_cannot_be_written_to() -> None:
    back = decode(encode(call("c1", delta=[1], said=[2])))
    for array in (back.node.delta_ids, back.node.completion_ids, back.node.logprobs):
        with pytest.raises(ValueError, match="read-only"):
            array[0] = 9


def test_long_texts_are_deflated_and_short_ones_are_not() -> None:
    short, long = b'["hello"]', b'["' + b"hello " * 500 + b'"]'
    small, large = (encode(call("c1", fields={"messages": text})) for text in (short, long))
    assert short in small
    assert len(large) < len(small) + 200
    assert decode(large).messages == long


def test_a_text_that_does_not_deflate_is_kept_as_it_is() -> None:
    noise = np.random.default_rng(0).bytes(400)
    assert noise in encode(call("c1", fields={"reply": noise}))


def test_every_truncation_is_a_decode_error() -> None:
    data = encode(GOLDEN_CALL)
    for length in range(len(data)):
        with pytest.raises(DecodeError):
            decode(data[:length])


def test_every_flipped_bit_is_a_decode_error() -> None:
    """An id with a flipped bit is a valid id: without a checksum it would be trained."""
    data = encode(GOLDEN_CALL)
    for position in range(len(data)):
        for bit in range(8):
            changed = bytearray(data)
            changed[position] ^= 1 << bit
            with pytest.raises(DecodeError):
                decode(bytes(changed))


@given(st.binary(max_size=200))
def test_garbage_is_a_decode_error(garbage: bytes) -> None:
    with pytest.raises(DecodeError):
        decode(garbage)


@given(st.binary(max_size=200))
def test_garbage_with_a_true_checksum_is_a_decode_error(garbage: bytes) -> None:
    with pytest.raises(DecodeError):
        decode(sealed(garbage))


@settings(max_examples=300)
@given(st.data())
def test_a_record_with_a_field_of_another_type_is_a_decode_error(data: st.DataObject) -> None:
    """Another program wrote it, with a true checksum: it must not come back as a call that breaks whoever sorts or reads it."""
    items = msgpack.unpackb(encode(GOLDEN_CALL)[:-4])
    position = data.draw(st.integers(1, len(items) - 1))
    wrong: Any = data.draw(st.sampled_from([None, True, 3, 1.5, "text", b"bytes", [], [1], {}, {"a": 1}, [[]], [None] * 8]))
    right = {type(items[position])} | ({int} if isinstance(items[position], float) else set())
    allowed: dict[int, Any] = {10: str | int | None, 29: NoneType}  # why it stopped, and details
    if type(wrong) in right or (position in allowed and isinstance(wrong, allowed[position])):
        return
    items[position] = wrong
    with pytest.raises(DecodeError):
        decode(sealed(msgpack.packb(items)))


@pytest.mark.parametrize(
    ("position", "wrong"),
    [
        (0, 5),
        (1, b"x"),
        (2, []),
        (3, None),
        (3, "4"),
        (3, 1.5),
        (4, b"123"),
        (5, "ids"),
        (6, None),
        (7, [[1, 2]]),
        (7, [[1, 0, "9"]]),
    ],
)
def test_a_node_with_a_field_of_another_type_is_a_decode_error(position: int, wrong: Any) -> None:
    items = msgpack.unpackb(encode(GOLDEN_CALL)[:-4])
    items[3][position] = wrong
    with pytest.raises(DecodeError, match="version-6 record"):
        decode(sealed(msgpack.packb(items)))


@pytest.mark.parametrize("missing_or_added", [-1, 1])
def test_a_record_with_a_field_too_few_or_too_many_is_a_decode_error(missing_or_added: int) -> None:
    items = msgpack.unpackb(encode(GOLDEN_CALL)[:-4])
    changed = items[:-1] if missing_or_added < 0 else [*items, 0]
    with pytest.raises(DecodeError, match="version-6 record"):
        decode(sealed(msgpack.packb(changed)))


@settings(max_examples=300)
@given(st.data())
def test_details_with_a_field_of_another_type_are_a_decode_error(data: st.DataObject) -> None:
    items = msgpack.unpackb(encode(GOLDEN_CALL)[:-4])
    details = items[-5]
    wrong = data.draw(
        st.sampled_from([True, 1.5, "text", b"bytes", [], [1], {}, [[2], b"1234567"], [[-1, -1], b""], [[1.0], b"1"]])
    )
    position = data.draw(st.integers(0, len(details)))
    if position == len(details):
        items[-5] = wrong
    else:
        details[position] = wrong
    with pytest.raises(DecodeError, match="version-6 record"):
        decode(sealed(msgpack.packb(items)))


@pytest.mark.parametrize("version", [0, 5, 7, 99, "1", None, 1.0, True])
def test_an_unknown_schema_version_is_a_decode_error_that_names_it(version: Any) -> None:
    items = msgpack.unpackb(encode(GOLDEN_CALL)[:-4])
    with pytest.raises(
        DecodeError, match=rf"schema version {version!r} is unknown to this build, which reads {SCHEMA_VERSION}"
    ):
        decode(sealed(msgpack.packb([version, *items[1:]])))


@pytest.mark.parametrize("value", [5, "text", {}, [], None])
def test_msgpack_that_is_no_record_is_a_decode_error(value: Any) -> None:
    with pytest.raises(DecodeError):
        decode(sealed(msgpack.packb(value)))
