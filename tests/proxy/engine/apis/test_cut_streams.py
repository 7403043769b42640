"""However the network cuts an engine's stream into reads, the harness gets the same events and the record is the same."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any, cast

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.replies import Size, chat_events, generate_events, parser_answer, plugin_steps
from proxy.dialects.base import Delta, FirstToken, Request
from proxy.engine.apis.base import EngineKind, SamplingJob
from proxy.engine.apis.chat import OpenAiChat
from proxy.engine.apis.renderer import LocalRenderer
from proxy.engine.apis.reply import EngineReply
from proxy.engine.apis.vllm import VllmTokens
from proxy.engine.in_vllm.frames import FailedFrame, write_frame
from proxy.engine.replica import Replica
from proxy.engine.wire.channels import Channel, Channels, EngineResponse, WholeResponse
from proxy.engine.wire.http import EngineHttp
from proxy.errors import VerbatimError
from proxy.timeline import CancelScope
from reconstruct.records import pack_ids

SIZE = Size("streamed", 3, 12)
CALL_ID = "0123456789abcdef01234567"
NO_FRAME = b"\0\0\0\2\x91\xc0"
STREAMS = {
    "chat": chat_events(SIZE),
    "completions": chat_events(SIZE, legacy=True),
    "token": generate_events(SIZE),
    "plugin": plugin_steps(SIZE),
}
ENDS = {
    "whole": b"",
    "reset": b"",
    "garbage": b'data: {"choices": 1}\n\n',
    "error": b'data: {"error": {"message": "it broke", "code": 500}}\n\n',
}
BAD_FRAMES = {"garbage": NO_FRAME, "error": write_frame(FailedFrame("it broke"))}
cuts = st.lists(st.integers(0, 20_000), max_size=12)


class Reads:
    """Stands in for the connections: a stream comes in these reads, chunk by chunk, and a parser's answer is made of words."""

    def __init__(self, reads: Sequence[bytes], *, whole: bool) -> None:
        self._reads = reads
        self._whole = whole
        self._saying: asyncio.Task[None] | None = None

    async def post(self, url: str, body: bytes, headers: Mapping[str, str] = {}) -> EngineResponse:
        channel = Channel(lambda channel: None, 0.0)
        channel.connection_made(cast(asyncio.Transport, Silent()))
        answer = EngineResponse(channel)
        channel.ask(body, answer)
        self._saying = asyncio.create_task(self._say(channel))
        await answer.wait_for_status()
        return answer

    async def _say(self, channel: Channel) -> None:
        channel.data_received(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n")
        for read in self._reads:
            channel.data_received(b"%x\r\n%b\r\n" % (len(read), read))
            await asyncio.sleep(0)
        if self._whole:
            channel.data_received(b"0\r\n\r\n")
        else:
            channel.connection_lost(ConnectionResetError("reset"))

    async def ask(self, url: str, body: bytes | None, headers: Mapping[str, str] = {}, seconds: float = 0) -> WholeResponse:
        return parser_answer(body or b"")


class Silent:
    """A transport on which a request goes nowhere."""

    def write(self, data: bytes) -> None: ...

    def get_write_buffer_size(self) -> int:
        return 0

    def pause_reading(self) -> None: ...

    def resume_reading(self) -> None: ...

    def abort(self) -> None: ...


Outcome = tuple[list[Any] | str, list[Delta]]
"""What is recorded of the reply, or the error in its place; and the deltas."""


def sample(way: str, reads: Sequence[bytes], *, whole: bool = True) -> Outcome:
    async def run() -> Outcome:
        channels = cast(Channels, Reads(reads, whole=whole))
        http = EngineHttp(channels, lambda replica, reason, refused: None)
        kinds: dict[str, type[EngineKind]] = {"chat": OpenAiChat, "completions": OpenAiChat}
        kind = kinds.get(way, VllmTokens)(http, LocalRenderer(None, {}))
        replica = Replica("one", "http://one", version="0.33", plugin=way == "plugin")
        prompt = "Say it." if way == "completions" else None
        request = Request("chat", "policy", [], stream=True, prompt=prompt)
        ids = pack_ids([]) if way in ("chat", "completions", "plugin") else pack_ids([1, 2, 3])
        job = SamplingJob(CALL_ID, request, {}, CancelScope("s", CALL_ID), prompt_ids=ids)
        pieces: list[Any] = []
        try:
            reply: EngineReply | str = await kind.sample(replica, job, stream=True, emit=pieces.append)
        except VerbatimError as error:
            reply = f"{type(error).__name__}: {error.message}"
        begun, *rest = pieces or [FirstToken()]
        assert isinstance(begun, FirstToken)
        return recorded(reply), [delta for piece in rest for delta in cast(Sequence[Delta], piece)]

    return asyncio.run(run())


def recorded(reply: EngineReply | str) -> list[Any] | str:
    if isinstance(reply, str):
        return reply
    (choice,) = reply.choices
    ids = None if reply.prompt_ids is None else reply.prompt_ids.tolist()
    return [
        choice.token_ids,
        choice.logprobs,
        choice.message,
        choice.finish_reason,
        choice.spans,
        choice.text,
        ids,
        reply.broken,
    ]


def cut(data: bytes, at: Sequence[int]) -> list[bytes]:
    edges = [0, *sorted({place % len(data) for place in at} - {0}), len(data)]
    return [data[start:end] for start, end in pairwise(edges)]


@pytest.mark.parametrize("way", STREAMS)
@settings(max_examples=25)
@given(end=st.sampled_from(list(ENDS)), at=cuts, lost=st.integers(1, 12))
def test_a_stream_is_the_same_however_it_is_cut(way: str, end: str, at: list[int], lost: int) -> None:
    """Also where it ends in the middle, in an error, or in what is no event, whether or not it comes in one read with what is good."""
    events = STREAMS[way] if end == "whole" else STREAMS[way][: -min(lost, len(STREAMS[way]) - 2)]
    if last := (BAD_FRAMES if way == "plugin" else ENDS).get(end):
        events = [*events, last]
    one_by_one = sample(way, events, whole=end == "whole")
    as_cut = sample(way, cut(b"".join(events), at), whole=end == "whole")
    assert as_cut[0] == one_by_one[0]
    if way == "token":
        # Its text comes of the parsers' steps, of which each takes what has arrived by then.
        texts = sorted([told(as_cut[1]), told(one_by_one[1])], key=len)
        assert texts[1].startswith(texts[0])
    else:
        assert as_cut[1] == one_by_one[1]
    if end == "whole":
        message: Any = as_cut[0][2]
        assert told(as_cut[1]) == message["content"]


def told(deltas: Sequence[Delta]) -> str:
    return "".join(delta.content for delta in deltas)
