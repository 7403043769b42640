"""The corridor learned from a teacher's scores: `python -m benchmarks.distillation --out FOLDER`.

The demo's corridor and tiny model, from the same weights for each arm of a seed. The teacher is the same model, taught with dialogues that
always try the right key. torch samples the rollouts here, without an engine; all else is the real thing: calls are recorded in Redis, the
teacher's logprobs of the exact ids are stored with them, the service makes groups of rows, and the trainer of the demo leases and learns
them. Arms differ in the advantage of a token alone (`ARMS`). A line per step is left in `steps.jsonl`, and a picture.
"""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
import typer
from transformers import AutoModelForCausalLM, AutoTokenizer

from examples.demo.environment import DOORS, FITS, TOOLS, Corridor, call_message, call_of, corridors, tool_message
from examples.demo.tiny_model import TURN_END, make_tiny_model
from examples.demo.trainer import Learner, Recipe, leased, write
from examples.demo.warmup import label, warm_up
from proxy.store.scores import ScoreStore
from reconstruct.codec import encode
from reconstruct.records import RAW
from reconstruct.scores import Score
from reconstruct.spans import Span
from tests.support.service.redis_server import Store, running_redis
from tests.support.service.running_service import TRAINER, RunningService
from tests.support.sessions.calls import Talk
from trainer_client import Batch, TrainerClient
from trainer_client.advantages import grpo
from trainer_client.distillation import toward_teacher

NO_ENGINE = "http://127.0.0.1:9"
REPLY_TOKENS, TOP_K = 40, 8
TEACHER_STEPS = 160
LAST = 3
"""Steps that are averaged."""


@dataclass(frozen=True, slots=True)
class Arm:
    """`reward` and `teacher` weigh what GRPO and the teacher say of a token; `shuffled`: the teacher's numbers are of other tokens."""

    reward: float
    teacher: float
    shuffled: bool = False
    color: str = ""

    def credit(self, batch: Batch) -> Any:
        rows = torch.from_numpy(batch.advantages(grpo)) * self.reward

        def advantages(tree: Any) -> torch.Tensor:
            per_token = rows[tree.row_index][tree.segment_index].numpy()
            scores, given = tree.scores["teacher"].logprobs, tree.inference_logprobs
            return torch.from_numpy(toward_teacher(per_token, scores, given, tree.loss_mask, self.teacher))

        return advantages


ARMS = {
    "grpo": Arm(1.0, 0.0, color="tab:blue"),
    "teacher": Arm(0.0, 0.5, color="tab:green"),
    "both": Arm(1.0, 0.5, color="tab:orange"),
    "shuffled": Arm(0.0, 0.5, shuffled=True, color="tab:red"),
}


@dataclass(slots=True)
class Rollout:
    """One attempt as whole prompts: `talk` has its calls, `ids` all tokens so far."""

    corridor: Corridor
    talk: Talk
    ids: list[int]
    broken: bool = False
    scores: dict[str, Score] = field(default_factory=dict)

    @property
    def done(self) -> bool:
        return self.broken or self.corridor.done


def teach(tokenizer: Any, rng: random.Random) -> tuple[list[int], list[int]]:
    """An attempt that opens every door."""
    corridor = Corridor(tuple(rng.choice(list(FITS)) for _ in range(DOORS)))
    messages: list[dict[str, Any]] = [{"role": "user", "content": corridor.instruction}]
    while not corridor.done:
        door, call_id = corridor.door, f"call_{len(messages)}"
        messages.append(call_message(door, FITS[door], call_id))
        messages.append(tool_message(corridor.open(door, FITS[door]), call_id))
    return label(tokenizer, messages, TOOLS)


@torch.no_grad()
def sample(
    model: Any, prompts: Sequence[Sequence[int]], ends: int, rng: torch.Generator
) -> list[tuple[list[int], list[float]]]:
    """The reply to each prompt, its end included, and the logprobs: at temperature 1, from the model's own logits."""
    width = max(map(len, prompts))
    ids = torch.tensor([[ends] * (width - len(each)) + list(each) for each in prompts])
    mask = torch.tensor([[0] * (width - len(each)) + [1] * len(each) for each in prompts])
    said: list[tuple[list[int], list[float]]] = [([], []) for _ in prompts]
    cache, new = None, ids
    for _ in range(REPLY_TOKENS):
        positions = (mask.cumsum(1) - 1).clamp(min=0)[:, -new.shape[1] :]
        out = model(new, attention_mask=mask, position_ids=positions, past_key_values=cache, use_cache=True, logits_to_keep=1)
        logprobs, cache = out.logits[:, -1].log_softmax(-1), out.past_key_values
        new = torch.multinomial(logprobs.exp(), 1, generator=rng)
        for (reply, told), token, line in zip(said, new[:, 0].tolist(), logprobs, strict=True):
            if not reply or reply[-1] != ends:
                reply.append(token)
                told.append(float(line[token]))
        if all(reply[-1] == ends for reply, _ in said):
            break
        mask = torch.cat([mask, torch.ones_like(new)], 1)
    return said


def play(model: Any, tokenizer: Any, rollouts: Sequence[Rollout], rng: torch.Generator) -> None:
    """Every rollout to its end, turn by turn. A reply that is no proper call of the tool ends one."""
    ends = tokenizer.convert_tokens_to_ids(TURN_END)
    while going := [each for each in rollouts if not each.done]:
        for rollout, (reply, logprobs) in zip(going, sample(model, [each.ids for each in going], ends, rng), strict=True):
            turn = len(rollout.talk.calls)
            parent = rollout.talk.calls[-1].call_id if turn else None
            name = f"c{turn + 1}"
            fields = {"finish_reason": "stop" if reply[-1] == ends else "length"}
            rollout.talk.say(name, rollout.ids, reply, parent=parent, logprobs=logprobs, mode=RAW, fields=fields)
            rollout.ids = [*rollout.ids, *reply]
            wish = read_call(tokenizer.decode(reply))
            if wish is None or fields["finish_reason"] == "length":
                rollout.broken = True
                continue
            rollout.ids += tokenizer(answer_text(rollout.corridor.open(*wish)))["input_ids"]


def read_call(text: str) -> tuple[str, int] | None:
    try:
        called = json.loads(text.split("<tool_call>")[1].split("</tool_call>")[0])
        return call_of(called["name"], json.dumps(called["arguments"]))
    except (IndexError, ValueError, KeyError, TypeError):
        return None


def answer_text(told: str) -> str:
    """As the template goes on after a reply."""
    return f"\n<|im_start|>user\n<tool_response>\n{told}\n</tool_response><|im_end|>\n<|im_start|>assistant\n"


@torch.no_grad()
def score(teacher: Any, rollouts: Sequence[Rollout], shuffle: np.random.Generator | None) -> None:
    """What the teacher says of every sampled token; with `shuffle` each token gets the number of another one of these rollouts."""
    for rollout in rollouts:
        logprobs = teacher(torch.tensor([rollout.ids])).logits[0].log_softmax(-1)
        for call in rollout.talk.calls:
            said = call.node.completion_ids.tolist()
            start = len(rollout.talk.full[call.call_id]) - len(said)
            before = logprobs[start - 1 : start - 1 + len(said)]
            best = before.topk(TOP_K)
            chosen = before[range(len(said)), said].numpy()
            spans = (Span(0, 0, len(said)),)
            rollout.scores[call.call_id] = Score(
                "teacher", RAW, chosen, best.indices.numpy().astype(np.int32), best.values.numpy(), spans
            )
    if shuffle is not None:
        numbers = [score.logprobs for rollout in rollouts for score in rollout.scores.values()]
        mixed = shuffle.permutation(np.concatenate(numbers))
        for number, part in zip(numbers, np.split(mixed, np.cumsum([len(each) for each in numbers])[:-1]), strict=True):
            number[:] = part


async def record(redis_url: str, rollouts: Sequence[Rollout]) -> None:
    store = Store.at(redis_url)
    for rollout in rollouts:
        session_id = rollout.talk.session
        for call in rollout.talk.calls:
            await store.sessions.commit(session_id, call.call_id, {call.call_id: encode(call)})
        await ScoreStore(store.connection).keep(session_id, "teacher", rollout.scores)
    await store.connection.close()


@dataclass(frozen=True, slots=True)
class Study:
    """What the arms of a run share."""

    service: RunningService
    redis_url: str
    client: TrainerClient
    tokenizer: Any
    out: Path
    steps: int
    groups: int
    rollouts: int
    learning_rate: float

    def run(self, seed: int, name: str, student: Path, teacher: Any) -> None:
        arm = ARMS[name]
        learner = Learner(str(student), seed, Recipe(self.learning_rate), arm.credit)
        rng, doors = torch.Generator().manual_seed(seed), corridors(random.Random(seed))
        mixing = np.random.default_rng(seed) if arm.shuffled else None
        sampler = AutoModelForCausalLM.from_pretrained(student, dtype=torch.float32)
        for step in range(1, self.steps + 1):
            made = [each for number in range(self.groups) for each in self.open(f"{seed}-{name}-{step}-{number}", next(doors))]
            sampler.load_state_dict(learner.weights())
            play(sampler, self.tokenizer, made, rng)
            score(teacher, made, mixing)
            asyncio.run(record(self.redis_url, made))
            for rollout in made:
                body = {"status": "completed", "reward": rollout.corridor.reward}
                self.service.request("POST", f"/sessions/{rollout.talk.session}/close", json=body).raise_for_status()
            with leased(self.client, self.groups, 0) as batch:
                told = learner.learn(batch)
                scored = sum(int(row.scores["teacher"].known.sum()) for row in batch.rows)
            kept = {key: told[key] for key in ("reward", "rows", "tokens", "loss", "train_seconds")}
            line = {"seed": seed, "arm": name, "step": step, **kept, "scored_tokens": scored}
            write(self.out / "steps.jsonl", line)

    def open(self, group_id: str, doors: tuple[str, ...]) -> list[Rollout]:
        messages = [{"role": "user", "content": Corridor(doors).instruction}]
        ids = self.tokenizer.apply_chat_template(messages, tools=TOOLS, add_generation_prompt=True)["input_ids"]
        made = []
        for number in range(self.rollouts):
            talk = Talk(f"{group_id}-{number}")
            body = {"session_id": talk.session, "group_id": group_id, "group_size": self.rollouts}
            self.service.request("POST", "/sessions", json=body).raise_for_status()
            made.append(Rollout(Corridor(doors), talk, list(ids)))
        return made


def draw(out: Path) -> None:
    """The reward of each arm by step, a line per seed."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    lines = [json.loads(line) for line in (out / "steps.jsonl").read_text().splitlines()]
    figure, axes = pyplot.subplots(figsize=(7, 4.5), dpi=150, layout="constrained")
    seeds = sorted({line["seed"] for line in lines})
    for name, arm in ARMS.items():
        for seed in seeds:
            rewards = [line["reward"] for line in lines if (line["arm"], line["seed"]) == (name, seed)]
            look = {"color": arm.color, "linestyle": ("-", "--", ":")[seeds.index(seed) % 3]}
            axes.plot(range(1, len(rewards) + 1), rewards, label=f"{name}, seed {seed}", **look)
    axes.set(xlabel="training step", ylabel="reward of the rollouts", ylim=(0, 1.03))
    axes.grid(alpha=0.3)
    axes.legend(fontsize="small", ncols=2)
    figure.savefig(out / "reward.png")
    pyplot.close(figure)


def make_model(folder: Path, seed: int, **lessons: Any) -> Path:
    make_tiny_model(folder, seed=seed, layers=2, initializer_range=0.1)
    warm_up(folder, seed=seed, **lessons)
    return folder


def main(
    out: Annotated[Path, typer.Option(help="Where everything is left.")],
    arms: Annotated[str, typer.Option(help=f"Which, with commas: {', '.join(ARMS)}.")] = ",".join(ARMS),
    steps: Annotated[int, typer.Option(min=1)] = 14,
    groups: Annotated[int, typer.Option(min=1, help="Tasks per step.")] = 8,
    rollouts: Annotated[int, typer.Option(min=2, help="Rollouts per task.")] = 4,
    learning_rate: Annotated[float, typer.Option()] = 5e-4,
    seeds: Annotated[int, typer.Option(min=1, help="How many.")] = 3,
    seed: Annotated[int, typer.Option(help="The first of them.")] = 0,
) -> None:
    """Run the arms of each seed, one after the other."""
    torch.set_num_threads(1)
    out.mkdir(parents=True, exist_ok=True)
    with (
        running_redis() as redis,
        RunningService(NO_ENGINE, redis.url) as service,
        TrainerClient(service.url, TRAINER) as client,
    ):
        for each in range(seed, seed + seeds):
            student = make_model(out / f"student-{each}", each)
            folder = make_model(out / f"teacher-{each}", each, make_dialogue=teach, steps=TEACHER_STEPS)
            teacher = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
            tokenizer = AutoTokenizer.from_pretrained(student)
            study = Study(service, redis.url, client, tokenizer, out, steps, groups, rollouts, learning_rate)
            for name in arms.split(","):
                study.run(each, name, student, teacher)
    draw(out)


if __name__ == "__main__":
    typer.run(main)
