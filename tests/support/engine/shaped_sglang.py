"""A server that answers as SGLang's source says it does, without a model: `/generate`, and the routes for weights.

The shapes are those of sglang 0.5.5 and 0.5.23: `managers/tokenizer_manager.py` (`_handle_batch_output` makes `meta_info`),
`managers/schedule_batch.py` (finish reasons), `utils/weight_versions.py` (spans, 0.5.23), `entrypoints/http_server.py` (routes).
What a stream repeats: 0.5.5 and 0.5.23 tell all logprobs again with every event, 0.5.23 under `--incremental-streaming-output` the
new ones alone.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Self

from tests.support.engine.scripted_details import given_logprobs
from tests.support.engine.scripted_engine import Exchange, ScriptedEngine
from tests.support.engine.scripted_sampling import POLL_SECONDS, Generation, Say, logprobs_of, script_ids
from tests.support.engine.scripted_wire import model_list

ABORTED = {"type": "abort", "message": "Aborted", "status_code": None, "err_type": None}


@dataclass(frozen=True)
class Shaped:
    """One choice: its ids; `finish` as SGLang writes it, None: stopped by the last id. `versions`: spans of 0.5.23, None: its label.
    `waits_after`: so many tokens come, and then nothing until the call is aborted."""

    ids: Sequence[int]
    finish: dict[str, Any] | None = None
    versions: list[dict[str, Any]] | None = None
    waits_after: int | None = None
    prompt_tokens: int | None = None


class ShapedSglang(ScriptedEngine):
    """Samples what it is told to `shape`, else what it is told to `say`, of whose gates none opens.

    `newer`: 0.5.23, else 0.5.5. `label`: its weight version; `model_path`: the checkpoint it says it loaded. `refuses`: what the next
    load is refused with; `keeps_cache`: how often its cache cannot be flushed, by the next load to begin with; `stays_paused`: how often it
    fails to go on. `holds`: the checkpoint in its workers."""

    def __init__(
        self,
        *,
        newer: bool = True,
        incremental: bool = False,
        label: str = "0",
        window: int | None = 8192,
        paused: bool = False,
    ) -> None:
        super().__init__("qwen3", plain=True, updatable=False)
        self.newer, self.incremental, self.label, self.window = newer, incremental, label, window
        self.model_path, self.paused, self.refuses = "/models/first", paused, ""
        self.holds = self.model_path
        self.stays_paused = self.keeps_cache = 0
        self.label_at_end: str | None = None
        self.bodies: list[dict[str, Any]] = []
        self.aborted: set[str] = set()
        self._shaped: deque[Shaped] = deque()
        self._routes = {
            ("GET", "/v1/models"): self._models,
            ("POST", "/generate"): self._generate,
            ("POST", "/abort_request"): self._abort,
            ("POST", "/detokenize"): self._detokenize,
            ("GET", "/model_info" if newer else "/get_model_info"): self._info,
            ("POST", "/update_weight_version"): self._set_label,
            ("POST", "/update_weights_from_disk"): self._load,
            ("POST", "/pause_generation"): self._pause,
            ("POST", "/continue_generation"): self._continue,
            ("POST", "/flush_cache"): self._flush,
        }
        if newer:
            self._routes["GET", "/ready"] = self._ready

    def reset(self) -> Self:
        """As a scripted engine; what it holds and calls it stays."""
        self.bodies, self.aborted, self.refuses, self.label_at_end = [], set(), "", None
        self.stays_paused = self.keeps_cache = 0
        self._shaped.clear()
        return super().reset()

    def shape(self, *replies: Shaped) -> None:
        self._shaped.extend(replies)

    async def _models(self, exchange: Exchange, body: Any) -> None:
        await exchange.answer(model_list("policy", self.window))

    async def _info(self, exchange: Exchange, body: Any) -> None:
        told = {"model_path": self.model_path, "tokenizer_path": "/models/first", "is_generation": True}
        await exchange.answer(told | {"preferred_sampling_params": None, "weight_version": self.label})

    async def _ready(self, exchange: Exchange, body: Any) -> None:
        await exchange.answer(None, 503 if self.paused else 200)

    async def _generate(self, exchange: Exchange, body: Any) -> None:
        if not body.get("input_ids"):
            message = "Either text, input_ids or input_embeds should be provided."
            return await exchange.answer({"error": {"message": message}}, 400)
        generation = self._note(exchange, body)
        window, count = self.window or 8192, len(body["input_ids"])
        if count >= window:
            message = f"The input ({count} tokens) is longer than the model's context length ({window} tokens)."
            return await self._refuse(exchange, body, message)
        choices = [self._choose(generation, index) for index in range(generation.n)]
        await (self._stream if body["stream"] else self._whole)(exchange, generation, choices)
        return None

    def _note(self, exchange: Exchange, body: Any) -> Generation:
        asked = {"path": exchange.path, "body": body, "headers": exchange.headers, "request_id": body["rid"]}
        given = {
            "prompt_ids": body["input_ids"],
            "prompt": self.family.decode(body["input_ids"]),
            "messages": None,
            "tools": [],
        }
        generation = Generation(**asked, **given, sampling=body["sampling_params"], stream=body["stream"])
        if not self.is_aside(exchange.headers):
            self.bodies.append(body)
            self.generations.append(generation)
        return generation

    def _choose(self, generation: Generation, index: int) -> Shaped:
        if self._shaped and not self.is_aside(generation.headers):
            return self._shaped.popleft()
        said = self.reply_to(generation, index)
        assert isinstance(said, Say)
        return Shaped(script_ids(self.family, said), waits_after=said.gate_after if said.gate else None)

    async def _refuse(self, exchange: Exchange, body: Any, message: str) -> None:
        """In a stream an error is an event: by then HTTP 200 is said."""
        if not body["stream"]:
            await exchange.answer({"error": {"message": message}}, 400)
            return
        await exchange.open_stream()
        told = {"message": message, "type": "invalid_request_error", "code": 400, "retryable": False}
        await exchange.event({"error": told})
        await exchange.close_stream()

    async def _whole(self, exchange: Exchange, generation: Generation, choices: Sequence[Shaped]) -> None:
        answers = []
        for index, choice in enumerate(choices):
            said, finish = await self._sampled(generation, index, choice)
            answers.append(self._answer(generation.body, choice, said, 0, finish))
        await exchange.answer(answers if len(answers) > 1 else answers[0])

    async def _stream(self, exchange: Exchange, generation: Generation, choices: Sequence[Shaped]) -> None:
        """Two tokens an event, and the finish with the last."""
        body = generation.body
        await exchange.open_stream()
        for index, choice in enumerate(choices):
            head = list(choice.ids[: choice.waits_after])
            for told in range(2, len(head) + (choice.waits_after is not None), 2):
                await exchange.event({**self._answer(body, choice, head[:told], told - 2, None), "index": index})
            said, finish = await self._sampled(generation, index, choice)
            sent = (len(said) - 1) // 2 * 2 if choice.waits_after is None else len(head) // 2 * 2
            await exchange.event({**self._answer(body, choice, said, sent, finish), "index": index})
        await exchange.close_stream()

    async def _sampled(self, generation: Generation, index: int, choice: Shaped) -> tuple[list[int], dict[str, Any]]:
        said = generation.sampled[index] = list(choice.ids[: choice.waits_after])
        if choice.waits_after is None:
            return said, choice.finish or {"type": "stop", "matched": said[-1]}
        while generation.request_id not in self.aborted:
            await asyncio.sleep(POLL_SECONDS)
        return said, ABORTED

    def _answer(
        self, body: dict[str, Any], choice: Shaped, said: list[int], sent: int, finish: dict[str, Any] | None
    ) -> dict[str, Any]:
        """All of the reply so far, or what is new since `sent` tokens."""
        start = sent if self.incremental and body["stream"] else 0
        logprobs = logprobs_of(body["input_ids"], said)
        label = self.label_at_end if finish is not None and self.label_at_end is not None else self.label
        entries: list[list[Any]] = [[logprob, token, None] for logprob, token in zip(logprobs, said, strict=True)][start:]
        meta = {
            "id": body["rid"],
            "finish_reason": finish,
            "prompt_tokens": choice.prompt_tokens or len(body["input_ids"]),
            "weight_version": label,
            "input_token_logprobs": self._score(body),
            "output_token_logprobs": entries,
            "completion_tokens": len(said),
            "cached_tokens": self.cached_tokens,
        }
        if body["top_logprobs_num"] and body["logprob_start_len"] == 0:
            told = [
                [[entry[0], entry[1], None], [entry[0] - 1, entry[1] + 1, None]] for entry in meta["input_token_logprobs"][1:]
            ]
            meta["input_top_logprobs"] = [None, *told]
        if body["top_logprobs_num"]:
            meta["output_top_logprobs"] = [[entry, [entry[0] - 1, 7, None]] for entry in entries]
        if self.newer:
            meta |= {"num_retractions": 0, "output_token_logprobs_length": len(said), "reasoning_tokens": 0}
            if finish is not None:
                meta["weight_versions"] = choice.versions or [{"version": label, "start": 0, "end": len(said)}]
        else:
            meta["total_retractions"] = 0
        streams = body["stream"] and not self.newer
        answer = {"text": self.family.decode(said[start:]), "output_ids": said[sent if streams else start :], "meta_info": meta}
        if self.newer and body.get("return_prompt_token_ids"):
            answer["prompt_token_ids"] = body["input_ids"]
        return answer

    def _score(self, body: dict[str, Any]) -> list[list[Any]]:
        """None of a prompt whose logprobs are not asked for from its first id on."""
        if body["logprob_start_len"] != 0:
            return []
        ids = body["input_ids"]
        told = [[logprob, token, None] for logprob, token in zip(given_logprobs(ids), ids, strict=True)]
        return told if self.bend_scores is None else self.bend_scores(self.generations[-1], told)

    async def _detokenize(self, exchange: Exchange, body: Any) -> None:
        skip = body.get("skip_special_tokens", True)
        await exchange.answer({"text": [self.family.decode(ids, skip_special=skip) for ids in body["tokens"]]})

    async def _abort(self, exchange: Exchange, body: Any) -> None:
        self.aborted.add(body["rid"])
        await exchange.answer_empty()

    async def _set_label(self, exchange: Exchange, body: Any) -> None:
        self.label = body["new_version"]
        message = f"Weight version updated to {self.label}"
        await exchange.answer({"success": True, "message": message, "new_version": self.label})

    async def _load(self, exchange: Exchange, body: Any) -> None:
        message, self.refuses = self.refuses, ""
        if message:
            return await exchange.answer({"success": False, "message": message, "num_paused_requests": 0}, 400)
        self.holds = body["model_path"]
        if self.keeps_cache:
            self.keeps_cache -= 1
            message = "Weights were updated, but the cache was not flushed."
            return await exchange.answer({"success": False, "message": message, "num_paused_requests": 0}, 400)
        self.model_path, self.label = body["model_path"], body["weight_version"]
        message = f"Succeeded to update model weights. Weight version updated to {self.label}."
        return await exchange.answer({"success": True, "message": message, "num_paused_requests": 0})

    async def _pause(self, exchange: Exchange, body: Any) -> None:
        self.paused = True
        await exchange.answer({"message": "Generation paused successfully.", "status": "ok"})

    async def _continue(self, exchange: Exchange, body: Any) -> None:
        if self.stays_paused:
            self.stays_paused -= 1
            return await exchange.answer({"message": "not now"}, 500)
        self.paused = False
        return await exchange.answer({"message": "Generation continued successfully.", "status": "ok"})

    async def _flush(self, exchange: Exchange, body: Any) -> None:
        if self.keeps_cache:
            self.keeps_cache -= 1
            return await exchange.answer("Cache flush failed.", 400)
        return await exchange.answer("Cache flushed.\nPlease check backend logs for more details.")
