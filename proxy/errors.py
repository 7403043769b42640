"""The errors of the service, one class per boundary crossed.

VerbatimError                        status  code
├── RequestError                     400     bad_request          the caller's fault; reported in its dialect
│   ├── ContextTooLong               400     context_length_exceeded
│   ├── Unauthorized                 401     invalid_api_key
│   ├── Forbidden                    403     forbidden
│   │   └── BudgetExhausted          403     budget_exhausted     the session has used up its calls or tokens (401 for OpenAI's)
│   ├── NotFound                     404     not_found            unknown session, model, lease, path
│   │   └── UnknownCall              404     not_found            a call or response that the session does not have
│   ├── Conflict                     409     conflict             closed session, older version, duplicate id
│   │   ├── NoCalls                  409     no_calls             a session without a call that is to be closed as completed
│   │   ├── ReplayDiverged           409     replay_diverged      a fork's request that its origin did not record
│   │   └── AttemptSuperseded        409     superseded           an attempt that the node does not have (any more)
│   ├── RequestTimeout               408     request_timeout      the body did not arrive in time
│   ├── EncodingRefused              415     unsupported_encoding a compressed body
│   └── TooLarge                     413     request_too_large
│       └── SessionFull              413     session_full         the session has reached its limit of recorded bytes
└── Unavailable                      503     unavailable          retryable; carries Retry-After
    ├── Backpressure                 429     backpressure         trainers lag behind: no new group may begin
    ├── TooManyCalls                 429     too_many_calls       the session or the process is at its limit of calls in flight
    ├── ServiceStopping              503     service_stopping     the process ends, and has cut the call
    ├── EngineUnavailable            503     engine_unavailable
    │   └── EngineBusy               503     engine_unavailable   the engine says how long to wait
    ├── EngineFailed                 502     engine_failed        the engine broke off or answered nonsense
    │   └── ChooserFailed            502     chooser_failed       no candidate of a lookahead was chosen
    └── StoreUnavailable             503     store_unavailable    Redis is down, full or loading: nothing was answered unrecorded

A dialect renders any of them in its vendor's shape; the control API as `{"error": {"code", "message", "param"?}}`.
"""

from __future__ import annotations


class VerbatimError(Exception):
    """Base of every error the service reports to a caller. `param` names the offending field."""

    status = 500
    code = "internal_error"
    retry_after_seconds: float | None = None

    def __init__(self, message: str, *, param: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.param = param


class RequestError(VerbatimError):
    status = 400
    code = "bad_request"


class ContextTooLong(RequestError):
    """A prompt of `tokens` tokens does not fit into the `window`, also in tokens. None: the engine did not say."""

    code = "context_length_exceeded"

    def __init__(self, message: str, *, param: str | None = None, tokens: int | None = None, window: int | None = None) -> None:
        super().__init__(message, param=param)
        self.tokens = tokens
        self.window = window


class Unauthorized(RequestError):
    status = 401
    code = "invalid_api_key"


class Forbidden(RequestError):
    status = 403
    code = "forbidden"


class BudgetExhausted(Forbidden):
    code = "budget_exhausted"


class NotFound(RequestError):
    status = 404
    code = "not_found"


class UnknownCall(NotFound):
    pass


class Conflict(RequestError):
    status = 409
    code = "conflict"


class NoCalls(Conflict):
    code = "no_calls"


class ReplayDiverged(Conflict):
    code = "replay_diverged"


class AttemptSuperseded(Conflict):
    code = "superseded"


class RequestTimeout(RequestError):
    status = 408
    code = "request_timeout"
    retry_after_seconds = 1.0


class EncodingRefused(RequestError):
    status = 415
    code = "unsupported_encoding"


class TooLarge(RequestError):
    status = 413
    code = "request_too_large"


class SessionFull(TooLarge):
    code = "session_full"


class Unavailable(VerbatimError):
    status = 503
    code = "unavailable"
    retry_after_seconds: float | None = 1.0


class Backpressure(Unavailable):
    status = 429
    code = "backpressure"
    retry_after_seconds = 5.0


class TooManyCalls(Unavailable):
    status = 429
    code = "too_many_calls"


class ServiceStopping(Unavailable):
    code = "service_stopping"


class EngineUnavailable(Unavailable):
    code = "engine_unavailable"


class EngineBusy(EngineUnavailable):
    """`retry_after_seconds`: how long the engine asks to wait."""

    retry_after_seconds: float

    def __init__(self, message: str, retry_after_seconds: float) -> None:
        super().__init__(message)
        self.retry_after_seconds = retry_after_seconds


class EngineFailed(Unavailable):
    status = 502
    code = "engine_failed"


class ChooserFailed(EngineFailed):
    code = "chooser_failed"


class StoreUnavailable(Unavailable):
    code = "store_unavailable"
