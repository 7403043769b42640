"""A prompt of its own, without messages, on the token path: ids in, ids and their text out.

`/v1/completions/render` tokenises text, `/v1/completions/derender` spells ids out, and generate tells the text of what it samples
itself when asked for it (`output_mode: text`): stop strings are held back and cut by the engine. Checked against vLLM 0.32.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any

import msgspec

from proxy.dialects.base import Delta, FirstToken, Request
from proxy.engine.apis.base import SEED_IDS, Engine, Job, Outcome, Rendered, Sampled, Tokenizer, at, check_heard, shows
from proxy.engine.apis.details import PromptLogprobs, details_of
from proxy.engine.apis.id_text import IdText
from proxy.engine.apis.vllm_reply import GENERATE, Usage, Version, generate_body, spans_of, streamed
from proxy.engine.replica import Replica
from proxy.engine.wire.http import EngineHttp, Told
from proxy.errors import ContextTooLong, EngineFailed, VerbatimError
from reconstruct.errors import IdOutOfRange
from reconstruct.records import Ids


class _Logprobs(msgspec.Struct):
    content: list[dict[str, Any]] | None = None


class _Choice(msgspec.Struct):
    index: int
    text: str = ""
    finish_reason: str | None = None
    stop_reason: str | int | None = None
    token_ids: list[int] | None = None
    logprobs: _Logprobs | None = None
    weight_versions: list[Version] | None = None
    routed_experts: str | None = None


class _Answer(Told):
    """A whole answer or an event of a stream."""

    choices: list[_Choice] = msgspec.field(default_factory=list)
    usage: Usage | None = None
    prompt_logprobs: PromptLogprobs | None = None


class _Spelled(msgspec.Struct):
    text: str


class _Derendered(msgspec.Struct):
    choices: list[_Spelled]


class TextApi:
    """The token path for requests with a prompt; what it does not do itself it leaves to `messages`, the token path for others."""

    api = "token"

    def __init__(self, http: EngineHttp, messages: Engine) -> None:
        self._http = http
        self._messages = messages

    def tokenizer(self, replica: Replica, request: Request, id_text: IdText) -> Tokenizer:
        return _Tokenizer(self._http, replica, request, id_text)

    async def count(self, replica: Replica, request: Request) -> int:
        if not isinstance(request.prompt, str):
            return len(request.prompt or ())
        rendered = await self.tokenizer(replica, request, IdText()).tokenize(request.prompt, whole=True)
        return len(rendered.ids)

    async def abort(self, replica: Replica, job: Job) -> bool:
        return await self._messages.abort(replica, job)

    async def sample(self, replica: Replica, job: Job, *, stream: bool) -> AsyncIterator[FirstToken | Delta | Outcome]:
        """Streaming, yields FirstToken and the engine's own pieces of text; then one Outcome."""
        choices = [_Gathered(index) for index in range(job.request.n)]
        usage, given, broken, begun = Usage(), None, None, not stream
        streams = streamed(job, stream)
        try:
            body = _text_body(replica, job, streams)
            async for answer in self._http.answers(replica, GENERATE, body, _Answer, job.line, stream=streams):
                usage.take(answer.usage)
                given = answer.prompt_logprobs or given
                if not begun:
                    begun = True
                    yield FirstToken()
                for piece in answer.choices:
                    delta = at(choices, piece.index).add(piece)
                    if stream and shows(job.request, delta):
                        yield delta
        except VerbatimError as error:
            if not any(choice.token_ids for choice in choices):
                raise
            broken = error.message
        else:
            check_heard(choices)
        assert job.prompt_ids is not None
        sampled = [choice.sampled(replica, job, given) for choice in choices]
        yield Outcome(sampled, None, len(job.prompt_ids), usage.cached_tokens, broken)


def _text_body(replica: Replica, job: Job, streams: bool) -> dict[str, Any]:
    body = generate_body(replica, job, streams) | {"output_mode": "text"}
    # Told as text, the most probable tokens have no ids that could be kept: no more of them than the harness asked for.
    body["sampling_params"]["logprobs"] = job.request.top_logprobs or 0
    return body


class _Gathered:
    """One choice, put together from a whole answer or from the events of a stream."""

    def __init__(self, index: int) -> None:
        self.index = index
        self.heard = False
        self.token_ids: list[int] = []
        self._text: list[str] = []
        self._entries: list[dict[str, Any]] = []
        self._versions: list[Version] = []
        self._finish_reason: str | None = None
        self._stop_reason: str | int | None = None
        self._routed_experts: str | None = None

    def add(self, piece: _Choice) -> Delta:
        entries = (piece.logprobs.content if piece.logprobs else None) or []
        token_ids = piece.token_ids or []
        self._text.append(piece.text)
        self.token_ids.extend(token_ids)
        self._entries.extend(entries)
        self._versions.extend(piece.weight_versions or ())
        self._routed_experts = piece.routed_experts or self._routed_experts
        self._finish_reason = piece.finish_reason or self._finish_reason
        self._stop_reason = piece.stop_reason if piece.stop_reason is not None else self._stop_reason
        return Delta(self.index, piece.text, logprobs=entries, token_ids=token_ids)

    def sampled(self, replica: Replica, job: Job, given: PromptLogprobs | None) -> Sampled:
        assert job.prompt_ids is not None
        return Sampled(
            index=self.index,
            token_ids=self.token_ids,
            logprobs=[entry.get("logprob") for entry in self._entries],
            spans=spans_of(replica, self._versions),
            finish_reason=self._finish_reason or "abort",
            stop_reason=self._stop_reason,
            message={"role": "assistant", "content": "".join(self._text)},
            logprob_content=self._entries if job.request.top_logprobs is not None else None,
            details=details_of(
                job.wanted,
                job.prompt_ids,
                len(self.token_ids),
                prompt_logprobs=given,
                routed_experts=self._routed_experts,
            ),
        )


class _Tokenizer:
    def __init__(self, http: EngineHttp, replica: Replica, request: Request, id_text: IdText) -> None:
        self._http = http
        self._replica = replica
        self._request = request
        self._id_text = id_text

    async def tokenize(self, text: str, *, whole: bool) -> Rendered:
        fields = {} if whole else {"add_special_tokens": False}
        answer = await self._render({"prompt": text, **fields})
        try:
            ids = self._id_text.read(bytes(answer.pop("token_ids", b"")), remember=whole)
            return Rendered(ids, _plain(answer))
        except (msgspec.DecodeError, IdOutOfRange) as error:
            raise EngineFailed(f"engine {self._replica.name} rendered no token_ids: {error}") from error

    async def parameters(self, prompt_ids: Sequence[int]) -> dict[str, Any]:
        # They do not depend on the ids, and one is less to send than all.
        answer = await self._render({"prompt": list(prompt_ids[-1:])})
        answer.pop("token_ids", None)
        return _plain(answer)

    async def spell(self, before: Ids, ids: Ids) -> str:
        body = {
            "model": self._request.model,
            "generate_responses": [{"choices": [{"index": 0, "token_ids": ids.tolist()}]}],
            "prompt_token_ids": [before[-SEED_IDS:].tolist()],
            "completion_request": {"model": self._request.model, "prompt": "?", "skip_special_tokens": False},
        }
        answer = await self._http.ask(self._replica, "/v1/completions/derender", body, _Derendered)
        return answer.choices[0].text

    async def _render(self, fields: Mapping[str, Any]) -> dict[str, msgspec.Raw]:
        # The limit is set when the ids are known; the API's own default would be taken off the window.
        body = {**self._request.forward, "model": self._request.model, "max_tokens": 1, **fields}
        try:
            (answer,) = await self._http.ask(self._replica, "/v1/completions/render", body, list[dict[str, msgspec.Raw]])
        except ContextTooLong as error:
            error.param = "prompt"
            raise
        except ValueError as error:
            raise EngineFailed(f"engine {self._replica.name} rendered one prompt as several") from error
        return answer


def _plain(answer: Mapping[str, msgspec.Raw]) -> dict[str, Any]:
    return {name: msgspec.json.decode(value) for name, value in answer.items()}
