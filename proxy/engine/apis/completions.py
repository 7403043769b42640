"""vLLM's `/v1/completions` with token ids, for vLLM since 0.10.2 without `--enable-scale-out`.

The prompt is rendered and the reply parsed by LocalRenderer. The engine repeats the ids it sampled after; ids other than it was given
are an error. It reports no weight versions: the version is the replica's before the call if it still is after it, otherwise unknown.
Checked against vLLM 0.32.

The request is always for a stream, because most versions end a call only when the client hangs up, and what was sampled
until then must be known. The harness gets the reply when it is complete.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec
import numpy as np

from proxy.dialects.base import FirstToken, Request
from proxy.engine.apis.base import Emit, EngineKind, SamplingJob
from proxy.engine.apis.probe import Probe
from proxy.engine.apis.question import Question
from proxy.engine.apis.renderer import LocalRenderer
from proxy.engine.apis.reply import EngineChoice, EngineReply, PartialReply, Usage, choice_at, visible_ids
from proxy.engine.apis.scores import Scored, ScoringJob
from proxy.engine.apis.versions import Versions
from proxy.engine.apis.vllm_scores import score_by_completions
from proxy.engine.replica import Replica, parse_version
from proxy.engine.wire.http import EngineAnswer
from proxy.errors import EngineFailed, RequestError
from proxy.timeline import CancelScope
from reconstruct.spans import Span

_PATH = "/v1/completions"

_RETURNS_IDS_SINCE = (0, 10, 2)
"""The first vLLM version whose `/v1/completions` has `return_token_ids`."""

_FORWARDED = (
    *("presence_penalty", "frequency_penalty", "repetition_penalty", "min_p", "min_tokens", "logit_bias", "ignore_eos"),
    *("response_format", "structured_outputs", "bad_words", "allowed_token_ids", "priority"),
)
"""Fields with the same meaning as on the chat endpoint, which harnesses write for; others would be ignored or change the prompt."""


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


class _Event(EngineAnswer):
    choices: list[_Choice] = msgspec.field(default_factory=list)
    usage: Usage | None = None


class VllmCompletions(EngineKind):
    name = "completions"
    detection_order = 30
    needs_renderer = True
    versions = (Versions("vLLM", run=("0.32",), first="0.10.2", last="0.33"),)

    async def detect(self, probe: Probe, *, asked: bool) -> str | None:
        if await probe.find_missing(_PATH):
            return "it has no /v1/completions"
        # Other engines have the endpoint too and may not take ids: use it unasked only for a vLLM that returns them.
        version = None if asked else parse_version((await self.read_version(probe))[0])
        return None if asked or (version is not None and version >= _RETURNS_IDS_SINCE) else "it may not return token ids"

    async def sample(self, replica: Replica, job: SamplingJob, *, stream: bool, emit: Emit) -> EngineReply:
        """Emits no deltas."""
        before = replica.host.weight_version
        choices = [IdChoice(index) for index in range(job.request.n)]
        proven, usage, begun = False, Usage(), not stream
        question, headers = _make_question(replica, job), {"x-request-id": job.call_id}

        def take(events: list[_Event]) -> None:
            nonlocal proven, usage, begun
            if not begun:
                begun = True
                emit(FirstToken())
            for event in events:
                for piece in event.choices:
                    proven = prove_prompt(job, piece.prompt_token_ids) or proven
                    _add(choice_at(choices, piece.index), piece)
                usage = event.usage or usage

        async def send(body: dict[str, Any]) -> None:
            async with self._http.receive(replica, _PATH, body, _Event, job.scope, stream=True, headers=headers) as answers:
                await answers.follow(take)

        with PartialReply(choices) as reading:
            await question.put(job.scope, choices, send)
        version = await self._http.find_version(replica, before, job.scope)
        for choice in choices:
            count = len(choice.token_ids)
            choice.spans = (Span(version, 0, count),) if version is not None and count else ()
        outcome = await parse_outcome(
            self._local, job, choices, proven=proven, cached_tokens=usage.cached_tokens, broken=reading.broken
        )
        outcome.completion_tokens = usage.completion_tokens or 0
        replica.note_ids(outcome.returns_ids, streamed=stream)
        return outcome

    async def score(self, replica: Replica, job: ScoringJob, scope: CancelScope) -> Scored:
        return await score_by_completions(self._http, replica, job, scope)

    async def abort(self, replica: Replica, job: SamplingJob, *, again: bool) -> bool:
        return await self._abort_request(replica, f"cmpl-{job.call_id}-0", again=again)


def _make_question(replica: Replica, job: SamplingJob) -> Question:
    forward = job.request.forward
    body = {**job.body["sampling_params"], **{key: forward[key] for key in _FORWARDED if key in forward}, **job.sampling}
    if "max_tokens" not in body:
        raise RequestError(f"engine {replica.name} does not report its context window: set 'max_tokens'", param="max_tokens")
    body["stop_token_ids"] = [*body.get("stop_token_ids", ()), *forward.get("stop_token_ids", ())]
    asked = {
        **body,
        "model": job.model,
        "prompt": job.prompt_json,
        "n": job.request.n,
        "skip_special_tokens": False,
        "stream": True,
    }
    added: dict[str, Any] = {"return_token_ids": True, "stream_options": {"include_usage": True}}
    if job.request.top_logprobs is None:
        added["logprobs"] = 0
    else:
        asked["logprobs"] = job.request.top_logprobs
    return Question(replica, asked, added)


def _add(choice: IdChoice, piece: _Choice) -> None:
    ids, logprobs = piece.token_ids or [], piece.logprobs or _Logprobs()
    if ids and len(logprobs.token_logprobs) != len(ids):
        raise EngineFailed(f"the engine gave {len(logprobs.token_logprobs)} logprobs for {len(ids)} tokens")
    choice.token_ids.extend(ids)
    choice.logprobs.extend(logprobs.token_logprobs)
    choice.tops.extend(list((top or {}).items()) for top in logprobs.top_logprobs or [None] * len(ids))
    choice.texts.append(piece.text or "")
    choice.finish_reason = piece.finish_reason or choice.finish_reason
    choice.stop_reason = piece.stop_reason if piece.stop_reason is not None else choice.stop_reason


# Shared with other engines that take and return ids.


@dataclass(slots=True)
class IdChoice:
    """One choice as an engine emitted it that takes and returns ids: one logprob and, if requested, one list of alternatives per id.

    An alternative is (id, or text if the engine gives no id; logprob). `texts` are pieces of the engine's own text, if it returns any."""

    index: int
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float | None] = field(default_factory=list)
    tops: list[Sequence[tuple[int | str, float]]] = field(default_factory=list)
    spans: tuple[Span, ...] = ()
    finish_reason: str | None = None
    stop_reason: str | int | None = None
    texts: list[str] = field(default_factory=list)
    heard: bool = False

    @property
    def text(self) -> str:
        return "".join(self.texts)

    @property
    def has_content(self) -> bool:
        return bool(self.token_ids or any(self.texts))

    @property
    def visible_ids(self) -> list[int]:
        return visible_ids(self.token_ids, self.finish_reason, self.stop_reason)

    @property
    def stop_id(self) -> int | None:
        """The stop token that ended it; an engine may name one without returning ids."""
        if len(self.visible_ids) < len(self.token_ids):
            return self.token_ids[-1]
        return self.stop_reason if isinstance(self.stop_reason, int) else None


def prove_prompt(job: SamplingJob, ids: Sequence[int] | None) -> bool:
    """Whether the engine reports what it sampled after. Raises EngineFailed if that is not the prompt it was given."""
    if ids is None:
        return False
    if not np.array_equal(job.prompt_ids, ids):
        raise EngineFailed("the engine sampled after other tokens than it was given")
    return True


async def parse_outcome(
    renderer: LocalRenderer,
    job: SamplingJob,
    choices: Sequence[IdChoice],
    *,
    proven: bool,
    cached_tokens: int = 0,
    broken: str | None = None,
) -> EngineReply:
    """The choices with their messages. Unless the engine returned ids (`proven`), the call is served and never trained."""
    sampled = []
    for choice in choices:
        message: dict[str, Any] = {"role": "assistant", "content": ""}
        try:
            visible = choice.visible_ids if proven else await renderer.encode(choice.text)
            if visible:
                stop = choice.stop_reason if isinstance(choice.stop_reason, str) else None
                message = await renderer.parse(job.request, job.prompt_ids, visible, stop, choice.stop_id)
        except EngineFailed as error:
            # The tokens are sampled and are recorded, even if they cannot be parsed.
            broken = broken or error.message
        sampled.append(
            EngineChoice(
                index=choice.index,
                token_ids=choice.token_ids if proven else None,
                logprobs=choice.logprobs if proven else [],
                spans=choice.spans if proven else (),
                finish_reason=choice.finish_reason or "abort",
                stop_reason=choice.stop_reason,
                message=message,
                logprob_content=await _chat_logprobs(renderer, job.request, choice) if proven else None,
            )
        )
    return EngineReply(sampled, None, len(job.prompt_ids), cached_tokens, broken)


async def _chat_logprobs(renderer: LocalRenderer, request: Request, choice: IdChoice) -> list[dict[str, Any]] | None:
    """Chat-shaped logprobs, None if the harness requested none."""
    if request.top_logprobs is None:
        return None
    alternatives = [item for tops in choice.tops for item, _ in tops if isinstance(item, int)]
    named = sorted({*alternatives, *choice.token_ids})
    names: Mapping[int, str] = dict(zip(named, await renderer.spell_ids(named), strict=True))
    tops = choice.tops if len(choice.tops) == len(choice.token_ids) else [()] * len(choice.token_ids)
    return [
        {
            **_entry(names[token], logprob),
            "top_logprobs": [_entry(names[item] if isinstance(item, int) else item, value) for item, value in each],
        }
        for token, logprob, each in zip(choice.token_ids, choice.logprobs, tops, strict=True)
    ]


def _entry(text: str, logprob: float | None) -> dict[str, Any]:
    return {"token": text, "logprob": logprob, "bytes": list(text.encode("utf-8", "replace"))}
