"""The errors of clients of the service, one class per answer that a caller may want to tell apart.

ClientError
├── ServiceError               the service did not fulfil a request; what is not below: another status
│   ├── RequestRefused         400, 413, 422: it will never accept this request
│   ├── AuthenticationFailed   401, 403: the token is missing, wrong, or lacks the right
│   ├── ResourceNotFound       404
│   ├── ResourceConflict       409: the resource is in another state than the request takes it to be
│   ├── HeldBack               429: not now; the service works, but others are behind
│   └── ServiceUnavailable     408, 502, 503, 504: it may pass
│       └── NoAnswer           refused, broken or timed out
└── ClientClosed               the client was closed
"""

from __future__ import annotations

from collections.abc import Mapping


class ClientError(Exception):
    pass


class ServiceError(ClientError):
    """The message names the request and quotes the service.

    `status` is the HTTP status, None without an answer; `code` and `reason` come from the service's error object and are empty if it sent
    none. `retry_after_seconds` is what the service asks for. `lost`: the request may have been carried out. `attempts` is how many times it
    was sent."""

    def __init__(
        self,
        message: str,
        *,
        status: int | None = None,
        code: str = "",
        reason: str = "",
        retry_after_seconds: float | None = None,
        lost: bool = False,
        attempts: int = 1,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.code = code
        self.reason = reason
        self.retry_after_seconds = retry_after_seconds
        self.lost = lost
        self.attempts = attempts


class RequestRefused(ServiceError):
    pass


class AuthenticationFailed(ServiceError):
    pass


class ResourceNotFound(ServiceError):
    pass


class ResourceConflict(ServiceError):
    pass


class HeldBack(ServiceError):
    pass


class ServiceUnavailable(ServiceError):
    pass


class NoAnswer(ServiceUnavailable):
    pass


class ClientClosed(ClientError):
    pass


KINDS: Mapping[int, type[ServiceError]] = {
    **dict.fromkeys((400, 413, 422), RequestRefused),
    **dict.fromkeys((401, 403), AuthenticationFailed),
    404: ResourceNotFound,
    409: ResourceConflict,
    429: HeldBack,
    **dict.fromkeys((408, 502, 503, 504), ServiceUnavailable),
}
"""By HTTP status; every other one is a `ServiceError`."""
