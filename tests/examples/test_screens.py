"""The screens that a policy learns to click: what they look like, what counts as a click, and what the warm-up teaches."""

from __future__ import annotations

import io
import random
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from examples.screen.screens import PER_SESSION, SIDE, SQUARES, draw, draw_tasks, every_screen, find_target, read_click
from examples.screen.warmup import click_beside


def test_the_red_square_is_where_the_target_is() -> None:
    from PIL import Image

    for screen in every_screen():
        picture = Image.open(io.BytesIO(draw(screen)))
        middles: list[Any] = [
            picture.getpixel((at % 2 * SIDE + SIDE // 2, at // 2 * SIDE + SIDE // 2)) for at in range(SQUARES)
        ]
        reddest = max(range(SQUARES), key=lambda at: middles[at][0] - middles[at][1] - middles[at][2])
        assert reddest + 1 == find_target(screen)


def test_a_screen_has_one_target_and_every_square_is_it_as_often() -> None:
    screens = every_screen()
    assert len(set(screens)) == len(screens) and all(screen.count("r") == 1 for screen in screens)
    assert set(Counter(map(find_target, screens)).values()) == {len(screens) // SQUARES}


def test_tasks_are_drawn_without_end_and_the_same_from_the_same_seed() -> None:
    first, second = draw_tasks(random.Random(3)), draw_tasks(random.Random(3))
    tasks = [next(first) for _ in range(50)]
    assert tasks == [next(second) for _ in range(50)]
    assert {len(task) for task in tasks} == {PER_SESSION}


@pytest.mark.parametrize(
    ("text", "click"),
    [("click 3", 3), (" click 1\n", 1), ("click 5", None), ("click 12", None), ("I click 2", None), ("", None)],
)
def test_only_a_number_of_a_square_is_a_click(text: str, click: int | None) -> None:
    assert read_click(text) == click


def test_the_habit_is_right_less_often_than_chance() -> None:
    rng = random.Random(0)
    right = sum(click_beside(screen, rng) == find_target(screen) for screen in every_screen() * 20)
    assert right / (20 * len(every_screen())) < 1 / SQUARES - 0.05


def test_the_warm_up_renders_what_the_engines_processor_would(tmp_path: Path) -> None:
    """Its images are expanded by hand; transformers' processor says the same."""
    from transformers import Idefics3Processor

    from examples.screen.screens import ask_message
    from examples.screen.tiny_vision_model import TILE, make_tiny_vision_model
    from examples.screen.warmup import Dialogues
    from trainer_client.media import decode_image

    folder = make_tiny_vision_model(tmp_path, longest_edge=TILE)
    processor, screen = Idefics3Processor.from_pretrained(folder), every_screen()[0]
    messages = [ask_message({"type": "image"})]
    text = processor.tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    made = processor(text=text, images=[[decode_image(draw(screen))]], add_special_tokens=False)
    dialogues = Dialogues(folder)
    assert dialogues.render(messages, prompt=True) == list(made["input_ids"][0])
