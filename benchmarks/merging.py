"""The merge loop of a peer, run on the same sessions: SkyRL's prefix-aware merging of stepwise samples.

Its functions are taken out of the installed file and run alone, since importing the module imports a whole trainer. Like every
merge that is given prompts instead of additions it works on lists whose length is the square of a session's.
"""

from __future__ import annotations

import ast
import time
from collections.abc import Callable
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Dict, List, Optional, Tuple, Union  # noqa: UP035  as the source spells its annotations

from reconstruct.codec import decode

_NEEDED = ("_is_prefix", "_merge_single_trajectory")


def skyrl_merge() -> Callable[[dict[str, Any]], dict[str, Any]]:
    """`_merge_single_trajectory` of the installed SkyRL. Raises SystemExit where there is none."""
    package = find_spec("skyrl")
    if package is None or not package.submodule_search_locations:
        raise SystemExit("skyrl is missing: pip install --no-deps -r tests/peers.txt")
    source = Path(next(iter(package.submodule_search_locations))) / "train" / "generators" / "utils.py"
    tree = ast.parse(source.read_text())
    tree.body = [node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name in _NEEDED]
    names: dict[str, Any] = {"Any": Any, "Dict": Dict, "List": List, "Optional": Optional, "Tuple": Tuple, "Union": Union}  # noqa: UP006
    names["GeneratorOutput"] = dict
    exec(compile(tree, str(source), "exec"), names)
    merge: Callable[[dict[str, Any]], dict[str, Any]] = names["_merge_single_trajectory"]
    return merge


def skyrl_version() -> str:
    return version("skyrl")


def merge_seconds(stored: list[bytes], parents: list[int | None]) -> tuple[float, int]:
    """Seconds of CPU in which the peer merges the session's calls, given as it wants them, and the rows it makes."""
    samples = _samples(stored, parents)
    merge = skyrl_merge()
    began = time.process_time()
    rows = merge(samples)
    return time.process_time() - began, len(rows["response_ids"])


def _samples(stored: list[bytes], parents: list[int | None]) -> dict[str, Any]:
    """The calls as whole prompts and responses, in lists, which is how stepwise samples come; equal ids are one object."""
    prompts: list[list[int]] = []
    responses: list[list[int]] = []
    logprobs = []
    for record, parent in zip(stored, parents, strict=True):
        node = decode(record).node
        before = prompts[parent] + responses[parent] if parent is not None else []
        prompts.append(before + node.delta_ids.tolist())
        responses.append(node.completion_ids.tolist())
        logprobs.append(node.logprobs.tolist())
    count = len(stored)
    return {
        "prompt_token_ids": prompts,
        "response_ids": responses,
        "loss_masks": [[1] * len(ids) for ids in responses],
        "rollout_logprobs": logprobs,
        "rewards": [0.0] * count,
        "stop_reasons": ["stop"] * count,
        "trajectory_ids": ["s"] * count,
        "is_last_step": [False] * (count - 1) + [True],
    }
