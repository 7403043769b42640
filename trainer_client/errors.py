"""The errors of this package beside those of its requests, which are in `contract.errors`. All derive from `contract.errors.ClientError`.

ClientError
├── ServiceError             the service answered with an error, or not at all (`contract.errors`)
│   ├── LeaseLost            404, 409 on ack, nack or extend: the lease expired or belongs to another trainer
│   └── ResourceConflict
│       └── VersionConflict  409 on a push: versions only increase and pushes never interleave
├── InvalidAnswer            an answer or a row breaks the contract; nothing is repaired
├── MixedLogprobModes        rows of different logprob modes would be in one array
├── RowTooLong               a row does not fit, and truncation was not requested
├── UnseenImages             rows with images would be trained without their pixels
├── VisionMismatch           what an image processor makes does not fit the placeholders in a row
└── PublishError             the new weights did not reach every engine
    ├── UnpublishableWeights the state dict or folder cannot be published as it is
    └── ReplicaFailed        at least one replica failed; `push` has every replica's result
"""

from __future__ import annotations

from contract.errors import ClientError, ResourceConflict, ServiceError


class LeaseLost(ServiceError):
    """Another trainer has the batch, or will get it: its rows may be trained on twice."""


class VersionConflict(ResourceConflict):
    pass


class InvalidAnswer(ClientError):
    pass


class MixedLogprobModes(ClientError):
    pass


class RowTooLong(ClientError):
    pass


class UnseenImages(ClientError):
    pass


class VisionMismatch(ClientError):
    pass


class PublishError(ClientError):
    pass


class UnpublishableWeights(PublishError):
    pass
