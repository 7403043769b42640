"""What the scripted engine samples for an agent: one step after another, in the family's own markup.

    player = Player(family, [Step("Let me look.", calls=[("read", {"path": "notes.txt"})]), Step("Done.")])
    engine.script = player

A prompt that was played before gets what it got before, so a request that is made twice does not put the play out of step; one
that met with a misfortune gets the next step. Side calls (titles, commit messages) are known by their prompt and have replies of
their own, and so have sub-agents: their prompts do not speak of the task.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from tests.support.engine.scripted_engine import Drop, Fail, Generation, Hang, Reply, Say
from tests.support.engine.template_families import Family

ToolCall = tuple[str, Mapping[str, Any]]


@dataclass(frozen=True)
class Step:
    """One reply of the model. `how` are further fields of `Say`: pauses, breaks. `raw` is sampled as it stands."""

    content: str = ""
    reasoning: str = ""
    calls: Sequence[ToolCall] = ()
    how: Mapping[str, Any] = field(default_factory=dict)
    raw: str = ""
    once: bool = False
    """Something goes wrong with it: the same prompt will get the next step."""

    def say(self, family: Family) -> Say:
        spoken = self.raw or family.speak(self.content, reasoning=self.reasoning, calls=self.calls)
        return Say(spoken, **self.how)


Act = Step | Fail | Drop | Hang | Callable[[str], Step]
"""A function is given the prompt, where a step depends on what the agent said."""


class Player:
    """`acts` are for prompts that have `task` in them, `helper` for others; `side`: pattern of a prompt -> what is said to it.
    `surplus` are prompts for which there was no step left, `missing` the tools that a step calls and the prompt does not offer."""

    def __init__(
        self,
        family: Family,
        acts: Sequence[Act],
        side: Mapping[str, str] | None = None,
        *,
        task: str = "",
        helper: Sequence[Act] = (),
    ) -> None:
        self._family = family
        self._task = task
        self._acts = list(acts)
        self._helper = list(helper)
        self._side = {re.compile(pattern, re.DOTALL): text for pattern, text in (side or {}).items()}
        self._played: dict[tuple[int, ...], Reply] = {}
        self._lock = threading.Lock()
        self.surplus: list[str] = []
        self.missing: list[str] = []

    @property
    def left(self) -> int:
        """Steps that were not played."""
        return len(self._acts) + len(self._helper)

    def __call__(self, generation: Generation, index: int) -> Reply:
        for pattern, text in self._side.items():
            if pattern.search(generation.prompt):
                return Say(self._family.speak(text))
        with self._lock:
            key = tuple(generation.prompt_ids)
            if key in self._played:
                return self._played[key]
            return self._next(key, generation.prompt)

    def _next(self, key: tuple[int, ...], prompt: str) -> Reply:
        acts = self._acts if self._task in prompt else self._helper
        if not acts:
            self.surplus.append(prompt)
            return Say(self._family.speak("There is nothing left to do."))
        act = acts.pop(0)
        if callable(act):
            act = act(prompt)
        if not isinstance(act, Step):
            return act
        self.missing += [name for name, _ in act.calls if not _offered(name, prompt)]
        reply = act.say(self._family)
        if not act.once:
            self._played[key] = reply
        return reply


def _offered(tool: str, prompt: str) -> bool:
    """Whether the prompt speaks of the tool as templates do: as JSON, or as a function of a namespace."""
    return f'"name": "{tool}"' in prompt or f"type {tool} = " in prompt
