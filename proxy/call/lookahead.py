"""Lookahead: several candidates for each reply, of which a chooser picks the one that the harness gets.

A session's `Lookahead` asks for `n` candidates of every request that asks for one reply. They are sampled as the choices of one request
and withheld until the chooser has picked. The chosen one then becomes the first choice, so that the call goes on as any other; all are
recorded in one step, the others marked NOT_CHOSEN: no harness saw them, nothing continues them, and none is trained.

A chooser that fails fails the call: another candidate would be another policy than the one that was asked for. The candidates are recorded
as not answered, and the harness may ask again.
"""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import replace
from typing import Any

from proxy.call.turn import Sampled, Turn
from proxy.dialects.base import Request
from proxy.engine.apis import reply as engine
from proxy.errors import ChooserFailed, VerbatimError
from proxy.outbound import Outbound, OutboundFailed
from proxy.store.states import Lookahead, SessionInfo
from proxy.timeline import ENGINE, Waiting

Ask = Callable[[Turn, str, str, Sequence[str]], Coroutine[Any, Any, str]]
"""What a model answers to a prompt, one of the texts if its engine can be told: (turn, model, prompt, texts)."""

INSTRUCTION = """Below is a conversation of an AI agent, then numbered candidates for the agent's next message. Which candidate serves the
agent's task best? Answer with its number and nothing else."""
LONGEST_CONVERSATION = 24_000
"""Characters of the conversation that a judge is shown: the beginning and the end of a longer one."""


def find_lookahead(info: SessionInfo, request: Request, role: str) -> Lookahead | None:
    """What applies to a request. A harness that asks for several choices chooses itself."""
    ahead = info.lookahead
    if ahead is None or request.n != 1 or (ahead.roles and role not in ahead.roles):
        return None
    return ahead


async def choose(sampled: Sampled, ahead: Lookahead, ask: Ask, outbound: Outbound) -> Sampled:
    """The call with the chosen candidate first. Raises ChooserFailed."""
    candidates, turn = sampled.outcome.choices, sampled.planned.turn
    try:
        async with asyncio.timeout(ahead.timeout_seconds):
            with turn.scope.interruptible():
                chosen = await _find_best(turn, candidates, ahead, ask, outbound)
    except TimeoutError as error:
        raise ChooserFailed(f"the chooser '{ahead.choose}' did not choose within {ahead.timeout_seconds:g} s") from error
    except ChooserFailed:
        raise
    except VerbatimError as error:
        raise ChooserFailed(f"the chooser '{ahead.choose}' failed: {error.message}") from error
    if not 0 <= chosen < len(candidates):
        raise ChooserFailed(f"the chooser '{ahead.choose}' chose {chosen} of {len(candidates)} candidates")
    ordered = [candidates[chosen], *candidates[:chosen], *candidates[chosen + 1 :]]
    choices = [replace(each, index=at) for at, each in enumerate(ordered)]
    return replace(sampled, outcome=replace(sampled.outcome, choices=choices), chosen=True)


async def _find_best(
    turn: Turn, candidates: Sequence[engine.EngineChoice], ahead: Lookahead, ask: Ask, outbound: Outbound
) -> int:
    if ahead.choose == "logprob":
        means = [mean_logprob(each) for each in candidates]
        return means.index(max(means))
    if ahead.choose == "model":
        numbers = [str(at + 1) for at in range(len(candidates))]
        answer = await ask(turn, ahead.model or "", write_question(turn.request, candidates), numbers)
        return read_number(answer) - 1
    return await _ask_endpoint(turn, candidates, ahead, outbound)


def mean_logprob(candidate: engine.EngineChoice) -> float:
    """The mean of its tokens' logprobs. Raises ChooserFailed where one is not known."""
    known = [logprob for logprob in candidate.logprobs if logprob is not None]
    if not known or len(known) < len(candidate.token_ids or ()):
        raise ChooserFailed("the engine did not tell the logprobs by which a candidate is to be chosen")
    return sum(known) / len(known)


def write_question(request: Request, candidates: Sequence[engine.EngineChoice]) -> str:
    """The prompt for a judge."""
    conversation = "\n".join(_dump(message) for message in request.messages)
    if len(conversation) > LONGEST_CONVERSATION:
        half = LONGEST_CONVERSATION // 2
        conversation = f"{conversation[:half]}\n[…]\n{conversation[-half:]}"
    listed = "\n\n".join(f"Candidate {at}:\n{_dump(each.message)}" for at, each in enumerate(candidates, 1))
    return f"{INSTRUCTION}\n\n{conversation}\n\n{listed}"


def read_number(answer: str) -> int:
    """The last number in a judge's answer. Raises ChooserFailed."""
    found = re.findall(r"\d{1,9}", answer)
    if not found:
        raise ChooserFailed(f"the judge named no candidate: it answered {answer[:200]!r}")
    return int(found[-1])


async def _ask_endpoint(turn: Turn, candidates: Sequence[engine.EngineChoice], ahead: Lookahead, outbound: Outbound) -> int:
    """What the endpoint chooses of `candidates`, counted from 0."""
    url = ahead.url or ""
    body = {
        "session_id": turn.session_id,
        "call_id": turn.call_id,
        "messages": turn.request.messages,
        "tools": turn.request.tools,
        "candidates": [
            {
                "message": each.message,
                "finish_reason": each.finish_reason,
                "tokens": len(each.token_ids or ()),
                "logprobs": each.logprobs,
            }
            for each in candidates
        ],
    }
    try:
        with Waiting(ENGINE):
            content_type = {"content-type": "application/json"}
            status, content = await outbound.post(url, json.dumps(body).encode(), content_type, seconds=ahead.timeout_seconds)
    except OutboundFailed as error:
        raise ChooserFailed(f"the chooser at {url} was not reached: {error}") from error
    try:
        chosen = json.loads(content)["choice"]
    except (ValueError, KeyError, TypeError):
        chosen = None
    if status != 200 or type(chosen) is not int:
        raise ChooserFailed(f"the chooser at {url} answered {status} without a 'choice': {content[:200]!r}")
    return chosen


def _dump(message: Any) -> str:
    return json.dumps(message, ensure_ascii=False)
