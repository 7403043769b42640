"""What the scripted engine samples: a script says the tokens, this module lets them out one by one as an engine would.

Stop tokens, stop strings, limits, aborts, pauses, weight versions and logprobs behave as in vLLM 0.32. A logprob is a function of
the ids before a token and the token alone, so a test can recompute every one of them: see `logprobs_of`.
"""

from __future__ import annotations

import asyncio
import random
import struct
import threading
import zlib
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from tokenizers.decoders import DecodeStream

from tests.support.engine.template_families import Family

POLL_SECONDS = 0.002


@dataclass(frozen=True)
class Say:
    """One choice as the model samples it: `text` in its canonical split, or exactly `token_ids`.

    A text without a stop token gets the family's EOS; ids are taken as they are. Tokens that run out without a stop end with
    `length`. `gate`: nothing more is sampled after `gate_after` tokens until it is set. `break_after`: the connection breaks
    after so many tokens; `error_after`: an error event takes its place (streams) or HTTP 500 (whole replies).
    """

    text: str = ""
    token_ids: Sequence[int] | None = None
    finish_reason: str | None = None
    seconds_before: float = 0.0
    seconds_per_token: float = 0.0
    gate: threading.Event | None = None
    gate_after: int = 0
    break_after: int | None = None
    error_after: int | None = None
    unknown_logprobs: frozenset[int] = frozenset()


@dataclass(frozen=True)
class Fail:
    """The request is answered with an error, in vLLM's shape."""

    status: int = 500
    message: str = "the engine failed"
    type: str = "InternalServerError"
    param: str | None = None


@dataclass(frozen=True)
class Drop:
    """The connection is closed without a word."""


@dataclass(frozen=True)
class Hang:
    """No answer ever comes."""


Reply = Say | Fail | Drop | Hang


@dataclass(eq=False)
class Generation:
    """One sampling request the engine took, and what became of it."""

    path: str
    body: dict[str, Any]
    headers: dict[str, str]
    request_id: str
    prompt_ids: list[int]
    prompt: str
    messages: list[dict[str, Any]] | None
    tools: list[dict[str, Any]]
    sampling: dict[str, Any]
    stream: bool
    cached_tokens: int = 0
    routes: bool = False
    bend_scores: Callable[[Generation, list[Any]], list[Any]] | None = None
    """What becomes of the logprobs of its prompt."""
    placeholders: list[dict[str, int]] = field(default_factory=list)
    """The ranges of its images."""
    sampled: dict[int, list[int]] = field(default_factory=dict)
    aborted: bool = False
    disconnected: bool = False

    @property
    def n(self) -> int:
        return int(self.sampling.get("n") or 1)


@dataclass(frozen=True)
class Step:
    """One token of one choice (None: only the end), with its logprob entry in the generate shape."""

    index: int
    token_id: int | None
    text: str
    entry: dict[str, Any] | None
    finish_reason: str | None
    stop_reason: str | int | None
    versions: list[dict[str, Any]] | None


class Broken(Exception):
    """The script says that the connection breaks here."""


class EngineError(Exception):
    """The script says that the engine fails here."""


def logprobs_of(prompt_ids: Sequence[int], completion_ids: Sequence[int]) -> list[float]:
    """The logprob of each sampled token after the ids before it; exact in float32."""
    state = zlib.crc32(struct.pack(f"<{len(prompt_ids)}i", *prompt_ids))
    logprobs = []
    for token_id in completion_ids:
        state = zlib.crc32(struct.pack("<i", token_id), state)
        logprobs.append(_logprob(state))
    return logprobs


def _logprob(state: int) -> float:
    return -(1 + state % 8191) / 1024


class Sampler:
    """The state that all requests share: whether sampling is paused, and the label of the weights."""

    def __init__(self, family: Family) -> None:
        self.family = family
        self.version = "default"
        self.admitting = asyncio.Event()
        self.going = asyncio.Event()
        self.running: set[Generation] = set()
        self.refuses_while_paused = False
        """As vLLM 0.33 does but in mode `keep`; before, new requests wait in every mode."""
        self.refused = 0
        self.shows_one_more = False
        """As vLLM 0.33 does where the sampled token is not among the likeliest."""
        self.resume()

    def resume(self) -> None:
        self.admitting.set()
        self.going.set()
        self.refusing = False

    async def pause(self, mode: str) -> None:
        """`keep` freezes what runs, `wait` lets it end first, `abort` ends it; new requests wait, or are refused."""
        self.admitting.clear()
        self.refusing = self.refuses_while_paused and mode != "keep"
        if mode == "keep":
            self.going.clear()
        if mode == "abort":
            for generation in self.running:
                generation.aborted = True
        while mode != "keep" and self.running:
            await asyncio.sleep(POLL_SECONDS)

    def abort(self, request_ids: Sequence[str]) -> int:
        """Abort by engine request id; none given: everything. How many were named."""
        for generation in self.running:
            if not request_ids or generation.request_id in request_ids:
                generation.aborted = True
        return len(request_ids) or len(self.running)

    async def steps(self, generation: Generation, index: int, say: Say, max_model_len: int) -> AsyncIterator[Step]:
        """The tokens of one choice. Raises Broken or EngineError where the script says so."""
        choice = _Choice(self, generation, index, say, max_model_len)
        async for step in choice.steps():
            yield step


class _Choice:
    def __init__(self, sampler: Sampler, generation: Generation, index: int, say: Say, max_model_len: int) -> None:
        self._sampler = sampler
        self._generation = generation
        self._index = index
        self._say = say
        self._ids = generation.sampled.setdefault(index, [])
        self._script = script_ids(sampler.family, say)
        self._state = zlib.crc32(struct.pack(f"<{len(generation.prompt_ids)}i", *generation.prompt_ids))
        sampling = generation.sampling
        room = max_model_len - len(generation.prompt_ids)
        self._limit = min(room, sampling["max_tokens"] if sampling.get("max_tokens") is not None else room)
        self._stop_ids = {*sampler.family.other_end_ids, *(sampling.get("stop_token_ids") or ())}
        stop = sampling.get("stop") or ()
        self._stop = (stop,) if isinstance(stop, str) else tuple(stop)
        self._text = ""
        self._decoder = DecodeStream(skip_special_tokens=bool(sampling.get("skip_special_tokens", True)))
        self._starts: list[tuple[str, int]] = []

    async def steps(self) -> AsyncIterator[Step]:
        await asyncio.sleep(self._say.seconds_before)
        while True:
            await self._wait()
            if self._generation.aborted:
                yield self._end("abort")
                return
            done = len(self._ids)
            if done == self._say.break_after:
                raise Broken
            if done == self._say.error_after:
                raise EngineError
            if done == len(self._script):
                yield self._end(self._say.finish_reason or "length")
                return
            step = self._sample(self._script[done])
            yield step
            if step.finish_reason is not None:
                return
            if self._say.seconds_per_token or self._generation.stream or len(self._ids) % 16 == 0:
                # Also without a delay: other requests and the client's hanging up get their turn.
                await asyncio.sleep(self._say.seconds_per_token)

    async def _wait(self) -> None:
        """Until neither a pause nor the script's gate holds this choice."""
        gate, after = self._say.gate, self._say.gate_after
        while not self._generation.aborted:
            gated = gate is not None and len(self._ids) >= after and not gate.is_set()
            if not gated and self._sampler.going.is_set():
                return
            await asyncio.sleep(POLL_SECONDS)

    def _sample(self, token_id: int) -> Step:
        if not self._starts or self._starts[-1][0] != self._sampler.version:
            self._starts.append((self._sampler.version, len(self._ids)))
        position = len(self._ids)
        self._ids.append(token_id)
        self._state = zlib.crc32(struct.pack("<i", token_id), self._state)
        finish_reason, stop_reason, text = self._finish(token_id)
        versions = self._versions() if finish_reason else None
        return Step(self._index, token_id, text, self._entry(token_id, position), finish_reason, stop_reason, versions)

    def _finish(self, token_id: int) -> tuple[str | None, str | int | None, str]:
        """(finish reason, stop reason, text the token adds). A stop token adds none."""
        ignore = self._generation.sampling.get("ignore_eos")
        if token_id == self._sampler.family.end_id and not ignore:
            return "stop", None, ""
        if token_id in self._stop_ids and not ignore:
            return "stop", token_id, ""
        added = self._decoder.step(self._sampler.family.tokenizer, token_id) or ""
        before, self._text = len(self._text), self._text + added
        found = ((self._text.find(stop, max(0, before - len(stop) + 1)), stop) for stop in self._stop)
        # Of several, the one that ends first.
        if met := [(at + len(stop), place, at, stop) for place, (at, stop) in enumerate(found) if at >= 0]:
            _, _, at, stop = min(met)
            return "stop", stop, added[: max(0, at - before)]
        if len(self._ids) >= self._limit:
            return "length", None, added
        if len(self._ids) == len(self._script) and self._say.finish_reason:
            return self._say.finish_reason, None, added
        return None, None, added

    def _entry(self, token_id: int, position: int) -> dict[str, Any] | None:
        wanted = self._generation.sampling.get("logprobs")
        if wanted is None:
            return None
        logprob = None if position in self._say.unknown_logprobs else _logprob(self._state)
        sampled = {"token_id": token_id, "logprob": logprob, "rank": 1 + self._state % 3}
        others = [
            (token_id + step) % self._sampler.family.tokenizer.get_vocab_size()
            for step in range(1, wanted + self._sampler.shows_one_more)
        ]
        top = [sampled, *({"token_id": other, "logprob": -9.0, "rank": 9} for other in others)]
        return {**sampled, "top_logprobs": top}

    def _end(self, finish_reason: str) -> Step:
        return Step(self._index, None, "", None, finish_reason, None, self._versions())

    def _versions(self) -> list[dict[str, Any]] | None:
        ends = [start for _, start in self._starts[1:]] + [len(self._ids)]
        spans = zip(self._starts, ends, strict=True)
        return [{"version": version, "start": start, "end": end} for (version, start), end in spans] if self._starts else None


def script_ids(family: Family, say: Say) -> list[int]:
    if say.token_ids is not None:
        return list(say.token_ids)
    ids = family.encode(say.text)
    ended = bool(ids) and ids[-1] in (family.end_id, *family.other_end_ids)
    return ids if ended or say.finish_reason is not None else [*ids, family.end_id]


def random_reply(family: Family, generation: Generation, index: int, *, tokens: int | None = None) -> Say:
    """A reply that depends on the prompt, the seed and the choice alone; `tokens` long, else 3 to 12 tokens and the end."""
    prompt = zlib.crc32(struct.pack(f"<{len(generation.prompt_ids)}i", *generation.prompt_ids))
    made = random.Random(f"{prompt} {generation.sampling.get('seed')} {index}")
    last = family.tokenizer.get_vocab_size() - len(family.special) - len(family.markup.tokens)
    ids = made.choices(range(last), k=tokens if tokens is not None else made.randint(3, 12))
    return Say(token_ids=ids if tokens is not None else [*ids, family.end_id])
