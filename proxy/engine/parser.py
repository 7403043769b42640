"""Parser: what the ids of a reply say, by the engine's own tool and reasoning parsers (vLLM's derender endpoint)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from proxy.dialects.base import Delta, Request
from proxy.engine.base import Job, chat_body
from proxy.engine.live_text import DERENDER, LiveText
from proxy.engine.replica import Replica
from proxy.engine.sampled_choice import Parsed, SampledChoice
from proxy.engine.wire import EngineHttp


class _Derendered(msgspec.Struct):
    choices: list[dict[str, Any]]


class Parser:
    """The parsers of one job's engine, under what they need of its request: tools, choice and flags, but not the history."""

    def __init__(self, http: EngineHttp, replica: Replica, job: Job) -> None:
        self._http = http
        self._replica = replica
        self._job = job
        self._request = chat_body(job.request, {})
        self._request.pop("n", None)
        self._request["messages"] = job.request.messages[-1:]

    async def told(self, choice: SampledChoice) -> Parsed:
        """What the choice says in the end: what it was told to say on the way, and else what its ids are parsed to as a whole.

        Raises VerbatimError when the engine cannot parse its own reply.
        """
        parsed = await self._whole(choice)
        if choice.live is None or choice.live.extends_to(parsed.message):
            return parsed
        # The harness has read it already: then all of the reply is what those parsers make of it that told its beginning.
        finish_reason, prompt_ids = choice.finish_reason or "abort", self._job.prompt_json
        message = await choice.live.finish(self._http, self._replica, prompt_ids, self._request, finish_reason)
        keep_one_call(message, self._job.request)
        return Parsed(message, parsed.logprobs)

    async def step(self, live: LiveText) -> Delta | None:
        """See LiveText.step."""
        return await live.step(self._http, self._replica, self._job.prompt_json, self._request)

    async def _whole(self, choice: SampledChoice) -> Parsed:
        wanted = self._job.request.top_logprobs is not None
        spoken = choice.spoken
        if not choice.token_ids or not (spoken or wanted):
            return Parsed({"role": "assistant", "content": ""})
        body = {
            "model": self._job.request.model,
            "generate_response": self._generate_response(choice, spoken or choice.token_ids, wanted),
            "chat_request": self._request,
        }
        derendered = (await self._http.ask(self._replica, DERENDER, body, _Derendered)).choices[0]
        content = (derendered.get("logprobs") or {}).get("content") if wanted else None
        message = self._cut(derendered.get("message") or {}, choice) if spoken else {"role": "assistant", "content": ""}
        return Parsed(message, content)

    def _cut(self, derendered: Mapping[str, Any], choice: SampledChoice) -> dict[str, Any]:
        """The message as vLLM's chat endpoint would show it; derender shows all that was sampled."""
        message = plain_message(derendered)
        if isinstance(choice.stop_reason, str):
            kept = bool(self._job.request.forward.get("include_stop_str_in_output"))
            cut_at_stop(message, choice.stop_reason, kept=kept)
        keep_one_call(message, self._job.request)
        return message

    def _generate_response(self, choice: SampledChoice, token_ids: Sequence[int], with_logprobs: bool) -> dict[str, Any]:
        shaped: dict[str, Any] = {
            "index": 0,
            "token_ids": token_ids,
            "finish_reason": choice.finish_reason or "abort",
            "stop_reason": choice.stop_reason,
        }
        if with_logprobs:
            shaped["logprobs"] = {"content": choice.shown(self._job)}
        return {"request_id": self._job.call_id, "choices": [shaped], "prompt_token_ids": self._job.prompt_json}


def plain_message(message: Mapping[str, Any]) -> dict[str, Any]:
    """An engine's assistant message with the fields harnesses know: content, reasoning_content, tool_calls."""
    plain: dict[str, Any] = {"role": "assistant", "content": message.get("content")}
    reasoning = message.get("reasoning_content") or message.get("reasoning")
    if reasoning:
        plain["reasoning_content"] = reasoning
    calls = message.get("tool_calls")
    if calls:
        plain["tool_calls"] = [_plain_call(call) for call in calls]
    if plain["content"] is None and not calls:
        plain["content"] = ""
    return plain


def _plain_call(call: Mapping[str, Any]) -> dict[str, Any]:
    function = call.get("function") or {}
    return {
        "id": call.get("id") or "",
        "type": "function",
        "function": {"name": function.get("name") or "", "arguments": function.get("arguments") or ""},
    }


def keep_one_call(message: dict[str, Any], request: Request) -> None:
    """Drop the tool calls after the first where the harness wants no parallel ones."""
    if request.forward.get("parallel_tool_calls") is False and message.get("tool_calls"):
        message["tool_calls"] = message["tool_calls"][:1]


def cut_at_stop(message: dict[str, Any], stop: str, *, kept: bool = False) -> None:
    """Drop the stop string, unless it is to be `kept`, and what follows from the text that holds it: the ids keep all of it, the
    harness's text does not."""
    for field in ("content", "reasoning_content"):
        text = message.get(field)
        if text and stop in text:
            message[field] = text[: text.rindex(stop) + (len(stop) if kept else 0)]
            return
