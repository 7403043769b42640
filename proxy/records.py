"""Make the record of one finished choice: the node's place and tokens, and what the API later shows of the call."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec
import numpy as np

from proxy.dialects.base import Request
from proxy.engine.base import Sampled
from proxy.plan import Continuation, Place
from reconstruct.messages import chain, digest_message
from reconstruct.records import Call, Node, Sampling, pack_ids, pack_logprobs

_encode = msgspec.json.Encoder().encode

FROZEN = "frozen_model"
"""Why a call of a model that is never trained is quarantined."""

_NOTED = ("min_p", "presence_penalty", "frequency_penalty", "repetition_penalty", "min_tokens", "logit_bias")
"""Engine parameters that bend the distribution and are kept with the call when they are not neutral."""

_NEUTRAL: Mapping[str, Any] = {"min_p": 0.0, "presence_penalty": 0.0, "frequency_penalty": 0.0, "repetition_penalty": 1.0}


def effective_sampling(asked: Mapping[str, Any], generate_body: Mapping[str, Any] | None) -> Sampling:
    """What was in effect: on the token path the engine's own parameters under ours, on the chat path what was sent."""
    engine = (generate_body or {}).get("sampling_params") or {}
    effective = {**engine, **asked}
    stop = effective.get("stop") or ()
    extra = {key: effective[key] for key in _NOTED if effective.get(key) not in (None, _NEUTRAL.get(key))}
    return Sampling(
        temperature=effective.get("temperature"),
        top_p=effective.get("top_p"),
        top_k=effective.get("top_k"),
        seed=effective.get("seed"),
        max_tokens=effective.get("max_tokens"),
        stop=(stop,) if isinstance(stop, str) else tuple(stop),
        extra=extra,
    )


def call_record(
    *,
    call_id: str,
    session_id: str,
    where: Place,
    sibling: Call | None,
    found: Continuation,
    request: Request,
    sampled: Sampled,
    has_prompt_ids: bool,
    message: Mapping[str, Any],
    finish_reason: str,
    sampling: Sampling,
    api: str,
    replica: str,
    digest: bytes,
    started_at: float,
    engine_seconds: float,
    own_seconds: float,
    broken: bool,
    frozen: bool,
    role: str,
    agent: str,
    marks: Mapping[str, str],
) -> Call:
    """The record of one choice. `sibling` is the call's first choice, whose prompt the others lean on instead of repeating."""
    messages_from = found.reply_at + 1 if found.parent is not None else 0
    quarantine = "" if has_prompt_ids and sampled.token_ids is not None else "no_token_ids"
    if broken and sampled.finish_reason != "abort":
        # A whole reply that no harness was given: nothing came of it.
        quarantine = quarantine or "not_answered"
    if frozen:
        quarantine = quarantine or FROZEN
    status = "failed" if broken else "aborted" if sampled.finish_reason == "abort" else "finished"
    return Call(
        call_id=call_id,
        session_id=session_id,
        node=_node(where, sibling, sampled),
        dialect=request.dialect,
        api=api,
        status=status,
        role=role,
        agent=agent,
        finish_reason=finish_reason,
        stop_reason=sampled.stop_reason,
        sampling=sampling,
        root_key=found.root,
        fingerprint=found.fingerprint,
        reply_fingerprint=chain(found.fingerprint, [digest_message(message)])[-1],
        message_count=len(request.messages),
        messages_from=messages_from,
        messages=_encode(request.messages[messages_from:]),
        reply=_encode(message),
        preamble=b"" if where.parent_id else _preamble(request),
        digest=digest,
        projection=found.projection,
        replica=replica,
        started_at=started_at,
        engine_seconds=engine_seconds,
        own_seconds=own_seconds,
        trainable=not quarantine,
        quarantine_reason=quarantine,
        marks=marks,
    )


def _node(where: Place, sibling: Call | None, sampled: Sampled) -> Node:
    base_id, base_length, delta_ids = where.base_id, where.base_length, pack_ids(where.delta_ids)
    if sibling is not None:
        base_id, base_length = sibling.call_id, where.base_length + len(where.delta_ids)
        delta_ids = pack_ids(())
    return Node(
        parent_id=where.parent_id,
        branch_reason=where.branch_reason,
        base_id=base_id,
        base_length=base_length,
        delta_ids=delta_ids,
        completion_ids=pack_ids(sampled.token_ids or ()),
        logprobs=pack_logprobs([np.nan if value is None else value for value in sampled.logprobs]),
        spans=sampled.spans,
    )


def _preamble(request: Request) -> bytes:
    return _encode({"model": request.model, "tools": request.tools, "template_kwargs": request.template_kwargs})
