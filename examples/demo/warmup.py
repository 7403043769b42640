"""Warm-up: supervised steps on dialogues of an agent with bad habits.

A random model speaks no JSON. After this it calls the tool correctly and opens fewer doors than one that draws its keys at
random: for each colour it has learned to prefer a key that does not fit. What is right, it learns later and from rewards.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch.nn.functional import cross_entropy
from transformers import AutoModelForCausalLM, AutoTokenizer

from examples.demo.environment import DOORS, FITS, KEYS, TOOLS, Corridor, call_message, tool_message

IGNORED = -100
# A habit makes the model look at the colour at all; that it is the wrong one leaves the learning to the rewards.
HABITS = {colour: key % KEYS + 1 for colour, key in FITS.items()}
HABIT_SHARE = 0.4
STEPS = 80
Labelled = tuple[list[int], list[int]]
"""Token ids of a dialogue, and labels of the same length: IGNORED but on the assistant's tokens."""


def clumsy_key(door: str, rng: random.Random) -> int:
    """The habit's key with probability HABIT_SHARE, otherwise any."""
    return HABITS[door] if rng.random() < HABIT_SHARE else rng.randint(1, KEYS)


def warm_up(
    model_dir: Path,
    *,
    seed: int,
    make_dialogue: Callable[[Any, random.Random], Labelled] | None = None,
    steps: int = STEPS,
    batch: int = 8,
    learning_rate: float = 1e-2,
    progress: Callable[[int, float], None] = lambda step, loss: None,
) -> float:
    """Train the model in `model_dir` and save it there; the last loss is returned. `progress(step, loss)` after each step.
    `make_dialogue(tokenizer, rng)` draws what it learns from; None: `dialogue`."""
    torch.manual_seed(seed)
    rng, draw = random.Random(seed), make_dialogue or dialogue
    tokenizer = AutoTokenizer.from_pretrained(model_dir)
    model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32)
    optimizer = torch.optim.AdamW(model.parameters(), lr=learning_rate, betas=(0.9, 0.98), weight_decay=0.0)
    shape = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 10) * (1 - 0.95 * step / steps))
    loss_value = float("nan")
    for step in range(steps):
        token_ids, labels = _padded([draw(tokenizer, rng) for _ in range(batch)], tokenizer.pad_token_id)
        logits = model(token_ids).logits[:, :-1].flatten(0, 1)
        targets = labels[:, 1:].flatten()
        loss = cross_entropy(logits, targets, ignore_index=IGNORED)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        shape.step()
        loss_value = loss.item()
        progress(step, loss_value)
    model.save_pretrained(model_dir)
    return loss_value


def dialogue(tokenizer: Any, rng: random.Random) -> Labelled:
    """One clumsy attempt."""
    corridor = Corridor(tuple(rng.choice(list(FITS)) for _ in range(DOORS)))
    messages: list[dict[str, Any]] = [{"role": "user", "content": corridor.instruction}]
    while not corridor.done:
        door, key, call_id = corridor.door, clumsy_key(corridor.door, rng), f"call_{len(messages)}"
        messages.append(call_message(door, key, call_id))
        messages.append(tool_message(corridor.open(door, key), call_id))
    return label(tokenizer, messages, TOOLS)


def label(tokenizer: Any, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]] | None) -> Labelled:
    """The dialogue up to its last assistant's turn, as the template renders it turn by turn."""

    def render(count: int, *, prompt: bool) -> list[int]:
        return list(tokenizer.apply_chat_template(messages[:count], tools=tools, add_generation_prompt=prompt)["input_ids"])

    token_ids: list[int] = []
    labels: list[int] = []
    for place in (place for place, message in enumerate(messages) if message["role"] == "assistant"):
        prompt = render(place, prompt=True)
        # The template puts a newline after the turn's end, which the model never samples.
        said = render(place + 1, prompt=False)[len(prompt) : -1]
        labels += [IGNORED] * (len(prompt) - len(token_ids)) + said
        token_ids = prompt + said
    return token_ids, labels


def _padded(rows: list[Labelled], pad_id: int) -> tuple[torch.Tensor, torch.Tensor]:
    width = max(len(ids) for ids, _ in rows)
    token_ids = torch.tensor([ids + [pad_id] * (width - len(ids)) for ids, _ in rows])
    labels = torch.tensor([labels + [IGNORED] * (width - len(labels)) for _, labels in rows])
    return token_ids, labels
