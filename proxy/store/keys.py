"""Every key in Redis: its name, type, lifetime and hash slot. No other module spells a key.

One session, all in the slot of `{s:<session_id>}`, until the session is deleted:

    vb:{s:<id>}:state      hash    info (msgpack), status, reward, per_call, per_branch, reward_metadata, error, closed_at,
                                   updated_at, leased, bytes (of the calls' arrays and texts, uncompressed), scored (how many scores
                                   were stored), accounting
    vb:{s:<id>}:calls      list    record bytes in commit order; append-only. A replayed call's is a reference to a record of another
                                   session: 0xc1, which begins no record, and [session_id, number] (msgpack)
    vb:{s:<id>}:forks      zset    session_id of each session that replays this one, by when it was announced; while there are any, this one
                                   is not deleted
    vb:{s:<id>}:index      hash    call_id -> digest of its record: makes a repeated commit a no-op and detects a conflicting one
    vb:{s:<id>}:intents    hash    call_id -> Intent (msgpack), which names its process; the commit removes it, a crash leaves it dangling
    vb:{s:<id>}:delivered  set     call_ids whose reply was flushed to the harness
    vb:{s:<id>}:log        string  the end of the agent's output, if its node sent it
    vb:{s:<id>}:media:<created>  hash  digest -> bytes of each image that its calls' histories have; until the images are released, after
                                   all others. <created>: microseconds of its creation
    vb:{s:<id>}:scores     hash    <scorer>=<call_id> -> what that scorer says of the tokens that the call sampled; fixed once
                                   the session was leased
    vb:{s:<id>}:answering  hash    call_id of a recorded call -> process that answers it; until it has told whether the reply was
                                   delivered, or the session is closed

Images, each in the slot of `{m:<sha256>}`, until the last session that refers to it is deleted:

    vb:{m:<sha256>}:bytes    string  what the harness sent
    vb:{m:<sha256>}:holders  hash    <created>:<session_id> of each session that refers to it -> ''

Listings, in slots of their own. Written before the session and removed after it, so readers skip an entry without a session:

    vb:sessions            zset    every session, all scores 0, members ordered by creation time
    vb:{g:<group>}:sessions zset   the same for one group id
    vb:{r:<run>}:sessions  zset   the same for one run
    vb:unclosed            zset    session_id of every unclosed session, by when it was last known active

The serving processes; kept for good:

    vb:processes           zset    process -> when it counts as dead, in seconds of the server's clock; kept an hour longer
    vb:cuts                stream  session_id whose calls are to be ended in every process; about the newest thousand

Delivery, all in the slot of `{delivery}`, so that a lease is one script; kept for good (an acknowledged group shrinks). A group id
may be reused; each use is a round, and a group's reference is `<round>:<group_id>`. The rows of one policy that were leased on their
own are a group of their own, `<round>/<policy>=<group_id>`:

    vb:{delivery}:groups     hash  reference -> group (msgpack): size, members, status, deliveries, oldest version, place
    vb:{delivery}:rounds     hash  group_id -> the round being filled
    vb:{delivery}:members    hash  session_id -> reference
    vb:{delivery}:ready      zset  reference, in the order in which groups became ready
    vb:{delivery}:stale      zset  reference of a ready group that was passed over, by its oldest version
    vb:{delivery}:leases     hash  lease_id -> lease (msgpack): references, consumer, status; kept a day after its end
    vb:{delivery}:deadlines  zset  lease_id of an active lease, by deadline
    vb:{delivery}:ended      zset  lease_id of an ended lease, by when it ended
    vb:{delivery}:dead       zset  reference of a dead group, by when it died
    vb:{delivery}:counts     hash  state -> number of groups; `place` numbers the groups that became ready; `taken` counts those leased
                                   under `version_seen`, the newest weight version seen here; other policies' have `:<policy>` appended
    vb:{delivery}:totals     hash  state or event -> how often, since the store began
    vb:{delivery}:filling    zset  reference of a filling group, by when its last member came
    vb:{delivery}:policies   set   named models whose rows were filled into groups; without the default policy
    vb:{delivery}:arrivals   stream one entry, replaced whenever a group becomes ready: waiting consumers read it
    vb:{delivery}:claims     hash  consumer that got nothing -> what it wants, and since when (msgpack); seconds after its last request
    vb:{delivery}:opening    hash  admitted group_id of which no member has closed -> its sessions (msgpack)
    vb:{delivery}:admitted   hash  admitted session_id -> group_id, while that group is opening
    vb:{delivery}:unseen     zset  session_id in `admitted` not yet known to exist, by when it was admitted
    vb:{delivery}:announced  zset  session_id about to enter a group or to be deleted, by time; until filled or retracted
    vb:{delivery}:requests   hash  session_id -> CloseRequest (msgpack) of the announcement
    vb:{delivery}:outcomes   hash  session_id -> what it added to the numbers of the run (msgpack), until its group is acknowledged
    vb:{delivery}:cells      hash  <start>=<curve> -> sums of a cell of the run (msgpack), see proxy/store/run.py
    vb:{delivery}:curves     hash  curve, `<axis>=<run>=<policy>=<label>` -> the starts of its cells, ascending (msgpack)
    vb:{delivery}:runs       hash  run -> {since, at, curves, ended_at, hidden} (msgpack), `RunRecord` of proxy/store/run.py
    vb:{delivery}:run_groups hash  <run>=<state>=<cause> -> how many of the run's groups are in the state

Weights, all in the slot of `{weights}`, kept for good. Those of other policies than the default have `:<policy>` appended:

    vb:{weights}:current   string  WeightState (msgpack)
    vb:{weights}:history   list    WeightState (msgpack), newest first, at most a thousand
    vb:{weights}:lock      string  owner of the one push; expires
    vb:{weights}:fence     string  greatest fencing token that a holder of the lock was given
    vb:{weights}:identity  string  this store's name among those whose services update the same engine; one for all policies

What is still to be scored, all in the slot of `{scores}`; a job is `<scorer>=<session_id>`, kept until it is done:

    vb:{scores}:due        zset    job, by when it may be taken: a job that is worked at, by when another process may take it
    vb:{scores}:jobs       hash    job -> ScoreJob (msgpack) of proxy/store/score_jobs.py
    vb:{scores}:taken      hash    job -> how often it was taken; since:job -> when first, or first after it got on
    vb:{scores}:asked      hash    job -> how often it was asked for

Engines added at run time, in their own slot; kept until they are removed:

    vb:engines             hash    name -> StoredEngine (msgpack): URL or watched name, policy

Projects, in their own slot; kept until they are removed:

    vb:projects            hash    name -> Project (msgpack), with sha256 of its secrets

The build, in its own slot; kept for good:

    vb:level               string  the least level (`proxy.store.service.LEVEL`) of a build that may serve the store

Log-outs from the pages, each in a slot of its own:

    vb:logout:<digest>     string  sha256 of a cookie that opens nothing any more, in hex; until the cookie would have ended

Retention, in its own slot:

    vb:{retention}:lock    string  owner of the right to archive and delete; expires
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, TypeVar

import msgspec

SESSIONS = "vb:sessions"
UNCLOSED = "vb:unclosed"

LEVEL = "vb:level"
PROCESSES = "vb:processes"
ENGINES = "vb:engines"
PROJECTS = "vb:projects"
SCORES_DUE = "vb:{scores}:due"
SCORES_JOBS = "vb:{scores}:jobs"
SCORES_TAKEN = "vb:{scores}:taken"
SCORES_ASKED = "vb:{scores}:asked"
CUTS = "vb:cuts"


def log_out(cookie_digest: bytes) -> str:
    return f"vb:logout:{cookie_digest.hex()}"


DELIVERY = tuple(
    f"vb:{{delivery}}:{name}"
    for name in (
        "groups",
        "rounds",
        "members",
        "ready",
        "stale",
        "leases",
        "deadlines",
        "ended",
        "dead",
        "counts",
        "announced",
        "requests",
        "filling",
        "claims",
        "opening",
        "admitted",
        "totals",
        "arrivals",
        "unseen",
        "policies",
        "outcomes",
        "cells",
        "curves",
        "runs",
        "run_groups",
    )
)
"""In the order in which `scripts/_delivery.lua` unpacks them."""
GROUP_TOTALS = "vb:{delivery}:totals"
GROUP_POLICIES = "vb:{delivery}:policies"
ARRIVALS = "vb:{delivery}:arrivals"

WEIGHTS_IDENTITY = "vb:{weights}:identity"
RETENTION_LOCK = "vb:{retention}:lock"

_Key = Callable[[str], str]

state: _Key = "vb:{{s:{}}}:state".format
calls: _Key = "vb:{{s:{}}}:calls".format
index: _Key = "vb:{{s:{}}}:index".format
intents: _Key = "vb:{{s:{}}}:intents".format
delivered: _Key = "vb:{{s:{}}}:delivered".format
log: _Key = "vb:{{s:{}}}:log".format
scores: _Key = "vb:{{s:{}}}:scores".format
answering: _Key = "vb:{{s:{}}}:answering".format
forks: _Key = "vb:{{s:{}}}:forks".format
"""Each makes a session's key from its id, without a function of Python."""


def media(session_id: str, created_at: float) -> str:
    return f"vb:{{s:{session_id}}}:media:{int(created_at * 1e6)}"


def media_bytes(digest: str) -> str:
    return f"vb:{{m:{digest}}}:bytes"


def media_holders(digest: str) -> str:
    return f"vb:{{m:{digest}}}:holders"


def media_holder(session_id: str, created_at: float) -> str:
    return f"{int(created_at * 1e6)}:{session_id}"


def group_sessions(group_id: str) -> str:
    return f"vb:{{g:{group_id}}}:sessions"


def run_sessions(run: str) -> str:
    return f"vb:{{r:{run}}}:sessions"


def weights(name: Literal["current", "history", "lock", "fence"], policy: str) -> str:
    return f"vb:{{weights}}:{name}:{policy}" if policy else f"vb:{{weights}}:{name}"


def listing_member(created_at: float, session_id: str) -> str:
    """Sorts by creation time: the microseconds since the epoch are zero-padded."""
    return f"{int(created_at * 1e6):020d}:{session_id}"


def parse_member(member: str) -> tuple[str, float]:
    """Session id and creation time, in epoch seconds, of a listing member."""
    created_at, _, session_id = member.partition(":")
    return session_id, int(created_at) / 1e6


def session(session_id: str) -> tuple[str, ...]:
    """All keys of one session; `forks` is the last."""
    return tuple(key(session_id) for key in (state, calls, index, intents, delivered, answering, log, scores, forks))


# Stored values: msgpack behind a schema version. A newer build's value raises `StoredValueError` instead of being half understood.

SCHEMA = 1
T = TypeVar("T")


class StoredValueError(Exception):
    """A value in the store that this build cannot read."""


pack: Callable[[Any], bytes] = msgspec.msgpack.Encoder().encode


def unpack(blob: bytes, kind: type[T]) -> T:
    try:
        return msgspec.msgpack.decode(blob, type=kind)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise StoredValueError(f"a stored {getattr(kind, '__name__', kind)} cannot be read: {error}") from error


def pack_versioned(value: Any) -> bytes:
    """`[schema, value]`."""
    return pack((SCHEMA, value))


def unpack_versioned(blob: bytes, kind: type[T]) -> T:
    schema, raw = unpack(blob, tuple[int, msgspec.Raw])
    if schema != SCHEMA:
        raise StoredValueError(f"a stored {kind.__name__} has schema {schema}; this build reads {SCHEMA}")
    return unpack(bytes(raw), kind)


def parse_hash(answer: Mapping[bytes, bytes] | Sequence[bytes]) -> dict[bytes, bytes]:
    """A hash as redis-py answers HGETALL: a mapping for a single command, flat within a pipeline."""
    pairs = answer.items() if isinstance(answer, Mapping) else zip(answer[::2], answer[1::2], strict=True)
    return dict(pairs)
