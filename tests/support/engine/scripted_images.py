"""Images at the scripted engine, in vLLM 0.32's shapes: placeholders in renderings, their ranges, and content parts that are expanded.

An image becomes one placeholder id per cell of `CELL` x `CELL` pixels. As in vLLM, ids that come with content parts have one placeholder
for each of them, and the first ones found are expanded, wherever they come from.
"""

from __future__ import annotations

import base64
import hashlib
import io
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from PIL import Image

from tests.support.engine.template_families import FAMILIES, Family

START, PAD, END = "<|vision_start|>", "<|image_pad|>", "<|vision_end|>"
CELL = 16

SEEING = replace(
    FAMILIES["qwen3"], name="qwen3-seeing", special=(*FAMILIES["qwen3"].special, START, PAD, END), template="qwen3"
)
"""Qwen3 with the markup of images."""

Ranges = list[dict[str, int]]


class ImagesRefused(Exception):
    """With vLLM's words, and the parameter it names."""

    def __init__(self, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.param = param


def take_images(messages: Sequence[Mapping[str, Any]], most: int, model: str) -> tuple[list[dict[str, Any]], list[bytes]]:
    """The messages with a placeholder in place of each image, and the images. Raises ImagesRefused for more than `most`."""
    images = [data_of(part["image_url"]["url"]) for part in _parts(messages)]
    check_number(len(images), most, model)
    return [_with_placeholders(message) for message in messages], images


def check_number(number: int, most: int, model: str) -> None:
    if number and not most:
        raise ImagesRefused(f"{model} is not a multimodal model")
    if number > most:
        raise ImagesRefused(
            f"At most {most} image(s) may be provided in one prompt. Set `--limit-mm-per-prompt` to increase this limit.",
            "image",
        )


def expand(family: Family, ids: Sequence[int], images: Sequence[bytes]) -> tuple[list[int], Ranges]:
    """The ids with each image's placeholders in place of the next one found, and their ranges. Raises ImagesRefused if too few are."""
    pad, left = family.id_of(PAD) if images else -1, list(images)
    expanded: list[int] = []
    ranges: Ranges = []
    for token in ids:
        if token == pad and left:
            length = count_placeholders(left.pop(0))
            ranges.append({"offset": len(expanded), "length": length})
            expanded += [token] * length
        else:
            expanded.append(token)
    if left:
        raise ImagesRefused(f"Failed to apply prompt replacement for mm_items['image'][{len(ranges)}]")
    return expanded, ranges


def features(images: Sequence[bytes], ranges: Ranges, payload: str) -> dict[str, Any] | None:
    """What render tells of a prompt's images."""
    if not images:
        return None
    data = {"image": ["A" * 64 for _ in images]} if payload == "tensors" else None
    hashes = [hashlib.blake2b(image).hexdigest() for image in images]
    return {"mm_hashes": {"image": hashes}, "mm_placeholders": {"image": ranges}, "kwargs_data": data, "mm_metadata": None}


def count_placeholders(data: bytes) -> int:
    with Image.open(io.BytesIO(data)) as image:
        return max(1, (image.width // CELL) * (image.height // CELL))


def data_of(url: str) -> bytes:
    """Only of data URLs: this engine fetches nothing."""
    head, _, body = url.partition(",")
    assert head.startswith("data:image/") and head.endswith(";base64"), url[:80]
    return base64.b64decode(body, validate=True)


def _parts(messages: Sequence[Mapping[str, Any]]) -> Iterator[dict[str, Any]]:
    for message in messages:
        content = message.get("content")
        for part in content if isinstance(content, list) else ():
            if isinstance(part, dict) and part.get("type") == "image_url":
                yield part


def _with_placeholders(message: Mapping[str, Any]) -> dict[str, Any]:
    content = message.get("content")
    if not isinstance(content, list):
        return dict(message)
    mark = {"type": "text", "text": START + PAD + END}
    parts = [mark if isinstance(part, dict) and part.get("type") == "image_url" else part for part in content]
    return {**message, "content": parts}


def picture(
    color: str | tuple[int, int, int] = "red", size: tuple[int, int] = (32, 32), format: str = "PNG", **options: Any
) -> bytes:
    """An image of one colour."""
    stream = io.BytesIO()
    Image.new("RGB", size, color).save(stream, format, **options)
    return stream.getvalue()


def url_of(data: bytes, kind: str = "image/png") -> str:
    return f"data:{kind};base64,{base64.b64encode(data).decode()}"
