"""Planner: what a call continues, and what its replica samples after.

`find` looks for the call's parent; `plan` decides what to ask: where the replica takes ids, it makes the prompt's ids and the
sampling that fits its window; how ids are proven is `proxy.plan`'s and `proxy.prompts`' to know. Both leave it on the turn.
"""

from __future__ import annotations

import time

from proxy.budget import fit_budget
from proxy.engine.apis import EngineApis
from proxy.engine.base import Rendered
from proxy.engine.replica import Replica
from proxy.plan import Continuation, TokenPlan, confirm, continuation, plan_tokens
from proxy.prompts import plan_prompt, prompt_continuation
from proxy.steps import PLAN
from proxy.turn import Turn, fit_window, refuse_media
from reconstruct.bridge import Rendering


class Planner:
    """`retain_thinking`: a template that drops earlier thinking at a new user turn does not branch there."""

    def __init__(self, apis: EngineApis, *, retain_thinking: bool) -> None:
        self._apis = apis
        self._retain_thinking = retain_thinking

    def find(self, turn: Turn) -> None:
        """Leave on the turn what it continues."""
        turn.times.begin(PLAN)
        turn.found = _found(turn)

    def find_again(self, turn: Turn) -> None:
        """The same, where the calls that the tree has just learned change it."""
        found = _found(turn)
        if turn.found is None or found.parent is not turn.found.parent:
            turn.found = found

    def plans(self, turn: Turn) -> bool:
        """Whether there is something to plan; on the chat path the engine makes the ids."""
        assert turn.replica is not None
        return turn.replica.api not in (None, "chat")

    async def plan(self, turn: Turn) -> Continuation:
        """Where it plans, make the prompt's ids after what was found, and the sampling that fits the window. Returns what it is planned
        for: meanwhile something else may have been found."""
        assert turn.replica is not None and turn.found is not None
        clock, found = time.perf_counter(), turn.found
        if turn.request.prompt is None:
            found, turn.plan = await self._of_messages(turn, found, turn.replica)
        else:
            tokenizer = self._apis.tokenizer(turn.replica, turn.request, turn.session_id)
            turn.plan = await plan_prompt(turn.tree, found, turn.request, tokenizer)
        turn.engine_seconds += time.perf_counter() - clock
        fit_window(turn, len(turn.plan.prompt_ids))
        fit_budget(turn, len(turn.plan.prompt_ids))
        return found

    async def _of_messages(self, turn: Turn, found: Continuation, replica: Replica) -> tuple[Continuation, TokenPlan]:
        refuse_media(turn.request, found)
        renderer, id_text = self._apis.renderer(replica), self._apis.id_text(turn.session_id)

        async def render(rendering: Rendering) -> Rendered:
            return await renderer.render(replica, turn.request, rendering, id_text)

        confirmed = await confirm(turn.tree, found, turn.request, render)
        if turn.found is found:
            turn.found = confirmed
        found = confirmed
        known = turn.tree.turn_ends.get(found.root)
        plan, close = await plan_tokens(turn.tree, found, turn.request, render, known, self._retain_thinking)
        if close is not None:
            turn.tree.turn_ends[found.root] = close
        return found, plan


def _found(turn: Turn) -> Continuation:
    assert turn.replica is not None
    find = continuation if turn.request.prompt is None else prompt_continuation
    return find(turn.tree, turn.request, turn.replica.policy)
