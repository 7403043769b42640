"""vLLM with this project's endpoint plugin (`proxy.engine.in_vllm`): one request plans the prompt, samples and parses.

What comes of it is what the three routes of `proxy.engine.apis.vllm` give, to the last field.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import msgspec
import numpy as np

from proxy.dialects.base import Delta, FirstToken, PromptReady, Request
from proxy.engine.apis.base import Emit, PlanRequest, PlansNoMore, SamplingJob, chat_body
from proxy.engine.apis.probe import Probe
from proxy.engine.apis.reply import (
    CertainText,
    EngineChoice,
    EnginePlan,
    EngineReply,
    GeneratedChoice,
    PartialReply,
    Version,
    choice_at,
    is_visible,
    keep_one_call,
    plain_message,
)
from proxy.engine.apis.reply import Tops as TopLists
from proxy.engine.in_vllm.frames import (
    PROTOCOL,
    ROUTE,
    SAMPLE,
    Ancestor,
    Ask,
    DoneFrame,
    EndFrame,
    FailedFrame,
    Frame,
    PieceFrame,
    PlanFrame,
    Tops,
    read_after,
    read_ids,
    read_logprobs,
    to_bytes,
    write_after,
    write_ask,
)
from proxy.engine.in_vllm.internals import CHECKED
from proxy.engine.replica import Replica
from proxy.engine.wire.http import EngineHttp
from proxy.engine.wire.refusals import FramesRefused
from proxy.errors import ContextTooLong, EngineFailed
from proxy.images import SCHEME, media_type, write_images
from reconstruct.details import NO_TOKEN
from reconstruct.prompt import Prompt
from reconstruct.records import Logprobs, pack_ids

_NO_IDS = pack_ids(())
_encode = msgspec.json.Encoder().encode


NOTE = "plugin"
"""The topic of what is noted about a plugin that is installed and not used."""


async def find_plugin(http: EngineHttp, probe: Probe, replica: Replica) -> bool:
    """Whether the engine has the plugin, with the protocol that this service speaks, and nothing on the way refuses its requests. Notes one
    that is installed and cannot be used."""
    about = await probe.read(ROUTE)
    protocol, replica.vocabulary = about.get("protocol"), str(about.get("vocabulary") or "")
    if protocol == PROTOCOL:
        if refused := await http.try_frames(replica, SAMPLE):
            _note_refused(replica, refused)
            return False
        replica.note(NOTE, "")
        return True
    if protocol is not None:
        why = f"it speaks protocol {protocol} and this service {PROTOCOL}; install the same release of Verbatim on both sides"
    elif await _is_installed(probe):
        version = str((await probe.read("/version")).get("version") or "")
        why = (
            f"it adds no routes to this vLLM {version} (it was checked with {' and '.join(CHECKED)}); the engine's log says why"
        )
    else:
        replica.note(NOTE, "")
        return False
    replica.note(NOTE, f"takes calls over vLLM's own routes: the plugin is installed, but {why}")
    return False


def _note_refused(replica: Replica, reason: str) -> None:
    replica.note(NOTE, f"takes calls over vLLM's own routes: the plugin's requests are refused there ({reason})")


async def _is_installed(probe: Probe) -> bool:
    """Whether vLLM says that it was started with the plugin; it only says so in dev mode."""
    # The first answer may take long: vLLM collects what it can about the machine.
    with contextlib.suppress(TimeoutError):
        environment = (await probe.read("/server_info?config_format=json")).get("vllm_env")
        return isinstance(environment, dict) and "verbatim" in str(environment.get("VLLM_PLUGINS"))
    return False


async def sample(http: EngineHttp, replica: Replica, job: SamplingJob, *, stream: bool, emit: Emit) -> EngineReply:
    """See EngineKind.sample. The plan is checked, and told as PromptReady, before anything else is emitted."""
    reply = _Reply(replica, job, stream, emit)
    try:
        with PartialReply(reply.choices) as reading:
            async with http.receive_frames(replica, SAMPLE, write_ask(_ask(replica, job, stream)), job.scope) as answer:
                await answer.follow(reply.take)
    except FramesRefused as error:
        # Of a router, or the engine was started again without the plugin.
        replica.host.plugin = replica.plugin = False
        _note_refused(replica.host, error.message)
        raise PlansNoMore(error.message) from error
    except ContextTooLong as error:
        error.param = "messages" if job.request.prompt is None else "prompt"
        raise
    return reply.finish(reading.broken)


def _ask(replica: Replica, job: SamplingJob, stream: bool) -> Ask:
    request, wanted, plan = job.request, job.wanted, job.plan
    # Images travel as bytes beside the messages that name them.
    names = {digest: SCHEME + digest for digest in request.images}
    body = chat_body(request, {}, job.id_text, () if names else None)
    if names:
        body["messages"] = write_images(request.engine_messages, names)
    body.pop("n", None)
    body["model"] = job.model
    sampling = {**job.sampling, **wanted.parameters}
    sampling["logprobs"] = (request.top_logprobs or 0) if request.prompt is not None else wanted.logprobs(request.top_logprobs)
    if request.n > 1:
        sampling["n"] = request.n
    return Ask(
        job.call_id,
        _encode(body),
        sampling,
        stream,
        to_bytes(job.prompt_ids) if len(job.prompt_ids) else None,
        None if plan is None else _ancestor(plan, request.engine_messages, names),
        None if plan is None else plan.max_total,
        request.top_logprobs,
        max(sampling["logprobs"], 1) if wanted.top_logprobs and request.prompt is None else 0,
        plan is not None and plan.experts_from_parent,
        {names[digest]: (media_type(data), data) for digest, data in request.image_bytes.items()},
    )


def _ancestor(plan: PlanRequest, messages: Sequence[Mapping[str, Any]], names: Mapping[str, str]) -> Ancestor | None:
    parent = plan.parent
    if parent is None:
        return None
    recorded = {
        position: _encode(write_images([known], names)[0] if names else known)
        for position, (known, sent) in enumerate(zip([*parent.history, *parent.tail], messages, strict=True))
        if known is not sent and known != sent
    }
    ids = parent.ids
    return Ancestor(
        len(parent.history),
        parent.closed,
        None if ids is None else to_bytes(ids),
        parent.sampled,
        recorded,
        None if plan.close is None else to_bytes(plan.close),
        None if parent.asked is None else write_after(_NO_IDS if ids is None else ids, parent.asked),
        parent.other_render_key,
        plan.retain_thinking,
        list(parent.media),
    )


class _Choice(GeneratedChoice):
    """One choice of a reply by the plugin."""

    def __init__(self, index: int, live: bool, continued: Request | None) -> None:
        """`continued`: the request whose prompt it goes on with, where that is streamed."""
        super().__init__(index)
        self._continued = continued
        self.text = CertainText(index) if live else None
        self.ended: EndFrame | None = None
        self._tops: list[Sequence[tuple[int, float]]] = []
        self._shown: list[dict[str, Any]] = []
        self._ids: list[bytes] = []
        self._logprobs: list[bytes] = []

    @property
    def has_content(self) -> bool:
        return any(self._ids)

    def add(self, piece: PieceFrame) -> Delta | None:
        """Add what was sampled; what the harness sees of it now."""
        self._ids.append(piece.ids)
        self._logprobs.append(piece.logprobs)
        if piece.tops is not None:
            self._tops += _read_tops(piece.tops)
        if piece.shown is not None:
            self._shown += piece.shown
        if self.text is not None:
            if piece.delta is None:
                return None
            self.text.add_delta(piece.delta)
            return self.text.take_certain()
        if self._continued is None:
            return None
        content = (piece.delta or {}).get("content") or ""
        delta = Delta(self.index, content, logprobs=piece.shown or [], token_ids=read_ids(piece.ids).tolist())
        return delta if is_visible(self._continued, delta) else None

    def end(self, ended: EndFrame) -> None:
        self.ended = ended
        self.finish_reason, self.stop_reason = ended.finish_reason, ended.stop_reason
        self.versions = [Version(*span) for span in ended.versions or ()]
        self.routed_experts = ended.experts
        self.sampled_text = ended.text

    def message(self, job: SamplingJob) -> dict[str, Any]:
        """The parse of the whole reply; what the streaming parsers made of it if the harness has already read text that the whole does
        not begin with."""
        ended = self.ended
        if not self.token_ids or ended is None or ended.message is None:
            return {"role": "assistant", "content": ""}
        message = plain_message(ended.message)
        if self.text is not None and not self.text.is_prefix_of(message):
            message = self.text.message()
        keep_one_call(message, job.request)
        return message

    def finish_sampled(self, replica: Replica, job: SamplingJob, prompt_logprobs: Logprobs | None) -> EngineChoice:
        self.token_ids = read_ids(b"".join(self._ids)).tolist()
        logprobs: list[float | None] = read_logprobs(b"".join(self._logprobs)).tolist()
        content = self._shown
        if job.request.prompt is None:
            content = (self.ended.shown if self.ended is not None else None) or []
        shown = content if job.request.top_logprobs is not None and self.token_ids else None
        tops = self._tops if job.wanted.top_logprobs and job.request.prompt is None else None
        return self.finish(replica, job.wanted, job.prompt_ids, logprobs, self.message(job), shown, prompt_logprobs, tops)


class _Reply:
    """A call's reply while its frames arrive."""

    def __init__(self, replica: Replica, job: SamplingJob, stream: bool, emit: Emit) -> None:
        self._replica = replica
        self._job = job
        self._stream = stream
        self._emit = emit
        self._begun = False
        self._adjusted: dict[str, Any] = {}
        self._done: DoneFrame | None = None
        self._plan: EnginePlan | None = None
        # Logprobs belong to the whole text: then it waits for the end.
        live = stream and job.request.prompt is None and job.request.top_logprobs is None
        continued = job.request if stream and job.request.prompt is not None else None
        self.choices = [_Choice(index, live, continued) for index in range(job.request.n)]

    def take(self, frames: list[Frame]) -> None:
        """Add what arrived together, and pass on what of it is certain."""
        deltas: list[Delta] = []
        try:
            choice = self.choices[0]
            for frame in frames:
                if not isinstance(frame, PieceFrame):
                    self._take_frame(frame)
                    continue
                if not (choice.heard and choice.index == frame.index):
                    choice = self._find_choice(frame)
                delta = choice.add(frame)
                if delta is not None:
                    deltas.append(delta)
        finally:
            if deltas:
                self._emit(deltas)

    def _take_frame(self, frame: Frame) -> None:
        match frame:
            case EndFrame():
                choice_at(self.choices, frame.index).end(frame)
            case PlanFrame():
                self._take_plan(frame)
            case DoneFrame():
                self._done = frame
            case FailedFrame():
                raise EngineFailed(f"engine {self._replica.name} broke off: {frame.message[:300]}")

    def _take_plan(self, told: PlanFrame) -> None:
        job, plan = self._job, self._job.plan
        parent_ids = _NO_IDS if plan is None or plan.parent is None or plan.parent.ids is None else plan.parent.ids
        try:
            ids = read_after(parent_ids, told.kept, told.tail)
            rendering = read_after(ids, told.shared, told.rest)
        except ValueError as error:
            raise EngineFailed(f"engine {self._replica.name} planned another call's prompt: {error}") from error
        if len(job.prompt_ids) and not np.array_equal(ids, job.prompt_ids):
            raise EngineFailed(f"engine {self._replica.name} sampled after other ids than it was given")
        media = tuple((start, length) for start, length in told.media)
        wanted = replace(job.wanted, routed_from=told.experts_from or job.wanted.routed_from)
        self._adjusted = {"max_tokens": told.max_tokens}
        self._job = msgspec.structs.replace(job, prompt_ids=ids, media=media, wanted=wanted)
        if plan is None:
            return
        plan.check(media)
        close = None if told.close is None else read_ids(told.close)
        prompt = Prompt(ids, told.branch_reason, rendering, close, told.continues, media, told.adds_end)
        self._plan = EnginePlan(prompt, {"sampling_params": told.defaults})
        if self._stream:
            self._emit(PromptReady(len(ids)))

    def _find_choice(self, piece: PieceFrame) -> _Choice:
        if self._stream and not self._begun:
            self._begun = True
            self._emit(FirstToken())
        return choice_at(self.choices, piece.index)

    def finish(self, broken: str | None) -> EngineReply:
        """Emits what is left of the text."""
        job, done = self._job, self._done
        scores = None if done is None or done.prompt_logprobs is None else read_logprobs(done.prompt_logprobs)
        sampled = [choice.finish_sampled(self._replica, job, scores) for choice in self.choices]
        unparsed = [choice.ended.unparsed for choice in self.choices if choice.ended is not None and choice.ended.unparsed]
        broken = broken or (f"engine {self._replica.name} cannot parse its reply: {unparsed[0][:300]}" if unparsed else None)
        for choice, one in zip(self.choices, sampled, strict=True):
            # The rest of a broken reply is not sent.
            rest = choice.text.take_rest(one.message) if choice.text is not None and broken is None else None
            if rest is not None:
                self._emit([rest])
        cached = 0 if done is None else done.cached_tokens
        return EngineReply(sampled, None, len(job.prompt_ids), cached, broken, plan=self._plan, adjusted=self._adjusted)


def _read_tops(tops: Tops) -> TopLists:
    ids = read_ids(tops.ids).reshape(-1, tops.width).tolist()
    logprobs = read_logprobs(tops.logprobs).reshape(-1, tops.width).tolist()
    return [
        [(token, logprob) for token, logprob in zip(row, values, strict=True) if token != NO_TOKEN]
        for row, values in zip(ids, logprobs, strict=True)
    ]
