"""The exercises in real variety, for a model that has read before: names and words from long lists, and several wordings of each request.

No instruction comes twice but by rare chance. A quarter of them, told by their checksum, are held out.
"""

from __future__ import annotations

import random
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from examples.learn.exercises import KINDS, Exercise, Split, draw_from

NOUNS = """
access accounts alerts answers archive backup basket books budget builds cities clients colors contacts customers data debug
devices dishes draft errors events expenses export fields files fruits games guests hosts import input invoices items journal
keys labels leads letters links list log mail meals members menu messages metrics models names nodes notes numbers orders
output parts people places plants prices products queue quotes rates records report results routes rows rules sales scores
servers songs staff stats stock stores tags tasks teams temp tests tickets tools towns trips units updates users values
visits votes words
"""
MARKS = ["", "", "", "_old", "_new", "_2024", "-final", "1", "2", "7"]
WORDS = """
acorn anchor apple arrow badge banana barrel basil beacon berry blanket blossom border bottle branch bridge bronze bucket
butter cabin cactus camera candle canyon carbon castle cedar cherry clover cobalt coffee copper cotton crater crystal desert
diamond dragon eagle ember falcon feather fiddle forest garden ginger granite guitar hammer harbor hazel honey indigo island
ivory jasmine jungle ladder lantern lemon lilac lumber magnet maple marble meadow melon mirror mustard needle ocean olive
onion orchid oyster paper pepper pillow planet plum pocket quartz rabbit ribbon river rocket saddle salmon sapphire shadow
silver spider spruce summer tiger timber tulip turtle valley velvet violet walnut willow window winter yellow zebra
"""

WORDINGS: Mapping[str, Sequence[str]] = {
    "count": (
        "Count the lines of {source} that contain {word} and write the number to {target}.",
        "How many lines of {source} have {word} in them? Write the number to {target}.",
        "Write to {target} how many lines in {source} contain {word}.",
        "{target} must hold the number of lines of {source} in which {word} occurs.",
    ),
    "select": (
        "Copy the lines of {source} that do not contain {word} to {target}.",
        "Write {source} to {target}, but leave out every line with {word}.",
        "Remove the lines with {word} from {source} and save what is left as {target}.",
        "{target} must hold all lines of {source} without {word} in them.",
    ),
    "order": (
        "Sort the lines of {source} from Z to A and write them to {target}.",
        "Write the lines of {source} to {target} in reverse alphabetical order.",
        "{target} must hold the lines of {source}, sorted backwards.",
        "Order {source} by the alphabet, last letters first, and save it as {target}.",
    ),
    "unique": (
        "Sort the lines of {source}, drop the duplicates and write the rest to {target}.",
        "Write each different line of {source} once to {target}, in alphabetical order.",
        "{target} must hold the sorted lines of {source} without repetitions.",
        "Which different lines does {source} have? Write them to {target}, sorted.",
    ),
    "rename": (
        "Rename {source} to {target}.",
        "Move the file {source} to {target}.",
        "Change the name of {source} into {target}.",
        "{source} must be called {target} from now on.",
    ),
    "replace": (
        "Replace every {word} in {source} by gold and write the text to {target}.",
        "Write {source} to {target} with gold instead of {word} everywhere.",
        "{target} must be {source} with all occurrences of {word} changed to gold.",
        "Change {word} to gold wherever it stands in {source}, and save the result as {target}.",
    ),
    "cut": (
        "Write the last {count} lines of {source} to {target}.",
        "Copy the final {count} lines from {source} into {target}.",
        "{target} must hold the last {count} lines of {source}.",
        "Take {count} lines from the end of {source} and save them as {target}.",
    ),
    "find": (
        "Which of the files *.txt contains {word}? Write its name to {target}.",
        "Write to {target} the name of the file among *.txt that has {word} in it.",
        "Search *.txt for {word} and write the name of the file that contains it to {target}.",
        "{target} must hold the name of the one file of *.txt with {word} in it.",
    ),
}


def make_varied(kind: str, rng: random.Random, split: Split) -> Exercise:
    """An exercise of the split: its instruction is in no other."""
    while True:
        source, target = rng.sample(NOUNS.split(), 2)
        draw = draw_from(rng, [source + rng.choice(MARKS)], [target + rng.choice(MARKS)], WORDS.split())
        told = {"source": draw.source, "target": draw.target, "word": draw.words[0], "count": draw.count}
        exercise = replace(KINDS[kind](draw), instruction=rng.choice(WORDINGS[kind]).format(**told))
        if (zlib.crc32(exercise.instruction.encode()) % 4 == 0) == (split == "held-out"):
            return exercise


def draw_varied(rng: random.Random, split: Split) -> Iterator[Exercise]:
    """Exercises of the split for ever: one of each kind in any order, then again."""
    while True:
        for kind in rng.sample(list(KINDS), len(KINDS)):
            yield make_varied(kind, rng, split)
