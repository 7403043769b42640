"""A body that is compared with known ones is taken apart as if nothing were known, whatever a harness changed in it."""

from __future__ import annotations

import json
import random
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import pytest

from proxy.dialects.fields import MAX_VALUES
from proxy.dialects.raw_history import RawHistory
from proxy.dialects.splitting import MAX_MESSAGES, split_body
from proxy.errors import RequestError

PAIRS = 3_000
"""Bodies that are compared, per field."""

LISTS = ("messages", "input", "contents")
"""The fields that hold a history, over all dialects."""

SPELLINGS = ((",", ":"), (", ", ": "), (" ,\n", " : "), (",\t", ":\r\n"))
"""What stands between items and after names."""


@dataclass(frozen=True)
class Body:
    """A body before it is written down."""

    listed: str
    before: dict[str, Any]
    after: dict[str, Any]
    items: list[Any]
    spelling: tuple[str, str]
    escapes: bool
    twice: Any = None
    """What the history's field holds when it comes a second time."""
    at_end: bool = False

    def write(self) -> bytes:
        separator, colon = self.spelling

        def dump(value: Any) -> str:
            return json.dumps(value, separators=self.spelling, ensure_ascii=self.escapes)

        history = f'"{self.listed}"{colon}[{separator.join(map(dump, self.items))}]'
        parts = [f"{dump(name)}{colon}{dump(value)}" for name, value in self.before.items()]
        parts += [history, *(f"{dump(name)}{colon}{dump(value)}" for name, value in self.after.items())]
        if self.twice is not None:
            parts.insert(len(parts) if self.at_end else 0, f'"{self.listed}"{colon}{dump(self.twice)}')
        return ("{" + separator.join(parts) + "}").encode("utf-8", "surrogatepass")


class Grammar:
    """Bodies, and what becomes of one from one request to the next."""

    def __init__(self, listed: str, seed: int) -> None:
        self.listed, self.random = listed, random.Random(seed)

    def value(self, depth: int = 0) -> Any:
        choose, kind = self.random.choice, self.random.randrange(10 if depth < 3 else 6)
        if kind == 0:
            return choose([1, 12, 123, -1, 1.5, 1e5, 0, 10**20, True, False, None])
        if kind <= 3:
            alphabet = ["a", "b", '"', ",", "[", "]", "{", "}", "\\", "\n", " ", "é", "\ud800", "😀", f'"{self.listed}":']
            return "".join(choose(alphabet) for _ in range(self.random.randrange(6)))
        if kind <= 5:
            return self.random.randrange(200)
        if kind == 6:
            return [self.value(depth + 1) for _ in range(self.random.randrange(4))]
        return {choose("abc") + str(self.random.randrange(3)): self.value(depth + 1) for _ in range(self.random.randrange(4))}

    def item(self) -> Any:
        if self.random.random() < 0.3:
            return self.value()
        return {"role": self.random.choice(["user", "assistant"]), "content": self.value()}

    def items(self, least: int, most: int) -> list[Any]:
        return [self.item() for _ in range(self.random.randint(least, most))]

    def body(self) -> Body:
        before = {f"f{at}": self.value() for at in range(self.random.randrange(3))}
        after = {f"g{at}": self.value() for at in range(self.random.randrange(3))}
        tools = [{"name": f"tool{at}", "about": "xy"[at % 2] * 400} for at in range(self.random.randrange(5))]
        after |= {"tools": tools} if tools else {}
        twice = self.items(0, 2) if self.random.random() < 0.05 else None
        spelling, escapes = self.random.choice(SPELLINGS), self.random.random() < 0.5
        at_end = self.random.random() < 0.5
        return Body(self.listed, before, after, self.items(1, 6), spelling, escapes, twice, at_end)

    def edit(self, old: Body) -> Body:
        """Appended mostly, as by harnesses; else cut, replaced, reordered, respelled, with other fields, or with another body's items."""
        items, kind = [*old.items], self.random.randrange(12)
        place = self.random.randrange(len(items))
        if kind <= 5:
            items += self.items(0, 3)
        elif kind == 6:
            del items[place:]
        elif kind == 7:
            items[place] = self.item()
        elif kind == 8:
            self.random.shuffle(items)
        elif kind == 9:
            items[place : place + 1] = [items[place], *self.items(1, 2)]
        else:
            items += self.items(1, 2)
            old = replace(old, before=dict(reversed(old.before.items())), after={**old.after, "f": self.value()})
            if "tools" in old.after and self.random.random() < 0.5:
                # Of the same length.
                old.after["tools"] = [{"name": each["name"], "about": each["about"].swapcase()} for each in old.after["tools"]]
        if self.random.random() < 0.1:
            old = replace(old, spelling=self.random.choice(SPELLINGS))
        if self.random.random() < 0.05:
            old = replace(old, twice=self.items(0, 2), at_end=self.random.random() < 0.5)
        return replace(old, items=items)

    def mutate(self, text: bytes) -> bytes:
        """A byte or two of it are others, so that it is mostly no JSON any more, or other JSON."""
        found = bytearray(text)
        pieces = [b",", b"]", b"[", b'"', b"1", b"2", b" ", b"}", b"{", b":", b"\\", b"\xff", b"e", b"l", b"null", b"true"]
        pieces += [b'],"x":[', b"[]", b',"%b":[7]' % self.listed.encode(), b",1", b"\\u0061", b"\\ud800"]
        for _ in range(self.random.randint(1, 2)):
            at, kind = self.random.randrange(len(found) + 1), self.random.randrange(3)
            if kind == 0:
                found[at : at + 1] = self.random.choice(pieces)
            elif kind == 1:
                found[at:at] = self.random.choice(pieces)
            else:
                del found[at : at + self.random.randint(1, 3)]
        return bytes(found)

    def lengthen(self, text: bytes, memo: RawHistory) -> bytes:
        """Something is put behind the last item that the memo knows: the seam that matters."""
        pieces = [
            b"1",
            b".5",
            b"e3",
            b" ",
            b" ,1",
            b",",
            b",,1",
            b"]",
            b"],[1",
            b',"a"',
            b"\n,{}",
            b"ll",
            b'"',
            b"}",
            b',"b" "c"',
        ]
        pieces += [b',1],"x":[2', b',1],"%b":[2' % self.listed.encode()]
        at = int(memo.ends[self.random.randrange(len(memo))])
        return text[:at] + self.random.choice(pieces) + text[at:]


def read(body: bytes, listed: str, known: list[RawHistory]) -> tuple[Any, str, Any]:
    """What a dialect learns of the body, the way that led there, and what would be remembered."""
    try:
        found = split_body(body, listed, known)
    except RequestError as error:
        return (error.message, error.param), "refused", None
    memo = found.remember()
    kept = None if memo is None else (memo.start, memo.ends.tolist(), memo.tail, dict(memo.long))
    return (
        (json.dumps(dict(found.fields)), list(found.fields), found.items(), found.span, found.digest(), kept),
        found.way,
        memo,
    )


def pairs(listed: str, seed: int) -> Iterator[tuple[list[RawHistory], bytes]]:
    """What is known of bodies, and the next one."""
    grammar = Grammar(listed, seed)
    for _ in range(PAIRS):
        bodies = [grammar.body() for _ in range(grammar.random.choice([1, 1, 2]))]
        known = [memo for body in bodies if (memo := read(body.write(), listed, [])[2]) is not None]
        if not known:
            continue
        text = grammar.edit(bodies[0]).write()
        chance = grammar.random.random()
        if chance < 0.3:
            text = grammar.mutate(text)
        elif chance < 0.45:
            text = grammar.lengthen(text, known[0])
        elif chance < 0.5:
            text = grammar.lengthen(known[0].body, known[0])
        yield known, text


@pytest.mark.parametrize("listed", LISTS)
def test_a_known_beginning_changes_nothing_of_what_is_read(listed: str) -> None:
    ways: Counter[str] = Counter()
    for known, text in pairs(listed, 1):
        wanted, _, _ = read(text, listed, [])
        got, way, memo = read(text, listed, known)
        assert got == wanted, (way, [each.body for each in known], text)
        ways[way] += 1
        if memo is not None:
            # What was remembered by a short way is as good as what the full way remembers.
            again, _, _ = read(text, listed, [memo])
            assert again == wanted, (way, text)
    assert min(ways[way] for way in ("fast", "medium", "full", "refused")) > PAIRS // 50, ways


def test_tools_of_the_same_bytes_are_the_very_same_object_whatever_stands_around_them() -> None:
    tools = [{"name": "f", "description": "d" * 2000}]
    known = split_body(json.dumps({"messages": [1], "tools": tools}).encode(), "messages")
    memo = known.remember()
    assert memo is not None
    for body in ({"messages": [1, 2], "tools": tools}, {"n": 2, "tools": tools, "messages": [5]}):
        assert split_body(json.dumps(body).encode(), "messages", [memo]).fields["tools"] is known.fields["tools"]


@pytest.mark.parametrize(
    ("items", "more"), [([0] * MAX_MESSAGES, [0]), ([{"a": [0] * (MAX_VALUES - 100)}, "x" * MAX_VALUES], [[0] * 100])]
)
def test_a_body_that_grows_beyond_a_bound_is_refused_as_one_that_comes_at_once(items: list[Any], more: list[Any]) -> None:
    memo = split_body(json.dumps({"messages": items}).encode(), "messages").remember()
    assert memo is not None
    body = json.dumps({"messages": items + more}).encode()
    assert read(body, "messages", [memo]) == read(body, "messages", [])
    assert read(body, "messages", [memo])[1] == "refused"


def test_a_large_body_that_stays_within_the_bounds_goes_on_the_fast_way() -> None:
    items: list[dict[str, Any]] = [{"text": "x" * MAX_VALUES}, {"more": "y" * MAX_VALUES}]
    memo = split_body(json.dumps({"messages": items}).encode(), "messages").remember()
    assert memo is not None
    for _ in range(2):
        items.append({"n": len(items)})
        found = split_body(json.dumps({"messages": items}).encode(), "messages", [memo])
        memo = found.remember()
        assert found.way == "fast" and memo is not None and len(memo) == len(items)
