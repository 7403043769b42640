"""SGLang's native API: `/generate` with token ids in and out, and its endpoints for new weights.

The prompt is rendered and the reply parsed by LocalRenderer. `meta_info.output_token_logprobs` has [logprob, id, text] per token; a
stream repeats all of them with every event or, with `--incremental-streaming-output`, sends only the new ones: `completion_tokens`
tells which. Weight versions: `weight_versions` are spans; older SGLang has `weight_version`, the label at the end of the call, which
counts if it was the same at the beginning. Only numeric labels are versions.

Written from SGLang's source and documentation, versions 0.5.5 and 0.5.23, and tested against replies in the shapes of both; not yet
run against a real SGLang.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import msgspec
import numpy as np

from proxy.dialects.base import FirstToken
from proxy.engine.apis.base import Emit, EngineKind, SamplingJob
from proxy.engine.apis.completions import IdChoice, parse_outcome, prove_prompt
from proxy.engine.apis.evidence import LABEL, SEED
from proxy.engine.apis.probe import SGLANG_INFO, Probe
from proxy.engine.apis.reply import EngineReply, PartialReply, Version, choice_at
from proxy.engine.apis.scores import ScoreArrays, Scored, ScoringJob, check_scores
from proxy.engine.apis.versions import Versions
from proxy.engine.replica import Replica
from proxy.engine.weights.vllm import PROBE_SECONDS, TORN, Claim, Loaded, StepRefused, Transfer, WeightApi
from proxy.engine.wire.http import EngineAnswer
from proxy.engine.wire.refusals import refusal
from proxy.errors import EngineFailed, RequestError, VerbatimError
from proxy.timeline import CancelScope
from reconstruct.spans import Span

_PATH = "/generate"

_INFO_ROUTES = ("/model_info", "/get_model_info")
"""Where SGLang reports its model and weight version, newer versions first."""

_STREAM_INTERVAL = 16
"""Tokens per event: without the incremental flag each event repeats all earlier tokens."""

_RENAMED = {"max_tokens": "max_new_tokens", "min_tokens": "min_new_tokens", "seed": "sampling_seed"}
_FORWARDED = ("presence_penalty", "frequency_penalty", "repetition_penalty", "min_p", "min_tokens", "logit_bias", "ignore_eos")
_GRAMMARS = {"regex": "regex", "json": "json_schema", "grammar": "ebnf"}
"""Kinds of `structured_outputs` by vLLM's names, with SGLang's names."""


class Sglang(EngineKind):
    name = "sglang"
    detection_order = 20
    needs_renderer = True
    versions = (Versions("SGLang", run=(), first="0.5.5", last="0.5.23"),)
    names_checkpoint = True
    leaves_raw = frozenset[str]()
    """SGLang adds biases and penalties to the logits before it takes logprobs."""
    sources = (SEED, LABEL)

    async def detect(self, probe: Probe, *, asked: bool) -> str | None:
        for route in _INFO_ROUTES:
            if "is_generation" in await probe.read(route):
                return "it is no SGLang: it has no /generate" if await probe.find_missing(_PATH) else None
        return "it is no SGLang: neither /model_info nor /get_model_info describes a model"

    def find_version_routes(self, owner: str) -> Sequence[tuple[str, str]]:
        return tuple((route, "version") for route in SGLANG_INFO)

    async def takes_weights(self, probe: Probe) -> bool:
        return True

    async def loads_adapters(self, probe: Probe) -> bool:
        return False

    async def find_logprob_mode(self, probe: Probe) -> str | None:
        return None

    def weights(self, replica: Replica, step_seconds: float, claim: Claim | None) -> WeightApi:
        return SglangWeights(self._http.session, replica, step_seconds, claim)

    async def sample(self, replica: Replica, job: SamplingJob, *, stream: bool, emit: Emit) -> EngineReply:
        """Emits no deltas."""
        before = await self._http.read_label(replica, _INFO_ROUTES)
        choices = [_SglangChoice(index) for index in range(job.request.n)]
        with PartialReply(choices) as reading:
            await self._receive(replica, job, stream, choices, emit)
        if any(choice.text and not choice.token_ids for choice in choices):
            raise EngineFailed(f"engine {replica.name} returned no token ids: is it SGLang?")
        for choice in choices:
            choice.spans = choice.find_spans(before)
        cached = max(choice.cached_tokens for choice in choices)
        return await parse_outcome(self._local, job, choices, proven=True, cached_tokens=cached, broken=reading.broken)

    async def _receive(
        self, replica: Replica, job: SamplingJob, stream: bool, choices: Sequence[_SglangChoice], emit: Emit
    ) -> None:
        body, end_id, begun = _body(replica, job, stream), self._local.end_id, not stream
        if not stream and job.request.n > 1:
            wholes = await self._http.post(replica, _PATH, body, list[_Answer], job.scope)
            for index, whole in enumerate(wholes):
                choice_at(choices, index).add(job, whole, end_id)
            return

        def take(answers: list[_Answer]) -> None:
            nonlocal begun
            if not begun:
                begun = True
                emit(FirstToken())
            for answer in answers:
                choice_at(choices, answer.index if stream else 0).add(job, answer, end_id)

        async with self._http.receive(replica, _PATH, body, _Answer, job.scope, stream=stream) as answers:
            await answers.follow(take)

    async def score(self, replica: Replica, job: ScoringJob, scope: CancelScope) -> Scored:
        """SGLang computes everything behind `logprob_start_len` anew, whatever it has cached."""
        if job.media:
            raise RequestError(f"engine {replica.name} takes no images with ids: it cannot score the row")
        before = await self._http.read_label(replica, _INFO_ROUTES)
        answer = await self._http.post(replica, _PATH, _score_body(job), _Answer, scope)
        meta = answer.meta_info
        arrays = await asyncio.to_thread(_read_scores, job, meta)
        versions = meta.weight_versions or []
        if not versions and meta.weight_version is not None and str(meta.weight_version) == before:
            versions = [Version(before, 0, 1)]
        finish = None if meta.finish_reason is None else meta.finish_reason.type
        return check_scores(replica, replace(job, reads_cache=False), arrays, finish, versions, 0)

    async def _detokenize(self, replica: Replica, groups: Sequence[tuple[int, ...]]) -> list[str]:
        body = {"tokens": [list(group) for group in groups], "skip_special_tokens": False}
        return (await self._http.ask(replica, "/detokenize", body, _Detokenized)).text

    async def abort(self, replica: Replica, job: SamplingJob, *, again: bool) -> bool:
        if job.request.n > 1:
            # SGLang makes up a request id for each choice.
            return False
        try:
            await self._http.order(replica, "/abort_request", {"rid": job.call_id})
        except VerbatimError:
            return False
        return True


class _Finish(msgspec.Struct):
    """`matched`: the stop text, the stop token's id, or the ids of a longer stop sequence."""

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
    input_token_logprobs: list[tuple[float | None, int, str | None]] | None = None
    input_top_logprobs: list[list[tuple[float | None, int, str | None]] | None] | None = None
    weight_version: str | int | None = None
    weight_versions: list[Version] | None = None


class _Answer(EngineAnswer):
    """A whole answer of one choice, or an event of a stream."""

    meta_info: _Meta = msgspec.field(default_factory=_Meta)
    index: int = 0
    text: str | None = None
    prompt_token_ids: list[int] | None = None
    error: dict[str, Any] | None = None

    def check(self, replica: Replica, path: str, content: bytes) -> None:
        """Raises the refusal that an event reports."""
        raise refusal(replica, path, int((self.error or {}).get("code") or 500), content)


class _Detokenized(msgspec.Struct):
    text: list[str]


class _SglangChoice(IdChoice):
    def __init__(self, index: int) -> None:
        super().__init__(index)
        self.cached_tokens = 0
        self._labels: set[str] = set()
        self._versions: list[Version] | None = None

    @property
    def has_content(self) -> bool:
        return bool(self.token_ids)

    def add(self, job: SamplingJob, answer: _Answer, end_id: int | None) -> None:
        """Raises EngineFailed if the answer contradicts an earlier one or is about another prompt."""
        meta = answer.meta_info
        prove_prompt(job, answer.prompt_token_ids)
        if meta.prompt_tokens is not None and meta.prompt_tokens != len(job.prompt_ids):
            raise EngineFailed(f"the engine sampled after {meta.prompt_tokens} of {len(job.prompt_ids)} prompt tokens")
        self._add_tokens(meta)
        self.texts = [answer.text or self.text]
        self.cached_tokens = meta.cached_tokens or self.cached_tokens
        self._versions = meta.weight_versions or self._versions
        self._labels.add(str(meta.weight_version))
        if meta.finish_reason is not None:
            self.finish_reason = meta.finish_reason.type
            matched = meta.finish_reason.matched
            self.stop_reason = None if isinstance(matched, list) or matched == end_id else matched

    def _add_tokens(self, meta: _Meta) -> None:
        entries, known = meta.output_token_logprobs or [], self.token_ids
        count = len(entries) if meta.completion_tokens is None else meta.completion_tokens
        if len(entries) >= count:
            # All of them again; an aborted call may have one logprob more than tokens.
            start = len(known)
            if [entry[1] for entry in entries[: min(start, count)]] != known:
                raise EngineFailed("the engine took back tokens that it had sent")
        else:
            start = len(known) - (count - len(entries))
            if start != 0:
                raise EngineFailed(f"the engine sent {len(entries)} tokens of {count}, but only {len(known)} before")
            count = len(entries)
        self.token_ids += [entry[1] for entry in entries[start:count]]
        self.logprobs += [entry[0] for entry in entries[start:count]]
        if meta.output_top_logprobs is not None:
            self.tops += [[(top[1], top[0]) for top in tops or ()] for tops in meta.output_top_logprobs[start:count]]

    def find_spans(self, before: str | None) -> tuple[Span, ...]:
        """Empty if a version is not a number, or unknown for any token; `before` is the label before the call."""
        count = len(self.token_ids)
        versions = self._versions
        if versions is None:
            versions = [Version(before, 0, count)] if self._labels == {before} else []
        ends = [0, *(item.end for item in versions)]
        numbers = [str(item.version) for item in versions]
        contiguous = [item.start for item in versions] == ends[:-1] and ends[-1] == count > 0
        if not contiguous or not all(number.isdecimal() for number in numbers):
            return ()
        return tuple(Span(int(number), item.start, item.end) for number, item in zip(numbers, versions, strict=True))


def _body(replica: Replica, job: SamplingJob, stream: bool) -> dict[str, Any]:
    return {
        "rid": job.call_id,
        "input_ids": job.prompt_json,
        "sampling_params": _sampling_params(job),
        "return_logprob": True,
        "logprob_start_len": -1,
        "top_logprobs_num": job.request.top_logprobs or 0,
        "return_prompt_token_ids": True,
        "stream": stream,
        **({"lora_path": job.served.name} if job.served.adapter else {}),
    }


def _score_body(job: ScoringJob) -> dict[str, Any]:
    return {
        "rid": job.request_id,
        "input_ids": job.ids.tolist(),
        # It samples in the same step, by which the answer tells its version.
        "sampling_params": {"max_new_tokens": 1},
        "return_logprob": True,
        "logprob_start_len": 0,
        "top_logprobs_num": job.top_k,
        "stream": False,
        **({"lora_path": job.served.name} if job.served.adapter else {}),
    }


def _read_scores(job: ScoringJob, meta: _Meta) -> ScoreArrays:
    """The first id has no logprob. One of another id is none."""
    entries = meta.input_token_logprobs or []
    arrays = ScoreArrays.unknown(len(entries), job.top_k)
    for at, ((logprob, token, _), expected) in enumerate(zip(entries, job.ids.tolist(), strict=False)):
        arrays.logprobs[at] = np.nan if logprob is None or token != expected else logprob
    for at, tops in enumerate((meta.input_top_logprobs or [])[: len(entries)] if job.top_k else ()):
        told = [(logprob, token) for logprob, token, _ in tops or () if logprob is not None][: job.top_k]
        for place, (logprob, token) in enumerate(told):
            arrays.top_ids[at, place], arrays.top_logprobs[at, place] = token, logprob
    return arrays


def _sampling_params(job: SamplingJob) -> dict[str, Any]:
    forward = job.request.forward
    given = {**job.body["sampling_params"], **{key: forward[key] for key in _FORWARDED if key in forward}, **job.sampling}
    params = {_RENAMED.get(name, name): value for name, value in given.items()}
    # SGLang's default stops after 128 tokens.
    params.setdefault("max_new_tokens", None)
    params["stop_token_ids"] = [*params.get("stop_token_ids", ()), *forward.get("stop_token_ids", ())]
    params |= {"skip_special_tokens": False, "stream_interval": _STREAM_INTERVAL, **_grammar(forward)}
    if job.request.n > 1:
        params["n"] = job.request.n
    return params


def _grammar(forward: Mapping[str, Any]) -> dict[str, Any]:
    """The constraint on the reply. Raises RequestError for constraints SGLang does not have."""
    wanted = forward.get("response_format") or {}
    kind = wanted.get("type", "text") if isinstance(wanted, dict) else None
    if kind == "json_object":
        return {"json_schema": '{"type": "object"}'}
    if kind == "json_schema":
        return {"json_schema": json.dumps((wanted.get("json_schema") or {}).get("schema") or {})}
    if kind != "text":
        raise RequestError(f"'response_format' of type {kind!r} is not known to the engine", param="response_format")
    outputs = {name: value for name, value in (forward.get("structured_outputs") or {}).items() if value is not None}
    if unknown := [name for name in outputs if name not in _GRAMMARS]:
        raise RequestError(
            f"'structured_outputs' of kind '{unknown[0]}' is not known to the engine", param="structured_outputs"
        )
    return {_GRAMMARS[name]: value if isinstance(value, str) else json.dumps(value) for name, value in outputs.items()}


_PAUSES = {"keep": "retract", "abort": "abort"}
"""`retract` puts calls in flight back into the queue and recomputes their context under the new weights; `in_place` would mix in the
old cache. 0.5.5 has no modes: every pause is an `abort`."""

_NO_TRANSFER = "weights go to SGLang by path, not over NCCL"

_ROLLED_BACK = "Rolling back"
_NOT_FLUSHED = "cache was not flushed"
"""SGLang holds the new weights, under the old label, and what it has cached of the old ones."""
_FLUSH_SECONDS = 0.25
"""Between two tries to flush the cache."""


class SglangWeights(WeightApi):
    """SGLang's weight endpoints. A checkpoint is loaded from disk and labelled in one step.

    SGLang does not say what its workers hold, only which checkpoint it loaded last, and when a load fails halfway each worker rolls back by
    itself, from the path it was just given. Weights after such a failure count as torn, and their label says so for any process that
    looks next. Where only its cache could not be flushed it holds the new ones: its calls are cut and the cache is flushed. `/ready`,
    which reports a pause, is in 0.5.23 but not in 0.5.5."""

    _whole = True

    async def claim(self) -> bool:
        """False: SGLang stores no claim, so two services on different stores must not share one."""
        return False

    async def release(self) -> None:
        """There is no claim."""

    async def read_label(self) -> str:
        return str((await self._model_info()).get("weight_version"))

    async def set_label(self, version: int | str) -> None:
        body = {"new_version": str(version), "abort_all_requests": False}
        await self._ask("POST", "/update_weight_version", body, seconds=PROBE_SECONDS)

    async def is_paused(self) -> bool | None:
        try:
            await self._ask("GET", "/ready", seconds=PROBE_SECONDS)
        except StepRefused as error:
            return None if error.http_status == 404 else error.http_status == 503
        return False

    async def read_loaded(self) -> Loaded:
        info = await self._model_info()
        label = str(info.get("weight_version"))
        whole = self._whole and not label.startswith(TORN)
        return Loaded(whole, info.get("model_path"), int(label) if label.isdecimal() else None, 0)

    async def prepare(self, path: str, kind: str) -> str | None:
        """None: SGLang inspects a checkpoint only when it loads it, and knows no digests. Raises StepRefused for a delta."""
        if kind == "delta":
            raise StepRefused("SGLang takes whole checkpoints and no deltas; push a full one")
        return None

    async def check_transfer(self, transfer: Transfer) -> None:
        raise StepRefused(_NO_TRANSFER)

    async def world_size(self) -> int:
        raise StepRefused(_NO_TRANSFER)

    async def join(self, group: str, nccl: dict[str, Any]) -> None:
        raise StepRefused(_NO_TRANSFER)

    async def pause(self, mode: str) -> None:
        """`wait` pauses nothing: loading waits for the calls in flight and holds new ones."""
        if mode in _PAUSES:
            await self._ask("POST", "/pause_generation", {"mode": _PAUSES[mode]})

    async def resume(self) -> None:
        await self._ask("POST", "/continue_generation", {})

    async def load_full(self, path: str, version: int) -> None:
        """Returns when SGLang holds the checkpoint, labelled `version`, with an empty cache."""
        body = {"model_path": path, "weight_version": str(version), "flush_cache": True, "abort_all_requests": False}
        try:
            await self._ask("POST", "/update_weights_from_disk", body)
        except EngineFailed as error:
            if isinstance(error, StepRefused) and not any(words in error.message for words in (_ROLLED_BACK, _NOT_FLUSHED)):
                raise
            self._whole = False
            await self.set_label(TORN)
            if _NOT_FLUSHED not in error.message:
                raise
            await self._flush_cache()
            await self.set_label(version)
            self._whole = True

    async def _flush_cache(self) -> None:
        """SGLang keeps its cache while it has calls, also queued ones: they are cut. Raises StepRefused if it keeps it all the same."""
        until = time.monotonic() + PROBE_SECONDS
        while True:
            await self.abort_all()
            try:
                await self._ask("POST", "/flush_cache", seconds=PROBE_SECONDS)
                return
            except StepRefused as error:
                if time.monotonic() > until:
                    raise StepRefused(
                        f"it holds the new weights, and cannot flush its cache of the old ones: {error.message}"
                    ) from error
            await asyncio.sleep(_FLUSH_SECONDS)

    async def finish_full(self, version: int) -> None:
        if (label := await self.read_label()) != str(version):
            raise StepRefused(f"the engine calls its weights {label!r} after loading version {version}")

    async def load_adapter(self, name: str, path: str) -> None:
        raise StepRefused("versions of adapters are not loaded into SGLang; push full weights")

    async def abort_all(self) -> None:
        await self._ask("POST", "/abort_request", {"rid": "", "abort_all": True}, seconds=PROBE_SECONDS)

    async def _ask(
        self, method: str, route: str, body: dict[str, Any] | None = None, *, seconds: float | None = None
    ) -> dict[str, Any]:
        try:
            return await super()._ask(method, route, body, seconds=seconds)
        except StepRefused as error:
            if error.http_status == 404:
                error.message = f"the engine has no {route}"
            raise

    async def _model_info(self) -> dict[str, Any]:
        newer, older = _INFO_ROUTES
        try:
            return await self._ask("GET", newer, seconds=PROBE_SECONDS)
        except StepRefused as error:
            if error.http_status != 404:
                raise
        return await self._ask("GET", older, seconds=PROBE_SECONDS)
