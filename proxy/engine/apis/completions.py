"""`/v1/completions` with token ids: vLLM without `--enable-scale-out`, since 0.10.2, which has `return_token_ids`.

The prompt is ids, rendered by LocalRenderer, and the reply is ids, read by it. The engine repeats the ids it sampled after; another
prompt than the one it was given is an error. It reports no weight versions: the version is the replica's before the call, if it is
still the same after it, and unknown otherwise. Checked against vLLM 0.32.

The engine is always asked for a stream: most versions can be told to end a call only by hanging up, and what was sampled until then
must be known. The harness is told the reply when it is whole.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec
import numpy as np

from proxy.dialects.base import Delta, FirstToken, Request
from proxy.engine.apis.base import Job, Outcome, Sampled, at, check_heard, spoken
from proxy.engine.apis.renderer import LocalRenderer
from proxy.engine.replica import Replica
from proxy.engine.wire.http import EngineHttp, Told
from proxy.errors import EngineFailed, RequestError, VerbatimError
from reconstruct.records import Span

_PATH = "/v1/completions"

_FORWARDED = (
    *("presence_penalty", "frequency_penalty", "repetition_penalty", "min_p", "min_tokens", "logit_bias", "ignore_eos"),
    *("response_format", "structured_outputs", "bad_words", "allowed_token_ids", "priority"),
)
"""Fields that mean the same on the chat endpoint, for which harnesses write them; others would be ignored or change the prompt."""


class _Logprobs(msgspec.Struct):
    token_logprobs: list[float | None] = []
    top_logprobs: list[dict[str, float] | None] | None = None


class _Choice(msgspec.Struct):
    index: int = 0
    text: str | None = None
    finish_reason: str | None = None
    stop_reason: str | int | None = None
    token_ids: list[int] | None = None
    prompt_token_ids: list[int] | None = None
    logprobs: _Logprobs | None = None


class _Details(msgspec.Struct):
    cached_tokens: int | None = None


class _Usage(msgspec.Struct):
    prompt_tokens_details: _Details | None = None


class _Event(Told):
    choices: list[_Choice] = msgspec.field(default_factory=list)
    usage: _Usage | None = None


class IdsApi:
    api = "completions"

    def __init__(self, http: EngineHttp, renderer: LocalRenderer) -> None:
        self._http = http
        self._renderer = renderer

    async def sample(self, replica: Replica, job: Job, *, stream: bool) -> AsyncIterator[FirstToken | Delta | Outcome]:
        """Streaming, yields FirstToken; then one Outcome. See `Engine.sample`."""
        before = replica.weight_version
        choices = [IdChoice(index) for index in range(job.request.n)]
        proven, cached, broken, begun = False, 0, None, not stream
        try:
            body, headers = _body(replica, job), {"x-request-id": job.call_id}
            async for event in self._http.answers(replica, _PATH, body, _Event, job.line, stream=True, headers=headers):
                if not begun:
                    begun = True
                    yield FirstToken()
                for piece in event.choices:
                    proven = check_prompt(job, piece.prompt_token_ids) or proven
                    _add(at(choices, piece.index), piece)
                if event.usage is not None and event.usage.prompt_tokens_details is not None:
                    cached = event.usage.prompt_tokens_details.cached_tokens or 0
        except VerbatimError as error:
            if not any(choice.token_ids or choice.text for choice in choices):
                raise
            broken = error.message
        else:
            check_heard(choices)
        version = await self._http.version_since(replica, before, job.line)
        spans = [_spans(version, len(choice.token_ids)) for choice in choices]
        yield await outcome(self._renderer, job, choices, spans, proven=proven, cached_tokens=cached, broken=broken)

    async def abort(self, replica: Replica, job: Job) -> bool:
        try:
            await self._http.ask(replica, "/abort_requests", {"request_ids": [f"cmpl-{job.call_id}-0"]}, dict[str, Any])
        except VerbatimError:
            return False
        return True

    async def count(self, replica: Replica, request: Request) -> int:
        return await self._renderer.count(replica, request)


def _body(replica: Replica, job: Job) -> dict[str, Any]:
    assert job.body is not None
    forward = job.request.forward
    body = {**job.body["sampling_params"], **{key: forward[key] for key in _FORWARDED if key in forward}, **job.sampling}
    if "max_tokens" not in body:
        raise RequestError(f"engine {replica.name} does not tell its window: say 'max_tokens'", param="max_tokens")
    body["stop_token_ids"] = [*body.get("stop_token_ids", ()), *forward.get("stop_token_ids", ())]
    return {
        **body,
        "model": replica.model_for(job.request.model),
        "prompt": job.prompt_json,
        "n": job.request.n,
        "logprobs": job.request.top_logprobs or 0,
        "return_token_ids": True,
        "skip_special_tokens": False,
        "stream": True,
        "stream_options": {"include_usage": True},
    }


def _add(choice: IdChoice, piece: _Choice) -> None:
    ids, told = piece.token_ids or [], piece.logprobs or _Logprobs()
    if ids and len(told.token_logprobs) != len(ids):
        raise EngineFailed(f"the engine gave {len(told.token_logprobs)} logprobs for {len(ids)} tokens")
    choice.token_ids.extend(ids)
    choice.logprobs.extend(told.token_logprobs)
    choice.tops.extend(list((top or {}).items()) for top in told.top_logprobs or [None] * len(ids))
    choice.text += piece.text or ""
    choice.finish_reason = piece.finish_reason or choice.finish_reason
    choice.stop_reason = piece.stop_reason if piece.stop_reason is not None else choice.stop_reason


def _spans(version: int | None, count: int) -> tuple[Span, ...]:
    return (Span(version, 0, count),) if version is not None and count else ()


# A choice as an engine that takes and returns ids emitted it, and what becomes of it: the message is read here, not there.


_EMPTY: Mapping[str, Any] = {"role": "assistant", "content": ""}


@dataclass(slots=True)
class IdChoice:
    """One choice. Lengths: one logprob and, where they were asked for, one list of alternatives per token id. An alternative is
    (its id, or its text where the engine gives no id; logprob). `text` is the engine's own spelling, where it tells one."""

    index: int
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float | None] = field(default_factory=list)
    tops: list[Sequence[tuple[int | str, float]]] = field(default_factory=list)
    finish_reason: str | None = None
    stop_reason: str | int | None = None
    text: str = ""
    heard: bool = False

    @property
    def spoken(self) -> list[int]:
        """The ids that show in the text."""
        return spoken(self.token_ids, self.finish_reason, self.stop_reason)

    @property
    def stop_id(self) -> int | None:
        """The stop token that ended it. An engine that gives no ids may name it all the same."""
        if len(self.spoken) < len(self.token_ids):
            return self.token_ids[-1]
        return self.stop_reason if isinstance(self.stop_reason, int) else None


def check_prompt(job: Job, ids: Sequence[int] | None) -> bool:
    """Whether the engine says what it sampled after. Raises EngineFailed when that is not what it was given."""
    if ids is None:
        return False
    assert job.prompt_ids is not None
    if not np.array_equal(job.prompt_ids, ids):
        raise EngineFailed("the engine sampled after other tokens than it was given")
    return True


async def outcome(
    renderer: LocalRenderer,
    job: Job,
    choices: Sequence[IdChoice],
    spans: Sequence[tuple[Span, ...]],
    *,
    proven: bool,
    cached_tokens: int = 0,
    broken: str | None = None,
) -> Outcome:
    """The choices with their messages. `proven`: the engine told the ids; without them the calls are served and never trained."""
    sampled = []
    for choice, versions in zip(choices, spans, strict=True):
        try:
            message = await _message(renderer, job, choice, proven)
        except EngineFailed as error:
            # The tokens are sampled and will be recorded, though nobody can say what they mean.
            broken, message = broken or error.message, dict(_EMPTY)
        content = await _entries(renderer, job.request, choice) if proven else None
        sampled.append(
            Sampled(
                index=choice.index,
                token_ids=choice.token_ids if proven else None,
                logprobs=choice.logprobs if proven else [],
                spans=versions if proven else (),
                finish_reason=choice.finish_reason or "abort",
                stop_reason=choice.stop_reason,
                message=message,
                logprob_content=content,
            )
        )
    assert job.prompt_ids is not None
    return Outcome(sampled, None, len(job.prompt_ids), cached_tokens, broken)


async def _message(renderer: LocalRenderer, job: Job, choice: IdChoice, proven: bool) -> dict[str, Any]:
    said = choice.spoken if proven else await renderer.encode(choice.text)
    if not said:
        return dict(_EMPTY)
    stop = choice.stop_reason if isinstance(choice.stop_reason, str) else None
    return await renderer.message(job, said, stop, choice.stop_id)


async def _entries(renderer: LocalRenderer, request: Request, choice: IdChoice) -> list[dict[str, Any]] | None:
    """Chat-shaped logprobs, None where the harness asked for none."""
    if request.top_logprobs is None:
        return None
    told = [[top for top in tops if isinstance(top[0], int)] for tops in choice.tops]
    named = {int(item) for tops in told for item, _ in tops} | set(choice.token_ids)
    names = dict(zip(sorted(named), await renderer.spell(sorted(named)), strict=True))
    tops = choice.tops if len(choice.tops) == len(choice.token_ids) else [()] * len(choice.token_ids)
    return [
        {
            **_entry(names[token], logprob),
            "top_logprobs": [_entry(names[item] if isinstance(item, int) else item, value) for item, value in alternatives],
        }
        for token, logprob, alternatives in zip(choice.token_ids, choice.logprobs, tops, strict=True)
    ]


def _entry(text: str, logprob: float | None) -> dict[str, Any]:
    return {"token": text, "logprob": logprob, "bytes": list(text.encode("utf-8", "replace"))}
