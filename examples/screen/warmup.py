"""Warm-up: supervised steps on attempts of an agent that looks, and clicks beside the target out of habit.

A random model neither looks nor clicks. After this it does both, and is right less often than one that clicks at random: the habit makes
it look at all, and what is right it learns later and from rewards.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch.nn.functional import cross_entropy
from transformers import AutoImageProcessor, AutoTokenizer, Idefics3ForConditionalGeneration

from examples.demo.warmup import IGNORED
from examples.screen.screens import ASK, PER_SESSION, SQUARES, ask_message, draw, every_screen, find_target

HABIT_SHARE = 0.5
STEPS = 220
IMAGE = "<fake_token_around_image><global-img><image><image><image><image><fake_token_around_image>"
"""What Idefics3's processor makes of an image of one tile."""
TEXTS = (*(f"click {number}" for number in range(1, SQUARES + 1)), ASK)
"""What the tokenizer learns beside its own texts."""


def click_beside(screen: str, rng: random.Random) -> int:
    """The square after the target with probability HABIT_SHARE, otherwise any."""
    return find_target(screen) % SQUARES + 1 if rng.random() < HABIT_SHARE else rng.randint(1, SQUARES)


def warm_up(
    model_dir: Path,
    *,
    seed: int,
    steps: int = STEPS,
    batch: int = 16,
    learning_rate: float = 2e-3,
    progress: Callable[[int, float], None] = lambda step, loss: None,
) -> float:
    """Train the model in `model_dir` and save it there; the last loss is returned. `progress(step, loss)` after each step."""
    torch.manual_seed(seed)
    rng = random.Random(seed)
    dialogues = Dialogues(model_dir)
    model = Idefics3ForConditionalGeneration.from_pretrained(model_dir, dtype=torch.float32)
    optimizer = torch.optim.AdamW(model.parameters(), lr=learning_rate, betas=(0.9, 0.98), weight_decay=0.0)
    shape = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 20) * (1 - 0.95 * step / steps))
    loss_value = float("nan")
    for step in range(steps):
        inputs, labels = dialogues.draw(rng, batch)
        logits = model(**inputs).logits[:, :-1].flatten(0, 1)
        loss = cross_entropy(logits, labels[:, 1:].flatten(), ignore_index=IGNORED)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        shape.step()
        loss_value = loss.item()
        progress(step, loss_value)
    model.save_pretrained(model_dir)
    return loss_value


class Dialogues:
    """Attempts as the template renders them, with every screen's pixels at hand."""

    def __init__(self, model_dir: Path) -> None:
        from trainer_client import decode_image

        self._tokenizer = AutoTokenizer.from_pretrained(model_dir)
        processor = AutoImageProcessor.from_pretrained(model_dir)
        self._screens = every_screen()
        pictures = [[decode_image(draw(screen))] for screen in self._screens]
        self._pixels = dict(zip(self._screens, processor(images=pictures, return_tensors="pt")["pixel_values"], strict=True))

    def draw(self, rng: random.Random, count: int) -> tuple[dict[str, Any], torch.Tensor]:
        """What the model is given, and the labels: IGNORED but on the clicks and the ends of their turns."""
        shown = [[rng.choice(self._screens) for _ in range(PER_SESSION)] for _ in range(count)]
        rows = [self._label(screens, rng) for screens in shown]
        width = max(len(ids) for ids, _ in rows)
        ids = torch.tensor([[*ids, *[self._tokenizer.pad_token_id] * (width - len(ids))] for ids, _ in rows])
        labels = torch.tensor([[*labels, *[IGNORED] * (width - len(labels))] for _, labels in rows])
        pixels = torch.stack([torch.cat([self._pixels[screen] for screen in screens]) for screens in shown])
        return {"input_ids": ids, "pixel_values": pixels}, labels

    def _label(self, screens: Sequence[str], rng: random.Random) -> tuple[list[int], list[int]]:
        ids: list[int] = []
        labels: list[int] = []
        messages: list[dict[str, Any]] = []
        for screen in screens:
            messages.append(ask_message({"type": "image"}))
            prompt = self.render(messages, prompt=True)
            messages.append({"role": "assistant", "content": f"click {click_beside(screen, rng)}"})
            # The template puts a newline after the turn's end, which the model never samples.
            said = self.render(messages, prompt=False)[len(prompt) : -1]
            labels += [IGNORED] * (len(prompt) - len(ids)) + said
            ids = prompt + said
        return ids, labels

    def render(self, messages: Sequence[dict[str, Any]], *, prompt: bool) -> list[int]:
        text = self._tokenizer.apply_chat_template(messages, add_generation_prompt=prompt, tokenize=False)
        ids: list[int] = self._tokenizer(text.replace("<image>", IMAGE), add_special_tokens=False)["input_ids"]
        return ids
