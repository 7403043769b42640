"""A trainer that leases batches until it is killed: most it acknowledges, some it gives back, some it forgets about.

    python tests/support/crashes/trainer.py JOURNAL SEED URL...

Every step is one line of JSON in the journal, written before the step that follows it: a kill at any moment leaves no line out.
"""

from __future__ import annotations

import hashlib
import json
import os
import random
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from contract.errors import ClientError
from reconstruct.trajectory import Trajectory
from trainer_client.batch import Batch
from trainer_client.client import TrainerClient
from trainer_client.errors import LeaseLost

LEASE_SECONDS = 2.0
BATCHES_PER_SERVICE = 4


def main() -> None:
    journal, seed, *urls = sys.argv[1:]
    write, dice = Journal(Path(journal)), random.Random(int(seed))
    while True:
        url = dice.choice(urls)
        token = os.environ["VERBATIM_TRAINER_TOKEN"]
        with TrainerClient(url, token, timeout_seconds=5, retry_seconds=2) as client:
            try:
                for _ in range(BATCHES_PER_SERVICE):
                    work(client, write, dice)
            except ClientError as error:
                write("failed", error=f"{type(error).__name__}: {error}")
                time.sleep(0.1)


class Journal:
    """Appends one line of JSON at a time; what is written outlives the process."""

    def __init__(self, path: Path) -> None:
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)

    def __call__(self, what: str, **fields: Any) -> None:
        os.write(self._file, json.dumps({"what": what, **fields}).encode() + b"\n")

    def close(self) -> None:
        os.close(self._file)


def work(client: TrainerClient, write: Journal, dice: random.Random) -> None:
    """One batch, if there is one."""
    batch = client.lease(max_groups=dice.randint(1, 3), wait_seconds=0.5, lease_seconds=LEASE_SECONDS)
    if batch is None:
        return
    note_lease(batch, write)
    time.sleep(dice.uniform(0, 0.2))
    deed = dice.random()
    if deed < 0.75:
        acknowledge(batch, write)
    elif deed < 0.9:
        give_back(batch, write)


def note_lease(batch: Batch, write: Journal) -> None:
    rows = {group.group_id: {row.trajectory_id: digest(row) for row in group.trajectories} for group in batch.groups}
    write("leased", lease=batch.lease_id, groups=rows)


def acknowledge(batch: Batch, write: Journal) -> None:
    write("acknowledging", lease=batch.lease_id, groups=names(batch))
    try:
        batch.ack()
    except LeaseLost as error:
        write("lost", lease=batch.lease_id, error=str(error))
        return
    write("acknowledged", lease=batch.lease_id, groups=names(batch))


def give_back(batch: Batch, write: Journal) -> None:
    try:
        batch.nack()
    except LeaseLost as error:
        write("lost", lease=batch.lease_id, error=str(error))


def names(batch: Batch) -> Sequence[str]:
    return [group.group_id for group in batch.groups]


def digest(row: Trajectory) -> str:
    """One short word for everything in the row that is trained on."""
    parts = (row.token_ids.tobytes(), row.loss_mask.tobytes(), row.logprobs.tobytes())
    rest = (row.session_id, row.group_id, row.reward, row.weight_versions, row.call_ids, row.finish_reason, row.row_weight)
    return hashlib.sha256(b"|".join((*parts, repr(rest).encode()))).hexdigest()[:16]


if __name__ == "__main__":
    main()
