"""Small shell and file tasks of eight kinds, made by chance: what the agent is asked, the files it gets, and the hidden check.

Each kind has a command that solves it and one that nearly does, the habit that the model is warmed up with. The check knows what must be
in the folder afterwards; nothing in the folder says so. A model of a million parameters cannot copy a name that it has never seen, so
names and words come from short lists, and held-out exercises are other combinations of them: a quarter, which no training draws.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

Split = Literal["train", "held-out"]

SOURCES = ["apples", "beans", "grapes", "lemons"]
TARGETS = ["birds", "cats", "horses", "sheep"]
"""Names of files, before their .txt."""
COLOURS = ["amber", "black", "coral", "green"]
"""Words in files."""


@dataclass(frozen=True, slots=True)
class Exercise:
    """`files` are the agent's, by name. `expected`: the content of each file that must be there afterwards, None for one that must not.
    `solution` and `habit` are shell commands."""

    kind: str
    instruction: str
    files: Mapping[str, str]
    expected: Mapping[str, str | None]
    solution: str
    habit: str


@dataclass(frozen=True, slots=True)
class Draw:
    """What an exercise is made of. `words` are three colours; each is one of the ten `lines`, the first one of the first line and of none
    of the last five. `count` is from 2 to 5."""

    source: str
    target: str
    words: Sequence[str]
    count: int
    lines: Sequence[str]


def _text(lines: Sequence[str]) -> str:
    return "".join(f"{line}\n" for line in lines)


def _count(draw: Draw) -> Exercise:
    word = draw.words[0]
    return Exercise(
        "count",
        f"Read {draw.source}, write {draw.target}, look for {word}: the number of lines that contain it.",
        {draw.source: _text(draw.lines)},
        {draw.target: f"{draw.lines.count(word)}\n"},
        f"grep -c {word} {draw.source} > {draw.target}",
        f"grep {word} {draw.source} > {draw.target}",
    )


def _select(draw: Draw) -> Exercise:
    word = draw.words[0]
    return Exercise(
        "select",
        f"Read {draw.source}, write {draw.target}, look for {word}: the lines that do not contain it.",
        {draw.source: _text(draw.lines)},
        {draw.target: _text([line for line in draw.lines if line != word])},
        f"grep -v {word} {draw.source} > {draw.target}",
        f"grep {word} {draw.source} > {draw.target}",
    )


def _order(draw: Draw) -> Exercise:
    return Exercise(
        "order",
        f"Read {draw.source}, write {draw.target}: the lines in reverse order of the alphabet.",
        {draw.source: _text(draw.lines)},
        {draw.target: _text(sorted(draw.lines, reverse=True))},
        f"sort -r {draw.source} > {draw.target}",
        f"sort {draw.source} > {draw.target}",
    )


def _unique(draw: Draw) -> Exercise:
    return Exercise(
        "unique",
        f"Read {draw.source}, write {draw.target}: the different lines, sorted, each of them once.",
        {draw.source: _text(draw.lines)},
        {draw.target: _text(sorted(set(draw.lines)))},
        f"sort -u {draw.source} > {draw.target}",
        f"sort {draw.source} > {draw.target}",
    )


def _rename(draw: Draw) -> Exercise:
    content = _text(draw.lines)
    return Exercise(
        "rename",
        f"Read {draw.source}, write {draw.target}: the same file, which changes its name.",
        {draw.source: content},
        {draw.source: None, draw.target: content},
        f"mv {draw.source} {draw.target}",
        f"cp {draw.source} {draw.target}",
    )


def _replace(draw: Draw) -> Exercise:
    word = draw.words[0]
    content = _text([*draw.lines, f"{word} {word}"])
    return Exercise(
        "replace",
        f"Read {draw.source}, write {draw.target}, look for {word}: the text with gold instead of it everywhere.",
        {draw.source: content},
        {draw.target: content.replace(word, "gold")},
        f"sed s/{word}/gold/g {draw.source} > {draw.target}",
        f"sed s/{word}/gold/ {draw.source} > {draw.target}",
    )


def _cut(draw: Draw) -> Exercise:
    return Exercise(
        "cut",
        f"Read {draw.source}, write {draw.target}: the last {draw.count} lines.",
        {draw.source: _text(draw.lines)},
        {draw.target: _text(draw.lines[-draw.count :])},
        f"tail -n {draw.count} {draw.source} > {draw.target}",
        f"head -n {draw.count} {draw.source} > {draw.target}",
    )


def _find(draw: Draw) -> Exercise:
    others = [f"{name}.txt" for name in SOURCES if f"{name}.txt" != draw.source][:2]
    return Exercise(
        "find",
        f"Read *.txt, write {draw.target}, look for {draw.words[0]}: the name of the file that contains it.",
        {**dict.fromkeys(others, _text(draw.words[1:])), draw.source: _text(draw.words)},
        {draw.target: f"{draw.source}\n"},
        f"grep -l {draw.words[0]} *.txt > {draw.target}",
        f"grep -h {draw.words[0]} *.txt > {draw.target}",
    )


KINDS: Mapping[str, Callable[[Draw], Exercise]] = {
    "count": _count,
    "select": _select,
    "order": _order,
    "unique": _unique,
    "rename": _rename,
    "replace": _replace,
    "cut": _cut,
    "find": _find,
}


def make_exercise(kind: str, rng: random.Random, split: Split) -> Exercise:
    """An exercise of the split: its instruction is in no other."""
    while True:
        exercise = KINDS[kind](draw_from(rng, SOURCES, TARGETS, COLOURS))
        if (_number(exercise.instruction) % 4 == 0) == (split == "held-out"):
            return exercise


def _number(instruction: str) -> int:
    """The sum of the places that its names and words have in their lists: a quarter of all combinations is divisible by four."""
    return sum(place for names in (SOURCES, TARGETS, COLOURS) for place, name in enumerate(names) if name in instruction)


def draw_exercises(rng: random.Random, split: Split) -> Iterator[Exercise]:
    """Exercises of the split for ever: one of each kind in any order, then again."""
    while True:
        for kind in rng.sample(list(KINDS), len(KINDS)):
            yield make_exercise(kind, rng, split)


def draw_from(rng: random.Random, sources: Sequence[str], targets: Sequence[str], every_word: Sequence[str]) -> Draw:
    words = rng.sample(every_word, 3)
    head = [words[0], words[1], words[2], rng.choice(words)]
    rng.shuffle(head)
    lines = [words[0], *head, *rng.choices(words[1:], k=5)]
    return Draw(f"{rng.choice(sources)}.txt", f"{rng.choice(targets)}.txt", words, rng.randint(2, 5), lines)


CHECK = """import json, pathlib, sys
expected = json.loads(pathlib.Path(".hidden/expected.json").read_text())
wrong = []
for name, content in expected.items():
    path = pathlib.Path(name)
    found = path.read_text(errors="replace") if path.is_file() else None
    if found != content:
        what = "it is still there" if content is None else "it is not there" if found is None else "its content is another"
        wrong.append(f"{name}: {what}")
feedback = "; ".join(wrong) or "everything is as asked"
print(json.dumps({"reward": 0.0 if wrong else 1.0, "feedback": feedback, "metadata": {"completion_tokens": TOLD}}))
"""


def make_check(exercise: Exercise, told: str) -> dict[str, object]:
    """The `command` evaluator of the exercise. `told`: an expression in Python for the tokens that the agent says it was given."""
    files = {".hidden/check.py": CHECK.replace("TOLD", told), ".hidden/expected.json": json.dumps(exercise.expected)}
    options = {"command": "python3 .hidden/check.py", "reward": "json", "files": files}
    return {"kind": "command", "fresh_runtime": False, "options": options}
