"""Question: a request to an OpenAI-compatible server, from which the service leaves out what it added itself and the server does not take.

Many servers refuse a request for a field that they do not know, such as `return_token_ids`. Then it is sent again without that field. What
a harness asked for is never left out: the server's refusal of that is the harness's. A refusal is remembered, by replica, once the
server has taken the request without the field: for its streamed requests alone if the refusal speaks of streams, and for the
requested model alone if it speaks of a model.
"""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

from proxy.engine.apis.reply import PartialChoice
from proxy.engine.replica import Replica
from proxy.engine.wire.refusals import find_refused
from proxy.errors import VerbatimError
from proxy.timeline import CancelScope

_SUCCESSOR = {"max_tokens": "max_completion_tokens"}
"""The name under which OpenAI's newer models take a field that they refuse."""

_NEEDS = {"top_logprobs": "logprobs", "return_tokens_as_token_ids": "logprobs"}
"""Fields that mean nothing without another."""

_MOST_REMEMBERED = 1024
"""Refusals by replica. Harnesses choose the names of models."""


class Question:
    """`asked` is what the harness wants, `added` what the service wants beside it."""

    def __init__(self, replica: Replica, asked: dict[str, Any], added: Mapping[str, Any]) -> None:
        self.asked = asked
        self._added = added
        self._replica = replica
        self._left_out = (
            {field for field in (*added, *_SUCCESSOR) if self._is_refused(field)} if replica.refused_fields else set()
        )
        self._learned: set[tuple[str, str, bool | None]] = set()

    @property
    def body(self) -> dict[str, Any]:
        """The request as the server is to get it."""
        if not self._left_out:
            return {**self.asked, **self._added}
        body = {_SUCCESSOR[name] if name in self._renamed else name: value for name, value in self.asked.items()}
        return body | {name: value for name, value in self._added.items() if not self._lacks(name)}

    async def put(
        self, scope: CancelScope, choices: Sequence[PartialChoice], send: Callable[[dict[str, Any]], Awaitable[None]]
    ) -> None:
        """Send it, again for each refusal of other fields that the service added. Raises as `send`."""
        while True:
            try:
                await send(self.body)
            except VerbatimError as error:
                if any(choice.heard for choice in choices) or not self._leave_out(error):
                    raise
                scope.redial()
            else:
                self._remember()
                return

    @property
    def _renamed(self) -> set[str]:
        return self._left_out & _SUCCESSOR.keys() & self.asked.keys()

    def _lacks(self, field: str) -> bool:
        return field in self._left_out or _NEEDS.get(field) in self._left_out

    def _leave_out(self, error: VerbatimError) -> bool:
        """Whether the server refused fields that were there and can be left out. They get fewer each time, so this ends."""
        removable = {field for field in self._added if not self._lacks(field)} | (
            _SUCCESSOR.keys() & self.asked.keys() - self._left_out
        )
        refused = find_refused(error.message, error.param, removable)
        model = self.asked["model"] if re.search(r"\bmodel\b", error.message) else ""
        stream = self.asked["stream"] if re.search(r"\bstream(?:s|ed|ing)?\b", error.message) else None
        self._learned |= {(field, model, stream) for field in refused}
        self._left_out |= refused
        return bool(refused)

    def _is_refused(self, field: str) -> bool:
        places = [(model, stream) for model in ("", self.asked["model"]) for stream in (None, self.asked["stream"])]
        return any((field, *place) in self._replica.refused_fields for place in places)

    def _remember(self) -> None:
        known = self._replica.refused_fields
        if self._learned and len(known) < _MOST_REMEMBERED:
            known |= self._learned
            if fields := sorted({field for field, *_ in known} - _SUCCESSOR.keys()):
                self._replica.note("fields", f"does not take {', '.join(fields)}: requests are sent without")
