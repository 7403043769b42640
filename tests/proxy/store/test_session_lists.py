"""Many sessions read at once, and the stamps that tell which have changed: on a real Redis, plain and cluster."""

from __future__ import annotations

from contract.sessions import TokenSums
from proxy.store.keys import parse_member
from proxy.store.states import Intent, SessionInfo
from tests.support.service.redis_server import Store


def info(name: str, at: float, run: str = "default") -> SessionInfo:
    return SessionInfo(name, b"", created_at=at, run=run)


async def test_many_sessions_are_read_as_one_by_one(store: Store) -> None:
    for number in range(5):
        await store.sessions.create(info(f"s{number}", 10.0 + number))
    names = ["s3", "gone", "s0"]
    assert await store.sessions.listing.load_many(names) == [await store.sessions.load(name) for name in names]
    assert await store.sessions.listing.load_many([]) == []


async def test_a_stamp_changes_with_whatever_a_list_shows(store: Store) -> None:
    await store.sessions.create(info("s", 10.0))

    async def stamp() -> bytes:
        return (await store.sessions.listing.load_stamps(["s"]))[0]

    seen = [await stamp()]
    await store.sessions.begin("s", 0, Intent("c1", None, b"", "r", 11.0))
    await store.sessions.commit("s", "c1", {"c1": b"\x90"})
    seen.append(await stamp())
    await store.sessions.begin_close("s")
    seen.append(await stamp())
    await store.sessions.close("s", "completed", 0.5, None, 20.0)
    seen.append(await stamp())
    await store.sessions.note_accounting("s", TokenSums(sampled_tokens=1, exported_tokens=1))
    seen.append(await stamp())
    await store.sessions.set_reward("s", 0.75, {}, {}, {})
    seen.append(await stamp())
    assert len(set(seen)) == len(seen) and await stamp() == seen[-1]
    await store.sessions.delete("s")
    assert await stamp() == b""


async def test_the_newest_members_are_listed_by_run_and_time(store: Store) -> None:
    for number, run in enumerate(("a", "b", "a", "b", "a")):
        await store.sessions.create(info(f"s{number}", 10.0 + number, run))

    async def listed(**wanted: object) -> list[str]:
        given = {"run": None, "after": None, "cursor": None, "limit": 9} | wanted
        return [parse_member(each)[0] for each in await store.sessions.listing.list_members(**given)]  # type: ignore[arg-type]

    assert await listed() == ["s4", "s3", "s2", "s1", "s0"]
    assert await listed(run="a", limit=2) == ["s4", "s2"]
    assert await listed(after=12.0) == ["s4", "s3", "s2"]
    (third,) = [
        each for each in await store.sessions.listing.list_members(run=None, after=None, cursor=None, limit=9) if "s2" in each
    ]
    assert await listed(cursor=third) == ["s1", "s0"]
