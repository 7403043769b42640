"""The sessions of a project's rollouts: opened by their first call, or by their declaration."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields

from contract.sessions import NewSession, OpeningFields
from proxy.api import admission
from proxy.auth import mint_key
from proxy.call.session import Session
from proxy.errors import NotFound, Unauthorized
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


async def open_rollout(services: Services, body: NewSession) -> bool:
    """False if its session is there already. No key of its own opens it. Raises what `admission.open_session` does."""
    assert body.session_id is not None
    _, key_hash = mint_key(body.session_id)
    info = SessionInfo(
        body.session_id,
        key_hash,
        await services.clock.now(),
        **{each.name: getattr(body, each.name) for each in fields(OpeningFields)}
        | {"echo_policy": body.echo_policy or services.settings.echo_policy, "replay": None},
    )

    async def stays() -> bool:
        return False

    return await admission.open_session(services, info, stays)
