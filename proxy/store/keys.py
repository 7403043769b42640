"""Every key in Redis: its name, type, lifetime and hash slot. No other module spells a key.

One session, all in the slot of `{s:<session_id>}`, until the session is deleted:

    vb:{s:<id>}:state      hash    info (msgpack), status, reward, per_call, per_branch, reward_metadata, error, closed_at,
                                   updated_at, leased, bytes (of the calls' arrays and texts, not compressed)
    vb:{s:<id>}:calls      list    record bytes in commit order; only ever appended to
    vb:{s:<id>}:index      hash    call_id -> digest of its record: makes a repeated commit a no-op and finds a conflicting one
    vb:{s:<id>}:intents    hash    call_id -> Intent (msgpack), which names its process; removed by the commit, left dangling by a
                                   crash
    vb:{s:<id>}:delivered  set     call_ids whose reply was flushed to the harness

Listing, slots of their own; written before the session and removed after it, so readers skip what they do not find:

    vb:sessions            zset    every session, all scores 0, members ordered by time of creation
    vb:{g:<group>}:sessions zset   the same for one group id
    vb:unclosed            zset    session_id of every session that is not closed, by when it was last known to be active

The processes that serve, kept for good:

    vb:processes           zset    process -> when it counts as dead, in seconds of the server's clock; an hour after that
    vb:cuts                stream  session_id whose calls are to be ended wherever they run; the newest thousand or so

Delivery, all in the slot of `{delivery}` so that a lease is one script; kept for good (a leased group shrinks when it is
acknowledged). A group id may be used again; each use is a round, and a group's reference is `<round>:<group_id>`. The rows of one
policy that were leased apart are a group of their own, `<round>/<policy>=<group_id>`:

    vb:{delivery}:groups     hash  reference -> group (msgpack): size, members, status, deliveries, oldest version, place
    vb:{delivery}:rounds     hash  group_id -> the round being filled
    vb:{delivery}:members    hash  session_id -> reference
    vb:{delivery}:ready      zset  reference, by the order in which groups became ready
    vb:{delivery}:stale      zset  reference of a ready group that was passed over, by its oldest version
    vb:{delivery}:leases     hash  lease_id -> lease (msgpack): references, consumer, status; a day after its end
    vb:{delivery}:deadlines  zset  lease_id of an active lease, by its deadline
    vb:{delivery}:ended      zset  lease_id of an ended lease, by its end
    vb:{delivery}:dead       zset  reference of a dead group, by its time of death
    vb:{delivery}:counts     hash  state -> number of groups; `place` numbers the groups that became ready; `taken` were
                                   leased under `version_seen`, the newest weight version that was seen here; another policy's have
                                   `:<policy>` behind them
    vb:{delivery}:totals     hash  state or event -> how often, since the store began
    vb:{delivery}:filling    zset  reference of a filling group, by when its last member came
    vb:{delivery}:policies   set   named models whose rows were filled into groups; the default policy's is not among them
    vb:{delivery}:arrivals   stream one entry, new whenever a group became ready: waiting consumers read it
    vb:{delivery}:claims     hash  consumer that got nothing -> since when it wants what (msgpack); seconds after its last request
    vb:{delivery}:opening    hash  group_id let in of which no member has closed -> its sessions (msgpack)
    vb:{delivery}:admitted   hash  session_id let in -> group_id, as long as that group is only opening
    vb:{delivery}:unseen     zset  session_id in `admitted` that was not yet seen to exist, by when it was let in
    vb:{delivery}:announced  zset  session_id on its way into a group or to its deletion, by time; until filled or retracted
    vb:{delivery}:requests   hash  session_id -> CloseRequest (msgpack) of the announcement

Weights, all in the slot of `{weights}`, kept for good. Those of the default policy; another one's have `:<policy>` behind them:

    vb:{weights}:current   string  WeightState (msgpack)
    vb:{weights}:history   list    WeightState (msgpack), newest first, at most a thousand
    vb:{weights}:lock      string  owner of the one push; expires
    vb:{weights}:fence     string  the greatest fencing token that a holder of the lock was given
    vb:{weights}:identity  string  name of this store among those whose services update the same engine; one for all policies

Engines that were added at run time, in a slot of its own; kept until they are removed:

    vb:engines             hash    name -> StoredEngine (msgpack): URL or watched name, policy

Retention, in a slot of its own:

    vb:{retention}:lock    string  owner of the one right to archive and delete; expires
"""

from __future__ import annotations

from typing import Any, Literal, TypeVar

import msgspec

SESSIONS = "vb:sessions"
UNCLOSED = "vb:unclosed"

PROCESSES = "vb:processes"
ENGINES = "vb:engines"
CUTS = "vb:cuts"

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
    )
)
"""In the order in which `scripts/_delivery.lua` names them."""
GROUP_TOTALS = "vb:{delivery}:totals"
GROUP_POLICIES = "vb:{delivery}:policies"
ARRIVALS = "vb:{delivery}:arrivals"

WEIGHTS_IDENTITY = "vb:{weights}:identity"
RETENTION_LOCK = "vb:{retention}:lock"


def state(session_id: str) -> str:
    return f"vb:{{s:{session_id}}}:state"


def calls(session_id: str) -> str:
    return f"vb:{{s:{session_id}}}:calls"


def index(session_id: str) -> str:
    return f"vb:{{s:{session_id}}}:index"


def intents(session_id: str) -> str:
    return f"vb:{{s:{session_id}}}:intents"


def delivered(session_id: str) -> str:
    return f"vb:{{s:{session_id}}}:delivered"


def group_sessions(group_id: str) -> str:
    return f"vb:{{g:{group_id}}}:sessions"


def weights(name: Literal["current", "history", "lock", "fence"], policy: str) -> str:
    return f"vb:{{weights}}:{name}:{policy}" if policy else f"vb:{{weights}}:{name}"


def listing_member(created_at: float, session_id: str) -> str:
    """A member that sorts by creation time; zero-padded microseconds since the epoch, so that text order is time order."""
    return f"{int(created_at * 1e6):020d}:{session_id}"


def listed(member: str) -> str:
    """The session id of a listing member."""
    return member.partition(":")[2]


def listed_at(member: str) -> float:
    """When the session of a listing member was created, in epoch seconds."""
    return int(member.partition(":")[0]) / 1e6


# The small values of the store as msgpack, each behind a schema version.
#
# A value written by a newer build than this one raises `StoredValueError` instead of being half understood.


SCHEMA = 1
T = TypeVar("T")


class StoredValueError(Exception):
    """A value in the store that this build cannot read."""


def pack(value: Any) -> bytes:
    return msgspec.msgpack.encode(value)


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
