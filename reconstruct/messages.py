"""Canonical messages and the fingerprint chain: when does a request continue a call that was answered before?

Messages here are OpenAI chat messages (every dialect is translated to them). A message's digest says what must be equal for a
history to be the same. Canonical: parsed tool arguments with sorted keys; a string equals one text part; `cache_control`,
`index`, null and empty optional fields are ignored. An assistant message leaves out its reasoning and outer white space, because
harnesses drop and trim them; what was dropped is checked against the call (`projection`) and recorded.

The chain is h[0] = root key, h[i] = H(h[i-1], digest of message i, which call of its turn it answers): tool-call ids count by
their position in the turn. Equal chains mean equal histories under equal tools and model. Whether template kwargs, or the
names of messages, make another prompt of them only a rendering can tell: they are the call's `dress`.
"""

from __future__ import annotations

import json
import unicodedata
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from re import Pattern
from typing import Any

DIGEST_BYTES = 16

DEEPEST = 100
"""Levels of nesting that are followed."""

_IGNORED_FIELDS = frozenset({"cache_control", "index", "role", "content", "tool_calls", "tool_call_id", "name"})
"""Not part of a message's digest by themselves: they count in a way of their own, or not at all."""

Message = Mapping[str, Any]

_canonical = json.JSONEncoder(sort_keys=True, separators=(",", ":"), ensure_ascii=True).encode


def hash_bytes(*parts: bytes) -> bytes:
    """A 16-byte digest of the parts; lengths are hashed too, so that no two lists of parts collide."""
    state = blake2b(digest_size=DIGEST_BYTES)
    for part in parts:
        state.update(len(part).to_bytes(8, "little"))
        state.update(part)
    return state.digest()


def canonical_json(value: Any) -> bytes:
    """`value` as JSON with sorted keys, no spaces, null fields and volatile keys dropped; lone surrogates survive."""
    return _canonical(_without_volatile(value)).encode("ascii")


def _without_volatile(value: Any) -> Any:
    if type(value) is str:
        return value
    # Asking whether something is a Mapping costs more than all the rest; it mostly is a dict.
    if type(value) is dict or isinstance(value, Mapping):
        return {k: _without_volatile(v) for k, v in value.items() if k != "cache_control" and v is not None}
    if isinstance(value, (list, tuple)):
        return [_without_volatile(item) for item in value]
    # JSON has one kind of number: a JavaScript harness reads the model's 1.0 and writes 1.
    return int(value) if isinstance(value, float) and value.is_integer() else value


def root_key(model: str, tools: Sequence[Any], template_kwargs: Mapping[str, Any], policy: str = "") -> bytes:
    """The identity of a tree's root: calls under other tools or model never share one, nor calls that one name took to two policies,
    whose tokens need not even be of one vocabulary. Without template kwargs: the root of the chain, which calls that are rendered
    alike share."""
    parts = [model.encode(), canonical_json(list(tools or ())), canonical_json(dict(template_kwargs or {}))]
    return hash_bytes(*parts, *([policy.encode()] if policy else []))


def dress(root: bytes, names: Sequence[tuple[int, str]]) -> bytes:
    """What a template may show of a request beside its canonical messages: the root's key, tools and template kwargs in it, and the
    `names` of messages by their position. Calls of equal history and dress are rendered alike; of another dress they may be."""
    return hash_bytes(root, canonical_json([list(name) for name in names])) if names else root


@dataclass(frozen=True, slots=True)
class Digests:
    """What the chain needs of one message, whatever stands around it. `call_ids` are the ids of the tool calls it makes,
    `answers` the id of the one it answers ("" for none): the chain turns them into positions. `name` is that of a message which is
    not the assistant's: hardly a template shows it, so it is no part of the digest, and of the call's dress (see `dress`)."""

    digest: bytes
    is_assistant: bool
    call_ids: tuple[str, ...] = ()
    answers: str = ""
    name: str = ""


def plain_content(content: Any) -> Any:
    """A string for absent content, a string, or text parts alone; a list of parts (None fields dropped) otherwise."""
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    parts = [_part(part) for part in content]
    if all(isinstance(part, str) for part in parts):
        if len(parts) == 1:
            return parts[0]
        return parts or ""
    return parts


def _part(part: Any) -> Any:
    if isinstance(part, str):
        return part
    if isinstance(part, Mapping) and part.get("type") in ("text", "input_text", "output_text"):
        return part.get("text") or ""
    return _without_volatile(part)


def plain_arguments(arguments: Any) -> Any:
    """Tool arguments parsed where they are JSON, the raw string where they are not; "" and {} are alike.

    A model that repeats itself nests them without end: what is deeper than `DEEPEST` stays a string, too.
    """
    if not isinstance(arguments, str):
        return arguments if arguments is not None else {}
    try:
        parsed = json.loads(arguments) if arguments.strip() else {}
    except (ValueError, RecursionError):
        return arguments
    shallow = arguments.count("[") + arguments.count("{") <= DEEPEST
    return parsed if shallow or is_shallow(parsed) else arguments


def is_shallow(value: Any) -> bool:
    """Whether JSON is nested at most `DEEPEST` levels deep; measured without recursion."""
    level = [value]
    for _ in range(DEEPEST + 1):
        inner: list[Any] = []
        for holder in level:
            if isinstance(holder, dict):
                inner.extend(holder.values())
            elif isinstance(holder, list):
                inner.extend(holder)
        if not inner:
            return True
        level = inner
    return False


def reasoning_of(message: Message) -> str:
    """The reasoning text of an assistant message under either of its two field names."""
    text = message.get("reasoning_content") or message.get("reasoning") or ""
    return text if isinstance(text, str) else ""


def without_lines(message: Message, volatile: Pattern[str]) -> Message:
    """A system or developer message without the lines that `volatile` matches; any other message as it is.

    Parts that held nothing else go, too: a harness may put its volatile line into a part of its own.
    """
    if message.get("role") not in ("system", "developer"):
        return message
    content = message.get("content")
    if isinstance(content, str):
        return {**message, "content": _without(content, volatile)}
    if not isinstance(content, list):
        return message
    parts = []
    for part in content:
        text = part.get("text") if isinstance(part, Mapping) else None
        if not isinstance(text, str):
            parts.append(part)
        elif kept := _without(text, volatile):
            parts.append({**part, "text": kept})
    return {**message, "content": parts}


def _without(text: str, volatile: Pattern[str]) -> str:
    if not volatile.search(text):
        return text
    return "".join(line for line in text.splitlines(keepends=True) if not volatile.search(line.rstrip("\r\n")))


def call_names(message: Message) -> list[tuple[str, Any]]:
    """(name, plain arguments) of the message's tool calls, in order."""
    names = []
    for call in message.get("tool_calls") or ():
        function = call.get("function") or {}
        names.append((function.get("name") or "", plain_arguments(function.get("arguments"))))
    return names


def digest_message(message: Message) -> Digests:
    """The digests of one message."""
    role = str(message.get("role") or "")
    if role == "assistant":
        content = plain_content(message.get("content"))
        trimmed = content.strip() if isinstance(content, str) else content
        digest = hash_bytes(b"assistant", canonical_json([trimmed, call_names(message)]))
        return Digests(digest, True, tuple(str(call.get("id") or "") for call in message.get("tool_calls") or ()))
    if role == "prompt":
        # Text or token ids that a model is to go on from: exactly those, and as many as a history has.
        return Digests(hash_bytes(b"prompt", json.dumps(message.get("content")).encode()), False)
    rest = {key: value for key, value in message.items() if key not in _IGNORED_FIELDS and value not in (None, "", [])}
    digest = hash_bytes(b"message", canonical_json([role, plain_content(message.get("content")), rest]))
    return Digests(digest, False, answers=str(message.get("tool_call_id") or ""), name=str(message.get("name") or ""))


def digest_messages(messages: Iterable[Message]) -> list[Digests]:
    return [digest_message(message) for message in messages]


Counts = Callable[[int, bytes], Digests]
"""What counts as the message at a position, after the fingerprint of those before it."""


def chain(root: bytes, digests: list[Digests], known: Sequence[bytes] = (), counts: Counts | None = None) -> list[bytes]:
    """h[0..n]: the fingerprint before the first message and after each of the n, tool-call ids resolved turn by turn.

    `known` is the beginning of the result, where it was made before for the same root and the same first digests. `counts` may put
    others into the place of those after it, in `digests` itself.
    """
    fingerprints = list(known) or [root]
    start = len(fingerprints) - 1
    positions = _positions(next((item.call_ids for item in reversed(digests[:start]) if item.call_ids), ()))
    for at in range(start, len(digests)):
        if counts is not None:
            digests[at] = counts(at, fingerprints[-1])
        item = digests[at]
        place = b""
        if item.answers:
            position = positions.get(item.answers)
            place = item.answers.encode("utf-8", "surrogatepass") if position is None else b"#%d" % position
        fingerprints.append(hash_bytes(fingerprints[-1], item.digest, place))
        if item.call_ids:
            positions = _positions(item.call_ids)
    return fingerprints


def _positions(call_ids: Sequence[str]) -> dict[str, int]:
    return {call_id: position for position, call_id in enumerate(call_ids)}


def minted_call_ids(message: Message, prefix: str = "call_") -> list[str]:
    """Call ids that the service minted into the message's tool-call ids (`call_<call id>_<position>`)."""
    named = []
    for call in message.get("tool_calls") or ():
        identifier = call.get("id") or ""
        if identifier.startswith(prefix) and identifier.count("_") == 2:
            named.append(identifier.split("_")[1])
    return named


def projection(sent: Message, replayed: Message, schemas: Mapping[str, Any] | None = None) -> str | None:
    """How `replayed` shows the reply that was `sent`: "exact", a comma-separated list of declared losses, or None when it
    is an edit.

    Declared: "arguments" (order or spacing of tool arguments), "defaults" (arguments left out by the model are filled in with the
    defaults of their tool's JSON schema, `schemas` by tool name), "trimmed" (outer white space), "reencoded" (see `reencoded`),
    "reasoning_dropped", "reasoning_trimmed", "fields" (added provider fields are not compared at all and need no name).
    """
    losses = []
    sent_content, content = plain_content(sent.get("content")), plain_content(replayed.get("content"))
    if content != sent_content:
        if not (isinstance(content, str) and isinstance(sent_content, str)):
            return None
        if content.strip() != sent_content.strip():
            if normalize(content.strip()) != normalize(sent_content.strip()):
                return None
            losses.append("reencoded")
        else:
            losses.append("trimmed")
    sent_calls, calls = call_names(sent), call_names(replayed)
    if canonical_json(sent_calls) != canonical_json(calls):
        found = _calls_projection(sent_calls, calls, schemas or {})
        if found is None:
            return None
        losses += [loss for loss in found if loss not in losses]
    elif _raw_arguments(sent) != _raw_arguments(replayed):
        losses.append("arguments")
    sent_reasoning, reasoning = reasoning_of(sent), reasoning_of(replayed)
    if reasoning != sent_reasoning:
        if not reasoning.strip():
            losses.append("reasoning_dropped")
        elif reasoning.strip() == sent_reasoning.strip():
            losses.append("reasoning_trimmed")
        else:
            return None
    return ",".join(losses) or "exact"


def _calls_projection(
    sent: list[tuple[str, Any]], replayed: list[tuple[str, Any]], schemas: Mapping[str, Any]
) -> list[str] | None:
    """How tool calls that are not the same as those sent show them all the same."""
    if _filled_in(sent, replayed, schemas):
        return ["defaults"]
    sent, replayed = [(name, normalize(told)) for name, told in sent], [(name, normalize(told)) for name, told in replayed]
    if canonical_json(sent) == canonical_json(replayed):
        return ["reencoded"]
    return ["defaults", "reencoded"] if _filled_in(sent, replayed, schemas) else None


def normalize(value: Any) -> Any:
    """One value for all that a text's or a number's own standard calls the same: texts of one canonical form (Unicode's NFC) and with
    line feeds alone for line ends; integers as a double holds them, which is all that JSON promises of them (RFC 8259, 6) and all
    that JavaScript reads."""
    if isinstance(value, str):
        return unicodedata.normalize("NFC", value.replace("\r\n", "\n"))
    if isinstance(value, Mapping):
        return {normalize(key): normalize(item) for key, item in value.items()}
    if isinstance(value, list):
        return [normalize(item) for item in value]
    if type(value) is int and abs(value) > _EXACT and abs(value) < _BEYOND_DOUBLES:
        return int(float(value))
    return value


_EXACT = 2**53
_BEYOND_DOUBLES = 2**1023
"""Integers between the two have a neighbour among the doubles."""


def describe_edits(sent: Message, replayed: Message) -> str:
    """What of a reply that was `sent` the `replayed` message changes, as the names of a projection that only an id proves."""
    changed = {
        "minted_content": plain_content(sent.get("content")) != plain_content(replayed.get("content")),
        "minted_calls": canonical_json(call_names(sent)) != canonical_json(call_names(replayed)),
        "minted_reasoning": reasoning_of(sent) != reasoning_of(replayed),
    }
    return ",".join(name for name, differs in changed.items() if differs)


def _filled_in(sent: list[tuple[str, Any]], replayed: list[tuple[str, Any]], schemas: Mapping[str, Any]) -> bool:
    """Whether the replayed calls are those sent, with nothing but defaults of their schemas added."""
    if [name for name, _ in sent] != [name for name, _ in replayed]:
        return False
    pairs = zip(sent, replayed, strict=True)
    return all(_only_defaults(arguments, back, schemas.get(name)) for (name, arguments), (_, back) in pairs)


def _only_defaults(sent: Any, replayed: Any, schema: Any) -> bool:
    """Whether `replayed` is `sent` with nothing but defaults of the JSON schema added to its objects, at any depth."""
    schema = schema if isinstance(schema, Mapping) else {}
    if isinstance(sent, Mapping) and isinstance(replayed, Mapping):
        properties = schema.get("properties")
        properties = properties if isinstance(properties, Mapping) else {}
        return sent.keys() <= replayed.keys() and all(
            _only_defaults(sent[key], value, properties.get(key)) if key in sent else _is_default(value, properties.get(key))
            for key, value in replayed.items()
        )
    if isinstance(sent, list) and isinstance(replayed, list):
        return len(sent) == len(replayed) and all(
            _only_defaults(one, back, schema.get("items")) for one, back in zip(sent, replayed, strict=True)
        )
    return canonical_json(sent) == canonical_json(replayed)


def _is_default(value: Any, schema: Any) -> bool:
    return isinstance(schema, Mapping) and "default" in schema and canonical_json(value) == canonical_json(schema["default"])


def _raw_arguments(message: Message) -> list[Any]:
    return [(call.get("function") or {}).get("arguments") for call in message.get("tool_calls") or ()]
