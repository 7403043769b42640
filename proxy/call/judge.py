"""One answer of a model to one question, of no session: nothing of it is recorded."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from proxy.dialects.base import Delta, FirstToken, HistoryMessage, PromptReady, Request, new_call_id
from proxy.engine.apis.base import PlansNoMore
from proxy.engine.apis.first_sample import prepare_job
from proxy.engine.pool.pool import EnginePool
from proxy.engine.pool.seats import Caller
from proxy.engine.replica import EngineCall, Replica
from proxy.errors import ChooserFailed
from proxy.timeline import CancelScope, Timeline
from reconstruct.messages import digest_message

_TOKENS = 4096
"""What a judge may think before it answers."""


async def complete(pool: EnginePool, session_id: str, model: str, question: str, answers: Sequence[str]) -> str:
    """What the model answers, one of the texts if its engine can be told; `session_id` is whose engine is preferred. Raises VerbatimError,
    and ChooserFailed if the answer broke off."""
    message = {"role": "user", "content": question}
    forward = {"structured_outputs": {"choice": list(answers)}}
    sampling = {"temperature": 0.0, "max_tokens": _TOKENS}
    history = [HistoryMessage(message, digest_message(message))]
    request = Request("chat", model, history, sampling=sampling, forward=forward, stream=True)
    scope = CancelScope(session_id, new_call_id())
    placement = pool.place(model, Caller(session_id, _stay), scope, Timeline())
    return await placement.run(partial(_ask, pool, request, scope))


async def _ask(pool: EnginePool, request: Request, scope: CancelScope, replica: Replica) -> str:
    kind = pool.kinds.of(replica)
    job = await prepare_job(kind, replica, request, request.sampling, scope)
    abort = partial(kind.abort, replica, job)
    try:
        with EngineCall(replica, scope, streams=True), scope.sampling(abort):
            reply = await kind.sample(replica, job, stream=True, emit=_drop)
    except PlansNoMore:
        return await _ask(pool, request, scope, replica)
    if reply.broken is not None:
        raise ChooserFailed(f"the judge's reply broke off: {reply.broken}")
    return str(reply.choices[0].message.get("content") or "")


async def _stay() -> None:
    """It is wanted for as long as its task runs."""


def _drop(piece: PromptReady | FirstToken | Sequence[Delta]) -> None:
    """Nobody reads it."""
