"""The sessions of a project's rollouts: opened by their first call, or by their declaration."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress

from contract.sessions import NewSession
from proxy.api.sessions import open_new
from proxy.call.session import Session
from proxy.errors import Conflict, NotFound, Unauthorized
from proxy.projects import KEY, name_session, read_rollout
from proxy.services import Services
from proxy.store.states import SessionInfo

HEADERS = ("x-verbatim-session", "x-session-id")


async def open_for_call(services: Services, key: str, headers: Mapping[str, str], path: str | None) -> Session:
    """The session of the rollout that a call with the project's `key` names, opened by the first call. `path`: the name in the path.
    Raises Unauthorized, RequestError for a name that is missing or none, and what opening a session does."""
    project = await services.projects.admit(key, KEY)
    session_id = name_session(project.name, path or next((name for each in HEADERS if (name := headers.get(each))), ""))

    def admits(info: SessionInfo) -> None:
        if info.project != project.name:
            raise Unauthorized(f"session {session_id} is not of project {project.name}")

    try:
        return await services.cache.open(session_id, admits)
    except NotFound:
        await open_rollout(services, read_rollout(project, session_id, {}))
        return await services.cache.open(session_id, admits)


async def open_rollout(services: Services, body: NewSession) -> None:
    """Its session is there afterwards. No key of its own opens it. Raises what `open_new` does, but for a session that was there."""

    async def stays() -> bool:
        return False

    with suppress(Conflict):
        await open_new(services, body, stays)
