"""Leases without their batches: extended by one thread, ended once, against a real HTTP server that follows a script."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator

import pytest

from tests.support.service.scripted_service import Answer, ScriptedService, error_answer, json_answer
from trainer_client.client import TrainerClient
from trainer_client.errors import LeaseLost
from trainer_client.held_leases import HeldLeases

DONE = json_answer({"groups": ["g1"]})
LOST = error_answer(409, "conflict", "the lease expired")


@pytest.fixture
def service(scripted_server: ScriptedService) -> ScriptedService:
    scripted = scripted_server.reset()
    for lease_id in ("a", "b"):
        scripted.script(f"POST /batches/{lease_id}/extend", json_answer({"expires_at": 3000.0}))
        scripted.script(f"POST /batches/{lease_id}/ack", DONE)
        scripted.script(f"POST /batches/{lease_id}/nack", DONE)
    return scripted


@pytest.fixture
def client(service: ScriptedService) -> Iterator[TrainerClient]:
    with TrainerClient(service.url, "trainer-token", retry_seconds=0.2) as client:
        yield client


def count(service: ScriptedService, path: str) -> int:
    return service.paths().count(f"/batches/{path}")


def test_all_leases_are_extended_and_given_back_in_the_end(service: ScriptedService, client: TrainerClient) -> None:
    with HeldLeases(client, 0.4) as leases:
        leases.hold("a")
        leases.hold("b")
        service.wait_for(lambda: min(count(service, "a/extend"), count(service, "b/extend")) >= 3)
    assert service.received[0].body == {"lease_seconds": 0.4}
    assert service.paths()[-2:] == ["/batches/a/nack", "/batches/b/nack"]
    assert "lease-keeper" not in [thread.name for thread in threading.enumerate()]


def test_an_acknowledged_lease_is_neither_extended_nor_given_back(service: ScriptedService, client: TrainerClient) -> None:
    with HeldLeases(client, 0.4) as leases:
        leases.hold("a")
        leases.hold("b")
        leases.ack("a")
        extended = count(service, "a/extend")
        service.wait_for(lambda: count(service, "b/extend") >= 3)
        # One may have been on its way when the acknowledgement came.
        assert count(service, "a/extend") <= extended + 1
    assert (count(service, "a/nack"), count(service, "b/nack")) == (0, 1)


def test_a_lease_that_another_process_ended_is_let_go(service: ScriptedService, client: TrainerClient) -> None:
    service.script("POST /batches/a/extend", LOST)
    with HeldLeases(client, 0.4) as leases:
        leases.hold("a")
        leases.hold("b")
        service.wait_for(lambda: count(service, "b/extend") >= 3)
    assert (count(service, "a/extend"), count(service, "a/nack"), count(service, "b/nack")) == (1, 0, 1)


def test_a_failed_extension_is_tried_again(service: ScriptedService, client: TrainerClient) -> None:
    failures = (error_answer(503, "store_unavailable", "loading"), Answer(drop=True))
    service.script("POST /batches/a/extend", *failures, json_answer({"expires_at": 3000.0}))
    with HeldLeases(client, 0.4) as leases:
        leases.hold("a")
        service.wait_for(lambda: count(service, "a/extend") >= 4)
    assert count(service, "a/nack") == 1


def test_a_lease_held_elsewhere_may_be_acknowledged_or_be_lost(service: ScriptedService, client: TrainerClient) -> None:
    with HeldLeases(client, 60) as leases:
        leases.ack("a")
        service.script("POST /batches/b/ack", LOST)
        with pytest.raises(LeaseLost, match="the lease expired"):
            leases.ack("b")
    assert service.paths() == ["/batches/a/ack", "/batches/b/ack"]


def test_a_thread_that_is_ended_before_it_waits_ends_at_once(service: ScriptedService, client: TrainerClient) -> None:
    """It once missed the notification, and `close` waited for half of the lease."""
    for _ in range(20):
        with HeldLeases(client, 3600) as leases:
            leases.hold("a")
    assert count(service, "a/nack") == 20


def test_leases_a_silent_service_is_not_told_of_expire_and_one_line_says_so(
    service: ScriptedService, client: TrainerClient, caplog: pytest.LogCaptureFixture
) -> None:
    service.script("POST /batches/a/nack", error_answer(503, "store_unavailable", "Redis is down", retry_after="0.1"))
    with caplog.at_level(logging.WARNING), HeldLeases(client, 60) as leases:
        leases.hold("a")
        leases.hold("b")
    assert [record.message for record in caplog.records] == [
        f"up to 2 leases could not be given back and will expire: POST {service.url}/batches/a/nack: 503 Redis is down"
    ]
    assert count(service, "b/nack") == 0
