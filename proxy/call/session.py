"""Session: one session in memory, with what was decoded, digested and compared once.

`known` says how many records of the session it has read; `begin` tells it of the ones that other processes wrote meanwhile.

Only recorded calls leave anything here. What a request brings that is new stands in its draft (`proxy.call.draft`), and goes with it when
the call is refused, fails or is not recorded.

A session that nobody has called for long is stripped (`strip`): of its calls stay ids, fingerprints and replies, which is all that the
next request is compared with and put behind. It costs that request a parse of its whole history. The texts of prompts are read
from the store again where something asks for them (`history`).
"""

from __future__ import annotations

import asyncio
import contextlib
import re
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import islice, zip_longest
from operator import attrgetter
from typing import Any

import msgspec
import numpy as np

from proxy.call.memo import Memos
from proxy.call.recording import Recording
from proxy.dialects.base import HistoryMessage, ItemReader, ParsedMessage, read_model
from proxy.errors import UnknownCall
from proxy.images import ImageBounds, images_in
from proxy.store.states import SessionInfo
from reconstruct.codec import decode
from reconstruct.errors import ReconstructError
from reconstruct.messages import (
    Digests,
    Message,
    chain,
    describe_edits,
    digest_message,
    drop_lines,
    hash_bytes,
    minted_call_ids,
    projection,
    read_tool_call_id,
    rename_calls,
    root_key,
    without_lines,
)
from reconstruct.records import Call, Forest, Ids, find_engine_id, pack_logprobs

_nbytes: Callable[[Ids], int] = attrgetter("nbytes")
_decode = msgspec.json.decode
_encode = msgspec.json.Encoder().encode

_RECENT_PROMPTS = 2
"""Calls whose whole ids are kept put together: the next call mostly continues one of them."""

_RECENT_HISTORIES = 4
"""Histories whose fingerprints and replays are kept: a request mostly goes on from one of them."""


_CALL_BYTES = 4096
"""The same for a call: its record, and its places in the forest's indexes."""

MEMORY_PER_BYTE = 3
"""Bytes of a message are there raw, decoded and, of some characters, twice as wide."""

SeenKey = tuple[ItemReader, bytes]
ReadImages = Callable[[dict[str, Any]], tuple[dict[str, Any], tuple[str, ...]]]


@dataclass(frozen=True, slots=True, eq=False)
class Chained:
    """A history under a root, its fingerprints, what counted as each of its messages, and its names by position."""

    root: bytes
    history: list[HistoryMessage]
    fingerprints: list[bytes]
    counted: list[Digests]
    names: Sequence[tuple[int, str]]
    """(position, name) of the messages that have one and are not the assistant's."""
    settled: bool
    """False: a message names a call that this process is still to hear of, and may count otherwise next time."""


@dataclass(frozen=True, slots=True, eq=False)
class ReplayedHistory:
    """A history that ends in a call's reply and replays it and all calls before it without an edit, and its messages as an engine
    gets them, each of those replies as it was sent."""

    history: list[HistoryMessage]
    messages: Sequence[Message]


@dataclass(slots=True)
class ParseLane:
    """A session's turn to have something large parsed, or something after it was refused; `closed_until` in seconds of
    `time.monotonic`."""

    lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    closed_until: float = 0.0


class Session:
    """One session's forest, with what was decoded, digested and compared once so that no call does it for its whole history."""

    def __init__(
        self,
        info: SessionInfo,
        volatile: re.Pattern[str] | None = None,
        bounds: ImageBounds | None = None,
        *,
        memo: bool = True,
    ) -> None:
        self.info = info
        self.memos = Memos() if memo else Memos(0)
        self.has_budget = info.has_budget
        self.bounds = bounds or ImageBounds()
        self.kept_images: set[str] = set()
        """The images that the store is known to keep for the session."""
        self.recording: Recording | None = None
        """What the session replays."""
        self._volatile = volatile
        self.forest = Forest()
        self.known = 0
        self.turn_ends: dict[bytes, Ids] = {}
        self.told: dict[str, tuple[int, str] | None] = {}
        """Of calls with a prompt instead of messages: what each added to the text, and after how many characters."""
        self._by_id = info.echo_policy == "minted"
        self._replies: dict[str, dict[str, Any]] = {}
        self._replied: dict[str, Digests] = {}
        self._models: dict[str, str] = {}
        self.items: dict[SeenKey, list[HistoryMessage]] = {}
        """The messages of each raw item that a recorded call of the session brought."""
        self._recent: OrderedDict[str, Ids] = OrderedDict()
        self._renderings: OrderedDict[str, Ids] = OrderedDict()
        self._replays: OrderedDict[str, ReplayedHistory] = OrderedDict()
        self._histories: OrderedDict[str, list[HistoryMessage]] = OrderedDict()
        self._roots = (b"", b"", b"")
        self._offered: tuple[Sequence[Any], bytes] = ((), b"")
        """The tools of the last request, and their digest."""
        self._chains: deque[Chained] = deque(maxlen=_RECENT_HISTORIES)
        self._call_bytes = self._reply_bytes = self._item_bytes = self._longest = 0
        self._stripped = 0
        """How many calls, from the first one on, may lack the texts of their prompts."""
        self.parse_lane: ParseLane | None = None

    @property
    def memory_bytes(self) -> int:
        """About how much memory the session takes here: an estimate, of what its calls and messages brought."""
        recorded = 0 if self.recording is None else self.recording.size_bytes
        recent = sum(map(_nbytes, (*self._recent.values(), *self._renderings.values())))
        # The next request has a reply decoded, and all ids of one call put together.
        coming = MEMORY_PER_BYTE * self._reply_bytes + max(0, np.dtype(np.int32).itemsize * self._longest - recent)
        return recorded + self._call_bytes + self._item_bytes + self.memos.size_bytes + recent + coming

    @property
    def lacks_texts(self) -> bool:
        """Whether the texts of some prompts are in the store alone."""
        return self._stripped > 0

    def strip(self) -> int:
        """Forget everything but what the calls' ids are put together from and later histories are found by. Returns about how much memory
        the session then takes, in bytes; it takes `memory_bytes` once a request has come."""
        self.items = {}
        self.memos.forget()
        self.told = {}
        self._replies, self._replied, self._histories = {}, {}, OrderedDict()
        self._recent, self._renderings, self._replays = OrderedDict(), OrderedDict(), OrderedDict()
        self._chains.clear()
        self._item_bytes = 0
        for call in list(islice(self.forest.calls.values(), self._stripped, None)):
            if model := read_model(call):
                self._models[call.call_id] = model
            self.forest.calls[call.call_id] = stripped = _strip(call)
            self._call_bytes -= call.size_bytes - stripped.size_bytes
        self._stripped = len(self.forest)
        return self._call_bytes + (0 if self.recording is None else self.recording.size_bytes)

    def keep(self, key: SeenKey, seen: list[HistoryMessage], size: int) -> None:
        """Remember the messages of a raw item that a recorded call brought; `size` is about how much memory they take, in bytes."""
        if self.items.setdefault(key, seen) is seen:
            self._item_bytes += size

    def digest(self, parsed: ParsedMessage, read_images: ReadImages | None = None) -> HistoryMessage:
        """`read_images` takes the images of a message that a harness sent."""
        message = parsed.message
        images: tuple[str, ...] = ()
        if read_images is not None and type(message.get("content")) is list:
            message, images = read_images(message)
        if self._volatile is not None:
            message = dict(without_lines(message, self._volatile))
        named = minted_call_ids(message)
        minted = (*named, parsed.minted) if parsed.minted else tuple(named)
        return HistoryMessage(message, digest_message(message), minted, images)

    def roots(self, policy: str, tools: Sequence[Any], template_kwargs: Mapping[str, Any]) -> tuple[bytes, bytes]:
        """`root_key` of the same, and that without template kwargs, made only where a call does not bring the values of the one before:
        all of a harness's tools go with every call."""
        offered = self._offered
        if tools is not offered[0]:
            offered = self._offered = (tools, hash_bytes(_encode(tools)))
        told = offered[1] + _encode((policy, template_kwargs))
        if told != self._roots[0]:
            chained = root_key(policy, tools, {})
            own = root_key(policy, tools, template_kwargs) if template_kwargs else chained
            self._roots = (told, own, chained)
        return self._roots[1:]

    def extend_chain(self, root: bytes, history: list[HistoryMessage]) -> Chained:
        """The hash chain over `history` (see reconstruct.messages.chain), hashed only from where no recent history agrees. Where ids
        prove replies, a message that names the one call whose request is the history before it counts as that call's reply."""
        known, shared = None, 0
        for item in self._chains:
            if item.root == root and (count := _count_shared(history, item.history)) > shared:
                known, shared = item, count
        if known is not None and shared == len(history) == len(known.history):
            return known
        counted = known.counted[:shared] if known is not None else []
        counted += [seen.digests for seen in history[shared:]]
        settled = True

        def counts(at: int, before: bytes) -> Digests:
            nonlocal settled
            seen = history[at]
            named = set(seen.minted) if seen.digests.is_assistant else set()
            if len(named) != 1:
                return seen.digests
            call = self.forest.calls.get(named.pop())
            # Of a call that this process is still to hear of: next time it may count.
            settled = settled and call is not None
            return self._sent(call) if call is not None and call.fingerprint == before else seen.digests

        fingerprints = known.fingerprints[: shared + 1] if known is not None else ()
        made = chain(root, counted, fingerprints, counts if self._by_id else None)
        names = _names(history, shared, [name for name in known.names if name[0] < shared] if known is not None else [])
        return Chained(root, history, made, counted, names, settled)

    def remember(self, chained: Chained) -> None:
        """A recorded call has this history."""
        if chained.settled and chained not in self._chains:
            self._chains.append(chained)

    def _sent(self, call: Call) -> Digests:
        """The digests of the call's reply as it was sent."""
        digests = self._replied.get(call.call_id)
        if digests is None:
            digests = self._replied[call.call_id] = digest_message(self.reply(call.call_id))
        return digests

    def changes_volatile_lines(self, one: Message, other: Message) -> bool:
        """Whether the user's messages differ only in lines that change with every run."""
        volatile = self._volatile
        if volatile is None or one.get("role") != "user" or other.get("role") != "user":
            return False
        return digest_message(drop_lines(one, volatile)).digest == digest_message(drop_lines(other, volatile)).digest

    def replay(self, call_id: str, history: list[HistoryMessage]) -> ReplayedHistory | None:
        """How `history` replays the call, if that was looked at before: the very same messages up to its reply."""
        known = self._replays.get(call_id)
        # Compared by identity: a session decodes each message but once.
        return known if known is not None and history[: len(known.history)] == known.history else None

    def keep_replay(self, call_id: str, replay: ReplayedHistory) -> None:
        self._replays[call_id] = replay
        while len(self._replays) > _RECENT_HISTORIES:
            self._replays.popitem(last=False)

    def projection(self, call_id: str, seen: HistoryMessage, schemas: Mapping[str, Any]) -> str | None:
        """How a replayed message shows the call's reply; see reconstruct.messages.projection, and `edits` for what an id proves where
        that is the session's echo policy. Compared once per pair."""
        known = seen.projections
        if call_id not in known:
            used = projection(self.reply(call_id), seen.message, schemas)
            if used is None and self._by_id and set(seen.minted) == {call_id}:
                used = describe_edits(self.reply(call_id), seen.message)
            known[call_id] = used
        return known[call_id]

    def known_ids(self, call_id: str) -> Ids | None:
        """The call's prompt and completion ids, int32; None where its engine did not tell them."""
        ids = self._recent.get(call_id)
        if ids is None:
            ids = self.forest.known_ids(call_id)
            if ids is not None:
                self._remember(call_id, ids)
        return ids

    def find_rendering(self, call_id: str) -> Ids | None:
        """The template's own rendering of the call's request, where it is still known."""
        return self._renderings.get(call_id)

    def keep_rendering(self, call_id: str, ids: Ids) -> None:
        _keep_recent(self._renderings, call_id, ids)

    def _remember(self, call_id: str, ids: Ids) -> None:
        _keep_recent(self._recent, call_id, ids)

    def call(self, call_id: str) -> Call:
        """Raises UnknownCall."""
        call = self.forest.calls.get(call_id)
        if call is None:
            raise UnknownCall(f"session {self.info.session_id} has no call {call_id}")
        return call

    def reply(self, call_id: str) -> dict[str, Any]:
        """The reply of a call as it was sent to the harness, a chat message. Raises UnknownCall."""
        message = self._replies.get(call_id)
        if message is None:
            message = self._replies[call_id] = _decode(self.call(call_id).reply)
        return message

    def engine_reply(self, call_id: str) -> Message:
        """The same with the engine's own ids of its tool calls. Raises UnknownCall."""
        return rename_calls(self.reply(call_id), partial(find_engine_id, self.forest.calls))

    def engine_messages(self, history: Sequence[HistoryMessage]) -> list[Message]:
        return [seen.engine_form[0] if seen.engine_form else self.engine_message(seen) for seen in history]

    def engine_message(self, seen: HistoryMessage) -> Message:
        """The message as the engine gets it: with its own ids of tool calls for those that were minted into the session's replies. Any
        other id stays as the harness sent it."""
        if seen.engine_form:
            return seen.engine_form[0]
        calls, digests = self.forest.calls, seen.digests
        if not (digests.call_ids or digests.answers):
            seen.engine_form.append(seen.message)
            return seen.message
        minted = [place for each in (*digests.call_ids, digests.answers) if (place := read_tool_call_id(each))]
        form = rename_calls(seen.message, partial(find_engine_id, calls)) if minted else seen.message
        # Another process may be about to record a call that is not known.
        if all(call_id in calls for call_id, _ in minted):
            seen.engine_form.append(form)
        return form

    def model(self, call_id: str | None) -> str:
        """The name that the call asked for its policy by; "" for None."""
        passed: list[str] = []
        while call_id is not None:
            passed.append(call_id)
            call = self.forest.calls[call_id]
            if model := self._models.get(call_id) or read_model(call):
                self._models.update(dict.fromkeys(passed, model))
                return model
            call_id = call.node.parent_id
        return ""

    def history(self, call_id: str) -> list[HistoryMessage]:
        """The messages of the call's request, then its reply. Raises UnknownCall, also where texts are in the store alone."""
        missing: list[Call] = []
        made: list[HistoryMessage] = []
        for call in self._lineage(call_id):
            known = self._histories.get(call.call_id)
            if known is not None:
                made = known
                break
            if not call.messages:
                raise UnknownCall(f"the texts of call {call.call_id} are not in memory")
            missing.append(call)
        for call in reversed(missing):
            own = _decode(call.messages)
            made = [*made, *(HistoryMessage(each, digest_message(each), (), images_in(each)) for each in own)]
            reply = self.reply(call.call_id)
            made.append(HistoryMessage(reply, digest_message(reply), (call.call_id,)))
        self._histories[call_id] = made
        while len(self._histories) > _RECENT_HISTORIES:
            self._histories.popitem(last=False)
        return made

    def _lineage(self, call_id: str) -> Iterator[Call]:
        """The call and those whose messages and replies its history begins with, newest first."""
        call = self.call(call_id)
        yield call
        while call.messages_from and call.node.parent_id is not None:
            call = self.call(call.node.parent_id)
            yield call

    def learn(self, records: Sequence[bytes], start: int) -> bool:
        """Take in the store's records from number `start` on; whether any was new, or brought texts that were missing. A damaged record is
        left to the accounting: it stays in the store, and no call can be found to continue it."""
        size, lacked = len(self.forest), self.lacks_texts and not start
        if lacked:
            self._stripped = 0
        for record in records:
            with contextlib.suppress(ReconstructError):
                call = decode(record)
                if lacked and call.call_id in self.forest:
                    self._call_bytes += call.size_bytes - self.forest.calls[call.call_id].size_bytes
                    self.forest.calls[call.call_id] = call
                self._add(call)
        self.known = max(self.known, start + len(records))
        return lacked or len(self.forest) > size

    def add_calls(self, calls: Sequence[Call], prompt_ids: Ids | None, total: int) -> None:
        """This process appended `calls`, all sampled after `prompt_ids` (None: not known); the store now counts `total` records."""
        for call in calls:
            self._add(call)
        if prompt_ids is not None and calls[0].ids_known:
            self._remember(calls[0].call_id, np.concatenate((prompt_ids, calls[0].node.completion_ids)))
        if total == self.known + len(calls):
            self.known = total

    def _add(self, call: Call) -> None:
        if call.call_id in self.forest:
            return
        self.forest.add(call)
        self._call_bytes += _CALL_BYTES + call.size_bytes
        self._reply_bytes += len(call.reply)
        self._longest = max(self._longest, self.forest.full_length(call.call_id))


_NO_LOGPROBS = pack_logprobs(())
_PROMPTS = (b'[{"role":"prompt"', b'[{"role": "prompt"')


def _strip(call: Call) -> Call:
    """The call without what only rows are made of. A prompt that is no message stays: later ones are compared with its text."""
    messages = call.messages if call.messages.startswith(_PROMPTS) else b""
    return replace(call, node=replace(call.node, logprobs=_NO_LOGPROBS), messages=messages, preamble=b"")


def _names(history: list[HistoryMessage], start: int = 0, known: Sequence[tuple[int, str]] = ()) -> Sequence[tuple[int, str]]:
    new = [(start + at, seen.digests.name) for at, seen in enumerate(history[start:]) if seen.digests.name]
    return [*known, *new] if new else known


def _count_shared(history: list[HistoryMessage], known: list[HistoryMessage]) -> int:
    """How many messages both begin with."""
    if history[: len(known)] == known:
        return len(known)
    return next(at for at, (one, other) in enumerate(zip_longest(history, known)) if one is not other)


def _keep_recent(kept: OrderedDict[str, Ids], call_id: str, ids: Ids) -> None:
    kept[call_id] = ids
    while len(kept) > _RECENT_PROMPTS:
        kept.popitem(last=False)
