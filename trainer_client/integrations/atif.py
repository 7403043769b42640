"""ATIF v1.8, the trajectory format of Harbor and others: sessions as its documents, and its documents as training rows.

ATIF has no loss mask: whoever trains takes each step's `completion_token_ids`. So only a step whose every sampled token is trained has ids,
it has them in one place, and none if images are in its prompt. Each training row is a trajectory; a call that is trained in another row is
there as copied context.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, Protocol

from reconstruct.messages import reasoning_of
from reconstruct.records import UNKNOWN_MODE, pack_ids, pack_logprobs
from reconstruct.trace import TrainedCalls, count_trained, is_trained_whole
from reconstruct.trajectory import Trajectory, weigh_rows
from trainer_client.wire import decode_trajectory

VERSION = "ATIF-v1.8"
SOURCES = {"system": "system", "developer": "system", "assistant": "agent"}
"""By the role of a message; tools' are observations, and all others the user's."""
UNKNOWN = "unknown"

Json = dict[str, Any]


class Row(TrainedCalls, Protocol):
    """A training row, such as `reconstruct.trajectory.Trajectory`."""

    @property
    def trajectory_id(self) -> str: ...
    @property
    def role(self) -> str: ...
    @property
    def agent(self) -> str: ...


def describe_session(
    state: Mapping[str, Any], calls: Sequence[Mapping[str, Any]], rows: Sequence[Row], tools: Sequence[Json] | None = None
) -> Json | None:
    """The session as one document of ATIF: the main agent's first row, and the other rows below it as `subagent_trajectories`. None for
    one without rows. `state`: as `GET /sessions/{id}` has it; `calls`: as its `/calls` lists them. Images are named and not contained."""
    if not rows:
        return None
    ordered = sorted(rows, key=lambda row: row.role != "main")
    by_id = {call["call_id"]: call for call in calls}
    owners = _find_owners(ordered, by_id)
    root, *others = (_describe_row(row, by_id, owners, tools) for row in ordered)
    about = {name: state.get(name) for name in ("status", "reward", "group_id", "task_id", "metadata")}
    root |= {"session_id": state["session_id"], "extra": {**root["extra"], **about}}
    return {**root, "subagent_trajectories": others} if others else root


def _find_owners(rows: Sequence[Row], calls: Mapping[str, Mapping[str, Any]]) -> dict[str, CallRow]:
    """Where each call belongs: to the row that trains it, otherwise to the first that has it."""
    owners: dict[str, CallRow] = {}
    for row in rows:
        for call_id in row.call_ids:
            call = calls[call_id]
            if call_id not in owners or count_trained(row, call):
                owners[call_id] = CallRow(row.trajectory_id, is_trained_whole(row, call))
    return owners


@dataclass(frozen=True, slots=True)
class CallRow:
    """The row that a call belongs to, and whether its ids say all that is trained of it."""

    trajectory_id: str
    trained: bool


def _describe_row(
    row: Row, calls: Mapping[str, Mapping[str, Any]], owners: Mapping[str, CallRow], tools: Sequence[Json] | None
) -> Json:
    steps: list[Json] = []
    seen = 0
    for call_id in row.call_ids:
        call, owner = calls[call_id], owners[call_id]
        for message in call["messages"][seen:]:
            _add_message(steps, message)
        seen = len(call["messages"]) + 1
        copied = owner.trajectory_id != row.trajectory_id
        steps.append(
            _describe_message(call["reply"]) | _describe_call(call, copied=copied, trained=owner.trained and not copied)
        )
    for number, step in enumerate(steps, 1):
        step["step_id"] = number
    own = [step["metrics"] for step in steps if "metrics" in step]
    totals = {f"total_{name}": sum(metrics[name] for metrics in own) for name in ("prompt_tokens", "completion_tokens")}
    model = next((calls[call_id]["model"] for call_id in row.call_ids if calls[call_id]["model"]), None)
    agent = {"name": row.agent or UNKNOWN, "version": UNKNOWN, "model_name": model, "tool_definitions": tools or None}
    return {
        "schema_version": VERSION,
        "trajectory_id": row.trajectory_id,
        "agent": {name: value for name, value in agent.items() if value is not None},
        "steps": steps,
        "final_metrics": {**totals, "total_steps": len(steps)},
        "extra": {"role": row.role},
    }


def _add_message(steps: list[Json], message: Mapping[str, Any]) -> None:
    """A message of a request. What tools answered is the observation of the step that called them."""
    if message.get("role") != "tool" or not steps or steps[-1]["source"] != "agent":
        # A reply that the harness wrote itself, or that another session sampled.
        copied = {"is_copied_context": True} if message.get("role") == "assistant" else {}
        steps.append(_describe_message(message) | copied)
        return
    called = {call["tool_call_id"] for call in steps[-1].get("tool_calls", ())}
    result: Json = {"content": _as_content(message.get("content"))}
    if message.get("tool_call_id") in called:
        result["source_call_id"] = message["tool_call_id"]
    steps[-1].setdefault("observation", {"results": []})["results"].append(result)


def _describe_message(message: Mapping[str, Any]) -> Json:
    step: Json = {
        "source": SOURCES.get(message.get("role", ""), "user"),
        "message": _as_content(message.get("content")),
    }
    if step["source"] == "agent":
        if thought := reasoning_of(dict(message)):
            step["reasoning_content"] = thought
        if called := list(_describe_tool_calls(message)):
            step["tool_calls"] = called
    return step


def _describe_tool_calls(message: Mapping[str, Any]) -> Iterator[Json]:
    for call in message.get("tool_calls") or ():
        function = call.get("function") or {}
        given = function.get("arguments")
        try:
            arguments = json.loads(given) if isinstance(given, str) else given
        except ValueError:
            arguments = None
        if not isinstance(arguments, dict):
            arguments = {"arguments": given}
        yield {"tool_call_id": call.get("id") or "", "function_name": function.get("name") or "", "arguments": arguments}


def _describe_call(call: Mapping[str, Any], *, copied: bool, trained: bool) -> Json:
    if copied:
        return {"is_copied_context": True, "extra": {"call_id": call["call_id"]}}
    metrics: Json = {"prompt_tokens": len(call["prompt_ids"]), "completion_tokens": len(call["completion_ids"])}
    if trained:
        metrics |= {
            "prompt_token_ids": call["prompt_ids"],
            "completion_token_ids": call["completion_ids"],
            "logprobs": call["logprobs"],
        }
    extra = {name: call[name] for name in ("call_id", "finish_reason", "weight_versions", "logprob_modes")}
    extra |= {"trained": trained, "images": len(call["media"])}
    step: Json = {"metrics": metrics, "llm_call_count": 1, "extra": extra}
    if call["model"]:
        step["model_name"] = call["model"]
    return step | {"timestamp": datetime.fromtimestamp(call["started_at"], UTC).isoformat()}


def _as_content(content: Any) -> str:
    """Text as it is, other parts by their kind."""
    if content is None or isinstance(content, str):
        return content or ""
    if not isinstance(content, list):
        return json.dumps(content, ensure_ascii=False)
    parts = (part if isinstance(part, dict) else {"type": "text", "text": str(part)} for part in content)
    return "".join(str(part.get("text") or "") if "text" in part else f"[{part.get('type', UNKNOWN)}]" for part in parts)


def read_rows(
    document: Mapping[str, Any], *, reward: float | None = None, weight_version: int | None = None
) -> list[Trajectory]:
    """The training rows of a document with ids and logprobs, whoever wrote it: `loss_mask` is 1 for completions of steps that are no copied
    context. A step whose prompt does not begin with all the ids before it begins another row. `reward` and `weight_version` stand for what
    the document does not say. Raises ValueError for a step without a version, a prompt or logprobs, and for one of several calls;
    InvalidAnswer for a row that is none."""
    extra = document.get("extra") or {}
    about = {
        "session_id": document.get("session_id") or document.get("trajectory_id") or UNKNOWN,
        "group_id": extra.get("group_id"),
        "task_id": extra.get("task_id"),
        "reward": reward if extra.get("reward") is None else extra["reward"],
        "metadata": extra.get("metadata") or {},
    }
    unsaid = {"weight_versions": weight_version, "logprob_modes": UNKNOWN_MODE}
    rows: list[Trajectory] = []
    for at, part in enumerate(_list_parts(document)):
        open_row: Json | None = None
        for step in part["steps"]:
            if (sampled := _read_sampled(step)) is None:
                continue
            if open_row is None or sampled[0][: len(open_row["token_ids"])] != open_row["token_ids"]:
                name = f"{part.get('trajectory_id') or about['session_id']}-{at}-{step['step_id']}"
                rows += _finish(open_row)
                open_row = {**about, "trajectory_id": name, "role": (part.get("extra") or {}).get("role") or "main"}
                open_row |= {"agent": part["agent"]["name"], "token_ids": [], "loss_mask": [], "logprobs": [], "call_ids": []}
                open_row |= {"weight_versions": [], "logprob_modes": []}
            _extend(open_row, step, *sampled, unsaid)
        rows += _finish(open_row)
    return weigh_rows(rows)


def _list_parts(document: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    yield document
    for part in document.get("subagent_trajectories") or ():
        yield from _list_parts(part)


def _read_sampled(step: Mapping[str, Any]) -> tuple[list[int], list[int], list[float]] | None:
    metrics = step.get("metrics") or {}
    completion = metrics.get("completion_token_ids")
    if not completion or step.get("is_copied_context"):
        return None
    where = f"step {step['step_id']}"
    if (step.get("llm_call_count") or 1) > 1:
        raise ValueError(f"{where} has the ids of {step['llm_call_count']} calls: which of them were sampled is not known")
    prompt, logprobs = metrics.get("prompt_token_ids"), metrics.get("logprobs")
    if prompt is None or logprobs is None or len(logprobs) != len(completion):
        raise ValueError(f"{where} has completion_token_ids, but no prompt_token_ids or not a logprob for each")
    return prompt, completion, logprobs


def _extend(
    row: Json,
    step: Mapping[str, Any],
    prompt: list[int],
    completion: list[int],
    logprobs: list[float],
    unsaid: Mapping[str, int | str | None],
) -> None:
    given, start = len(prompt) - len(row["token_ids"]), len(prompt)
    row["token_ids"] = prompt + completion
    row["loss_mask"] += [0] * given + [1] * len(completion)
    row["logprobs"] += [0.0] * given + logprobs
    extra = step.get("extra") or {}
    row["call_ids"].append(str(extra.get("call_id") or step["step_id"]))
    row["finish_reason"] = extra.get("finish_reason") or ""
    for name, value in unsaid.items():
        spans = extra.get(name) or [[value, 0, len(completion)]]
        if spans[0][0] is None:
            raise ValueError(f"step {step['step_id']} does not say its {name}: pass {name.removesuffix('s')}")
        row[name] += [[said, start + begin, start + end] for said, begin, end in spans]


def _finish(row: Json | None) -> list[Trajectory]:
    if row is None:
        return []
    arrays = {"token_ids": pack_ids(row["token_ids"]), "logprobs": pack_logprobs(row["logprobs"])}
    return [decode_trajectory({**row, **arrays, "truncated": row["finish_reason"] == "length"})]
