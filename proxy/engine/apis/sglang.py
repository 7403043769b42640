"""SGLang's native `/generate`: token ids in, token ids out, with `meta_info` about them.

The prompt is rendered and the reply read by LocalRenderer. Every token comes with its logprob in `meta_info.output_token_logprobs`,
as [logprob, id, text]; a stream repeats all of them with every event, or, with `--incremental-streaming-output`, only the new ones:
`completion_tokens` tells which. Weight versions: `weight_versions` are spans; before there were those, `weight_version` was the
label at the end of the call, which counts when it was the same at its beginning. Only labels that are numbers are versions.

Written from SGLang's source and documentation, versions 0.5.5 and 0.5.23, and tested against replies in the shapes of these two; it
has not met a running SGLang yet.
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Sequence
from typing import Any

import msgspec

from proxy.dialects.base import Delta, FirstToken, Request
from proxy.engine.apis.base import Job, Outcome, at, check_heard
from proxy.engine.apis.completions import IdChoice, check_prompt, outcome
from proxy.engine.apis.renderer import LocalRenderer
from proxy.engine.apis.vllm_reply import Version
from proxy.engine.replica import Replica
from proxy.engine.wire.http import EngineHttp, refusal
from proxy.errors import EngineFailed, RequestError, VerbatimError
from reconstruct.records import Span

_PATH = "/generate"

_STREAM_INTERVAL = 16
"""Tokens between two events: without the incremental flag each repeats all that came before."""

_RENAMED = {"max_tokens": "max_new_tokens", "min_tokens": "min_new_tokens", "seed": "sampling_seed"}
_FORWARDED = ("presence_penalty", "frequency_penalty", "repetition_penalty", "min_p", "min_tokens", "logit_bias", "ignore_eos")
_GRAMMARS = {"regex": "regex", "json": "json_schema", "grammar": "ebnf"}
"""Kinds of `structured_outputs`, as vLLM calls them, and SGLang's names."""


class _Finish(msgspec.Struct):
    """`matched`: the stop text, the stop token's id, or the ids of a longer end."""

    type: str
    matched: str | int | list[int] | None = None
    message: str | None = None


class _Meta(msgspec.Struct):
    completion_tokens: int | None = None
    prompt_tokens: int | None = None
    cached_tokens: int | None = None
    finish_reason: _Finish | None = None
    output_token_logprobs: list[tuple[float | None, int, str | None]] | None = None
    output_top_logprobs: list[list[tuple[float, int, str | None]] | None] | None = None
    weight_version: str | int | None = None
    weight_versions: list[Version] | None = None


class _Answer(msgspec.Struct):
    """A whole answer of one choice, or an event of a stream."""

    meta_info: _Meta = msgspec.field(default_factory=_Meta)
    index: int = 0
    text: str | None = None
    prompt_token_ids: list[int] | None = None
    error: dict[str, Any] | None = None


class _Told:
    """One choice as far as it is told."""

    def __init__(self, index: int) -> None:
        self.index = index
        self.heard = False
        self.choice = IdChoice(index)
        self.labels: set[str] = set()
        self.versions: list[Version] | None = None
        self.cached_tokens = 0

    def add(self, job: Job, answer: _Answer, end_id: int | None) -> None:
        """Raises EngineFailed when the answer does not go on from what was told, or is about another prompt."""
        meta = answer.meta_info
        check_prompt(job, answer.prompt_token_ids)
        assert job.prompt_ids is not None
        if meta.prompt_tokens is not None and meta.prompt_tokens != len(job.prompt_ids):
            raise EngineFailed(f"the engine sampled after {meta.prompt_tokens} of {len(job.prompt_ids)} prompt tokens")
        self._add_tokens(meta)
        self.choice.text = answer.text or self.choice.text
        self.cached_tokens = meta.cached_tokens or self.cached_tokens
        self.versions = meta.weight_versions or self.versions
        self.labels.add(str(meta.weight_version))
        if meta.finish_reason is not None:
            self.choice.finish_reason = meta.finish_reason.type
            matched = meta.finish_reason.matched
            self.choice.stop_reason = None if isinstance(matched, list) or matched == end_id else matched

    def _add_tokens(self, meta: _Meta) -> None:
        entries, known = meta.output_token_logprobs or [], self.choice.token_ids
        count = len(entries) if meta.completion_tokens is None else meta.completion_tokens
        if len(entries) >= count:
            # All of them again; an aborted call may name a logprob more than it has tokens.
            start = len(known)
            if [entry[1] for entry in entries[: min(start, count)]] != known:
                raise EngineFailed("the engine took back tokens that it had told")
        else:
            start = len(known) - (count - len(entries))
            if start != 0:
                raise EngineFailed(f"the engine told {len(entries)} tokens of {count}, but only {len(known)} before")
            count = len(entries)
        self.choice.token_ids += [entry[1] for entry in entries[start:count]]
        self.choice.logprobs += [entry[0] for entry in entries[start:count]]
        tops = meta.output_top_logprobs
        if tops is not None:
            self.choice.tops += [[(top[1], top[0]) for top in at or ()] for at in tops[start:count]]

    def spans(self, before: str | None) -> tuple[Span, ...]:
        """Empty where a version is no number, or not known for every token."""
        count = len(self.choice.token_ids)
        told = self.versions
        if told is None:
            told = [Version(before, 0, count)] if self.labels == {before} else []
        ends = [0, *(item.end for item in told)]
        numbers = [str(item.version) for item in told]
        whole = [item.start for item in told] == ends[:-1] and ends[-1] == count > 0
        if not whole or not all(number.isdecimal() for number in numbers):
            return ()
        return tuple(Span(int(number), item.start, item.end) for number, item in zip(numbers, told, strict=True))


class SglangApi:
    api = "sglang"

    def __init__(self, http: EngineHttp, renderer: LocalRenderer) -> None:
        self._http = http
        self._renderer = renderer

    async def sample(self, replica: Replica, job: Job, *, stream: bool) -> AsyncIterator[FirstToken | Delta | Outcome]:
        """Streaming, yields FirstToken; then one Outcome. See `Engine.sample`."""
        before = await self._http.label(replica, LABEL_ROUTES)
        told = [_Told(index) for index in range(job.request.n)]
        broken, begun = None, not stream
        try:
            async for answer in self._answers(replica, job, stream):
                if not begun:
                    begun = True
                    yield FirstToken()
                at(told, answer.index).add(job, answer, self._renderer.end_id)
        except VerbatimError as error:
            if not any(item.choice.token_ids for item in told):
                raise
            broken = error.message
        else:
            check_heard(told)
        if any(item.choice.text and not item.choice.token_ids for item in told):
            raise EngineFailed(f"engine {replica.name} returned no token ids: is it SGLang?")
        choices = [item.choice for item in told]
        spans = [item.spans(before) for item in told]
        cached = max(item.cached_tokens for item in told)
        yield await outcome(self._renderer, job, choices, spans, proven=True, cached_tokens=cached, broken=broken)

    async def abort(self, replica: Replica, job: Job) -> bool:
        if job.request.n > 1:
            # SGLang gives each choice a request id of its own making.
            return False
        try:
            await self._http.order(replica, "/abort_request", {"rid": job.call_id})
        except VerbatimError:
            return False
        return True

    async def count(self, replica: Replica, request: Request) -> int:
        return await self._renderer.count(replica, request)

    async def _answers(self, replica: Replica, job: Job, stream: bool) -> AsyncIterator[_Answer]:
        body = _body(replica, job, stream)
        if not stream:
            for index, answer in enumerate(await self._whole(replica, job, body)):
                answer.index = index
                yield answer
            return
        async for data in self._http.events(replica, _PATH, body, job.line):
            try:
                event = msgspec.json.decode(data, type=_Answer)
            except msgspec.DecodeError as error:
                raise EngineFailed(f"engine {replica.name} streamed something else than expected: {error}") from error
            if event.error:
                raise refusal(replica, _PATH, int(event.error.get("code") or 500), data)
            yield event

    async def _whole(self, replica: Replica, job: Job, body: Any) -> list[_Answer]:
        if job.request.n > 1:
            return await self._http.post(replica, _PATH, body, list[_Answer], line=job.line)
        return [await self._http.post(replica, _PATH, body, _Answer, line=job.line)]


LABEL_ROUTES = ("/model_info", "/get_model_info")
"""Where SGLang tells its weight version, newer versions first."""


def _body(replica: Replica, job: Job, stream: bool) -> dict[str, Any]:
    model = replica.model_for(job.request.model)
    return {
        "rid": job.call_id,
        "input_ids": job.prompt_json,
        "sampling_params": _sampling(job),
        "return_logprob": True,
        "logprob_start_len": -1,
        "top_logprobs_num": job.request.top_logprobs or 0,
        "return_prompt_token_ids": True,
        "stream": stream,
        **({"lora_path": model} if model == replica.adapter else {}),
    }


def _sampling(job: Job) -> dict[str, Any]:
    """SGLang's sampling_params: everything that has a say is said."""
    assert job.body is not None
    forward = job.request.forward
    asked = {**job.body["sampling_params"], **{key: forward[key] for key in _FORWARDED if key in forward}, **job.sampling}
    params = {_RENAMED.get(name, name): value for name, value in asked.items()}
    # Otherwise SGLang stops after 128 tokens.
    params.setdefault("max_new_tokens", None)
    params["stop_token_ids"] = [*params.get("stop_token_ids", ()), *forward.get("stop_token_ids", ())]
    params |= {"skip_special_tokens": False, "stream_interval": _STREAM_INTERVAL, **_grammar(forward)}
    if job.request.n > 1:
        params["n"] = job.request.n
    return params


def _grammar(forward: Any) -> dict[str, Any]:
    """What the reply must look like. Raises RequestError for what SGLang has no name for."""
    wanted = forward.get("response_format") or {}
    kind = wanted.get("type", "text") if isinstance(wanted, dict) else None
    if kind == "json_object":
        return {"json_schema": '{"type": "object"}'}
    if kind == "json_schema":
        return {"json_schema": json.dumps((wanted.get("json_schema") or {}).get("schema") or {})}
    if kind != "text":
        raise RequestError(f"'response_format' of type {kind!r} is not known to the engine", param="response_format")
    outputs = forward.get("structured_outputs") or {}
    unknown: Sequence[str] = [name for name in outputs if name not in _GRAMMARS and outputs[name] is not None]
    if unknown:
        raise RequestError(
            f"'structured_outputs' of kind '{unknown[0]}' is not known to the engine", param="structured_outputs"
        )
    return {
        _GRAMMARS[name]: value if isinstance(value, str) else json.dumps(value)
        for name, value in outputs.items()
        if value is not None
    }
