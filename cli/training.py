"""The section *training* of `verbatim doctor`: what the last sessions are worth to a trainer, and what a person should do."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from cli.checks import Check, State
from reconstruct.reasons import REASONS, name_reason

if TYPE_CHECKING:
    from cli.control import CommandClient

LOOKED_AT = 100
"""Sessions, the newest."""
FEW = 4
"""With fewer rewards, groups or sessions nothing is concluded from all of them being alike."""
MUCH, SOME = 0.2, 0.02
"""Shares of sampled tokens: a loss to fix, and one to note."""
ABOUT = "training"
ADVICE: Mapping[str, str] = {
    "not_delivered": "agents hang up or retry before the reply is there: raise their timeouts, or look why calls are slow",
    "no_token_ids": "serve the model with an engine that returns token ids: verbatim engines list shows the path of each",
    "weight_version_unknown": "push a version, or label the engine's: verbatim weights",
    "missing_logprob": "the engine left out logprobs: check its version with verbatim doctor --engine URL",
    "length_mismatch": "the engine's answers contradict themselves: check its version with verbatim doctor --engine URL",
    "logits_for_logprobs": "start the engine with --logprobs-mode raw_logprobs or processed_logprobs",
    "dangling": "service processes died during calls: look for their end in the log and in the memory of the machine",
}
CAUSES: Mapping[str, str] = {
    "incomplete": "members fail: read their errors with verbatim groups show, or let groups be delivered without them (allow_partial)",
    "never_acknowledged": "the trainer dies on them, or needs longer than its lease: let it extend its leases",
    "undeliverable": "their sessions are damaged or were deleted: verbatim dead-letters list says why",
}


def check_training(control: CommandClient, run: str | None = None) -> Iterator[Check]:
    """What the newest sessions and the groups of the service show, of one run or of all."""
    sessions = control.get("/sessions", run=run, limit=LOOKED_AT)["sessions"]
    runs = [each for each in control.get("/runs")["runs"] if run in (None, each["run"])]
    yield from judge_sessions(sessions)
    yield from judge_groups([state for each in runs for state in each["groups"]])


def judge_sessions(sessions: Sequence[Mapping[str, Any]]) -> Iterator[Check]:
    """`sessions` as `GET /sessions` lists them, newest first."""
    trained = [each for each in sessions if each["trained"] and each["closed_at"] is not None]
    if not trained:
        yield Check(ABOUT, "note", "no session that could be trained has been closed yet")
        return
    found = [
        *_judge_ends(trained),
        *_judge_tokens([each["accounting"] for each in trained if each["accounting"]]),
        *_judge_rewards(trained),
        *_judge_variance(trained),
    ]
    yield from found or [Check(ABOUT, "ok", f"{_count(len(trained), 'session')} closed last, nothing is lost")]


def _judge_ends(trained: Sequence[Mapping[str, Any]]) -> Iterator[Check]:
    failed = [each for each in trained if each["status"] in ("failed", "cancelled")]
    if len(trained) >= FEW and len(failed) > len(trained) / 2:
        why = next((each["error"] for each in failed if each["error"]), "no error was given")
        found = f"{len(failed)} of the last {len(trained)} sessions failed, the newest of them: {why[:200]}"
        yield Check(ABOUT, "fix", found, f"verbatim sessions show {failed[0]['session_id']}")
    waiting = [each for each in trained if each["status"] == "completed" and each["reward"] is None]
    if waiting:
        found = f"no trainer gets {_count(len(waiting), 'completed session')} without a reward"
        state: State = "fix" if len(trained) >= FEW and len(waiting) > len(trained) / 2 else "note"
        yield Check(ABOUT, state, found, "give tasks an evaluator, or post rewards: verbatim sessions reward")
    cut = [each for each in trained if each["accounting"] and each["accounting"]["truncated"]]
    if len(trained) >= FEW and len(cut) > len(trained) / 2:
        found = f"{len(cut)} of the last {len(trained)} sessions end in a reply that was cut short"
        yield Check(ABOUT, "fix", found, "raise max_tokens or the engine's context length")


def _judge_tokens(accountings: Sequence[Mapping[str, Any]]) -> Iterator[Check]:
    sampled = sum(each["sampled_tokens"] for each in accountings)
    lost, dangling = Counter[str](), sum(each["dangling_calls"] for each in accountings)
    for each in accountings:
        for given, tokens in each["quarantined"].items():
            if not REASONS[reason := name_reason(given)].chosen:
                lost[reason] += tokens
    share = lost.total() / sampled if sampled else 0.0
    if share >= SOME:
        parts = ", ".join(f"{reason} {100 * tokens / sampled:.0f} %" for reason, tokens in lost.most_common() if tokens)
        worst = lost.most_common(1)[0][0]
        advice = f"{REASONS[worst].sentence} {ADVICE.get(worst, 'See Concepts, A training row')}"
        state: State = "fix" if share >= MUCH else "note"
        yield Check(ABOUT, state, f"{100 * share:.0f} % of the sampled tokens are quarantined: {parts}", advice)
    if dangling:
        yield Check(ABOUT, "note", f"{_count(dangling, 'call')} dangling, of sessions closed last", ADVICE["dangling"])


def _judge_rewards(trained: Sequence[Mapping[str, Any]]) -> Iterator[Check]:
    rewards = [each["reward"] for each in trained if each["reward"] is not None]
    if len(rewards) >= FEW and len(set(rewards)) == 1:
        one = next(each["session_id"] for each in trained if each["reward"] is not None)
        look = f"read the evaluator's feedback: verbatim sessions show {one}"
        if rewards[0] == 0:
            yield Check(ABOUT, "fix", f"every reward is 0, of {len(rewards)}", look)
        else:
            yield Check(
                ABOUT, "fix", f"every reward is {rewards[0]:g}, of {len(rewards)}", f"nothing is left to learn, or {look}"
            )


def _judge_variance(trained: Sequence[Mapping[str, Any]]) -> Iterator[Check]:
    """Of groups with two members or more among these sessions."""
    groups: dict[str, list[float]] = {}
    for each in trained:
        if each["group_id"] is not None and each["reward"] is not None:
            groups.setdefault(each["group_id"], []).append(each["reward"])
    compared = [rewards for rewards in groups.values() if len(rewards) > 1]
    equal = sum(len(set(rewards)) == 1 for rewards in compared)
    if len(compared) >= FEW and equal == len(compared):
        advice = "rewards that are compared teach nothing: take tasks that some attempts solve, or rewards with more steps"
        yield Check(ABOUT, "fix", f"every group has equal rewards, of {len(compared)}", advice)


def judge_groups(states: Sequence[Mapping[str, Any]]) -> Iterator[Check]:
    """`states` as the runs of `GET /runs` have them in `groups`."""
    counted = Counter[str]()
    dead = Counter[str]()
    for each in states:
        counted[each["state"]] += each["groups"]
        if each["state"] == "dead":
            dead[each["cause"]] += each["groups"]
    if dead:
        parts = ", ".join(f"{cause} {number}" for cause, number in dead.most_common())
        advice = CAUSES.get(dead.most_common(1)[0][0], "verbatim dead-letters list says why")
        yield Check(ABOUT, "fix", f"{_count(dead.total(), 'group')} no longer delivered (dead letters): {parts}", advice)
    if counted["ready"] and not counted["leased"] + counted["acked"]:
        found = f"{_count(counted['ready'], 'group')} ready, and none was ever leased"
        yield Check(ABOUT, "note", found, "start a trainer, or look at the run, policy and staleness that its lease asks for")


def _count(number: int, thing: str) -> str:
    return f"{number} {thing}{'' if number == 1 else 's'}"
