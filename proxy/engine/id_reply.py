"""A choice as an engine that takes and returns ids emitted it, and what becomes of it: the message is read here, not there."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from proxy.dialects.base import Request
from proxy.engine.base import Job, Outcome, Sampled, spoken
from proxy.engine.local_renderer import LocalRenderer
from proxy.errors import EngineFailed
from reconstruct.records import Span

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
