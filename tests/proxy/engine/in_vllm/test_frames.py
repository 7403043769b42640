"""The wire between the service and the plugin inside vLLM."""

from __future__ import annotations

from itertools import pairwise

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from proxy.engine.in_vllm.frames import (
    Ancestor,
    Ask,
    DoneFrame,
    EndFrame,
    FailedFrame,
    Frame,
    FrameDecoder,
    PieceFrame,
    PlanFrame,
    Tops,
    read_after,
    read_ask,
    read_ids,
    to_bytes,
    write_after,
    write_ask,
    write_frame,
)
from reconstruct.records import pack_ids

FRAMES: list[Frame] = [
    PlanFrame(3, to_bytes(pack_ids([4, 5])), 2, b"", "edited", None, True, 7, 0, {"temperature": 1.0}),
    PieceFrame(
        0, to_bytes(pack_ids([1])), np.array([-0.5], "<f4").tobytes(), {"content": "é"}, Tops(1, b"\1\0\0\0", b"\0\0\0\0")
    ),
    PieceFrame(1, b"", b""),
    EndFrame(0, "stop", 1015, {"content": "é", "tool_calls": []}, None, [("41", 0, 1)], b"npy", None),
    DoneFrame(128, None),
    FailedFrame("it broke"),
]


@given(st.lists(st.integers(0, 400), max_size=12))
def test_frames_survive_however_the_bytes_are_split(cuts: list[int]) -> None:
    data = b"".join(write_frame(frame) for frame in FRAMES)
    edges = [0, *sorted(min(cut, len(data)) for cut in cuts), len(data)]
    decoder, read = FrameDecoder(), []
    for start, end in pairwise(edges):
        read += decoder.feed(data[start:end])
    assert read == FRAMES


def test_an_unknown_frame_is_an_error() -> None:
    data = msgspec.msgpack.encode(["gossip", 1])
    with pytest.raises(msgspec.MsgspecError):
        FrameDecoder().feed(len(data).to_bytes(4, "big") + data)


def test_a_request_survives() -> None:
    parent = Ancestor(2, True, b"\1\0\0\0", 1, {1: b"{}"}, b"", (1, b""), True, True)
    ask = Ask("r", b"{}", {"temperature": 0.0}, True, None, parent, 9, 0, 4, True)
    assert read_ask(write_ask(ask)) == ask


@given(st.lists(st.integers(0, 3)), st.lists(st.integers(0, 3)))
def test_ids_are_sent_as_what_they_add_to_others(base: list[int], ids: list[int]) -> None:
    assert read_after(pack_ids(base), *write_after(pack_ids(base), pack_ids(ids))).tolist() == ids


def test_ids_that_would_share_more_than_there_is_are_refused() -> None:
    with pytest.raises(ValueError, match="cannot be shared"):
        read_after(pack_ids([1]), 2, b"")
    assert read_ids(b"").tolist() == []
