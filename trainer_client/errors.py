"""The errors of this package, one class per boundary crossed.

TrainerClientError
├── ServiceError             the service answered with an error; status, code, attempts
│   ├── Unauthorized         401, 403: the token is missing, wrong, or lacks the right
│   ├── LeaseLost            404, 409 on ack, nack or extend: the lease expired or belongs to another trainer
│   ├── VersionConflict      409 on a push: versions only increase and pushes never interleave
│   └── Unavailable          502, 503, after retries for `retry_seconds`
├── ConnectionFailed         no answer: refused, broken or timed out, after retries
├── ClientClosed             the client was closed
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


class TrainerClientError(Exception):
    """Base of every error of this package."""


class ServiceError(TrainerClientError):
    """`status` is the HTTP status; `code` and `reason` come from the service's error object and are empty if it sent none."""

    def __init__(
        self,
        message: str,
        *,
        status: int,
        code: str = "",
        reason: str = "",
        retry_after_seconds: float | None = None,
        attempts: int = 1,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.code = code
        self.reason = reason
        self.retry_after_seconds = retry_after_seconds
        self.attempts = attempts


class Unauthorized(ServiceError):
    pass


class LeaseLost(ServiceError):
    """Another trainer has the batch, or will get it: its rows may be trained on twice."""


class VersionConflict(ServiceError):
    pass


class Unavailable(ServiceError):
    pass


class ConnectionFailed(TrainerClientError):
    """`sent` is False if the request certainly was not sent, so that a retry cannot repeat its effect."""

    def __init__(self, message: str, *, sent: bool) -> None:
        super().__init__(message)
        self.sent = sent


class ClientClosed(TrainerClientError):
    pass


class InvalidAnswer(TrainerClientError):
    pass


class MixedLogprobModes(TrainerClientError):
    pass


class RowTooLong(TrainerClientError):
    pass


class UnseenImages(TrainerClientError):
    pass


class VisionMismatch(TrainerClientError):
    pass


class PublishError(TrainerClientError):
    pass


class UnpublishableWeights(PublishError):
    pass
