"""In place of prime-rl's orchestrator and inference: leased groups to its trainer, its weights to the engines. docs/trainers/prime-rl.md"""

import asyncio
import os
import time
from pathlib import Path

from prime_rl.configs.shared import FileSystemTransportConfig
from prime_rl.trainer.batch import build_bin_cost, prepare_batch
from prime_rl.transports.rollouts import TrainingSample, setup_micro_batch_sender

from trainer_client import TrainerClient
from trainer_client.adapters.prime_rl import training_samples
from trainer_client.adapters.steps import Steps
from trainer_client.advantages import dr_grpo

OUTPUT, WORKERS, SEQ_LEN, GROUPS, STEPS = Path("outputs"), 8, 16_384, 16, 1000  # as in trainer.toml

client = TrainerClient(os.environ["VERBATIM_URL"], os.environ["VERBATIM_TRAINER_TOKEN"])
steps = Steps(client, GROUPS, max_staleness=4)
sender = setup_micro_batch_sender(OUTPUT, WORKERS, 1, FileSystemTransportConfig())
saved = None
for step in range(1, STEPS + 1):
    batch = steps.take(saved)
    rows = training_samples(
        batch, TrainingSample, batch.advantages(dr_grpo), env_name="verbatim", max_length=SEQ_LEN, truncate=True
    )
    asyncio.run(sender.send(prepare_batch(rows, SEQ_LEN, WORKERS, build_bin_cost(None))))
    saved = OUTPUT / "broadcasts" / f"step_{step}"
    while not (saved / "STABLE").exists():
        time.sleep(0.2)
client.publish(saved, int(client.weights()["current"]["version"]) + 1)
steps.finish()
