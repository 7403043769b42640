"""What must be true of every run, whatever the agent did: of the records, the rows and the tree."""

from __future__ import annotations

import json
from typing import Any

from tests.harnesses.stage import Played, Record
from tests.support.engine.scripted_engine import Generation, logprobs_of

_REQUEST = "generate-tokens-"


def check_records(played: Played) -> None:
    """Every recorded call is one of the engine's, with the ids that the engine was given and has sampled, and none is there
    twice. A reply that broke is there as far as it had come."""
    made = _generations(played)
    ids = [call["call_id"] for call in played.calls]
    assert len(ids) == len(set(ids))
    for call in played.calls:
        generation = made[call["call_id"]]
        sampled = generation.sampled[0]
        assert call["prompt_ids"] == generation.prompt_ids
        came = len(call["completion_ids"]) if call["finish_reason"] == "abort" else len(sampled)
        assert call["completion_ids"] == sampled[:came]
        assert call["logprobs"] == logprobs_of(generation.prompt_ids, sampled)[:came]
        assert (call["api"], call["dialect"]) == ("token", played.cli.dialect)


def check_done(played: Played) -> None:
    """The agent ended well, has done its task, and heard every step of the model once."""
    assert played.ended.exit_code == 0, str(played.ended)
    assert played.text_of("number.py") == "value = 42\n", str(played.ended)
    assert played.player.missing == []
    assert played.player.surplus == []
    assert played.player.left == 0


def check_truths(played: Played) -> None:
    check_records(played)
    check_rows(played)
    check_continuations(played)
    assert false_forks(played) == []


def unrecorded(played: Played) -> list[Generation]:
    """What the engine was asked to sample and no record shows."""
    recorded = {call["call_id"] for call in played.calls}
    return [generation for call_id, generation in _generations(played).items() if call_id not in recorded]


def check_rows(played: Played) -> None:
    """Every row is what the engine saw and said, token for token, and every sampled token is trained once or accounted for."""
    calls = {call["call_id"]: call for call in played.calls}
    trained = dict.fromkeys(calls, 0)
    for row in played.rows:
        assert len(row["token_ids"]) == len(row["loss_mask"]) == len(row["logprobs"])
        expected = [0] * len(row["token_ids"])
        for call in (calls[call_id] for call_id in row["call_ids"]):
            start, end = len(call["prompt_ids"]), len(call["prompt_ids"]) + len(call["completion_ids"])
            assert row["token_ids"][:end] == call["prompt_ids"] + call["completion_ids"]
            masked = sum(row["loss_mask"][start:end])
            assert masked in (0, end - start), f"{call['call_id']} is trained in part"
            if masked:
                assert row["logprobs"][start:end] == call["logprobs"]
                expected[start:end] = [1] * (end - start)
                trained[call["call_id"]] += 1
        assert row["loss_mask"] == expected
    quarantined = {item["call_id"]: item["tokens"] for item in played.accounting["quarantined"]}
    for call_id, call in calls.items():
        sampled = len(call["completion_ids"])
        assert (trained[call_id], quarantined.get(call_id, 0)) in ((1, 0), (0, sampled)), call_id
    assert played.accounting["sampled_tokens"] == sum(len(call["completion_ids"]) for call in played.calls)


def check_continuations(played: Played) -> None:
    """A call that goes on from another one was sampled after that one's own ids."""
    calls = {call["call_id"]: call for call in played.calls}
    for call in played.calls:
        if call["parent_id"] is not None and call["branch_reason"] is None:
            parent = calls[call["parent_id"]]
            before = parent["prompt_ids"] + parent["completion_ids"]
            assert call["prompt_ids"][: len(before)] == before, call["call_id"]


def false_forks(played: Played) -> list[str]:
    """The calls whose history goes on from an earlier call of their role, message for message, and which the tree puts
    elsewhere. Compaction is made with tools of its own, which is reason enough for another root."""
    found = []
    for number, call in enumerate(played.calls):
        held = [(len(other["messages"]), other["call_id"]) for other in played.calls[:number] if _goes_on(call, other)]
        longest = max((length for length, _ in held), default=0)
        nearest = {call_id for length, call_id in held if length == longest}
        if nearest and call["parent_id"] not in nearest:
            found.append(f"{call['call_id']}: {call['branch_reason']}")
    return found


def _generations(played: Played) -> dict[str, Generation]:
    return {generation.request_id.removeprefix(_REQUEST): generation for generation in played.generations}


def _goes_on(call: Record, other: Record) -> bool:
    if call["role"] != other["role"]:
        return False
    before = [*other["messages"], other["reply"]]
    return [_told(message) for message in call["messages"][: len(before)]] == [_told(message) for message in before]


def _told(message: Record) -> tuple[Any, ...]:
    """What an agent cannot leave out of a message that it sends again: the text and the calls, whatever their spelling."""
    content = message.get("content") or ""
    if isinstance(content, list):
        content = "".join(part.get("text") or json.dumps(part) for part in content)
    calls = [(call["id"], call["function"]["name"], _arguments(call)) for call in message.get("tool_calls") or ()]
    return message["role"], content.strip(), message.get("tool_call_id"), calls


def _arguments(call: Record) -> Any:
    try:
        return json.loads(call["function"]["arguments"])
    except ValueError:
        return call["function"]["arguments"]
