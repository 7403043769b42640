"""The data card of a generation, README.md: what `datasets.load_dataset` reads of the folder, and what a person should know of it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

CONFIGS = """configs:
- config_name: conversations
  data_files: conversations.parquet
  default: true
- config_name: trajectories
  data_files: accepted/trajectories-*.parquet
"""
CARD = """---
{configs}tags:
- verbatim
- agent-trajectories
---

# Attempts that passed

{count} of {attempts} attempts at {tasks} tasks were accepted and kept, as {conversations} conversations. {truncated} of these are
truncated: see the column `truncated`.

```python
from datasets import load_dataset

conversations = load_dataset(FOLDER, "conversations", split="train")  # messages and tools, for fine-tuning on text
trajectories = load_dataset(FOLDER, "trajectories", split="train")  # tokens exactly as sampled, with text beside them
```

- `conversations`, also as `chat.jsonl`: `messages` up to the last reply, `tools` (null without any), `reward`, `truncated`,
  `finish_reason`, ids. TRL and Axolotl take `messages` and `tools` as they are.
- `trajectories`: `token_ids`, `loss_mask` (1: sampled), `logprobs` of the engine, `weight_versions`, `text` (null if no engine
  could tell), `tools` as JSON, `reward`, `truncated`, ids. Rows of the two belong together by `trajectory_id`.
- `rollouts.jsonl`: every attempt with its reward, whether it was kept, and why not.

| setting | |
|---|---|
{settings}"""


def render_card(settings: Mapping[str, Any], tasks: int, attempts: int, kept: int, conversations: int, truncated: int) -> str:
    rows = "".join(f"| `{name}` | {_cell(value)} |\n" for name, value in settings.items() if value is not None)
    # A configuration without files does not load.
    return CARD.format(
        configs=CONFIGS if conversations else "",
        count=kept,
        attempts=attempts,
        tasks=tasks,
        conversations=conversations,
        truncated=truncated,
        settings=rows,
    )


def _cell(value: Any) -> str:
    return "`" + str(value).replace("|", "\\|") + "`"
