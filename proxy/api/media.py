"""The images of a session over HTTP, as the harness sent them: for trainers, who compute logprobs from pixels, and for the admin."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Depends, Path, Response

from contract.sessions import Fork
from proxy.api.requests import Served, SessionId, require_trainer
from proxy.errors import NotFound
from proxy.images import FORMATS, media_type
from proxy.services import Services
from proxy.store.states import SessionInfo

router = APIRouter(prefix="/sessions/{session_id}/media", tags=["sessions"], default_response_class=Response)

Digest = Annotated[str, Path(pattern="^[0-9a-f]{64}$", description="sha256 of the image's bytes, as in a row's `media`.")]


@router.get(
    "/{digest}",
    dependencies=[Depends(require_trainer)],
    responses={
        200: {"content": {kind: {} for kind in FORMATS.values()}, "description": "the bytes"},
        404: {"description": "the session has no such image (`not_found`)"},
    },
)
async def get_media(services: Served, session_id: SessionId, digest: Digest) -> Response:
    """An image that the session's calls saw, as long as the session exists."""
    state = await services.sessions.load(session_id)
    if state is None:
        raise NotFound(f"there is no session {session_id}")
    return image_response(await load_image(services, state.info, digest))


async def load_image(services: Services, info: SessionInfo, digest: str) -> bytes:
    """Raises NotFound for one that neither the session nor those that it replays have."""
    kept: SessionInfo | Fork | None = info
    while kept is not None and digest not in await services.media.sizes(kept.session_id, kept.created_at):
        if isinstance(kept, SessionInfo):
            kept = kept.replay
        else:
            origin = await services.sessions.load(kept.session_id)
            kept = None if origin is None else origin.info.replay
    data = (await services.media.load([digest])).get(digest) if kept is not None else None
    if data is None:
        raise NotFound(f"session {info.session_id} has no image {digest}")
    return data


def image_response(data: bytes) -> Response:
    """It never changes, and no browser takes it for anything else."""
    headers = {
        "cache-control": "private, max-age=31536000, immutable",
        "content-security-policy": "default-src 'none'; sandbox",
        "x-content-type-options": "nosniff",
    }
    return Response(data, media_type=media_type(data), headers=headers)
