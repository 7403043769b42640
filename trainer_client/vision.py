"""What a vision-language model is given besides a row's ids: the pixels of its images and, for M-RoPE, positions.

    vision = Vision.load(model_dir)                        # the image processor that lies beside the weights
    data = batch.padded(framework="torch", vision=vision)
    logits = model(data.token_ids, attention_mask=data.attention_mask, **data.vision_inputs).logits

The ids of a row already hold an image's placeholders, as the engine's processor expanded them: text is never processed again. So only
the image processor of a checkpoint is needed, and it must be the engine's: the same files, and the same backend of transformers
(torchvision or Pillow), whose pixels differ. What does not fit a row's placeholders raises.
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from reconstruct.media import Media
from reconstruct.trajectory import Trajectory
from trainer_client.errors import VisionMismatch
from trainer_client.media import MediaFiles

Features = Mapping[str, NDArray[Any]]
"""What an image processor makes of one image, by the names of the model's parameters."""

_NESTED = "pixel_attention_mask"
"""Of models that take tiles per sample, (samples, tiles, channels, height, width): Idefics3, SmolVLM. Others take images end to end."""


@dataclass(frozen=True, slots=True, eq=False)
class RowVision:
    """A row's images in order, and per token: `token_types` int64 (n,), 1 on placeholders; `rope_positions` int64 (3, n) or None."""

    images: tuple[Features, ...]
    token_types: NDArray[np.int64]
    rope_positions: NDArray[np.int64] | None


@dataclass(frozen=True, slots=True, eq=False)
class Vision:
    """`image_processor`: one of transformers, or a function of `images` and `return_tensors` with such a result. `placeholder_id`: the
    token that stands for a piece of an image. `rope_merge`: for models with M-RoPE the patches per side that one placeholder covers, else
    None. `tile`: for models that take tiles, the patch size and the patches per side that one placeholder covers, else None."""

    image_processor: Any
    placeholder_id: int
    rope_merge: int | None = None
    tile: tuple[int, int] | None = None

    @classmethod
    def load(cls, model: str | os.PathLike[str]) -> Self:
        """For the checkpoint in a folder, or of a name that transformers finds. Needs transformers and Pillow."""
        from transformers import AutoConfig, AutoImageProcessor

        return cls.of(AutoConfig.from_pretrained(model), AutoImageProcessor.from_pretrained(model))

    @classmethod
    def of(cls, config: Any, processor: Any) -> Self:
        """For a model's configuration and its processor, or its image processor. Raises ValueError for a model without images."""
        placeholder = getattr(config, "image_token_id", getattr(config, "image_token_index", None))
        if placeholder is None:
            raise ValueError(f"a model of type {config.model_type!r} has no image token")
        text = config.get_text_config()
        rope = getattr(text, "rope_parameters", None) or getattr(text, "rope_scaling", None) or {}
        merge = config.vision_config.spatial_merge_size if "mrope_section" in rope else None
        scale = getattr(config, "scale_factor", None)
        return cls(
            image_processor=getattr(processor, "image_processor", processor),
            placeholder_id=int(placeholder),
            rope_merge=merge,
            tile=None if scale is None else (int(config.vision_config.patch_size), int(scale)),
        )

    def read(self, rows: Sequence[Trajectory], lengths: Sequence[int], media: MediaFiles) -> list[RowVision]:
        """For the first `lengths` tokens of each row, every image processed once. Raises VisionMismatch, and what `MediaFiles` raises."""
        shown = [cut_media(row, length) for row, length in zip(rows, lengths, strict=True)]
        digests = list(dict.fromkeys(item.digest for items in shown for item in items))
        media.fetch(digests)
        features = {digest: self._process(media.image(digest)) for digest in digests}
        return [
            self._read_row(row, length, [(item, features[item.digest]) for item in items])
            for row, length, items in zip(rows, lengths, shown, strict=True)
        ]

    def _process(self, picture: Any) -> Features:
        # Image processors of the torchvision backend make no numpy arrays.
        form = "pt" if importlib.util.find_spec("torch") else "np"
        made = self.image_processor(images=[picture], return_tensors=form)
        return {name: np.asarray(value) for name, value in made.items() if hasattr(value, "shape")}

    def _read_row(self, row: Trajectory, length: int, shown: Sequence[tuple[Media, Features]]) -> RowVision:
        is_placeholder = np.asarray(row.token_ids[:length]) == self.placeholder_id
        places: list[NDArray[np.int64]] = []
        for item, features in shown:
            at = item.start + np.flatnonzero(is_placeholder[item.start : item.end])
            wanted = self._count(features)
            if not len(at) or (wanted is not None and wanted != len(at)):
                raise VisionMismatch(
                    f"trajectory {row.trajectory_id!r}: image {item.digest} has {len(at)} placeholders from token {item.start} on, "
                    f"the image processor makes {'some' if wanted is None else wanted}: it must be the engine's"
                )
            places.append(at)
        if is_placeholder.sum() != sum(map(len, places)):
            stray = np.setdiff1d(np.flatnonzero(is_placeholder), np.concatenate([np.zeros(0, np.int64), *places]))[0]
            raise VisionMismatch(
                f"trajectory {row.trajectory_id!r}: token {stray} is the placeholder {self.placeholder_id} of an image, and no image "
                "stands there"
            )
        images = tuple(features for _, features in shown)
        rope = None if self.rope_merge is None else _rope_positions(length, places, [self._grid(each) for each in images], row)
        return RowVision(images, is_placeholder.astype(np.int64), rope)

    def _count(self, features: Features) -> int | None:
        """The placeholders of an image; None if unknown here: then the model itself compares."""
        if self.rope_merge is not None:
            return int(np.prod(self._grid(features)))
        if self.tile is not None and _NESTED in features:
            patch, scale = self.tile
            _, tiles, _, height, width = features["pixel_values"].shape
            return int(tiles * (height // patch) * (width // patch) // scale**2)
        return None

    def _grid(self, features: Features) -> tuple[int, int, int]:
        """In placeholders: frames, rows, columns."""
        frames, height, width = (int(side) for side in features["image_grid_thw"][0])
        assert self.rope_merge is not None
        return frames, height // self.rope_merge, width // self.rope_merge


def cut_media(row: Trajectory, length: int) -> tuple[Media, ...]:
    """The images within the row's first `length` tokens."""
    return tuple(item for item in row.media if item.end <= length)


def join_rows(rows: Sequence[RowVision]) -> dict[str, NDArray[Any]]:
    """The images of the rows of a rectangle, as a model takes them beside ids of shape (rows, length)."""
    if not any(_NESTED in image for row in rows for image in row.images):
        return join_sequence(rows)
    names = {name: array for row in rows for image in row.images for name, array in image.items()}
    return {name: _concatenate([_tiles_of(row, name, like) for row in rows], axis=0) for name, like in names.items()}


def join_sequence(rows: Iterable[RowVision]) -> dict[str, NDArray[Any]]:
    """The images of rows laid end to end, as a model takes them beside ids of shape (1, tokens)."""
    images = [image for row in rows for image in row.images]
    axis = 1 if any(_NESTED in image for image in images) else 0
    names = dict.fromkeys(name for image in images for name in image)
    return {name: _concatenate([image[name] for image in images], axis=axis) for name in names}


def _tiles_of(row: RowVision, name: str, like: NDArray[Any]) -> NDArray[Any]:
    """The tiles of a row, (1, tiles, …); none for a row without images. A model drops the tiles that padding adds."""
    if not row.images:
        return np.zeros((1, 0, *like.shape[2:]), like.dtype)
    return _concatenate([image[name] for image in row.images], axis=1)


def _concatenate(arrays: Sequence[NDArray[Any]], axis: int) -> NDArray[Any]:
    """Joined along `axis`; the other dimensions are filled with zeros up to the largest."""
    largest = np.max([array.shape for array in arrays], axis=0)
    widened = []
    for array in arrays:
        missing = [
            (0, 0 if at == axis else int(side) - have) for at, (side, have) in enumerate(zip(largest, array.shape, strict=True))
        ]
        widened.append(np.pad(array, missing) if any(after for _, after in missing) else array)
    return np.concatenate(widened, axis=axis)


def _rope_positions(
    length: int, places: Sequence[NDArray[np.int64]], grids: Sequence[tuple[int, int, int]], row: Trajectory
) -> NDArray[np.int64]:
    """M-RoPE positions, (3, length): text counts on in all three, an image counts frames, rows and columns from where it begins, and the
    text after it goes on behind its longer side (Wang et al., "Qwen2-VL", arXiv:2409.12191; transformers' `get_rope_index`)."""
    positions = np.empty((3, length), dtype=np.int64)
    at = following = 0
    for place, grid in zip(places, grids, strict=True):
        start, end = int(place[0]), int(place[-1]) + 1
        if end - start != len(place):
            raise VisionMismatch(
                f"trajectory {row.trajectory_id!r}: the placeholders of an image at token {start} are not together"
            )
        positions[:, at:start] = np.arange(following, following + start - at)
        following += start - at
        positions[:, start:end] = following + np.indices(grid).reshape(3, -1)
        following += max(grid[1:])
        at = end
    positions[:, at:] = np.arange(following, following + length - at)
    return positions
