"""The request and the answer of the plugin inside vLLM (`proxy.engine.in_vllm.plugin`), as both sides write and read them.

The request is one msgpack map, `Ask`. The answer is a sequence of frames, each four bytes of length (big-endian) and a msgpack array
whose first item names its kind: `PlanFrame`, then a `PieceFrame` for each step of the sampling, then one `EndFrame` per choice and
`DoneFrame`. `FailedFrame` may come instead of any frame after the first. A refusal is no frame but vLLM's own JSON error. Ids are
little-endian int32, logprobs little-endian float32, both as bytes.
"""

from __future__ import annotations

import struct
from typing import Any

import msgspec
import numpy as np

from reconstruct.records import Ids, Logprobs, shared_length

PROTOCOL = 3
"""Raised by every change that the other side would misread."""
ROUTE = "/inference/verbatim/v1"
"""GET: `About`. Below `/inference`, which vLLM's `--api-key` guards."""
SAMPLE = f"{ROUTE}/sample"
SCORE = f"{ROUTE}/score"
"""POST: `ScoreAsk`. The answer is `ScoreFrame`, without a length before it."""
ABORT = f"{ROUTE}/abort"
"""POST: `Abort`, as JSON."""
MEDIA_TYPE = "application/vnd.msgpack"
BUDGET = "max_total"
"""The parameter that a refusal names if the prompt leaves too little of `Ask.max_total`."""


class About(msgspec.Struct):
    """`engine` is a random name that all API servers of one vLLM have, until it starts again. `vocabulary`: a digest of every id with its
    token, "" if the tokenizer does not list them."""

    protocol: int
    vllm: str
    engine: str
    vocabulary: str = ""


class Abort(msgspec.Struct):
    """Whole ids of requests: vLLM puts `generate-tokens-` before what `Ask` names."""

    request_ids: list[str]


class Ancestor(msgspec.Struct, omit_defaults=True):
    """The parent of the call: see reconstruct.prompt.Parent. Its history is the request's first `covered` messages and its tail the
    others, but for those in `recorded` (JSON by position), which stand otherwise in the parent's lineage than the harness replays them.
    `asked` shares its first ids with `ids`."""

    covered: int
    closed: bool
    ids: bytes | None = None
    sampled: int = 0
    recorded: dict[int, bytes] = {}
    close: bytes | None = None
    asked: tuple[int, bytes] | None = None
    redressed: bool = False
    retain_thinking: bool = False
    media: list[tuple[int, int]] = []
    """The ranges of images in `ids`."""


class Ask(msgspec.Struct, omit_defaults=True):
    """One sampling request. `body` is the JSON of a chat or completions body, with the messages or the prompt and all fields that shape
    the rendering. `sampling` are SamplingParams by name, on top of what the body means. `ids`: the prompt is planned already.

    `max_total`: room in tokens for the prompt and the reply of every choice. `shown`: how many alternatives per token the harness
    wants to see, None if it wants no logprobs. `alternatives`: how many ids and logprobs per token to return beside the sampled one's."""

    request_id: str
    body: bytes
    sampling: dict[str, Any]
    stream: bool = False
    ids: bytes | None = None
    parent: Ancestor | None = None
    max_total: int | None = None
    shown: int | None = None
    alternatives: int = 0
    experts_from_parent: bool = False
    """The experts of the parent's positions are recorded: leave them out where the prompt extends the parent."""
    images: dict[str, tuple[str, bytes]] = {}
    """Media type and bytes of the images that messages name by URLs `sha256:<hex>`, by that name."""


class ScoreAsk(msgspec.Struct, omit_defaults=True):
    """A request for the logprob of each of `ids` after those before it, and of the `top_k` most probable ids there. `reads_cache`: what the
    engine has in its prefix cache need not be computed; nothing is known of it then. `images`: media type and bytes of each image, in the
    ranges `media` of the ids."""

    request_id: str
    model: str
    ids: bytes
    top_k: int = 0
    reads_cache: bool = False
    media: list[tuple[int, int]] = []
    images: list[tuple[str, bytes]] = []


class ScoreFrame(msgspec.Struct, array_like=True, tag="score"):
    """One logprob for each entry of vLLM's list, NaN where it has none of that id; `width` alternatives for each, as `Tops`. `versions` are
    those of the one token that was sampled, and thereby of all numbers."""

    cached_tokens: int
    finish_reason: str | None
    versions: list[tuple[str | int | None, int, int]] | None
    logprobs: bytes
    width: int
    top_ids: bytes
    top_logprobs: bytes


class PlanFrame(msgspec.Struct, array_like=True, tag="plan"):
    """See reconstruct.prompt.Prompt. The prompt is the first `kept` of the parent's ids and `tail`; the rendering the first
    `shared` of the prompt's ids and `rest`. `max_tokens` is what the window and the budget leave, `defaults` the sampling that the engine
    takes from the body and its own configuration."""

    kept: int
    tail: bytes
    shared: int
    rest: bytes
    branch_reason: str | None
    close: bytes | None
    continues: bool
    max_tokens: int
    experts_from: int
    defaults: dict[str, Any]
    media: list[tuple[int, int]] = []
    """The ranges of the images in the prompt."""
    adds_end: bool = False


class Tops(msgspec.Struct, array_like=True):
    """`width` alternatives per token, padded with id -1 and NaN."""

    width: int
    ids: bytes
    logprobs: bytes


class PieceFrame(msgspec.Struct, array_like=True, tag="piece"):
    """What was sampled of one choice, and the text that the engine's streaming parsers made of it: content, reasoning, tool_calls.
    `shown` are chat-shaped logprobs, for a prompt in place of messages."""

    index: int
    ids: bytes
    logprobs: bytes
    delta: dict[str, Any] | None = None
    tops: Tops | None = None
    shown: list[dict[str, Any]] | None = None


class EndFrame(msgspec.Struct, array_like=True, tag="end"):
    """The end of one choice. `message` is the parse of the whole reply, None if the engine could not parse it, for the reason
    `unparsed`. `versions` are the spans of weight labels; `experts` a `.npy` file. `text` is what the message was read from, where the
    request offers tools."""

    index: int
    finish_reason: str | None
    stop_reason: str | int | None
    message: dict[str, Any] | None
    unparsed: str | None
    versions: list[tuple[str | int | None, int, int]] | None
    experts: bytes | None
    shown: list[dict[str, Any]] | None
    text: str | None = None


class DoneFrame(msgspec.Struct, array_like=True, tag="done"):
    cached_tokens: int
    prompt_logprobs: bytes | None
    """Of each prompt id, NaN for the first."""


class FailedFrame(msgspec.Struct, array_like=True, tag="failed"):
    message: str


Frame = PlanFrame | PieceFrame | EndFrame | DoneFrame | FailedFrame

_LENGTH = struct.Struct(">I")
_HEAD_BYTES, _read_length = _LENGTH.size, _LENGTH.unpack_from
_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(Frame).decode
_decode_ask = msgspec.msgpack.Decoder(Ask).decode


def write_ask(ask: Ask | ScoreAsk) -> bytes:
    return _encode(ask)


def read_ask(data: bytes) -> Ask:
    """Raises msgspec.MsgspecError."""
    return _decode_ask(data)


def write_frame(frame: Frame) -> bytes:
    data = _encode(frame)
    return _LENGTH.pack(len(data)) + data


class FrameDecoder:
    """Frames from bytes split anywhere."""

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, data: bytes, found: list[Frame] | None = None) -> list[Frame]:
        """The frames that are complete, added to those `found` before. Raises msgspec.MsgspecError at the first that is none."""
        data = self._rest + data if self._rest else data
        frames: list[Frame] = [] if found is None else found
        start, size = _HEAD_BYTES, len(data)
        while start <= size:
            (length,) = _read_length(data, start - _HEAD_BYTES)
            if start + length > size:
                break
            frames.append(_decode(data[start : start + length]))
            start += length + _HEAD_BYTES
        self._rest = data[start - _HEAD_BYTES :]
        return frames


def to_bytes(ids: Ids) -> bytes:
    return ids.astype("<i4", copy=False).tobytes()


def read_ids(data: bytes) -> Ids:
    return np.frombuffer(data, "<i4")


def read_logprobs(data: bytes) -> Logprobs:
    return np.frombuffer(data, "<f4")


def write_after(base: Ids, ids: Ids) -> tuple[int, bytes]:
    """`ids` as the length of the beginning that `base` shares, and the rest."""
    shared = shared_length(base, ids)
    return shared, to_bytes(ids[shared:])


def read_after(base: Ids, shared: int, rest: bytes) -> Ids:
    """Raises ValueError if `base` is shorter than what is shared."""
    if not 0 <= shared <= len(base):
        raise ValueError(f"{shared} ids of {len(base)} cannot be shared")
    if not rest:
        return base[:shared]
    return np.concatenate((base[:shared], read_ids(rest))) if shared else read_ids(rest)
