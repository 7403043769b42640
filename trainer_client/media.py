"""The images of rows, by digest: each fetched once, when it is first read, and checked against its digest.

A digest is the SHA-256 of the image file's bytes, in hexadecimal. Rows say where an image stands (`row.media`); the bytes come from the
service, from the folder of an export, or from any mapping.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import TYPE_CHECKING, Self

from reconstruct.trajectory import Trajectory
from trainer_client.errors import InvalidAnswer

if TYPE_CHECKING:
    from PIL.Image import Image

Fetch = Callable[[str, str], bytes]
"""The bytes of a session's image, by the session's id and the digest."""

FORMATS = ("PNG", "JPEG", "WEBP", "GIF")


class MediaFiles(Mapping[str, bytes]):
    """Bytes by digest. Thread-safe: at worst an image is fetched twice."""

    def __init__(self, sources: Mapping[str, Callable[[], bytes]]) -> None:
        """`sources`: for each digest, the function that fetches it."""
        self._sources = dict(sources)
        self._bytes: dict[str, bytes] = {}

    @classmethod
    def of(cls, rows: Iterable[Trajectory], fetch: Fetch) -> Self:
        """The images of `rows`, each from one of the sessions that have it."""
        return cls({item.digest: partial(fetch, row.session_id, item.digest) for row in rows for item in row.media})

    @classmethod
    def join(cls, parts: Sequence[MediaFiles]) -> Self:
        """The images of several batches."""
        joined = cls({digest: source for part in parts for digest, source in part._sources.items()})
        for part in parts:
            joined._bytes |= part._bytes
        return joined

    def __getitem__(self, digest: str) -> bytes:
        """The image file. Raises InvalidAnswer if the bytes do not have this digest, KeyError for one that no row names."""
        found = self._bytes.get(digest)
        if found is None:
            found = self._bytes[digest] = self._fetch(digest)
        return found

    def __iter__(self) -> Iterator[str]:
        return iter(self._sources)

    def __len__(self) -> int:
        return len(self._sources)

    def fetch(self, digests: Iterable[str] | None = None, *, connections: int = 8) -> None:
        """Fetch these, or all, now, over as many connections at once; what is here already is not fetched again."""
        missing = [digest for digest in dict.fromkeys(self if digests is None else digests) if digest not in self._bytes]
        if missing:
            with ThreadPoolExecutor(min(connections, len(missing)), "media") as pool:
                for _ in pool.map(self.__getitem__, missing):
                    pass

    def image(self, digest: str) -> Image:
        """The picture as the engine sees it; see `decode_image`."""
        return decode_image(self[digest])

    def _fetch(self, digest: str) -> bytes:
        data = self._sources[digest]()
        if (found := hashlib.sha256(data).hexdigest()) != digest:
            raise InvalidAnswer(f"image {digest} came as {len(data)} bytes with the digest {found}")
        return data


def decode_image(data: bytes) -> Image:
    """An RGB picture, decoded as vLLM 0.32 decodes it (vllm/multimodal/media/image.py): the first frame, turned as its EXIF orientation
    says, with white behind what is transparent. Needs Pillow."""
    from PIL import Image, ImageOps

    picture: Image.Image = Image.open(io.BytesIO(data), formats=FORMATS)
    # As the engine: a damaged EXIF block is no reason to refuse the picture.
    with contextlib.suppress(Exception):
        picture = ImageOps.exif_transpose(picture)
    picture.load()
    if picture.mode == "RGB" or not ("transparency" in picture.info or picture.mode in ("RGBA", "LA", "PA")):
        return picture.convert("RGB")
    picture = picture.convert("RGBA")
    white = Image.new("RGB", picture.size, (255, 255, 255))
    white.paste(picture, mask=picture.getchannel("A"))
    return white
