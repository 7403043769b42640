"""The demo's environment, and the dialogues its model is warmed up on."""

from __future__ import annotations

import itertools
import random
from pathlib import Path

import pytest
from transformers import AutoTokenizer

from examples.demo.environment import FITS, TOOLS, Corridor, call_of, corridors
from examples.demo.tiny_model import make_tiny_model
from examples.demo.warmup import HABITS, IGNORED, dialogue


def test_the_right_keys_open_every_door_and_are_rewarded_in_full() -> None:
    corridor = Corridor(("red", "blue", "green"))
    assert corridor.instruction == "Open 3 doors with keys 1 to 3. Door: red"
    assert corridor.open("red", FITS["red"]) == "opened. Door: blue"
    assert corridor.open("blue", FITS["blue"]) == "opened. Door: green"
    assert corridor.open("green", FITS["green"]) == "opened. No door"
    assert corridor.done and corridor.reward == 1.0


def test_a_wrong_key_or_a_door_that_is_not_there_leaves_it_shut() -> None:
    corridor = Corridor(("red", "blue", "green"))
    assert corridor.open("red", FITS["blue"]) == "wrong key. Door: blue"
    assert corridor.open("red", FITS["red"]) == "wrong key. Door: green"
    assert corridor.opened == [False, False] and not corridor.done
    assert corridor.reward == 0.0


def test_each_colour_has_a_key_of_its_own() -> None:
    assert sorted(FITS.values()) == list(range(1, len(FITS) + 1))


@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        ("open", "not JSON"),
        ("open", "[]"),
        ("open", '{"door": "red"}'),
        ("open", '{"door": "red", "key": "2"}'),
        ("open", '{"door": "red", "key": true}'),
        ("open", '{"door": 1, "key": 2}'),
        ("close", '{"door": "red", "key": 2}'),
    ],
)
def test_a_malformed_call_is_no_call(name: str, arguments: str) -> None:
    assert call_of(name, arguments) is None


def test_a_proper_call_is_read() -> None:
    assert call_of("open", '{"key": 2, "door": "red"}') == ("red", 2)


def test_every_corridor_comes_up_once_before_any_comes_again() -> None:
    rows = list(itertools.islice(corridors(random.Random(0)), 2 * 27))
    assert len(set(rows[:27])) == len(set(rows[27:])) == 27
    assert rows == list(itertools.islice(corridors(random.Random(0)), 2 * 27))


def test_no_habit_of_the_warm_up_opens_a_door() -> None:
    assert HABITS.keys() == FITS.keys()
    assert all(HABITS[colour] != FITS[colour] for colour in FITS)
    assert sorted(HABITS.values()) == sorted(FITS.values())


def test_a_dialogue_labels_what_the_assistant_says_and_nothing_else(tmp_path: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(make_tiny_model(tmp_path))
    token_ids, labels = dialogue(tokenizer, random.Random(0))
    assert len(token_ids) == len(labels)
    assert all(label in (IGNORED, token) for token, label in zip(token_ids, labels, strict=True))
    turns = tokenizer.decode([label for label in labels if label != IGNORED]).split("<|im_end|>")
    assert len(turns) == 4 and turns[-1] == ""
    assert all(turn.startswith('<tool_call>\n{"name": "open"') and turn.endswith("}}\n</tool_call>") for turn in turns[:-1])


def test_a_dialogue_is_what_the_template_renders(tmp_path: Path) -> None:
    """The context the engine will see is the context the model was warmed up on."""
    tokenizer = AutoTokenizer.from_pretrained(make_tiny_model(tmp_path))
    token_ids, _ = dialogue(tokenizer, random.Random(0))
    prompt = [{"role": "user", "content": tokenizer.decode(token_ids).split("<|im_start|>user\n")[1].split("<|im_end|>")[0]}]
    rendered = tokenizer.apply_chat_template(prompt, tools=TOOLS, add_generation_prompt=True)["input_ids"]
    assert token_ids[: len(rendered)] == rendered
