"""Decodes the answer to a lease into checked rows.

The client accepts msgpack with packed arrays (`token_ids` little-endian int32, `loss_mask` int8, `logprobs` little-endian float32;
details and scores as `{"shape", "data"}`), plain msgpack, and JSON; the latter two have lists of numbers, with null for NaN. All three
give equal rows. A row that breaks the contract raises InvalidAnswer with the row, the token and the rule; nothing is repaired.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import httpx
import msgpack
import numpy as np
from numpy.typing import NDArray

from contract.batches import LeasedSession
from reconstruct.details import of_one_shape
from reconstruct.media import Media
from reconstruct.records import INFERRED, LOGPROB_MODES, pack_ids, pack_logprobs
from reconstruct.scores import Score
from reconstruct.spans import ModeSpan, Span
from reconstruct.trajectory import NAMES, Quarantined, RowDetails, Trajectory
from trainer_client.errors import InvalidAnswer

MSGPACK = "application/msgpack"
ACCEPT = f"{MSGPACK};arrays=packed"
_READ_BYTES = 2**18
_PACKED = {"token_ids": "<i4", "loss_mask": "i1", "logprobs": "<f4"}
_DETAILS = {
    "top_token_ids": ("<i4", 2),
    "top_logprobs": ("<f4", 2),
    "prompt_logprobs": ("<f4", 1),
    "routed_experts": ("<i2", 3),
    "logprobs": ("<f4", 1),
    "top_ids": ("<i4", 2),
}
"""The dtype and the number of dimensions of details and of what scores consist of."""
_INT32_MAX = 2**31 - 1


@dataclass(frozen=True, slots=True)
class Group:
    """The rollouts of one task that are compared with each other; a rollout may have several rows. `stale`: older than `max_staleness`,
    but the service is set to deliver such groups. `sessions` has the accounting of each rollout; earlier services send none."""

    group_id: str
    trajectories: tuple[Trajectory, ...]
    stale: bool = False
    sessions: tuple[LeasedSession, ...] = ()


def decode_body(response: httpx.Response) -> Any:
    """The decoded body, by content type. Raises InvalidAnswer if the type is unknown or the body is malformed."""
    kind = _kind_of(response)
    try:
        if kind == MSGPACK:
            return msgpack.unpackb(response.content, strict_map_key=False)
        if kind == "application/json":
            return json.loads(response.content)
    except (ValueError, msgpack.UnpackException) as error:
        raise InvalidAnswer(f"the answer is not valid {kind}: {error}") from error
    raise InvalidAnswer(f"the answer is {kind or 'without a content type'}, not msgpack or JSON")


def _kind_of(response: httpx.Response) -> str:
    kind: str = response.headers.get("Content-Type", "").partition(";")[0].strip().lower()
    return kind


def decode_group(sent: Mapping[str, Any]) -> Group:
    """The group, every row checked. Raises InvalidAnswer."""
    try:
        rows = Counter(_session(row) for row in sent["trajectories"])
        return Group(
            sent["group_id"],
            tuple(decode_trajectory(row, 1 / rows[_session(row)]) for row in sent["trajectories"]),
            stale=sent.get("stale") is True,
            sessions=tuple(_decode_session(each) for each in sent.get("sessions", ())),
        )
    except (AttributeError, KeyError, TypeError) as error:
        raise InvalidAnswer(f"the lease has no readable groups: {error!r}") from error


class LeaseReader:
    """Reads the answer to a lease. In msgpack each group is decoded as soon as it has arrived: besides the rows hardly more than one group
    is in memory. JSON is read whole."""

    def __init__(self) -> None:
        self.head: dict[str, Any] = {}
        """The fields that have arrived, without the groups."""
        self.groups: list[Group] = []
        self._names: set[str] = set()

    def read(self, response: httpx.Response) -> None:
        """Raises InvalidAnswer for an answer that breaks the contract, has a row twice, or ends too early; and httpx's errors for one that
        breaks off. May be called again for another answer."""
        self.head, self.groups, self._names = {}, [], set()
        if response.status_code != 204 and _kind_of(response) == MSGPACK:
            self._unpack(response)
            return
        response.read()
        if response.status_code != 204:
            self._take(decode_body(response))

    def _unpack(self, response: httpx.Response) -> None:
        unpacker = msgpack.Unpacker(_Arriving(response), read_size=_READ_BYTES, max_buffer_size=0, strict_map_key=False)
        try:
            names = {self._unpack_field(unpacker) for _ in range(unpacker.read_map_header())}
            # Read to the end: only then it is known that nothing broke off.
            if unpacker.read_bytes(1):
                raise InvalidAnswer("the answer goes on behind its end")
        except msgpack.OutOfData as error:
            raise InvalidAnswer("the answer ends before it is whole") from error
        except (ValueError, TypeError, msgpack.UnpackException) as error:
            raise InvalidAnswer(f"the answer is not valid {MSGPACK}: {error}") from error
        if "groups" not in names:
            raise InvalidAnswer("the lease has no groups")

    def _unpack_field(self, unpacker: msgpack.Unpacker) -> str:
        name: str = unpacker.unpack()
        if name != "groups":
            self.head[name] = unpacker.unpack()
            return name
        for _ in range(unpacker.read_array_header()):
            self._add(unpacker.unpack())
        return name

    def _take(self, body: Any) -> None:
        try:
            self.head = {name: value for name, value in body.items() if name != "groups"}
            sent = body["groups"]
        except (AttributeError, KeyError) as error:
            raise InvalidAnswer(f"the lease has no readable groups: {error!r}") from error
        for group in sent:
            self._add(group)

    def _add(self, sent: Any) -> None:
        group = decode_group(sent)
        for row in group.trajectories:
            if row.trajectory_id in self._names:
                raise InvalidAnswer(f"trajectory {row.trajectory_id!r} is in one batch 2 times")
            self._names.add(row.trajectory_id)
        self.groups.append(group)


class _Arriving:
    """The body of a response as the file that msgpack reads."""

    def __init__(self, response: httpx.Response) -> None:
        self._pieces = response.iter_bytes()

    def read(self, _: int) -> bytes:
        return next(self._pieces, b"")


def _decode_session(sent: Mapping[str, Any]) -> LeasedSession:
    """Raises KeyError, TypeError, or InvalidAnswer if the token counts do not add up."""
    quarantined = tuple(Quarantined(item["call_id"], int(item["tokens"]), item["reason"]) for item in sent["quarantined"])
    session = LeasedSession(
        session_id=sent["session_id"],
        sampled_tokens=int(sent["sampled_tokens"]),
        exported_tokens=int(sent["exported_tokens"]),
        quarantined=quarantined,
        dangling_calls=int(sent["dangling_calls"]),
        complete=sent["complete"] is True,
        replayed_tokens=int(sent.get("replayed_tokens", 0)),
    )
    lost = sum(item.tokens for item in quarantined)
    if session.sampled_tokens != session.exported_tokens + lost:
        raise InvalidAnswer(
            f"session {session.session_id!r}: {session.sampled_tokens} tokens were sampled, but {session.exported_tokens} are "
            f"exported and {lost} quarantined"
        )
    return session


def decode_versions(body: Mapping[str, Any]) -> dict[str, int]:
    """The current version of every model, "" being the default one. Raises KeyError, TypeError or ValueError."""
    versions = {str(policy): int(version) for policy, version in body.get("weight_versions", {}).items()}
    return {**versions, "": int(body["weight_version"])}


def decode_trajectory(row: Mapping[str, Any], row_weight: float = 1.0) -> Trajectory:
    """The row as a checked Trajectory. Unknown fields are ignored; `row_weight` is used if the row has none. Raises InvalidAnswer."""
    name = row.get("trajectory_id") if isinstance(row, Mapping) else None
    try:
        trajectory = Trajectory(
            trajectory_id=row["trajectory_id"],
            session_id=row["session_id"],
            group_id=row["group_id"],
            task_id=row["task_id"],
            role=row["role"],
            agent=row["agent"],
            token_ids=pack_ids(_integers(row, "token_ids")),
            loss_mask=_mask(row),
            logprobs=pack_logprobs(_array(row, "logprobs")),
            logprob_modes=tuple(ModeSpan(str(mode), int(start), int(end)) for mode, start, end in row["logprob_modes"]),
            weight_versions=tuple(Span(*map(int, span)) for span in row["weight_versions"]),
            reward=None if row["reward"] is None else float(row["reward"]),
            call_ids=tuple(row["call_ids"]),
            finish_reason=row["finish_reason"],
            truncated=bool(row["truncated"]),
            metadata=row["metadata"],
            row_weight=float(row.get("row_weight", row_weight)),
            details=_details(row),
            policy=str(row.get("policy", "")),
            role_source=str(row.get("role_source", INFERRED)),
            media=tuple(_media(**each) for each in row.get("media", ())),
            scores={str(name): _score(sent) for name, sent in (row.get("scores") or {}).items()},
        )
        _check(trajectory)
    except (KeyError, TypeError, ValueError, OverflowError) as error:
        raise InvalidAnswer(f"trajectory {name!r}: {error!r}") from error
    return trajectory


def _media(digest: str, kind: str, start: int, length: int, **_: Any) -> Media:
    return Media(str(digest), str(kind), int(start), int(length))


def _score(sent: Mapping[str, Any]) -> Score:
    return Score(
        policy=str(sent["policy"]),
        mode=str(sent["mode"]),
        logprobs=_detail("logprobs", sent["logprobs"]),
        top_ids=_detail("top_ids", sent["top_ids"]),
        top_logprobs=_detail("top_logprobs", sent["top_logprobs"]),
        weight_versions=tuple(Span(*map(int, span)) for span in sent["weight_versions"]),
        error=str(sent.get("error", "")),
    )


def _details(row: Mapping[str, Any]) -> RowDetails | None:
    given = {name: _detail(name, value) for name in NAMES if (value := row.get(name)) is not None}
    return RowDetails(**given) if given else None


def _detail(name: str, value: Any) -> NDArray[Any]:
    dtype, dimensions = _DETAILS[name]
    if isinstance(value, Mapping):
        array = np.frombuffer(value["data"], dtype=dtype).reshape(value["shape"])
    else:
        # None, an unknown number, becomes NaN.
        numbers = np.array(value, dtype=np.float64)
        array = numbers.astype(dtype)
        if dtype != "<f4" and not np.array_equal(numbers, array):
            raise TypeError(f"{name} has values that are not small integers")
    if array.ndim != dimensions:
        raise ValueError(f"{name} has {array.ndim} dimensions, not {dimensions}")
    array.flags.writeable = False
    return array


def _session(row: Any) -> str:
    return str(row.get("session_id")) if isinstance(row, Mapping) else ""


def versions_by_token(row: Trajectory) -> NDArray[np.int64]:
    """The weight version of each token, int64 of the row's length; -1 for tokens that were not sampled."""
    versions = np.full(len(row.token_ids), -1, dtype=np.int64)
    for span in row.weight_versions:
        versions[span.start : span.end] = span.version
    return versions


def modes_by_token(row: Trajectory) -> NDArray[np.int8]:
    """What the logprob of each token was taken from, as its place in LOGPROB_MODES: int8 of the row's length; -1 for tokens that were not
    sampled."""
    modes = np.full(len(row.token_ids), -1, dtype=np.int8)
    for span in row.logprob_modes:
        modes[span.start : span.end] = LOGPROB_MODES.index(span.mode)
    return modes


def _mask(row: Mapping[str, Any]) -> NDArray[np.int32]:
    mask = _integers(row, "loss_mask")
    if mask.size and not np.isin(mask, (0, 1)).all():
        raise ValueError("loss_mask has values other than 0 and 1")
    # Python's `sum` of int8 wraps around at 128, without a word.
    packed = mask.astype(np.int32)
    packed.flags.writeable = False
    return packed


def _integers(row: Mapping[str, Any], field: str) -> NDArray[Any]:
    array = _array(row, field)
    if array.size and array.dtype.kind not in "iu":
        raise TypeError(f"{field} has values that are not integers")
    if array.size and not 0 <= int(array.min()) <= int(array.max()) <= _INT32_MAX:
        raise ValueError(f"{field} has values from {int(array.min())} to {int(array.max())}, outside 0 to {_INT32_MAX}")
    return array


def _array(row: Mapping[str, Any], field: str) -> NDArray[Any]:
    value = row[field]
    array = np.frombuffer(value, dtype=_PACKED[field]) if isinstance(value, bytes) else np.asarray(value)
    if array.ndim != 1:
        raise ValueError(f"{field} has {array.ndim} dimensions")
    if array.size and array.dtype.kind not in "iuf":
        raise TypeError(f"{field} has values that are not numbers")
    return array


def _check(row: Trajectory) -> None:
    lengths = (len(row.token_ids), len(row.loss_mask), len(row.logprobs))
    if len(set(lengths)) != 1 or not lengths[0]:
        raise ValueError(f"token_ids, loss_mask and logprobs have lengths {lengths}")
    sampled = row.loss_mask == 1
    if sampled[0]:
        raise ValueError("the first token is sampled, but it has no context")
    _refuse(sampled & ~np.isfinite(row.logprobs), "a sampled token has no finite logprob")
    _refuse(~sampled & (row.logprobs != 0), "a token that was not sampled has a logprob")
    _check_spans(row, sampled)
    if row.details is not None:
        _check_details(row.details, len(sampled))
    for name, score in row.scores.items():
        if len(score.logprobs) != len(sampled):
            raise ValueError(f"the score {name!r} has {len(score.logprobs)} tokens, the row {len(sampled)}")
        _refuse(~sampled & score.known, f"a token that was not sampled has a score {name!r}")
    _check_media(row.media, sampled)
    if row.reward is not None and not np.isfinite(row.reward):
        raise ValueError(f"the reward is {row.reward}")
    if not 0 <= row.row_weight <= 1:
        raise ValueError(f"the row weight is {row.row_weight}, outside 0 to 1")


def _check_details(details: RowDetails, length: int) -> None:
    for name in NAMES:
        array = getattr(details, name)
        if array is not None and len(array) != length:
            raise ValueError(f"{name} has {len(array)} tokens, the row {length}")
    if not of_one_shape(details.top_token_ids, details.top_logprobs):
        raise ValueError("top_token_ids and top_logprobs differ in shape")


def _check_media(media: Sequence[Media], sampled: NDArray[np.bool_]) -> None:
    end = 0
    for each in media:
        if not end <= each.start < each.end <= len(sampled):
            raise ValueError(f"{each} is not valid media after token {end} of {len(sampled)}")
        if sampled[each.start : each.end].any():
            raise ValueError(f"a placeholder of {each} is sampled")
        end = each.end


def _check_spans(row: Trajectory, sampled: NDArray[np.bool_]) -> None:
    end = 0
    for span in row.weight_versions:
        if not (end <= span.start < span.end <= len(sampled) and span.version >= 0):
            raise ValueError(f"{span} is not a valid weight-version span after token {end} of {len(sampled)}")
        end = span.end
    _refuse((versions_by_token(row) >= 0) != sampled, "weight_versions do not cover exactly the sampled tokens")
    end = 0
    for mode in row.logprob_modes:
        if not (end <= mode.start < mode.end <= len(sampled) and mode.mode in LOGPROB_MODES):
            raise ValueError(f"{mode} is not a valid span of a logprob mode after token {end} of {len(sampled)}")
        end = mode.end
    _refuse((modes_by_token(row) >= 0) != sampled, "logprob_modes do not cover exactly the sampled tokens")


def _refuse(broken: NDArray[np.bool_], rule: str) -> None:
    if broken.any():
        raise ValueError(f"token {int(broken.argmax())}: {rule}")
