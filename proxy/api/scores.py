"""Scores of a session over HTTP: have a closed session scored, see how far that is, and say what was wrong with a call."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Depends, Response
from pydantic import BaseModel, ConfigDict, Field, FiniteFloat

from contract.attempts import ENDED
from proxy.api import closing
from proxy.api.requests import Body, JsonBody, Served, SessionId, json_response, require_admin, require_owner
from proxy.errors import Conflict, RequestError, UnknownCall
from proxy.rows import decode_records
from proxy.scoring.scorers import Scorer, check_known, select
from proxy.services import Services
from proxy.store.states import FEEDBACK, SessionState, Verdicts
from reconstruct.scores import Score

router = APIRouter(prefix="/sessions", tags=["sessions"], default_response_class=Response)
ADMIN = [Depends(require_admin)]


class ScoreRequest(Body, json_schema_extra={"example": {"scorer": "teacher"}}):
    scorer: str
    """A name of the service's setting `scorers`."""


class ScorerState(BaseModel):
    """Of one scorer. queued: not all calls have a score; failed: some have none for good, and `error` says why."""

    model_config = ConfigDict(extra="forbid", strict=True, use_attribute_docstrings=True)

    state: Literal["none", "queued", "scored", "failed"]
    calls: int
    """Calls with a score, or the reason why they have none."""
    tokens: int
    """Tokens that have a logprob."""
    error: str


_EXAMPLE = {"session_id": "first", "scorers": {"teacher": {"state": "scored", "calls": 3, "tokens": 412, "error": ""}}}


class SessionScores(BaseModel, json_schema_extra={"example": _EXAMPLE}):
    model_config = ConfigDict(extra="forbid", strict=True, use_attribute_docstrings=True)

    session_id: str
    scorers: dict[str, ScorerState]


@router.post(
    "/{session_id}/scores",
    dependencies=ADMIN,
    status_code=202,
    responses={
        202: {"model": SessionScores, "description": "it will be scored"},
        409: {"description": "it is not closed yet, or a trainer has leased it: its rows stay as they are (`conflict`)"},
    },
)
async def score_session(
    services: Served, session_id: SessionId, body: Annotated[ScoreRequest, Depends(JsonBody(ScoreRequest).read)]
) -> Response:
    """Calls that have a score keep it; those that could not be scored are tried again."""
    check_known(services.settings.scorers, body.scorer, "scorer")
    state = await closing.load_session(services, session_id)
    if state.status not in ENDED:
        raise Conflict(f"session {session_id} is {state.status}: it is scored once it is closed")
    if await services.sessions.is_leased(session_id):
        raise Conflict(f"session {session_id} was leased to a trainer: its rows stay as they are")
    await services.scoring.ask(state.info, body.scorer, again=True)
    return json_response(await _describe(services, state), 202)


@router.get("/{session_id}/scores", dependencies=ADMIN, responses={200: {"model": SessionScores, "description": "the scores"}})
async def get_scores(services: Served, session_id: SessionId) -> Response:
    """How far each of its scorers is. The scores themselves are in its rows."""
    return json_response(await _describe(services, await closing.load_session(services, session_id)))


class Feedback(
    Body, json_schema_extra={"example": {"call_id": "01a2", "reward": 0.0, "hint": "read the file before you edit it"}}
):
    call_id: str
    reward: FiniteFloat | None = None
    """The call's. Null: none is given."""
    hint: str = Field("", max_length=4096)
    """What would have been better."""


@router.post(
    "/{session_id}/feedback",
    dependencies=[Depends(require_owner)],
    status_code=204,
    responses={
        204: {"description": "noted"},
        404: {"description": "the session has no such call (`not_found`)"},
        409: {
            "description": "a trainer has leased the session: its rewards are fixed; or the call was scored with its hint (`conflict`)"
        },
    },
)
async def give_feedback(
    services: Served, session_id: SessionId, body: Annotated[Feedback, Depends(JsonBody(Feedback).read)]
) -> Response:
    """What a person says of a call, while the session is open or afterwards: it counts before what judges say, and replaces earlier
    feedback on the call. An evaluator's reward of the call counts before it."""
    state = await closing.load_session(services, session_id)
    hint = body.hint.strip()
    if body.reward is None and not hint:
        raise RequestError("reward: feedback has a reward or a hint", param="reward")
    calls, _ = await asyncio.to_thread(decode_records, await services.sessions.load_records(session_id))
    if body.call_id not in {call.call_id for call in calls}:
        raise UnknownCall(f"session {session_id} has no call {body.call_id}", param="call_id")
    earlier = state.verdicts.get(FEEDBACK + body.call_id)
    if hint != (earlier.hints.get(body.call_id, "") if earlier else ""):
        await _refuse_used(services, session_id, body.call_id)
    scores = {} if body.reward is None else {body.call_id: body.reward}
    verdicts = Verdicts(scores, {body.call_id: hint} if hint else {})
    await services.sessions.note_verdicts(session_id, state.info.created_at, FEEDBACK + body.call_id, verdicts)
    return Response(status_code=204)


async def _refuse_used(services: Services, session_id: str, call_id: str) -> None:
    """Raises Conflict if the call has a score that was computed with its hint: another one would stand beside a score that is not its."""
    scorers = select(services.settings.scorers, Scorer)
    for name, score in (await services.scores.load(session_id)).get(call_id, {}).items():
        if name in scorers and scorers[name].in_hindsight and not score.error:
            raise Conflict(f"call {call_id} was scored by {name} with the hint that it has: that one stays")


async def _describe(services: Services, state: SessionState) -> dict[str, Any]:
    session_id = state.info.session_id
    named = {*state.info.scores, *services.settings.scorers}
    # Before the scores: of a job that ends in between there are some.
    queued = await services.scoring.find_queued(state, named)
    state = await closing.load_session(services, session_id)
    # Those of judges, and of scorers that broke.
    verdicts = {name: each for name, each in state.verdicts.items() if not name.startswith(FEEDBACK)}
    by_call = await services.scores.load(session_id)
    stored = {name for scores in by_call.values() for name in scores}
    scorers = {}
    for name in sorted(queued | stored | {*state.info.scores, *verdicts}):
        own = {call_id: scores[name] for call_id, scores in by_call.items() if name in scores}
        if (said := verdicts.get(name)) is not None and (said.error or not own):
            scorers[name] = _summarize_verdicts(said, name in queued)
        else:
            scorers[name] = _summarize(own, name in queued)
    return {"session_id": session_id, "scorers": scorers}


def _summarize(scores: Mapping[str, Score], queued: bool) -> dict[str, Any]:
    errors = [score.error for score in scores.values() if score.error]
    state = "queued" if queued else "failed" if errors else "scored" if scores else "none"
    tokens = sum(int(score.known.sum()) for score in scores.values())
    return {"state": state, "calls": len(scores), "tokens": tokens, "error": "; ".join(dict.fromkeys(errors))}


def _summarize_verdicts(verdicts: Verdicts, queued: bool) -> dict[str, Any]:
    state = "queued" if queued else "failed" if verdicts.error else "scored"
    return {"state": state, "calls": len(verdicts.scores), "tokens": 0, "error": verdicts.error}
