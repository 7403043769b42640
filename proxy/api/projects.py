"""Projects over HTTP: made, listed and removed by the admin, and their rollouts declared with the project's own token."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Depends, Path, Request, Response
from pydantic import Field

from contract.sessions import NewSession, SessionView
from proxy.api.closing import load_session
from proxy.api.requests import Body, JsonBody, Opener, Served, json_response, parse_aside, require_admin, require_opener
from proxy.api.rollouts import open_rollout
from proxy.api.sessions import find_harness_url, session_as_wire
from proxy.auth import hash_key
from proxy.dialects.catalogue import base_urls
from proxy.errors import Conflict, Forbidden, NotFound, RequestError
from proxy.projects import KEY, TOKEN, check_declared, mint_secret, name_session, read_rollout
from proxy.store.projects import Project

router = APIRouter(prefix="/projects", tags=["projects"], default_response_class=Response)
ADMIN = [Depends(require_admin)]

Name = Annotated[str, Path(description="The project's name.")]


class NewProject(Body, json_schema_extra={"example": {"name": "swe", "defaults": {"group_size": 1}}}):
    name: str = Field(pattern=r"^[a-z0-9][a-z0-9-]{0,39}$")
    """1 to 40 lower-case letters, digits and '-'."""
    defaults: dict[str, Any] = Field(default_factory=dict)
    """Fields of the sessions that its rollouts open, as in `POST /sessions`."""


_EXAMPLE = {"name": "swe", "defaults": {"group_size": 1}, "created_at": 1767225600.0}
_SECRETS = {
    "key": "vp-0123456789abcdef0123456789abcdef01234567-swe",
    "token": "vt-0123456789abcdef0123456789abcdef01234567-swe",
}
_URLS = {"openai": "http://127.0.0.1:8700/v1", "anthropic": "http://127.0.0.1:8700", "gemini": "http://127.0.0.1:8700"}


class ProjectView(Body, json_schema_extra={"example": _EXAMPLE}):
    name: str
    defaults: dict[str, Any]
    created_at: float


class MadeProject(ProjectView, json_schema_extra={"example": {**_EXAMPLE, **_SECRETS, "base_urls": _URLS}}):
    key: str
    """For the framework's model calls. Shown only here."""
    token: str
    """For whoever opens, reads, rewards and closes its sessions. Shown only here."""
    base_urls: dict[str, str]


class Renewal(Body, json_schema_extra={"example": {"renew": ["key"]}}):
    renew: list[Literal["key", "token"]] = Field(["key", "token"], min_length=1)
    """Default: both."""


class RenewedSecrets(Body, json_schema_extra={"example": {"key": _SECRETS["key"], "token": None}}):
    key: str | None
    """Shown only here; null: it is as it was."""
    token: str | None
    """Shown only here; null: it is as it was."""


class ProjectList(Body, json_schema_extra={"example": {"projects": [_EXAMPLE]}}):
    projects: list[ProjectView]


@router.post(
    "",
    dependencies=ADMIN,
    status_code=201,
    responses={
        201: {"model": MadeProject, "description": "made"},
        409: {"description": "a project of this name exists (`conflict`)"},
    },
)
async def make_project(
    request: Request, services: Served, body: Annotated[NewProject, Depends(JsonBody(NewProject).read)]
) -> Response:
    """A call with the project's key names its rollout: `X-Session-ID`, `X-Verbatim-Session` or `/r/{name}/v1/...`."""
    key, token = mint_secret(KEY, body.name), mint_secret(TOKEN, body.name)
    now = await services.clock.now()
    project = Project(body.name, hash_key(key), hash_key(token), now, body.defaults)
    read_rollout(project, name_session(project.name, "a"), {})
    if not await services.projects.store.add(project):
        raise Conflict(f"there is a project {project.name} already", param="name")
    urls = base_urls(find_harness_url(request, services.settings))
    return json_response({**as_wire(project), "key": key, "token": token, "base_urls": urls}, 201)


@router.get("", dependencies=ADMIN, responses={200: {"model": ProjectList, "description": "all of them"}})
async def list_projects(services: Served) -> Response:
    """By name."""
    return json_response({"projects": [as_wire(project) for project in await services.projects.store.list()]})


@router.delete("/{project}", dependencies=ADMIN, status_code=204, responses={204: {"description": "removed"}})
async def remove_project(services: Served, project: Name) -> Response:
    """Its key and token open nothing any more, within a second. Its sessions stay. Made again, it has other secrets."""
    if not await services.projects.store.remove(project):
        raise NotFound(f"there is no project {project}")
    return Response(status_code=204)


@router.post(
    "/{project}/secrets",
    dependencies=ADMIN,
    responses={
        200: {"model": RenewedSecrets, "description": "the new secrets"},
        409: {"description": "the project was changed meanwhile: ask again (`conflict`)"},
    },
)
async def renew_secrets(services: Served, project: Name, body: Annotated[Renewal, Depends(JsonBody(Renewal).read)]) -> Response:
    """The old ones open nothing any more, within a second. Sessions, their own keys and the project's rollouts stay as they are."""
    found = await services.projects.store.load(project)
    if found is None:
        raise NotFound(f"there is no project {project}")
    key = mint_secret(KEY, project) if "key" in body.renew else None
    token = mint_secret(TOKEN, project) if "token" in body.renew else None
    renewed = replace(
        found,
        key_hash=found.key_hash if key is None else hash_key(key),
        token_hash=found.token_hash if token is None else hash_key(token),
    )
    if not await services.projects.store.replace(found, renewed):
        raise Conflict(f"project {project} was changed or removed meanwhile")
    return json_response({"key": key, "token": token})


@router.put(
    "/{project}/rollouts/{name}",
    dependencies=[Depends(require_opener)],
    responses={
        200: {"model": SessionView, "description": "its session"},
        409: {"description": "it was opened as something else, by a call or by another declaration (`conflict`)"},
        429: {"description": "a new group may not begin because trainers lag behind; see `Retry-After` (`backpressure`)"},
    },
)
async def declare_rollout(
    services: Served,
    opener: Opener,
    project: Name,
    name: Annotated[str, Path(description="The rollout's name, as its calls give it.")],
    raw: Annotated[bytes, Depends(JsonBody(NewSession).read_raw)],
) -> Response:
    """Opens the session of a rollout before its first call, with fields of `POST /sessions`: its group, task and so on. Repeating it is
    not an error. `/sessions/{session_id}` rewards and closes it."""
    if opener is not None and opener.name != project:
        raise Forbidden(f"the token is of project {opener.name}")
    found = opener or await services.projects.store.load(project)
    if found is None:
        raise NotFound(f"there is no project {project}")
    session_id = name_session(project, name)
    body = await parse_aside(raw, lambda raw: read_rollout(found, session_id, _read_object(raw)))
    await open_rollout(services, body)
    state = await load_session(services, session_id)
    check_declared(body, state.info)
    return json_response(session_as_wire(state))


def as_wire(project: Project) -> dict[str, Any]:
    return {"name": project.name, "defaults": dict(project.defaults), "created_at": project.created_at}


def _read_object(raw: bytes) -> dict[str, Any]:
    """Raises RequestError."""
    try:
        given = json.loads(raw) if raw.strip() else {}
    except ValueError as error:
        raise RequestError(f"the body is no JSON: {error}") from error
    if not isinstance(given, dict):
        raise RequestError("the body must be a JSON object")
    return given
