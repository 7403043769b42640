"""Where a feature joins a call: at five points, from a room of its own. This knows no feature.

A hook is asked once per call whether it joins; a call that none joins pays nothing. Sampled tokens are never lost to a feature: what a hook
raises after sampling becomes the error that the harness gets, and the tokens are recorded.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Sequence
from dataclasses import replace
from typing import ClassVar

import msgspec

from proxy.call.draft import Draft
from proxy.call.phases import NO_HOOKS, Admitted, Arrival, Hooks, Sampled
from proxy.dialects.base import Request
from proxy.engine.apis.reply import EngineChoice
from proxy.engine.replica import Replica
from proxy.errors import Conflict, NotFound, StoreUnavailable, VerbatimError
from proxy.store.states import SessionInfo
from reconstruct.records import Call

_encode = msgspec.json.Encoder().encode

log = logging.getLogger(__name__)


class CallHook:
    """Every method does nothing: a hook overrides what it uses. It joins the calls of sessions that have the field `of_session`, or of
    requests that have `of_request`."""

    of_session: ClassVar[str] = ""
    of_request: ClassVar[str] = ""

    async def admit(self, arrival: Arrival) -> None:
        """Before the request becomes a call. May write into `arrival`. Raises VerbatimError to refuse it."""

    async def before_sampling(self, draft: Draft, request: Request, replica: Replica) -> None:
        """The intent is stored, and nothing is sampled; or the prompt is to be counted. May load what the request names. Raises
        VerbatimError to refuse it."""

    async def after_sampling(self, sampled: Sampled) -> Sampled:
        """May order the choices, mark them, give reasons not to train them, and set `error`. What was sampled stays what it is."""
        return sampled

    async def before_commit(self, sampled: Sampled) -> None:
        """May store what the records will refer to. Raises Conflict, NotFound and StoreUnavailable, as the commit does: then nothing is
        recorded, and the call stays dangling."""

    def after_commit(self, call: Admitted, records: Sequence[Call]) -> None:
        """The records are stored. May begin what nobody waits for; must not raise."""


def choose_hooks(hooks: Sequence[CallHook], info: SessionInfo, request: Request) -> Hooks:
    """Those that join the call: NO_HOOKS for nearly all calls."""
    joining = [
        hook
        for hook in hooks
        if (hook.of_session and getattr(info, hook.of_session)) or (hook.of_request and getattr(request, hook.of_request))
    ]
    if not joining:
        return NO_HOOKS
    return Hooks(
        tuple(hook.admit for hook in joining if _overrides(hook, "admit")),
        tuple(hook.before_sampling for hook in joining if _overrides(hook, "before_sampling")),
        tuple(hook.after_sampling for hook in joining if _overrides(hook, "after_sampling")),
        tuple(hook.before_commit for hook in joining if _overrides(hook, "before_commit")),
        tuple(hook.after_commit for hook in joining if _overrides(hook, "after_commit")),
    )


def _overrides(hook: CallHook, method: str) -> bool:
    return getattr(type(hook), method) is not getattr(CallHook, method)


async def run_after_sampling(sampled: Sampled) -> Sampled:
    """What the call's hooks make of it. One that fails, or that changes what was sampled, becomes the error of the call, and what was
    sampled is recorded as it was before."""
    for hook in sampled.call.hooks.after_sampling:
        before, was = _copy(sampled), _digest(sampled)
        try:
            judged = await hook(sampled)
            if _digest(judged) != was:
                raise RuntimeError("a hook changed what was sampled")
            sampled = judged
        except Exception as error:
            sampled = msgspec.structs.replace(before, is_broken=True, error=before.error or _explain(before, error))
    return sampled


async def run_before_commit(sampled: Sampled) -> Sampled:
    """As `run_after_sampling`. Raises what the commit itself may raise."""
    for hook in sampled.call.hooks.before_commit:
        try:
            await hook(sampled)
        except (Conflict, NotFound, StoreUnavailable):
            raise
        except Exception as error:
            sampled = msgspec.structs.replace(sampled, is_broken=True, error=sampled.error or _explain(sampled, error))
    return sampled


def _explain(sampled: Sampled, error: Exception) -> VerbatimError:
    if isinstance(error, VerbatimError):
        return error
    call = sampled.call
    log.error("session %s: a hook failed after call %s was sampled", call.session_id, call.call_id, exc_info=error)
    return VerbatimError("the service failed inside; its log says where")


def _copy(sampled: Sampled) -> Sampled:
    choices = tuple(
        replace(
            each,
            token_ids=None if each.token_ids is None else list(each.token_ids),
            logprobs=list(each.logprobs),
            message=copy.deepcopy(each.message),
        )
        for each in sampled.choices
    )
    ids = None if sampled.prompt_ids is None else sampled.prompt_ids.copy()
    return msgspec.structs.replace(sampled, choices=choices, prompt_ids=ids)


def _digest(sampled: Sampled) -> tuple[object, ...]:
    """What a hook must leave as it is; the order of the choices may change."""
    ids = None if sampled.prompt_ids is None else sampled.prompt_ids.tobytes()
    return id(sampled.placed), ids, sampled.media, sorted(map(_digest_choice, sampled.choices))


def _digest_choice(choice: EngineChoice) -> bytes:
    spans = [(span.version, span.start, span.end) for span in choice.spans]
    return _encode((choice.token_ids, choice.logprobs, choice.message, choice.finish_reason, spans))
