"""Scores of a session over HTTP: have a closed session scored, and see how far that is."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Depends, Response
from pydantic import BaseModel, ConfigDict

from contract.attempts import ENDED
from proxy.api import closing
from proxy.api.requests import Body, JsonBody, Served, SessionId, json_response, require_admin
from proxy.errors import Conflict, RequestError
from proxy.services import Services
from proxy.store.states import SessionState
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
    if body.scorer not in services.settings.scorers:
        known = ", ".join(sorted(services.settings.scorers)) or "none"
        raise RequestError(
            f"scorer: there is no scorer {body.scorer!r} in VERBATIM_SCORERS; there are: {known}", param="scorer"
        )
    state = await closing.load_session(services, session_id)
    if state.status not in ENDED:
        raise Conflict(f"session {session_id} is {state.status}: it is scored once it is closed")
    if state.leased:
        raise Conflict(f"session {session_id} was leased to a trainer: its rows stay as they are")
    await services.scoring.ask(state.info, body.scorer, again=True)
    return json_response(await _describe(services, state), 202)


@router.get("/{session_id}/scores", dependencies=ADMIN, responses={200: {"model": SessionScores, "description": "the scores"}})
async def get_scores(services: Served, session_id: SessionId) -> Response:
    """How far each of its scorers is. The scores themselves are in its rows."""
    return json_response(await _describe(services, await closing.load_session(services, session_id)))


async def _describe(services: Services, state: SessionState) -> dict[str, Any]:
    session_id = state.info.session_id
    named = {*state.info.scores, *services.settings.scorers}
    # Before the scores: of a job that ends in between there are some.
    queued = {name for name in named if await services.scoring.find_job(session_id, name) is not None}
    by_call = await services.scores.load(session_id)
    stored = {name for scores in by_call.values() for name in scores}
    scorers = {}
    for name in sorted(queued | stored | {*state.info.scores}):
        own = {call_id: scores[name] for call_id, scores in by_call.items() if name in scores}
        scorers[name] = _summarize(own, name in queued)
    return {"session_id": session_id, "scorers": scorers}


def _summarize(scores: Mapping[str, Score], queued: bool) -> dict[str, Any]:
    errors = [score.error for score in scores.values() if score.error]
    state = "queued" if queued else "failed" if errors else "scored" if scores else "none"
    tokens = sum(int(score.known.sum()) for score in scores.values())
    return {"state": state, "calls": len(scores), "tokens": tokens, "error": "; ".join(dict.fromkeys(errors))}
