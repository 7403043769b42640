"""A judge per turn: an endpoint or a model that reads a call and what came of it, and gives it a reward and a hint.

What came of a call is what the harness sent next: the new messages of the call that continues it. Verdicts become the rewards of calls
(`per_call`), where no evaluator gave one, and their hints stand in the reward's metadata.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from proxy.call.lookahead import ask_model, read_number, shorten
from proxy.errors import ChooserFailed, EngineFailed
from proxy.outbound import OutboundFailed
from proxy.scoring.scorers import TurnJudge
from proxy.store.states import Verdicts
from proxy.transcripts import messages_of
from reconstruct.records import Call, Forest

if TYPE_CHECKING:
    from proxy.services import Services
    from proxy.store.states import SessionState

INSTRUCTION = """Below is a conversation of an AI agent, then its next message, then what came of that. How much did the message serve the
agent's task? Answer with a number from 0 (it did harm) to 10 (nothing could have been better) and nothing else."""
BEST = 10
_ANSWERS = [str(number) for number in range(BEST + 1)]
HINT_INSTRUCTION = """Below is a conversation of an AI agent, then its next message, then what came of that. What should the agent have been
told before it wrote the message? Answer with one to three sentences to the agent, or with NONE if the message could not be better."""
MOST_HINT = 4096
"""Characters of a hint."""


async def judge_session(
    services: Services, judge: TurnJudge, state: SessionState, forest: Forest, calls: Sequence[Call]
) -> Verdicts:
    """The verdict on each of the calls. Raises EngineFailed and EngineUnavailable if one cannot be had now."""
    scores: dict[str, float] = {}
    hints: dict[str, str] = {}
    for call in calls:
        scores[call.call_id], hint = await _judge_call(services, judge, state, forest, call)
        if hint:
            hints[call.call_id] = hint
    return Verdicts(scores, hints)


async def _judge_call(
    services: Services, judge: TurnJudge, state: SessionState, forest: Forest, call: Call
) -> tuple[float, str]:
    """The mean of the votes, and the longest hint: a short one often says that there is nothing to say."""
    shown = _describe(state, forest, call)
    votes = [await _vote(services, judge, state.info.session_id, shown) for _ in range(judge.votes)]
    return sum(score for score, _ in votes) / len(votes), max((hint for _, hint in votes), key=len)


def _describe(state: SessionState, forest: Forest, call: Call) -> dict[str, Any]:
    children = [forest.calls[each] for each in forest.children(call.call_id)]
    following = min(children, key=lambda each: each.started_at, default=None)
    return {
        "session_id": state.info.session_id,
        "call_id": call.call_id,
        "messages": messages_of(call, forest),
        "reply": json.loads(call.reply),
        "next": [] if following is None else json.loads(following.messages),
        "reward": state.reward,
    }


async def _vote(services: Services, judge: TurnJudge, session_id: str, shown: Mapping[str, Any]) -> tuple[float, str]:
    if judge.url is not None:
        return await _ask_endpoint(services, judge.url, judge.timeout_seconds, shown)
    # Votes of a judge that always answers the same would be one.
    temperature = 0.0 if judge.votes == 1 else 1.0
    case = _write_case(shown)
    ask = partial(ask_model, services.pool, session_id, judge.model or "", temperature=temperature)
    number = read_number(await ask(f"{INSTRUCTION}\n\n{case}", _ANSWERS))
    if not 0 <= number <= BEST:
        raise ChooserFailed(f"the judge answered {number}, which is not from 0 to {BEST}")
    return number / BEST, _read_hint(await ask(f"{HINT_INSTRUCTION}\n\n{case}", ())) if judge.hints else ""


def _write_case(shown: Mapping[str, Any]) -> str:
    conversation = shorten("\n".join(json.dumps(each, ensure_ascii=False) for each in shown["messages"]))
    reply, following = (json.dumps(shown[name], ensure_ascii=False) for name in ("reply", "next"))
    return f"{conversation}\n\nThe message:\n{reply}\n\nWhat came of it:\n{shorten(following)}"


def _read_hint(text: str) -> str:
    """As much of it as is kept, without what no store can write; "" for an answer that says that there is none."""
    hint = text.encode("utf-8", "replace").decode()[:MOST_HINT].strip()
    return "" if hint.strip(".").upper() == "NONE" else hint


async def _ask_endpoint(services: Services, url: str, seconds: float, shown: Mapping[str, Any]) -> tuple[float, str]:
    content_type = {"content-type": "application/json"}
    try:
        status, content = await services.outbound.post(url, json.dumps(shown).encode(), content_type, seconds=seconds)
    except OutboundFailed as error:
        raise EngineFailed(f"the judge at {url} was not reached: {error}") from error
    try:
        told = json.loads(content)
        score, hint = told["score"], told.get("hint") or ""
    except (ValueError, KeyError, TypeError, AttributeError):
        score, hint = None, ""
    if status != 200 or type(score) not in (int, float) or not math.isfinite(score) or not isinstance(hint, str):
        raise EngineFailed(f"the judge at {url} answered {status} without a finite 'score': {content[:200]!r}")
    return float(score), _read_hint(hint)
