"""Images in messages: read from the forms that the dialects have, named by the sha256 of their bytes, bounded and decoded once.

A canonical message holds `{"type": "image", "digest": ...}`; the bytes stand beside it. So the same image in another dialect's form or in
another base64 is the same message, and no history repeats its bytes. What an engine is sent is made here, too.
"""

from __future__ import annotations

import base64
import binascii
import contextlib
import hashlib
import io
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from urllib.parse import unquote_to_bytes

from proxy.errors import RequestError

FORMATS = {"PNG": "image/png", "JPEG": "image/jpeg", "WEBP": "image/webp", "GIF": "image/gif"}
"""Pillow's names of what is taken, and the media types."""

SCHEME = "sha256:"
"""`sha256:<hex>` in place of a URL or a file's id names an image that the session has sent before."""

_DIGEST = re.compile(r"(?:sha256:)?([0-9a-f]{64})")
_URL_SAFE = str.maketrans("-_", "+/")


@dataclass(frozen=True, slots=True)
class ImageBounds:
    """The largest image in bytes and pixels, and the most images of one call and of one session."""

    image_bytes: int = 20 * 2**20
    pixels: int = 40_000_000
    per_call: int = 128
    per_session: int = 2048


class ImageReader:
    """Reads the images of one request. `images` collects the bytes by digest. `size_bytes`: of all data read, repeated images included."""

    __slots__ = ("_bounds", "images", "size_bytes")

    def __init__(self, bounds: ImageBounds) -> None:
        self._bounds = bounds
        self.images: dict[str, bytes] = {}
        self.size_bytes = 0

    def read(self, message: dict[str, Any]) -> tuple[dict[str, Any], tuple[str, ...]]:
        """The canonical message, and the digests of its images in order. Raises RequestError for an image that cannot be one, and
        for media named by a URL."""
        content = message.get("content")
        if type(content) is not list or all(type(part) is dict and part.get("type") == "text" for part in content):
            return message, ()
        digests: list[str] = []
        parts: list[Any] = []
        for part in content:
            if type(part) is dict:
                # Engines take the field alone for its type.
                kind = part.get("type", "image_url" if "image_url" in part else None)
                if kind in ("image_url", "image"):
                    digests.append(self._digest(part, kind))
                    part = {"type": "image", "digest": digests[-1]}
                else:
                    _refuse_urls(part)
            parts.append(part)
        return {**message, "content": parts}, tuple(digests)

    def add(self, data: bytes) -> str:
        """The digest of an image's bytes. Raises RequestError for too many of them."""
        if len(data) > self._bounds.image_bytes:
            raise RequestError(
                f"an image has {len(data)} bytes, of at most {self._bounds.image_bytes}",
                param="messages",
            )
        digest = hashlib.sha256(data).hexdigest()
        self.size_bytes += len(data)
        self.images.setdefault(digest, data)
        return digest

    def _digest(self, part: Mapping[str, Any], kind: str) -> str:
        if kind == "image":
            return _parse_digest(part.get("digest"))
        value = part.get("image_url")
        url = value.get("url") if isinstance(value, dict) else value
        if not isinstance(url, str):
            raise RequestError("an image needs its URL as a string", param="messages")
        if url[:5].lower() == "data:":
            return self.add(_decode_data_url(url))
        if url.startswith(SCHEME):
            return _parse_digest(url)
        raise refuse_url("image")


def images_in(message: Mapping[str, Any]) -> tuple[str, ...]:
    """The digests of a canonical message's images, in order."""
    content = message.get("content")
    if type(content) is not list:
        return ()
    return tuple(part["digest"] for part in content if type(part) is dict and part.get("type") == "image")


def _parse_digest(name: Any) -> str:
    found = _DIGEST.fullmatch(name) if isinstance(name, str) else None
    if found is None:
        raise RequestError("an image is named by its digest as 'sha256:' and 64 hexadecimal digits", param="messages")
    return found[1]


def _decode_data_url(url: str) -> bytes:
    head, comma, body = url[5:].partition(",")
    if not comma:
        raise RequestError("an image's data URL has no comma before its data", param="messages")
    if not head.lower().endswith(";base64"):
        return unquote_to_bytes(body)
    with contextlib.suppress(ValueError):
        return binascii.a2b_base64(body, strict_mode=True)
    plain = body.translate(_URL_SAFE)
    if "%" in plain:
        plain = unquote_to_bytes(plain).decode("latin-1")
    # A tenth of what a regular expression takes.
    plain = "".join(plain.split()).rstrip("=")
    try:
        return base64.b64decode(plain + "=" * (-len(plain) % 4), validate=True)
    except (binascii.Error, ValueError) as error:
        raise RequestError(f"an image's base64 cannot be decoded: {error}", param="messages") from error


def refuse_url(kind: str, param: str = "messages") -> RequestError:
    """The error for media named by a URL."""
    return RequestError(
        f"the request names its {kind} by a URL, and nothing is fetched for a request: send the bytes, as base64 or as a data URL",
        param=param,
    )


def _refuse_urls(part: Mapping[str, Any]) -> None:
    """Raise RequestError if the part names its media by anything but a data URL: an engine would fetch it, from a network that the harness
    may not reach."""
    for name, value in part.items():
        if not name.endswith("url"):
            continue
        address = value.get("url") if isinstance(value, dict) else value
        if isinstance(address, str) and address[:5].lower() != "data:":
            raise refuse_url(name.removesuffix("_url"))


def check_image(data: bytes, bounds: ImageBounds) -> None:
    """Decode it. Raises RequestError if it is broken, of no format that is taken, or has too many pixels: then before it is decoded."""
    # Most services never see an image: the library takes 30 ms and 10 MB.
    from PIL import Image

    # Its own bound is one for all, and warns first.
    Image.MAX_IMAGE_PIXELS = None
    try:
        with Image.open(io.BytesIO(data), formats=tuple(FORMATS)) as image:
            _check_size(image.size, bounds)
            image.load()
            # A GIF's first frame may be larger than its head says.
            _check_size(image.size, bounds)
    except RequestError:
        raise
    except Exception as error:
        names = ", ".join(FORMATS)
        raise RequestError(
            f"an image of {len(data)} bytes cannot be decoded as {names}: {str(error)[:200]}", param="messages"
        ) from error


def _check_size(size: tuple[int, int], bounds: ImageBounds) -> None:
    width, height = size
    if not 0 < width * height <= bounds.pixels:
        raise RequestError(f"an image has {width} x {height} pixels, of at most {bounds.pixels}", param="messages")


def media_type(data: bytes) -> str:
    """By the first bytes, of an image that was checked."""
    for start, kind in ((b"\x89PNG", "PNG"), (b"\xff\xd8", "JPEG"), (b"RIFF", "WEBP"), (b"GIF8", "GIF")):
        if data.startswith(start):
            return FORMATS[kind]
    return "application/octet-stream"


def data_url(data: bytes) -> str:
    return f"data:{media_type(data)};base64,{base64.b64encode(data).decode()}"


def write_images(messages: Sequence[Mapping[str, Any]], urls: Mapping[str, str]) -> list[Mapping[str, Any]]:
    """The messages as chat messages with the URL of each image."""
    return [_write(message, urls) if images_in(message) else message for message in messages]


def _write(message: Mapping[str, Any], urls: Mapping[str, str]) -> Mapping[str, Any]:
    parts = [
        {"type": "image_url", "image_url": {"url": urls[part["digest"]]}}
        if type(part) is dict and part.get("type") == "image"
        else part
        for part in message["content"]
    ]
    return {**message, "content": parts}


def without_images(message: Mapping[str, Any]) -> Mapping[str, Any]:
    """The message for an endpoint that only wants to know that there is one."""
    return {**message, "content": "?"} if images_in(message) else message
