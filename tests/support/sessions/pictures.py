"""Pictures of a few colours as image files, and rows in which they stand."""

from __future__ import annotations

import hashlib
import io
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from examples.screen.tiny_vision_model import Family, make_tiny_vision_model
from reconstruct.media import Media
from reconstruct.records import pack_ids, pack_logprobs
from reconstruct.trajectory import Trajectory
from tests.support.sessions.training_rows import groups, spans, trajectory
from trainer_client.batch import Batch
from trainer_client.media import MediaFiles
from trainer_client.recompute import load_model, recompute
from trainer_client.vision import Vision


def picture(seed: int, width: int = 56, height: int = 56, form: str = "PNG") -> bytes:
    """Four by four squares, each of a colour of its own; other seeds, other colours."""
    from PIL import Image

    drawn = random.Random(seed)
    squares = Image.new("RGB", (4, 4))
    squares.putdata([tuple(drawn.randrange(256) for _ in range(3)) for _ in range(16)])
    file = io.BytesIO()
    squares.resize((width, height), Image.Resampling.NEAREST).save(file, form)
    return file.getvalue()


def digest_of(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


@dataclass
class Album:
    """Image files by digest, and how often each was fetched."""

    files: dict[str, bytes] = field(default_factory=dict)
    fetched: list[str] = field(default_factory=list)

    def add(self, data: bytes) -> str:
        self.files[digest_of(data)] = data
        return digest_of(data)

    def fetch(self, session_id: str, digest: str) -> bytes:
        self.fetched.append(digest)
        return self.files[digest]

    def batch(self, *members: Sequence[Trajectory]) -> Batch:
        """One group per argument."""
        leased = groups(*members)
        return Batch(leased, 9, media=MediaFiles.of([row for group in leased for row in group.trajectories], self.fetch))


def seen_row(name: str, parts: Sequence[Any], *, count: Mapping[str, int], placeholder: int, **changes: Any) -> Trajectory:
    """`parts`: a list of given ids, a list of trained ids in a tuple, or the digest of an image, which has `count[digest]` placeholders."""
    ids: list[int] = []
    mask: list[int] = []
    media = []
    for part in parts:
        if isinstance(part, str):
            media.append(Media(part, "image", len(ids), count[part]))
        new = [placeholder] * count[part] if isinstance(part, str) else list(part)
        ids += new
        mask += [int(isinstance(part, tuple))] * len(new)
    given = {
        "token_ids": pack_ids(ids),
        "loss_mask": np.array(mask, dtype=np.int8),
        "logprobs": pack_logprobs([-0.1 * (at % 7 + 1) if trained else 0.0 for at, trained in enumerate(mask)]),
        "weight_versions": tuple(span for at, trained in enumerate(mask) if trained for span in spans(at, [5])),
        "media": tuple(media),
    }
    return trajectory(name, **{**given, **changes})


FAMILIES: tuple[Family, ...] = ("idefics3", "qwen2.5-vl")
SIZES = ((56, 56), (168, 56), (84, 140))
COUNTS: dict[str, tuple[int, ...]] = {"idefics3": (20, 12, 20), "qwen2.5-vl": (4, 12, 15)}
"""The placeholders of images of these sizes."""


@dataclass
class Sighted:
    """A model with its vision, and an album of one image of each of SIZES."""

    family: Family
    folder: Path
    model: Any
    vision: Vision
    album: Album
    digests: tuple[str, ...]

    def row(self, name: str, parts: Sequence[Any], **changes: Any) -> Trajectory:
        """`parts` as for `seen_row`, an image being its index."""
        shown = [self.digests[part] if isinstance(part, int) else part for part in parts]
        count = dict(zip(self.digests, COUNTS[self.family], strict=True))
        return seen_row(name, shown, count=count, placeholder=self.vision.placeholder_id, **changes)

    def alone(self, batch: Batch, row: Trajectory) -> Any:
        return recompute(self.model, row, vision=self.vision, media=batch.media)


def open_eyes(family: Family, folder: Path) -> Sighted:
    """A tiny model of the family, made in `folder`."""
    model, vision = load_model(make_tiny_vision_model(folder, family=family))
    assert vision is not None
    album = Album()
    digests = tuple(album.add(picture(seed, *size)) for seed, size in enumerate(SIZES))
    return Sighted(family, folder, model, vision, album, digests)


def three_rows(sighted: Sighted) -> Batch:
    """Two rows that begin with the same image, and part after another; one row without."""
    return sighted.album.batch(
        [
            sighted.row("a", [[700, 701], 0, [702], (703, 704), 1, [705], (706,)]),
            sighted.row("b", [[700, 701], 0, [702], (703,), [707], 2, (708, 709)]),
            sighted.row("c", [[700, 710], (711,)]),
        ]
    )
