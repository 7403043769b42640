"""The sample of one token that is taken at first contact, the way a call is sampled, to see that the engine's answers can be read.

It belongs to no session: nothing of it is recorded or counted.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from proxy.dialects.base import Delta, FirstToken, HistoryMessage, PromptReady, Request, new_call_id
from proxy.engine.apis.base import EngineKind, PlanRequest, SamplingJob
from proxy.engine.apis.json_text import IdText
from proxy.engine.apis.reply import EngineReply, check_sampled
from proxy.engine.replica import Replica
from proxy.errors import EngineFailed, EngineUnavailable, RequestError, VerbatimError
from proxy.timeline import CancelScope
from reconstruct.messages import digest_message
from reconstruct.prompt import Rendering, turn_end
from reconstruct.records import Ids, pack_ids

_replace = msgspec.structs.replace

_TEXT = "Hello"
_MODELS, _MESSAGES, _STREAMS, TURN_END = "models", "messages", "streams", "turn_end_unknown"
"""Topics of notes."""

TURN_END_UNKNOWN = (
    "renders no dialogue from which the end of a turn can be read: calls whose sampled ids the chat template would write otherwise "
    "branch (turn_end_unknown), a row each"
)


class NotReadable(Exception):
    """Why a sample could not be read."""


async def read_sample(kind: EngineKind, replica: Replica, logprob_mode: str) -> None:
    """Sample a token and note on the replica what of a call's answer is missing. `logprob_mode`: vLLM's, "" if it is not known.

    A stream is asked for, then a whole answer if that cannot be read, and where messages are refused one after a prompt.

    Raises NotReadable if no call could be read, EngineUnavailable if the engine takes no call now."""
    failures: list[VerbatimError] = []
    for request in (
        _ask_with_messages(replica, stream=True),
        _ask_with_messages(replica, stream=False),
        _ask_with_prompt(replica),
    ):
        if request.prompt is not None and not isinstance(failures[0], RequestError):
            break
        try:
            outcome = await _sample(kind, replica, request, logprob_mode)
        except EngineUnavailable:
            raise
        except VerbatimError as error:
            failures.append(error)
        else:
            refuses = f"refuses messages ({failures[0].message}): it serves prompts alone" if request.prompt else ""
            replica.note(_MESSAGES, refuses)
            streams = request.stream or request.prompt is not None
            replica.note(_STREAMS, "" if streams else f"answers no stream that can be read: {failures[0].message}")
            if request.stream and not outcome.returns_ids:
                # Some return ids with whole replies alone.
                with contextlib.suppress(VerbatimError):
                    await _sample(kind, replica, _ask_with_messages(replica, stream=False), logprob_mode)
            if kind.takes_ids and request.prompt is None:
                await _check_turn_end(kind, replica, request)
            return
    if len(replica.models) != 1 and isinstance(failures[0], RequestError):
        # Calls name a model; of several the first may take no messages, and this engine may not say which it has.
        listed = f"lists {len(replica.models)}" if replica.models else "lists no"
        why = f"it {listed} models, and refuses a sample of {_model(replica)!r} ({failures[0].message})"
        replica.trainable = False
        replica.note(_MODELS, f"was not read before its first call: {why}")
        return
    raise NotReadable(failures[0].message) from failures[0]


async def sample_token(kind: EngineKind, replica: Replica) -> None:
    """Sample one token that belongs to no call. Raises as `EngineKind.sample`."""
    await _sample(kind, replica, _ask_with_messages(replica, stream=False), "")


def _ask_with_messages(replica: Replica, *, stream: bool) -> Request:
    message = {"role": "user", "content": _TEXT}
    return Request("chat", _model(replica), [HistoryMessage(message, digest_message(message))], stream=stream)


def _ask_with_prompt(replica: Replica) -> Request:
    return Request("completions", _model(replica), [], prompt=_TEXT)


def _model(replica: Replica) -> str:
    return replica.models[0] if replica.models else "default"


async def _sample(kind: EngineKind, replica: Replica, request: Request, logprob_mode: str) -> EngineReply:
    """Raises as `EngineKind.sample`, and EngineFailed for what no call could be recorded from."""
    job = await prepare_job(kind, replica, request, {"max_tokens": 1}, CancelScope("", new_call_id()))
    outcome = await kind.sample(replica, job, stream=request.stream, emit=discard)
    if outcome.broken is not None:
        raise EngineFailed(outcome.broken)
    if not outcome.choices[0].token_ids and outcome.choices[0].finish_reason == "abort":
        # A weight update aborts what is in flight.
        raise EngineUnavailable("it ended a sample of one token before there was a token")
    check_sampled(outcome, logprob_mode)
    if not outcome.returns_ids:
        # Also where there is no id in the list of them: a token was sampled.
        replica.note_ids(False, streamed=request.stream)
    elif kind.takes_ids:
        replica.note_ids(True, streamed=request.stream)
    return outcome


async def prepare_job(
    kind: EngineKind, replica: Replica, request: Request, sampling: Mapping[str, Any], scope: CancelScope
) -> SamplingJob:
    """What the replica is asked for a request that belongs to no session, with its prompt as it is rendered, and no more `max_tokens` than
    the window leaves. Raises as `EngineKind.render`."""
    job = SamplingJob(scope.call_id, request, sampling, scope, served=replica.serve(request.model))
    if kind.plans(replica, request):
        return _replace(job, plan=PlanRequest(None, None, False, None, False, lambda media: None))
    if not kind.takes_ids:
        return job
    if request.prompt is None:
        rendered = await kind.render(replica, request, Rendering(request.messages, True), job.id_text)
    else:
        rendered = await kind.tokenizer(replica, request, job.id_text).tokenize(str(request.prompt), whole=True)
    most = sampling["max_tokens"]
    if replica.max_model_len is not None:
        most = max(1, min(most, replica.max_model_len - len(rendered.ids)))
    return _replace(job, prompt_ids=rendered.ids, body=rendered.body, sampling={**sampling, "max_tokens": most})


def discard(piece: PromptReady | FirstToken | Sequence[Delta]) -> None:
    """Nobody reads it."""


async def _check_turn_end(kind: EngineKind, replica: Replica, request: Request) -> None:
    """Note it if no short dialogue tells which ids end a turn."""

    async def render(rendering: Rendering) -> Ids:
        try:
            return (await kind.render(replica, request, rendering, IdText())).ids
        except RequestError:
            return pack_ids(())

    steps = turn_end()
    wanted = next(steps)
    with contextlib.suppress(VerbatimError):
        while True:
            rendered = await asyncio.gather(*map(render, wanted))
            try:
                wanted = steps.send(rendered)
            except StopIteration as stop:
                replica.note(TURN_END, "" if stop.value is not None else TURN_END_UNKNOWN)
                return
