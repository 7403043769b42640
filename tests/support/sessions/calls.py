"""Records with valid defaults, small enough to check by eye, and `Talk`, which records a session as a store holds it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from reconstruct.records import UNKNOWN_MODE, Call, Node, Sampling, pack_ids, pack_logprobs
from reconstruct.spans import ModeSpan, Span


def node(
    *,
    parent: str | None = None,
    base: str | None = None,
    base_length: int = 0,
    delta: Sequence[int] = (),
    said: Sequence[int] = (),
    logprobs: Sequence[float | None] | None = None,
    version: int = 0,
    spans: Sequence[Span] | None = None,
    reason: str | None = None,
    mode: str = UNKNOWN_MODE,
    modes: Sequence[ModeSpan] | None = None,
) -> Node:
    """A node that says `said` after `base_length` ids of `base` and `delta`; logprobs -0.5, -1.0, … and one span by default."""
    if logprobs is None:
        logprobs = [-0.5 * at for at in range(1, len(said) + 1)]
    if spans is None:
        spans = [Span(version, 0, len(said))] if said else []
    if modes is None:
        modes = [ModeSpan(mode, 0, len(said))] if said else []
    arrays = pack_ids(delta), pack_ids(said), pack_logprobs(logprobs)
    return Node(parent, reason, base, base_length, *arrays, tuple(spans), tuple(modes))


def call(call_id: str = "c1", *, session: str = "s", fields: dict[str, Any] | None = None, **of_node: Any) -> Call:
    """A finished call; it started at the second its id ends in (c12 at 12.0). `fields` replaces the call's own fields.
    A role other than main was declared, unless `fields` says otherwise."""
    fields = {"role_source": "declared" if (fields or {}).get("role", "main") != "main" else "inferred", **(fields or {})}
    digits = "".join(character for character in call_id if character.isdigit())
    made = Call(
        call_id=call_id,
        session_id=session,
        node=node(**of_node),
        dialect="chat",
        api="token",
        status="finished",
        role="main",
        agent="",
        finish_reason="stop",
        stop_reason=None,
        sampling=Sampling(),
        root_key=b"root",
        fingerprint=b"asked " + call_id.encode(),
        reply_fingerprint=b"answered " + call_id.encode(),
        message_count=1,
        messages_from=0,
        messages=b"[]",
        reply=b"{}",
        preamble=b"",
        digest=b"digest",
        projection="",
        replica="r1",
        started_at=float(digits or 0),
        engine_seconds=0.25,
        own_seconds=0.125,
    )
    return replace(made, **fields)


class Talk:
    """A session told as whole prompts. `said` works out what a store keeps: the ids shared with a base, and the rest."""

    def __init__(self, session: str = "s") -> None:
        self.session = session
        self.calls: list[Call] = []
        self.full: dict[str, list[int]] = {}

    def say(
        self,
        call_id: str,
        prompt: Sequence[int],
        said: Sequence[int],
        *,
        parent: str | None = None,
        base: str | None = "its parent",
        base_length: int | None = None,
        fields: dict[str, Any] | None = None,
        **of_node: Any,
    ) -> Call:
        """Add a call sampled after `prompt`. Its base is its parent unless another, or None, is named; it leans on all ids it
        shares with it unless `base_length` says fewer."""
        if base == "its parent":
            base = parent
        shared = common_prefix(self.full[base], prompt) if base else 0
        if base_length is not None:
            assert base_length <= shared
            shared = base_length
        made = call(
            call_id,
            session=self.session,
            parent=parent,
            base=base,
            base_length=shared,
            delta=prompt[shared:],
            said=said,
            fields=fields,
            **of_node,
        )
        self.calls.append(made)
        self.full[call_id] = [*prompt, *said]
        return made

    def go_on(self, call_id: str, parent: str, new: Sequence[int], said: Sequence[int], **more: Any) -> Call:
        """Add a call whose prompt is all of its parent's ids and `new`."""
        return self.say(call_id, [*self.full[parent], *new], said, parent=parent, **more)


def tell(*calls: str, **fields: dict[str, Any]) -> Talk:
    """A session as its calls, each as what it is told and what it says: "c1: 1 2 | 3".

    "c2 < c1: 4 | 5" continues c1, with all of c1's ids before its own. "c2 / c1: 1 9 | 5" has c1 as its parent and its whole prompt
    written out. "c2 @ c1: 1 2 | 5" is stored on c1, "c2 @ -: 1 2 | 5" on nothing. `fields` are the calls' own, by their ids.
    """
    talk = Talk()
    for told in calls:
        names, _, ids = told.partition(":")
        prompt, said = ([int(each) for each in part.split()] for part in ids.split("|"))
        call_id, *given = names.split()
        of = dict(zip(given[::2], given[1::2], strict=True))
        more: dict[str, Any] = {"fields": fields.get(call_id)}
        if "@" in of:
            more["base"] = None if of["@"] == "-" else of["@"]
        if "<" in of:
            talk.go_on(call_id, of["<"], prompt, said, **more)
        else:
            talk.say(call_id, prompt, said, parent=of.get("/"), **more)
    return talk


def common_prefix(left: Sequence[int], right: Sequence[int]) -> int:
    length = 0
    for one, other in zip(left, right, strict=False):
        if one != other:
            break
        length += 1
    return length
