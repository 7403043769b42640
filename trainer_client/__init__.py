"""All of it that is public: leases, batches as arrays, weight publishing, corrections, and sessions of an agent of yours.

Beside these names, `trainer_client.advantages`, `trainer_client.distillation`, the adapters of docs/trainers.md and the integrations of
docs/integrations.md are public. Any other module may move.
"""

from contract.errors import AuthenticationFailed, ClientError, NoAnswer, ServiceError, ServiceUnavailable
from trainer_client.arrays import PackedBatch, PaddedBatch, ScoreArrays
from trainer_client.batch import Batch
from trainer_client.client import TrainerClient
from trainer_client.errors import (
    LeaseLost,
    MixedLogprobModes,
    PublishError,
    RowTooLong,
    UnpublishableWeights,
    UnseenImages,
    VersionConflict,
)
from trainer_client.importance import batch_statistics, masked_weights, row_of_token, truncated_weights
from trainer_client.media import MediaFiles, decode_image
from trainer_client.publish import prune_versions, version_folder, write_weights
from trainer_client.recompute import Difference, compare_trees, load_model
from trainer_client.sessions import AsyncSession, AsyncSessions, Session, Sessions
from trainer_client.tree import TreeBatch
from trainer_client.vision import Vision
from trainer_client.wire import Group, decode_trajectory

__all__ = [
    "TrainerClient",
    "Sessions",
    "Session",
    "AsyncSessions",
    "AsyncSession",
    "Batch",
    "Group",
    "PaddedBatch",
    "PackedBatch",
    "TreeBatch",
    "ScoreArrays",
    "decode_trajectory",
    "Vision",
    "MediaFiles",
    "decode_image",
    "write_weights",
    "version_folder",
    "prune_versions",
    "batch_statistics",
    "truncated_weights",
    "masked_weights",
    "row_of_token",
    "load_model",
    "compare_trees",
    "Difference",
    "ClientError",
    "ServiceError",
    "AuthenticationFailed",
    "ServiceUnavailable",
    "NoAnswer",
    "LeaseLost",
    "VersionConflict",
    "MixedLogprobModes",
    "RowTooLong",
    "UnseenImages",
    "PublishError",
    "UnpublishableWeights",
]
