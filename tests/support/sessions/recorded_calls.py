"""Records of small calls for tests of what happens after a call: ids small enough to check by eye."""

from __future__ import annotations

from reconstruct.codec import encode
from reconstruct.records import RAW, Call, Node, Sampling, pack_ids, pack_logprobs
from reconstruct.spans import ModeSpan, Span


def record(call_id: str, session_id: str, *, prompt: list[int], sampled: list[int], version: int = 0) -> bytes:
    """A root call: `prompt` in, `sampled` out, logprob -0.5 each, under one weight version."""
    node = Node(
        parent_id=None,
        branch_reason=None,
        base_id=None,
        base_length=0,
        delta_ids=pack_ids(prompt),
        completion_ids=pack_ids(sampled),
        logprobs=pack_logprobs([-0.5] * len(sampled)),
        spans=(Span(version, 0, len(sampled)),) if sampled else (),
        modes=(ModeSpan(RAW, 0, len(sampled)),) if sampled else (),
    )
    call = Call(
        call_id=call_id,
        session_id=session_id,
        node=node,
        dialect="chat",
        api="token",
        status="ok",
        role="main",
        agent="main",
        finish_reason="stop",
        stop_reason=None,
        sampling=Sampling(),
        root_key=call_id.encode(),
        fingerprint=call_id.encode(),
        reply_fingerprint=call_id.encode() + b"r",
        message_count=1,
        messages_from=0,
        messages=b'[{"role":"user","content":"hello"}]',
        reply=b'{"role":"assistant","content":"hi"}',
        preamble=b"{}",
        digest=call_id.encode(),
        projection="exact",
        replica="r",
        started_at=1.0,
        engine_seconds=0.1,
        own_seconds=0.001,
    )
    return encode(call)
