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
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import msgspec

from contract.sessions import Lookahead
from proxy.call.hooks import CallHook
from proxy.call.phases import Arrival, Sampled
from proxy.dialects.base import HistoryMessage, Request, new_call_id
from proxy.engine.apis import reply as engine
from proxy.engine.apis.base import PlansNoMore
from proxy.engine.apis.first_sample import discard, prepare_job
from proxy.engine.pool.placement import Placement
from proxy.engine.pool.pool import EnginePool
from proxy.engine.pool.seats import Caller
from proxy.engine.replica import EngineCall, Replica
from proxy.errors import ChooserFailed, EngineFailed, VerbatimError
from proxy.outbound import Outbound, OutboundFailed
from proxy.store.states import SessionInfo
from proxy.timeline import ENGINE, CancelScope, Timeline, Waiting
from reconstruct.messages import digest_message
from reconstruct.records import CHOSEN, LOOKAHEAD, NOT_CHOSEN

_replace = msgspec.structs.replace

INSTRUCTION = """Below is a conversation of an AI agent, then numbered candidates for the agent's next message. Which candidate serves the
agent's task best? Answer with its number and nothing else."""
JUDGE_TOKENS = 4096
"""What a judge may think before it answers."""

LONGEST_CONVERSATION = 24_000
"""Characters of the conversation that a judge is shown: the beginning and the end of a longer one."""


class LookaheadHook(CallHook):
    """Asks for the candidates of a session's `Lookahead`, and puts the chosen one first."""

    of_session = "lookahead"

    def __init__(self, pool: EnginePool, outbound: Outbound) -> None:
        self._pool = pool
        self._outbound = outbound

    async def admit(self, arrival: Arrival) -> None:
        ahead = _find_lookahead(arrival.draft.session.info)
        # A harness that asks for several choices chooses itself.
        applies = arrival.request.n == 1 and (not ahead.roles or arrival.purpose.role in ahead.roles)
        if applies and arrival.recorded is None:
            arrival.request = replace(arrival.request, n=ahead.n)
            arrival.withheld = True

    async def after_sampling(self, sampled: Sampled) -> Sampled:
        if not sampled.call.withheld:
            return sampled
        if sampled.is_broken:
            return _mark(sampled, None)
        if sampled.call.scope.cancelled:
            return _replace(_mark(sampled, None), error=EngineFailed("the call was cut before a candidate was chosen"))
        try:
            chosen = await self._choose(sampled, _find_lookahead(sampled.call.session.info))
        except ChooserFailed as error:
            return _mark(_replace(sampled, is_broken=True, error=error), None)
        return _mark(sampled, chosen)

    async def _choose(self, sampled: Sampled, ahead: Lookahead) -> int:
        """The index of the chosen candidate. Raises ChooserFailed."""
        try:
            async with asyncio.timeout(ahead.timeout_seconds):
                with sampled.call.scope.interruptible():
                    chosen = await self._find_best(sampled, ahead)
        except TimeoutError as error:
            raise ChooserFailed(f"the chooser '{ahead.choose}' did not choose within {ahead.timeout_seconds:g} s") from error
        except ChooserFailed:
            raise
        except VerbatimError as error:
            raise ChooserFailed(f"the chooser '{ahead.choose}' failed: {error.message}") from error
        if not 0 <= chosen < len(sampled.choices):
            raise ChooserFailed(f"the chooser '{ahead.choose}' chose {chosen} of {len(sampled.choices)} candidates")
        return chosen

    async def _find_best(self, sampled: Sampled, ahead: Lookahead) -> int:
        if ahead.choose == "logprob":
            means = [mean_logprob(each) for each in sampled.choices]
            return means.index(max(means))
        if ahead.choose == "model":
            numbers = [str(at + 1) for at in range(len(sampled.choices))]
            question = write_question(sampled.call.request, sampled.choices)
            answer = await ask_model(self._pool, sampled.call.session_id, ahead.model or "", question, numbers)
            return read_number(answer) - 1
        return await _ask_endpoint(sampled, ahead, self._outbound)


def _find_lookahead(info: SessionInfo) -> Lookahead:
    if info.lookahead is None:
        raise RuntimeError("a session without a lookahead has no candidates")
    return info.lookahead


def _mark(sampled: Sampled, chosen: int | None) -> Sampled:
    """The candidates marked, the chosen one first: only that one is for the harness."""
    choices = sampled.choices
    if chosen is not None:
        ordered = [choices[chosen], *choices[:chosen], *choices[chosen + 1 :]]
        choices = tuple(replace(each, index=at) for at, each in enumerate(ordered))
    marks = {each.index: {LOOKAHEAD: NOT_CHOSEN} for each in choices}
    reasons = {} if sampled.is_broken else {each.index: NOT_CHOSEN for each in choices}
    if chosen is not None:
        marks[0] = {LOOKAHEAD: CHOSEN}
        reasons.pop(0, None)
    return _replace(sampled, choices=choices, marks=marks, reasons=reasons)


def mean_logprob(candidate: engine.EngineChoice) -> float:
    """The mean of its tokens' logprobs. Raises ChooserFailed where one is not known."""
    known = [logprob for logprob in candidate.logprobs if logprob is not None]
    if not known or len(known) < len(candidate.token_ids or ()):
        raise ChooserFailed("the engine did not tell the logprobs by which a candidate is to be chosen")
    return sum(known) / len(known)


def write_question(request: Request, candidates: Sequence[engine.EngineChoice]) -> str:
    """The prompt for a judge."""
    conversation = shorten("\n".join(_dump(message) for message in request.messages))
    listed = "\n\n".join(f"Candidate {at}:\n{_dump(each.message)}" for at, each in enumerate(candidates, 1))
    return f"{INSTRUCTION}\n\n{conversation}\n\n{listed}"


def shorten(conversation: str) -> str:
    """What a judge is shown of it."""
    if len(conversation) <= LONGEST_CONVERSATION:
        return conversation
    half = LONGEST_CONVERSATION // 2
    return f"{conversation[:half]}\n[…]\n{conversation[-half:]}"


def read_number(answer: str) -> int:
    """The last number in a judge's answer. Raises ChooserFailed."""
    found = re.findall(r"\d{1,9}", answer)
    if not found:
        raise ChooserFailed(f"the judge named no candidate: it answered {answer[:200]!r}")
    return int(found[-1])


# A judge: one answer of a model to one question, of no session. Nothing of it is recorded.


async def ask_model(
    pool: EnginePool, session_id: str, model: str, question: str, answers: Sequence[str], temperature: float = 0.0
) -> str:
    """What the model answers, one of the texts, if there are any and its engine can be told; `session_id` is whose engine is preferred.
    Raises VerbatimError, and ChooserFailed if the answer broke off."""
    message = {"role": "user", "content": question}
    forward = {"structured_outputs": {"choice": list(answers)}} if answers else {}
    sampling = {"temperature": temperature, "max_tokens": JUDGE_TOKENS}
    history = [HistoryMessage(message, digest_message(message))]
    request = Request("chat", model, history, sampling=sampling, forward=forward, stream=True)
    scope = CancelScope(session_id, new_call_id())
    placement = Placement(pool, model, Caller(session_id, _stay), scope, Timeline())
    return await placement.run(partial(_ask_judge, pool, request, scope))


async def _ask_judge(pool: EnginePool, request: Request, scope: CancelScope, replica: Replica) -> str:
    kind = pool.kinds.of(replica)
    job = await prepare_job(kind, replica, request, request.sampling, scope)
    abort = partial(kind.abort, replica, job)
    try:
        with EngineCall(replica, scope, streams=True), scope.sampling(abort):
            reply = await kind.sample(replica, job, stream=True, emit=discard)
    except PlansNoMore:
        return await _ask_judge(pool, request, scope, replica)
    if reply.broken is not None:
        raise ChooserFailed(f"the judge's reply broke off: {reply.broken}")
    return str(reply.choices[0].message.get("content") or "")


async def _stay() -> None:
    """It is wanted for as long as its task runs."""


# Or an endpoint.


async def _ask_endpoint(sampled: Sampled, ahead: Lookahead, outbound: Outbound) -> int:
    """What the endpoint chooses of the candidates, counted from 0."""
    call = sampled.call
    url = ahead.url or ""
    body = {
        "session_id": call.session_id,
        "call_id": call.call_id,
        "messages": call.request.messages,
        "tools": call.request.tools,
        "candidates": [
            {
                "message": each.message,
                "finish_reason": each.finish_reason,
                "tokens": len(each.token_ids or ()),
                "logprobs": each.logprobs,
            }
            for each in sampled.choices
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
