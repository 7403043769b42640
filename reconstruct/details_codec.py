"""A call's details as the fields of a record: each array as its shape and its little-endian bytes, None for one that there is not."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

from reconstruct.details import CallDetails

_TOP_IDS, _LOGPROBS, _EXPERTS = ("<i4",), ("<f4",), ("<u1", "<u2")
"""The types that an array may have: the number of its bytes tells which."""


def details_fields(details: CallDetails) -> tuple[Any, ...]:
    return (
        _packed(details.top_token_ids),
        _packed(details.top_logprobs),
        _packed(details.prompt_logprobs),
        _packed(details.routed_experts),
        details.routed_from,
    )


def details_of(fields: Any) -> CallDetails:
    """The details that `details_fields` wrote. Raises TypeError or ValueError for anything else."""
    top_token_ids, top_logprobs, prompt_logprobs, routed_experts, routed_from = fields
    if type(routed_from) is not int or routed_from < 0:
        raise TypeError(f"{routed_from!r} is no position")
    return CallDetails(
        _array(top_token_ids, 2, _TOP_IDS),
        _array(top_logprobs, 2, _LOGPROBS),
        _array(prompt_logprobs, 1, _LOGPROBS),
        _array(routed_experts, 3, _EXPERTS),
        routed_from,
    )


def _packed(array: NDArray[Any] | None) -> tuple[tuple[int, ...], bytes] | None:
    if array is None:
        return None
    return array.shape, array.astype(array.dtype.newbyteorder("<"), copy=False).tobytes()


def _array(packed: Any, dimensions: int, types: tuple[str, ...]) -> NDArray[Any] | None:
    if packed is None:
        return None
    shape, data = packed
    if type(data) is not bytes or len(shape) != dimensions or any(type(size) is not int or size < 0 for size in shape):
        raise TypeError(f"{packed!r} is no array of {dimensions} dimensions")
    for dtype in types:
        if len(data) == math.prod(shape) * np.dtype(dtype).itemsize:
            return np.frombuffer(data, dtype=dtype).reshape(shape)
    raise ValueError(f"{len(data)} bytes are no array of the shape {shape}")
