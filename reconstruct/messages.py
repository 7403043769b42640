"""Canonical messages and the fingerprint chain: decides whether a request continues an earlier call.

Messages are OpenAI chat messages, to which every dialect is translated. A message's digest covers what must be equal for a history to
be the same. Canonical form: tool arguments are parsed and their keys sorted; a string equals one text part; `cache_control`, `index`,
and null and empty optional fields are ignored. The reasoning and outer white space of an assistant message are left out, because
harnesses drop and trim them; what was dropped is compared with the call (`projection`) and recorded.

The chain is h[0] = root key, h[i] = H(h[i-1], digest of message i, which call of its turn it answers): tool-call ids count by their
position in the turn. Equal chains mean equal histories under equal tools and policy. Template kwargs and message names may change the
prompt, which only a rendering can tell: they are the call's `render_key`.
"""

from __future__ import annotations

import json
import re
import unicodedata
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from re import Pattern
from typing import Any

DIGEST_BYTES = 16

MAX_DEPTH = 100
"""The deepest nesting that is parsed."""

_IGNORED_FIELDS = frozenset({"cache_control", "index", "role", "content", "tool_calls", "tool_call_id", "name"})
"""Fields that are digested in their own way or not at all."""

Message = Mapping[str, Any]

_canonical = json.JSONEncoder(sort_keys=True, separators=(",", ":"), ensure_ascii=True).encode


def hash_bytes(*parts: bytes) -> bytes:
    """A 16-byte digest of the parts, including their lengths so that different splits do not collide."""
    state = blake2b(digest_size=DIGEST_BYTES)
    for part in parts:
        state.update(len(part).to_bytes(8, "little"))
        state.update(part)
    return state.digest()


def canonical_json(value: Any) -> bytes:
    """`value` as JSON with sorted keys and without spaces, null fields and volatile keys; lone surrogates are kept."""
    return _canonical(_without_volatile(value)).encode("ascii")


def _without_volatile(value: Any) -> Any:
    # Most values are texts, and of the others most are dicts: the Mapping check costs more than all the rest.
    if type(value) is dict or isinstance(value, Mapping):
        return {
            k: v if type(v) is str else _without_volatile(v) for k, v in value.items() if k != "cache_control" and v is not None
        }
    if isinstance(value, (list, tuple)):
        return [item if type(item) is str else _without_volatile(item) for item in value]
    # JSON has one number type: a JavaScript harness reads 1.0 and writes 1.
    return int(value) if isinstance(value, float) and value.is_integer() else value


def root_key(policy: str, tools: Sequence[Any], template_kwargs: Mapping[str, Any]) -> bytes:
    """The identity of a tree's root. Calls with different tools or policies never share one; policies may even have different
    vocabularies. The name that a policy was asked for by is no part of it: a harness may use several. Without template kwargs it is the
    root of the chain, shared by calls that are rendered alike."""
    return hash_bytes(policy.encode(), canonical_json(list(tools or ())), canonical_json(dict(template_kwargs or {})))


def render_key(root: bytes, names: Sequence[tuple[int, str]]) -> bytes:
    """What a template may render besides the canonical messages: the root key (with tools and template kwargs) and the `names` of
    messages by position. Calls of equal history and render key are rendered alike; of different render keys they may be."""
    return hash_bytes(root, canonical_json([list(name) for name in names])) if names else root


@dataclass(frozen=True, slots=True)
class Digests:
    """What the chain needs of a message, independent of its context. `call_ids` are the ids of its tool calls, `answers` the id of the
    call it answers ("" for none); the chain turns them into positions. `name` is a non-assistant message's: few templates render it,
    so it is part of the call's render key instead of the digest."""

    digest: bytes
    is_assistant: bool
    call_ids: tuple[str, ...] = ()
    answers: str = ""
    name: str = ""


def plain_content(content: Any) -> Any:
    """A string if the content is absent, a string, or a single text part; otherwise a list of parts without None fields."""
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
    """Tool arguments, parsed if they are JSON and otherwise the raw string; "" equals {}.

    A model that repeats itself may nest them endlessly: arguments deeper than `MAX_DEPTH` also stay a string.
    """
    if not isinstance(arguments, str):
        return arguments if arguments is not None else {}
    try:
        parsed = json.loads(arguments) if arguments.strip() else {}
    except (ValueError, RecursionError):
        return arguments
    shallow = arguments.count("[") + arguments.count("{") <= MAX_DEPTH
    return parsed if shallow or is_shallow(parsed) else arguments


def is_shallow(value: Any) -> bool:
    """Whether JSON is nested at most `MAX_DEPTH` levels deep; without recursion."""
    level = [value]
    for _ in range(MAX_DEPTH + 1):
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
    """The reasoning of an assistant message, under either field name."""
    text = message.get("reasoning_content") or message.get("reasoning") or ""
    return text if isinstance(text, str) else ""


_THOUGHT_END = re.compile(r"</(?:\w+:)?(?:think|thinking|thoughts?|reason|reasoning)>|\[/THINK\]|◁/think▷")
_THOUGHT_BEGIN = re.compile(r"\s*(?:<[^<>\s]+>|\[THINK\]|◁think▷)")


def split_thought(message: Message) -> tuple[str, str] | None:
    """The content of a reply as far as its thought goes, and from the mark on that ends it, where the engine left a thought in the content;
    None if there is none. Marks are those of the large families."""
    content = message.get("content")
    found = _THOUGHT_END.search(content) if isinstance(content, str) and not reasoning_of(message) else None
    if not isinstance(content, str) or found is None:
        return None
    thought, rest = content[: found.start()], content[found.start() :]
    return (thought, rest) if _THOUGHT_BEGIN.sub("", thought, count=1).strip() else None


def drop_thought(content: str) -> str:
    """What follows the last mark that ends a thought."""
    return _THOUGHT_END.split(content)[-1].lstrip("\n")


def without_lines(message: Message, volatile: Pattern[str]) -> Message:
    """A system or developer message without the lines that `volatile` matches; any other message unchanged.

    Parts that become empty are dropped: a harness may put its volatile line into its own part.
    """
    return drop_lines(message, volatile) if message.get("role") in ("system", "developer") else message


def drop_lines(message: Message, volatile: Pattern[str]) -> Message:
    """Any message without those lines."""
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
    """(name, plain arguments) of each tool call, in order."""
    names = []
    for call in message.get("tool_calls") or ():
        function = call.get("function") or {}
        names.append((function.get("name") or "", plain_arguments(function.get("arguments"))))
    return names


def digest_message(message: Message) -> Digests:
    role = str(message.get("role") or "")
    content = message.get("content")
    if role == "assistant":
        calls = message.get("tool_calls")
        if type(content) is str and not calls:
            # As canonical JSON is written, without a look for what it leaves out.
            return Digests(hash_bytes(b"assistant", _canonical([content.strip(), []]).encode("ascii")), True)
        content = plain_content(content)
        trimmed = content.strip() if isinstance(content, str) else content
        digest = hash_bytes(b"assistant", canonical_json([trimmed, call_names(message)]))
        return Digests(digest, True, tuple(str(call.get("id") or "") for call in calls or ()))
    if role == "prompt":
        # Text or token ids to complete: compared exactly.
        return Digests(hash_bytes(b"prompt", json.dumps(content).encode()), False)
    if type(content) is str and role and len(message) == 2:
        return Digests(hash_bytes(b"message", _canonical([role, content, {}]).encode("ascii")), False)
    rest = {key: value for key, value in message.items() if key not in _IGNORED_FIELDS and value not in (None, "", [])}
    digest = hash_bytes(b"message", canonical_json([role, plain_content(content), rest]))
    return Digests(digest, False, answers=str(message.get("tool_call_id") or ""), name=str(message.get("name") or ""))


def digest_messages(messages: Iterable[Message]) -> list[Digests]:
    return [digest_message(message) for message in messages]


Counts = Callable[[int, bytes], Digests]
"""Returns the digests to use at a position, given the fingerprint of the messages before it."""


def chain(root: bytes, digests: list[Digests], known: Sequence[bytes] = (), counts: Counts | None = None) -> list[bytes]:
    """h[0..n]: the fingerprint before the first message and after each of the n, tool-call ids resolved turn by turn.

    `known` is a prefix of the result, computed before for the same root and digests. `counts` may replace later digests, in `digests`
    itself.
    """
    fingerprints = list(known) or [root]
    start = len(fingerprints) - 1
    positions: dict[str, int] | None = None
    for at in range(start, len(digests)):
        if counts is not None:
            digests[at] = counts(at, fingerprints[-1])
        item = digests[at]
        place = b""
        if item.answers:
            if positions is None:
                positions = _find_positions(digests, at)
            position = positions.get(item.answers)
            place = item.answers.encode("utf-8", "surrogatepass") if position is None else b"#%d" % position
        fingerprints.append(hash_bytes(fingerprints[-1], item.digest, place))
        if item.call_ids:
            positions = None
    return fingerprints


def _find_positions(digests: list[Digests], end: int) -> dict[str, int]:
    """The positions of the tool calls of the last message before number `end` that has any."""
    for at in range(end - 1, -1, -1):
        if call_ids := digests[at].call_ids:
            return {call_id: position for position, call_id in enumerate(call_ids)}
    return {}


def name_calls(replayed: Message, reply: Message, after: Sequence[Message]) -> Sequence[Message]:
    """The messages `after` a `replayed` reply as they read after the `reply` that was sent: tool results that name a call by an id of
    the harness's own name it by the reply's, which stands in the prompt."""
    if not replayed.get("tool_calls") and not reply.get("tool_calls"):
        return after
    theirs, ours = ([str(call.get("id") or "") for call in each.get("tool_calls") or ()] for each in (replayed, reply))
    if theirs == ours or len(theirs) != len(ours):
        return after
    names: dict[str, list[str]] = {}
    for their, our in zip(theirs, ours, strict=True):
        names.setdefault(their, []).append(our)
    named: list[Message] = []
    for at, message in enumerate(after):
        if message.get("role") == "assistant":
            return [*named, *after[at:]]
        waiting = names.get(str(message.get("tool_call_id") or "")) if message.get("role") == "tool" else None
        # Calls that share one id are answered in their order.
        if waiting:
            message = {**message, "tool_call_id": waiting.pop(0) if len(waiting) > 1 else waiting[0]}
        named.append(message)
    return named


def minted_call_ids(message: Message) -> list[str]:
    """The call ids that the service minted into the message's tool-call ids (`call_<call id>_<position>`)."""
    calls = message.get("tool_calls")
    if not calls:
        return []
    places = map(read_tool_call_id, [call.get("id") or "" for call in calls])
    return [place[0] for place in places if place is not None]


def read_tool_call_id(identifier: str) -> tuple[str, int] | None:
    """(call id, position) of a minted tool-call id; None for any other."""
    parts = identifier.split("_")
    if len(parts) != 3 or parts[0] != "call" or not (parts[2].isascii() and parts[2].isdigit() and len(parts[2]) < 10):
        return None
    return parts[1], int(parts[2])


def rename_calls(message: Message, rename: Callable[[str], str]) -> Message:
    """The message with other ids of its tool calls, or of the call that it answers; the same object if none changes."""
    calls, answers = message.get("tool_calls") or (), str(message.get("tool_call_id") or "")
    if not calls and not answers:
        return message
    renamed = [{**call, "id": rename(str(call.get("id") or ""))} for call in calls]
    changed: dict[str, Any] = {}
    if any(new["id"] != (old.get("id") or "") for new, old in zip(renamed, calls, strict=True)):
        changed["tool_calls"] = renamed
    if answers and rename(answers) != answers:
        changed["tool_call_id"] = rename(answers)
    return {**message, **changed} if changed else message


def projection(sent: Message, replayed: Message, schemas: Mapping[str, Any] | None = None) -> str | None:
    """How `replayed` differs from the reply that was `sent`: "exact", a comma-separated list of known losses, or None for an edit.

    Losses: "arguments" (order or spacing of tool arguments), "defaults" (arguments omitted by the model are filled in from the tool's
    JSON schema, `schemas` by tool name), "trimmed" (outer white space), "reencoded" (see `normalize`), "reasoning_dropped",
    "reasoning_trimmed". Added provider fields are not compared.
    """
    if sent == replayed and not replayed.get("tool_calls"):
        return "exact"
    losses = []
    sent_content, content = sent.get("content"), replayed.get("content")
    if content != sent_content and (content := plain_content(content)) != (sent_content := plain_content(sent_content)):
        if not (isinstance(content, str) and isinstance(sent_content, str)):
            return None
        if content.strip() != sent_content.strip():
            if normalize(content.strip()) != normalize(sent_content.strip()):
                return None
            losses.append("reencoded")
        else:
            losses.append("trimmed")
    if sent.get("tool_calls") or replayed.get("tool_calls"):
        found = _calls_projection(sent, replayed, schemas or {})
        if found is None:
            return None
        losses += [loss for loss in found if loss not in losses]
    sent_reasoning, reasoning = reasoning_of(sent), reasoning_of(replayed)
    if reasoning != sent_reasoning:
        if not reasoning.strip():
            losses.append("reasoning_dropped")
        elif reasoning.strip() == sent_reasoning.strip():
            losses.append("reasoning_trimmed")
        else:
            return None
    return ",".join(losses) or "exact"


TURN_END = "turn_end"
"""The reply ended with another of the model's end tokens than the template's, whose own follows it in the prompt."""


def declare(used: str, loss: str) -> str:
    """The projection with one more loss."""
    return loss if used in ("", "exact") else f"{used},{loss}"


def _calls_projection(one: Message, other: Message, schemas: Mapping[str, Any]) -> list[str] | None:
    """The losses that explain the difference between the tool calls of two messages; None if they do not."""
    sent, replayed = call_names(one), call_names(other)
    if canonical_json(sent) == canonical_json(replayed):
        return [] if _raw_arguments(one) == _raw_arguments(other) else ["arguments"]
    if _adds_defaults(sent, replayed, schemas):
        return ["defaults"]
    sent, replayed = [(name, normalize(given)) for name, given in sent], [(name, normalize(given)) for name, given in replayed]
    if canonical_json(sent) == canonical_json(replayed):
        return ["reencoded"]
    return ["defaults", "reencoded"] if _adds_defaults(sent, replayed, schemas) else None


def normalize(value: Any) -> Any:
    """A canonical value: texts in Unicode's NFC with line feeds as line ends; integers rounded to doubles, the only precision that JSON
    guarantees (RFC 8259, 6) and JavaScript reads."""
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
"""Integers between the two are rounded to a double."""


def describe_edits(sent: Message, replayed: Message) -> str:
    """The parts of the reply that `replayed` changes, as a projection that only a minted id proves."""
    changed = {
        "minted_content": plain_content(sent.get("content")) != plain_content(replayed.get("content")),
        "minted_calls": canonical_json(call_names(sent)) != canonical_json(call_names(replayed)),
        "minted_reasoning": reasoning_of(sent) != reasoning_of(replayed),
    }
    return ",".join(name for name, differs in changed.items() if differs)


def _adds_defaults(sent: list[tuple[str, Any]], replayed: list[tuple[str, Any]], schemas: Mapping[str, Any]) -> bool:
    """Whether the replayed calls are those sent plus defaults of their schemas."""
    if [name for name, _ in sent] != [name for name, _ in replayed]:
        return False
    pairs = zip(sent, replayed, strict=True)
    return all(_only_defaults(arguments, back, schemas.get(name)) for (name, arguments), (_, back) in pairs)


def _only_defaults(sent: Any, replayed: Any, schema: Any) -> bool:
    """Whether `replayed` is `sent` plus defaults of the JSON schema, at any depth."""
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
