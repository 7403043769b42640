"""The only clock of leases, deadlines and retention is Redis's: services whose own clocks are days apart do each other no harm."""

from __future__ import annotations

import time
from typing import Any

import pytest

from proxy.api import closing
from proxy.store.service import RedisClock
from proxy.store.states import SessionInfo
from tests.support.engine.scripted_engine import ScriptedEngine
from tests.support.engine.scripted_fixtures import fresh_engine
from tests.support.service.redis_server import Store
from tests.support.service.running_service import TRAINER, RunningService, wait_until

__all__ = ["fresh_engine"]

DAYS = 2 * 86400.0


@pytest.mark.case(69)
@pytest.mark.parametrize("apart", [DAYS, -DAYS])
def test_leases_and_groups_outlive_a_service_whose_clock_is_days_off(
    engine: ScriptedEngine, redis_url: str, monkeypatch: pytest.MonkeyPatch, apart: float
) -> None:
    """A clock that was two hours ahead took another's lease, and one two days ahead made a dead letter of half a group."""
    monkeypatch.setattr(closing, "SWEEP_SECONDS", 0.05)
    own = time.time
    with RunningService(engine.url, redis_url, group={"timeout_seconds": 3600.0}) as service:
        group: dict[str, Any] = {"group_id": "half", "group_size": 2}
        first, second = service.session(**group), service.session(**group)
        first.ask("q")
        first.close(reward=1.0)
        alone = service.session()
        alone.ask("q")
        alone.close(reward=1.0)
        leased = service.request("POST", "/batches/lease", TRAINER, json={"max_groups": 1, "lease_seconds": 600})
        assert leased.status_code == 200, leased.text
        lease = leased.json()
        assert abs(lease["expires_at"] - own() - 600) < 60

        monkeypatch.setattr(time, "time", lambda: own() + apart)
        with RunningService(engine.url, redis_url, group={"timeout_seconds": 3600.0}, session_idle_seconds=3600.0) as off:
            services = off._server.config.app._services
            swept: list[int] = []
            tend = services.delivery.tend

            async def tending(*args: object) -> int:
                swept.append(await tend(*args))
                return swept[-1]

            monkeypatch.setattr(services.delivery, "tend", tending)
            wait_until(lambda: len(swept) >= 2, 60, "the other service has swept")
            assert off.request("POST", "/batches/lease", TRAINER, json={"max_groups": 1}).status_code == 204
            assert off.request("GET", "/batches/dead").json()["dead_letters"] == []
            assert off.request("GET", f"/sessions/{second.session_id}").json()["status"] == "open"
            late = off.session()
            assert abs(off.request("GET", f"/sessions/{late.session_id}").json()["created_at"] - own()) < 60
            second.ask("q")
            second.close(reward=0.0)
            assert off.request("POST", f"/batches/{lease['lease_id']}/extend", TRAINER, json={}).status_code == 200
            whole = off.request("POST", "/batches/lease", TRAINER, json={"max_groups": 1})
            assert [group["group_id"] for group in whole.json()["groups"]] == ["half"]
        acked = service.request("POST", f"/batches/{lease['lease_id']}/ack", TRAINER)
        assert acked.status_code == 200, acked.text


@pytest.mark.case(69)
async def test_what_a_session_is_written_at_is_rediss_time(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    now = RedisClock(store.connection).now
    began = await now()
    monkeypatch.setattr(time, "time", lambda: 1.0)
    await store.sessions.create(SessionInfo("s", b"hash", began))
    await store.sessions.commit("s", "c", {"c": b"x"})
    written = [await store.sessions.load("s")]
    written.append(await store.sessions.set_reward("s", 1.0, {}, {}, {}))
    written.append(await store.sessions.begin_close("s"))
    ended = await now()
    # The servers of a cluster share this machine's clock.
    assert all(state is not None and began - 1 <= state.updated_at <= ended + 1 for state in written)
