"""The reference of an archive's columns: their types from the service, their meanings from here. A column without one fails the build."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from proxy.archive.tables import SCHEMA_VERSION, TABLES

HEAD = f"""# Archive

The tables of an [archive](../store.md#files), schema version {SCHEMA_VERSION}: what `verbatim export` and retention write,
`verbatim import` reads and `verbatim generate` keeps. Columns of type json hold JSON as text. NaN and unknown values are null.
"""
INTRODUCTIONS = {
    "trajectories": "One row per training row. The columns from `trajectory_id` to `policy` are the trajectory of the HTTP contract."
    " Rows of untrained roles are included with a mask of zeros. In a `per_call` export the reward is the call's own.",
    "sessions": "One row per session.",
    "records": "One row per call. Everything else follows from these.",
    "scores": "One row per call and scorer.",
    "media": "One row per [image](../images.md). An image that several sessions have is in the part of the first.",
}
SHARED = {
    "session_id": "the session; a rollout is a session",
    "run": "the run of the session, `default` if none was named",
    "group_id": "null: none",
    "task_id": "null: none",
    "group_size": "members of the session's group",
    "created_at": "of the session, epoch seconds",
    "closed_at": "of the session, epoch seconds",
    "reward_metadata": "what came with the reward",
}
MEANINGS: Mapping[str, Mapping[str, str]] = {
    "trajectories": {
        "trajectory_id": "the same for the same calls, always: deduplicate by it",
        "rollout_id": "rows of one rollout have one",
        "role": "main, subagent, compaction or side",
        "role_source": "declared, rule or inferred",
        "agent": "the agent's name",
        "token_ids": "the row; its first tokens are its first prompt",
        "loss_mask": "1 where a token was sampled and is trained in this row",
        "logprobs": "of the engine at sampling time; 0.0 where the mask is 0",
        "logprob_modes": "`[mode, start, end]` over exactly the trained tokens ([modes](../trainers.md#which-mode-a-token-has))",
        "weight_versions": "`[version, start, end]` over exactly the trained tokens",
        "reward": "the branch's own if it was given one, else the session's; null: none",
        "row_weight": "1 / (rows of the rollout and the policy that train anything); 0 for a row that trains nothing",
        "call_ids": "the calls of the row, in order",
        "finish_reason": "of the last call, or `budget`",
        "truncated": "cut by length, abort or the session's [budget](../delivery.md#budgets)",
        "metadata": "of the session, and: `per_call_rewards` of the calls that this row trains; `per_call_spans`, `[start, end]` of each;"
        " `invalid_tool_calls`, calls whose reply has a tool call that could not be parsed, is of no offered tool, does not fit its schema"
        " (required properties, types) or was not finished; `control_tokens` in texts of its history; `base_versions`,"
        " `[version, start, end]` of the base model under the adapter that sampled it; `replay`, what a [fork](../forks.md#rows) replays",
        "top_token_ids": "[token details](../trainers.md#token-details), one entry per token",
        "top_logprobs": "the logprobs of those",
        "prompt_logprobs": "of tokens that were given and not sampled",
        "routed_experts": "the experts that each token was routed to",
        "policy": "the model that sampled the row, whose versions `weight_versions` counts; empty for the default one",
        "media": "the [images](../concepts.md#images) in the row: digest, kind, start, length",
        "scores": "by [scorer](../trainers.md#distillation-from-scores): policy, weight_versions, mode, error; null: none",
        "score_logprobs": "of each scorer, in the order of `scores`: the logprob of each token; null where nothing is known",
        "score_top_ids": "of each scorer: the ids that it holds most probable at each token; -1 where nothing is known",
        "score_top_logprobs": "the logprobs of those",
        "text": "what the tokens spell; only in folders of `verbatim generate`",
        "tools": "the tools of the row's last request; only in folders of `verbatim generate`",
        "session_status": "as the control API has it",
        "session_reward": "as the control API has it",
        "session_trained": 'false: no trainer gets the session (`"trained": false`), a judge\'s for example: leave its rows out',
    },
    "sessions": {
        "updated_at": "epoch seconds",
        "status": "as the control API has it",
        "run": "the training run that it belongs to",
        "project": "the project that it belongs to; null: none",
        "trained": "false: no trainer gets it",
        "echo_policy": "`strict` or `minted`",
        "max_calls": "its [budget](../delivery.md#budgets)",
        "max_completion_tokens": "its budget",
        "max_total_tokens": "its budget",
        "replay": "what it replays, if it is a [fork](../forks.md)",
        "lookahead": "how its [candidates](../forks.md#lookahead) are chosen",
        "scores": "the [scorers](../scores.md) that were asked about its tokens",
        "reward": "null: none",
        "per_call": "rewards of calls",
        "per_branch": "rewards of branches, by their last calls",
        "error": "what it was closed with",
        "flag": "a person's mark on it; null: none",
        "note": "what that person wrote",
        "unserved": "the last call that was not served, and why; null: none",
        "metadata": "as it was opened with",
        "sampling": "as it was opened with",
        "calls": "how many",
        "delivered": "calls whose reply was sent completely",
        "intents": "calls without a result",
        "sampled_tokens": "the accounting of its rows",
        "exported_tokens": "the accounting of its rows",
        "quarantined": "`[{call_id, tokens, reason}]`",
        "dangling_calls": "calls whose process died while the engine sampled",
        "complete": "whether anything that its harness got is missing",
        "replayed_tokens": "tokens that other sessions account for",
        "problem": "why the session has no trajectories, when its records contradict each other",
        "log": "the end of what the agent printed, at most 65,536 characters; null if nothing was sent",
        "media": "digests of its images",
        "scored": "how often a scorer's numbers of one call were stored",
    },
    "records": {
        "position": "in the session",
        "call_id": "the call",
        "record": "the call as the store holds it, with a schema version and its own checksum; `reconstruct.codec.decode` reads it",
    },
    "scores": {
        "scorer": "its name",
        "call_id": "the call whose sampled tokens it scored",
        "score": "as the store holds it, with a schema version; `reconstruct.scores.decode_score` reads it",
    },
    "media": {"digest": "sha256 of the bytes", "data": "the bytes as they were sent"},
}


def render() -> str:
    return HEAD + "".join(_render_table(name) for name in ("trajectories", "sessions", "records", "scores", "media"))


def _render_table(name: str) -> str:
    return (
        f"\n## {name}\n\n{INTRODUCTIONS[name]}\n\n| column | type | meaning |\n|---|---|---|\n"
        + "\n".join(_list_columns(name))
        + "\n"
    )


def _list_columns(name: str) -> Iterator[str]:
    meanings = {**SHARED, **MEANINGS[name]}
    return (f"| `{column}` | `{kind}` | {meanings[column]} |" for column, kind in TABLES[name].items())
