"""The images of a call: their bytes for the engine, from the request, from memory or the store; kept before the call is recorded."""

from __future__ import annotations

from collections import OrderedDict

from proxy.call.draft import Draft
from proxy.call.hooks import CallHook
from proxy.call.phases import Admitted, Sampled
from proxy.call.plan import refuse_images
from proxy.call.session import Session
from proxy.dialects.base import Request
from proxy.engine.apis.contact import EngineKinds
from proxy.engine.replica import Replica
from proxy.errors import Conflict, RequestError
from proxy.store.media import MediaStore


class ImageHook(CallHook):
    """Of requests with images."""

    of_request = "images"

    def __init__(self, images: ImageCache, kinds: EngineKinds) -> None:
        self._images = images
        self._kinds = kinds

    async def before_sampling(self, draft: Draft, request: Request, replica: Replica) -> None:
        refuse_images(request, self._kinds.of(replica))
        if not request.image_bytes:
            await self._images.load(draft, request)

    async def before_commit(self, sampled: Sampled) -> None:
        await self._images.keep(sampled.call)


class ImageCache:
    """Keeps `capacity_bytes` of the images used last in memory: a harness sends its whole history with every call."""

    def __init__(self, store: MediaStore, capacity_bytes: int) -> None:
        self._store = store
        self._capacity_bytes = capacity_bytes
        self._recent: OrderedDict[str, bytes] = OrderedDict()
        self.memory_bytes = 0

    async def load(self, draft: Draft, request: Request) -> None:
        """Give the request the bytes of its images. Raises RequestError for one that the session never sent, and for more than one session
        may have."""
        session, sent = draft.session, dict(draft.images)
        digests = set(request.images)
        unknown = digests - sent.keys() - session.kept_images
        if unknown:
            # Of another process's calls, or only named. A stored history names what its own session sent.
            session.kept_images |= (await self._store.sizes(session.info.session_id, session.info.created_at)).keys()
            unknown -= session.kept_images
            if unknown and session.recording is not None:
                # What a fork replays, its origin keeps.
                unknown -= session.recording.images
        if unknown:
            raise RequestError(f"the session has sent no image with the digest {min(unknown)}", param="messages")
        await self._check_number(session, digests)
        request.image_bytes = sent | await self._find(digests - sent.keys())

    async def _check_number(self, session: Session, digests: set[str]) -> None:
        new = digests - session.kept_images
        if not new:
            return
        session_id = session.info.session_id
        kept = await self._store.count(session_id, session.info.created_at)
        if kept + len(new) > session.bounds.per_session:
            raise RequestError(
                f"session '{session_id}' has {kept} images and the request {len(new)} new ones, of at most "
                f"{session.bounds.per_session}",
                param="messages",
            )

    async def _find(self, digests: set[str]) -> dict[str, bytes]:
        found = {digest: self._recent[digest] for digest in digests if digest in self._recent}
        for digest in found:
            self._recent.move_to_end(digest)
        if missing := digests - found.keys():
            loaded = await self._store.load(missing)
            if lost := missing - loaded.keys():
                raise Conflict(f"the store has lost the image with the digest {min(lost)}")
            found |= loaded
            self._remember(loaded)
        return found

    async def keep(self, call: Admitted) -> None:
        """Store the images of a call that is about to be recorded. Raises Conflict when the session is closed or gone."""
        request, session = call.request, call.session
        new = {digest: request.image_bytes[digest] for digest in request.images if digest not in session.kept_images}
        if new:
            await self._store.keep(call.session_id, session.info.created_at, new)
            session.kept_images |= new.keys()
            self._remember(new)

    def _remember(self, images: dict[str, bytes]) -> None:
        for digest, data in images.items():
            if digest not in self._recent:
                self._recent[digest] = data
                self.memory_bytes += len(data)
        while self.memory_bytes > self._capacity_bytes:
            _, data = self._recent.popitem(last=False)
            self.memory_bytes -= len(data)
