"""One key for many rollouts: whom a project's secrets let in, and what the session of one of its rollouts is.

A framework that holds one endpoint and one key for a whole run names each rollout in its calls, by `X-Verbatim-Session`, `X-Session-ID` or
the path `/r/{name}/v1/...`. The session of the rollout is `<project>.<name>`, in every process: the first call opens it, unless it was
declared. Project names have no dot, so that no other session of a project is called so.

A project's key `vp-<40 hex>-<project>` opens those calls; its token `vt-<40 hex>-<project>` the control side of its own sessions. Neither
opens anything of another project's.
"""

from __future__ import annotations

import hmac
import json
import re
import secrets
import time
from collections.abc import Callable, Mapping
from dataclasses import fields, replace
from functools import cache
from typing import Any, Literal

from pydantic import TypeAdapter, ValidationError

from contract.sessions import SESSION_ID, NewSession, OpeningFields
from proxy.auth import hash_key
from proxy.errors import Conflict, RequestError, Unauthorized
from proxy.store.projects import Project, ProjectStore
from proxy.store.states import SessionInfo

KEY: Literal["vp-"] = "vp-"
TOKEN: Literal["vt-"] = "vt-"
_SECRET = re.compile(r"(vp-|vt-)[0-9a-f]{40}-([a-z0-9][a-z0-9-]{0,39})\Z")
CHECK_SECONDS = 1.0
"""How soon a project that was removed lets nobody in any more."""
MOST_GROUP_CHARACTERS = 256


def mint_secret(kind: Literal["vp-", "vt-"], project: str) -> str:
    return f"{kind}{secrets.token_hex(20)}-{project}"


class Projects:
    """What this process knows of them. A secret is held against the store's hash, which is read again after `CHECK_SECONDS`."""

    def __init__(self, store: ProjectStore, clock: Callable[[], float] = time.monotonic) -> None:
        self.store = store
        self._clock = clock
        # Before there are threads: it reads source.
        _reader()
        self._known: dict[str, tuple[float, Project]] = {}

    async def admit(self, secret: str, kind: Literal["vp-", "vt-"]) -> Project:
        """The project whose secret of that kind it is. Raises Unauthorized."""
        match = _SECRET.match(secret)
        project = await self._find(match[2]) if match and match[1] == kind else None
        if project is not None:
            expected = project.key_hash if kind == KEY else project.token_hash
            if hmac.compare_digest(hash_key(secret), expected):
                return project
        raise Unauthorized(f"the project's {'key' if kind == KEY else 'token'} is not known here")

    async def _find(self, name: str) -> Project | None:
        at, known = self._known.get(name, (0.0, None))
        if known is not None and self._clock() - at < CHECK_SECONDS:
            return known
        project = await self.store.load(name)
        self._known.pop(name, None)
        if project is not None:
            self._known[name] = (self._clock(), project)
        return project


def name_session(project: str, rollout: str) -> str:
    """The id of the rollout's session. Raises RequestError."""
    session_id = f"{project}.{rollout}"
    if not rollout:
        raise RequestError("a project's key needs the rollout's name: send X-Session-ID, or call /r/{name}/v1/...")
    if not SESSION_ID.match(session_id):
        most = 127 - len(project)
        raise RequestError(f"a rollout's name has 1 to {most} letters, digits, '.', '_' and '-': not {rollout[:140]!r}")
    return session_id


@cache
def _reader() -> TypeAdapter[NewSession]:
    return TypeAdapter(NewSession)


def read_rollout(project: Project, session_id: str, declared: Mapping[str, Any]) -> NewSession:
    """The session of a rollout: the project's defaults, then what was declared, both as JSON. Raises RequestError."""
    given = {**project.defaults, **declared, "session_id": session_id, "project": project.name}
    try:
        body = _reader().validate_json(json.dumps(given))
    except ValidationError as error:
        first = error.errors()[0]
        raise RequestError(f"{'.'.join(map(str, first['loc']))}: {first['msg']}".removeprefix(": ")) from error
    return claim(body, project.name)


def claim(body: NewSession, project: str) -> NewSession:
    """The session as one of the project: its group is the project's own. Raises RequestError for what is another's."""
    if body.project not in (None, project):
        raise RequestError(f"project: the token is of project {project}", param="project")
    if body.replay is not None:
        raise RequestError("replay: a project's token replays no session", param="replay")
    owner, dot, _ = (body.session_id or "").partition(".")
    if dot and owner != project:
        raise RequestError(f"session_id: one with a dot begins with '{project}.'", param="session_id")
    group_id = None if body.group_id is None else name_group(project, body.group_id)
    return replace(body, project=project, group_id=group_id)


def name_group(project: str, group_id: str) -> str:
    """The project's own group of that name. Raises RequestError."""
    named = f"{project}/{group_id}"
    if len(named) > MOST_GROUP_CHARACTERS:
        raise RequestError(f"group_id: with its project it has more than {MOST_GROUP_CHARACTERS} characters", param="group_id")
    return named


def check_declared(body: NewSession, info: SessionInfo) -> None:
    """Raises Conflict where the rollout's session was opened as something else."""
    other = [
        each.name
        for each in fields(OpeningFields)
        if each.name != "echo_policy" and getattr(info, each.name) != getattr(body, each.name)
    ]
    if other:
        raise Conflict(
            f"rollout {info.session_id} was opened with another {', '.join(other)}: declare it before its first call"
        )
