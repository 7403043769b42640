"""What a trainer imports: the lease client, batches as arrays, weight publishing, advantages."""

from trainer_client.batch import Batch
from trainer_client.client import TrainerClient
from trainer_client.errors import TrainerClientError

__all__ = ["Batch", "TrainerClient", "TrainerClientError"]
