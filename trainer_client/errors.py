"""What can go wrong in a trainer's process, one class per boundary crossed.

TrainerClientError
├── ServiceError             the service answered with an error; status, code, attempts
│   ├── Unauthorized         401, 403: the token is missing, wrong, or does not open this
│   ├── LeaseLost            404, 409 on ack, nack or extend: the lease expired or was given to another
│   ├── VersionConflict      409 on a push: versions only grow and two pushes never interleave
│   └── Unavailable          502, 503: retried until `retry_seconds` were spent
├── ConnectionFailed         no answer: refused, broken off or timed out; also retried first
├── ClientClosed             the client was closed
├── InvalidAnswer            an answer or a row breaks the contract; nothing is repaired
├── MixedLogprobModes        rows whose logprobs do not mean the same are put into one array
├── RowTooLong               a row does not fit and no one asked for its end to be cut
└── PublishError             the new weights did not reach every engine
    ├── UnpublishableWeights the state dict or folder cannot be published as it is
    └── ReplicaFailed        at least one replica refused the update; `push` has every replica's result
"""

from __future__ import annotations


class TrainerClientError(Exception):
    """Base of everything this package raises on its own account."""


class ServiceError(TrainerClientError):
    """The service's own message, with the HTTP status and the `code` of its error object."""

    def __init__(
        self,
        message: str,
        *,
        status: int,
        code: str = "",
        retry_after_seconds: float | None = None,
        attempts: int = 1,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.code = code
        self.retry_after_seconds = retry_after_seconds
        self.attempts = attempts


class Unauthorized(ServiceError):
    pass


class LeaseLost(ServiceError):
    """The batch is, or will be, someone else's: what was learnt from it may be learnt twice."""


class VersionConflict(ServiceError):
    pass


class Unavailable(ServiceError):
    pass


class ConnectionFailed(TrainerClientError):
    """`sent` is false when the request certainly never left, so that repeating it cannot do a thing twice."""

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


class PublishError(TrainerClientError):
    pass


class UnpublishableWeights(PublishError):
    pass
