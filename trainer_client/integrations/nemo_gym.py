"""NeMo Gym (tested with the records of 0.7.0): the calls of a session as its `TokenEntry`.

Gym trains every entry and merges by token prefixes, so a call that is not trained whole has none; nor has one whose prompt has images. A
parent is named if it has an entry and the prompt begins with all its tokens; other entries are roots.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Mapping, Sequence
from typing import Any

from reconstruct.trace import is_trained_whole
from reconstruct.trajectory import Trajectory

DIGEST_VERSION = 1
DIGEST_DOMAIN = b"nemo-gym-tokens"


def describe_calls(calls: Sequence[Mapping[str, Any]], rows: Sequence[Trajectory], rollout_id: str) -> list[dict[str, Any]]:
    """Fields of `TokenEntry`, one per call that is trained, in their order. `calls` and `rows`: as `Session` reads them."""
    trained = {call["call_id"]: call for call in calls if any(is_trained_whole(row, call) for row in rows)}
    return [_describe(call, trained.get(call["parent_id"] or ""), rollout_id) for call in trained.values()]


def _describe(call: Mapping[str, Any], parent: Mapping[str, Any] | None, rollout_id: str) -> dict[str, Any]:
    ids = call["prompt_ids"] + call["completion_ids"]
    before = [] if parent is None else parent["prompt_ids"] + parent["completion_ids"]
    extends = parent is not None and call["prompt_ids"][: len(before)] == before
    return {
        "rollout_id": rollout_id,
        "model_call_id": call["call_id"],
        "model": call["model"] or "",
        "prompt_token_ids": call["prompt_ids"],
        "generation_token_ids": call["completion_ids"],
        "generation_log_probs": call["logprobs"],
        "output_items": [{"type": "message", **call["reply"]}],
        "token_item_index": 0,
        "created_at": call["started_at"],
        "parent_call_id": call["parent_id"] if extends else None,
        "parent_resolution": "resolved" if extends else "root",
        "cum_len": len(ids),
        "digest": hashlib.sha256(DIGEST_DOMAIN + struct.pack(f">BQ{len(ids)}Q", DIGEST_VERSION, len(ids), *ids)).hexdigest(),
    }
