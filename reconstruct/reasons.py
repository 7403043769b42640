"""Why sampled tokens are in quarantine: every reason, one sentence each, and whether it is a loss or a choice.

Reasons of other packages' dialects and of damaged records are counted as `other`, which bounds the numbers of a run.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

OTHER = "other"


@dataclass(frozen=True, slots=True)
class Reason:
    """`sentence` says why. `chosen`: left out on purpose, so no loss."""

    sentence: str
    chosen: bool = False


REASONS: Mapping[str, Reason] = {
    "role_compaction": Reason("A summary of the agent's own history, whose role is not trained (VERBATIM_TRAIN_ROLES).", True),
    "role_side": Reason("A side call, such as a title, whose role is not trained (VERBATIM_TRAIN_ROLES).", True),
    "role_subagent": Reason("A sub-agent's call, whose role is not trained (VERBATIM_TRAIN_ROLES).", True),
    "role_main": Reason("A call of the main agent, whose role is not trained (VERBATIM_TRAIN_ROLES).", True),
    "role_inferred_side": Reason("A call without tools that looks like a side call (VERBATIM_TRAIN_ROLES).", True),
    "frozen_model": Reason("A judge, or another model that is never trained.", True),
    "not_chosen": Reason("A candidate of a lookahead that its harness did not get.", True),
    "logprob_mode": Reason("Its logprobs have a mode that is not trained (VERBATIM_TRAIN_LOGPROB_MODES).", True),
    "replayed": Reason("A fork's call that another session sampled, and trains.", True),
    "not_delivered": Reason("An abandoned attempt: the harness hung up or gave up before it got the reply."),
    "no_token_ids": Reason("The engine returned no token ids: it serves this model without the token path."),
    "placeholder_sampled": Reason("The model sampled the id that stands for an image."),
    "weight_version_unknown": Reason("The engine did not say which weights sampled it: push or label a version."),
    "missing_logprob": Reason("The engine returned a token without its logprob."),
    "length_mismatch": Reason("The engine returned ids and logprobs of different lengths."),
    "logits_for_logprobs": Reason("The engine reports logits in place of logprobs: correct its --logprobs-mode."),
    "not_trainable": Reason("The engine that answered is not one whose tokens are trained."),
    "unknown_parent": Reason("The call that it continues is missing from the session."),
    "id_out_of_range": Reason("A token id in its context is negative."),
    "invalid_record": Reason("Its record contradicts itself."),
    "unreadable_record": Reason("Its record cannot be read."),
    "dangling": Reason("The process died while the engine sampled: it has no record and no tokens."),
    OTHER: Reason("A reason of another package, or one that this version does not know."),
}


def name_reason(given: str) -> str:
    """The reason as it is counted."""
    return given if given in REASONS else OTHER
