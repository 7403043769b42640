"""The trainer's side of a lease, against a real HTTP server that follows a script."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import httpx
import msgpack
import numpy as np
import pytest

from contract.errors import AuthenticationFailed, ClientClosed, NoAnswer, ServiceError, ServiceUnavailable
from reconstruct.media import Media
from reconstruct.spans import ModeSpan, Span
from tests.support.service.running_service import wait_until
from tests.support.service.scripted_service import Answer, ScriptedService, error_answer, json_answer
from tests.support.sessions.pictures import digest_of, picture
from tests.support.sessions.training_rows import lease_body, leased, trajectory
from trainer_client.client import TrainerClient
from trainer_client.errors import InvalidAnswer, LeaseLost
from trainer_client.wire import ACCEPT, LeaseReader

LEASE = "POST /batches/lease"
ACK, NACK, EXTEND = (f"POST /batches/lease-1/{action}" for action in ("ack", "nack", "extend"))
NOTHING = Answer(204)
DONE = json_answer({"groups": ["g1"]})


@pytest.fixture
def service(scripted_server: ScriptedService) -> ScriptedService:
    scripted = scripted_server.reset()
    scripted.script(LEASE, leased([trajectory()]))
    scripted.script(ACK, DONE)
    scripted.script(NACK, DONE)
    scripted.script(EXTEND, json_answer({"lease_id": "lease-1", "expires_at": 3000.0}))
    return scripted


@pytest.fixture
def client(service: ScriptedService) -> Iterator[TrainerClient]:
    with TrainerClient(service.url, "trainer-token", consumer="trainer-1", retry_seconds=5) as client:
        yield client


def actions(service: ScriptedService) -> list[str]:
    return [path.rpartition("/")[2] for path in service.paths()]


def test_a_batch_is_acknowledged_when_its_block_ends_well(service: ScriptedService, client: TrainerClient) -> None:
    with next(client.batches(max_groups=2, max_staleness=3, wait_seconds=1, lease_seconds=60)) as batch:
        assert (batch.lease_id, batch.expires_at, batch.weight_version) == ("lease-1", 2000.0, 7)
        assert actions(service) == ["lease"]
    assert actions(service) == ["lease", "ack"]
    asked = service.received[0]
    assert asked.body == {
        "max_groups": 2, "max_staleness": 3, "wait_seconds": 1, "lease_seconds": 60, "consumer": "trainer-1",
    }  # fmt: skip
    assert (asked.headers["accept"], asked.headers["authorization"]) == (ACCEPT, "Bearer trainer-token")


def test_a_batch_is_given_back_when_its_block_raises(service: ScriptedService, client: TrainerClient) -> None:
    with pytest.raises(ZeroDivisionError), next(client.batches()):
        _ = 1 / 0
    assert actions(service) == ["lease", "nack"]


def test_a_batch_without_a_block_is_not_acknowledged_or_given_back(service: ScriptedService, client: TrainerClient) -> None:
    assert len(next(client.batches())) == 1
    client.close()
    assert actions(service) == ["lease"]


def test_polling_goes_on_while_there_is_nothing(service: ScriptedService, client: TrainerClient) -> None:
    service.script(LEASE, NOTHING, NOTHING, leased([trajectory()]))
    with next(client.batches(wait_seconds=0)):
        pass
    assert actions(service) == ["lease", "lease", "lease", "ack"]


def test_lease_is_none_when_nothing_came(service: ScriptedService, client: TrainerClient) -> None:
    service.script(LEASE, NOTHING)
    assert client.lease() is None


def test_waiting_for_a_batch_may_take_longer_than_the_usual_timeout(service: ScriptedService) -> None:
    service.script(LEASE, replace(leased([trajectory()]), delay_seconds=0.6))
    with TrainerClient(service.url, "t", timeout_seconds=0.3, retry_seconds=0) as client:
        assert client.lease(wait_seconds=20) is not None
        with pytest.raises(NoAnswer, match="timed out"):
            client.lease(wait_seconds=0)


def test_batches_end_when_stop_says_so(service: ScriptedService, client: TrainerClient) -> None:
    service.script(LEASE, NOTHING)
    assert list(client.batches(wait_seconds=0, stop=lambda: len(service.received) >= 3)) == []
    assert actions(service) == ["lease"] * 3


def test_a_batch_that_arrives_after_stop_is_given_back(service: ScriptedService, client: TrainerClient) -> None:
    assert list(client.batches(stop=lambda: len(service.received) >= 1)) == []
    assert actions(service) == ["lease", "nack"]


def test_close_from_another_thread_ends_the_polling(service: ScriptedService, client: TrainerClient) -> None:
    # Long enough that the client is closed while the first request is under way.
    service.script(LEASE, Answer(204, delay_seconds=1.0))
    seen: list[object] = []
    polling = threading.Thread(target=lambda: seen.extend(client.batches(wait_seconds=0.2)))
    polling.start()
    service.wait_for(lambda: bool(service.received))
    client.close()
    polling.join(120)
    assert not polling.is_alive() and seen == [] and actions(service) == ["lease"]


def test_closing_the_client_inside_a_block_still_acknowledges(service: ScriptedService, client: TrainerClient) -> None:
    batches = client.batches()
    with next(batches):
        client.close()
    assert actions(service) == ["lease", "ack"]
    assert list(batches) == []
    with pytest.raises(ClientClosed):
        client.lease()


@pytest.mark.parametrize("status", [404, 409])
def test_a_lost_lease_is_told_at_the_end_of_the_block(service: ScriptedService, client: TrainerClient, status: int) -> None:
    service.script(ACK, error_answer(status, "conflict", "lease 'lease-1' expired"))
    with pytest.raises(LeaseLost, match="lease 'lease-1' expired") as lost, next(client.batches()):
        pass
    assert (lost.value.status, lost.value.code, lost.value.attempts) == (status, "conflict", 1)
    assert actions(service) == ["lease", "ack"]


def test_a_lost_lease_after_a_lost_answer_may_have_been_acknowledged(service: ScriptedService, client: TrainerClient) -> None:
    service.script(ACK, Answer(drop=True), error_answer(404, "not_found", "no such lease"))
    with pytest.raises(LeaseLost, match="may have succeeded"), next(client.batches()):
        pass


def test_the_error_of_the_block_is_not_hidden_by_a_lost_lease(service: ScriptedService, client: TrainerClient) -> None:
    service.script(NACK, error_answer(409, "conflict", "expired"))
    with pytest.raises(ZeroDivisionError) as failure, next(client.batches()):
        _ = 1 / 0
    assert "could not be given back" in failure.value.__notes__[0]


def test_an_explicit_ack_or_nack_is_not_repeated_at_the_end(service: ScriptedService, client: TrainerClient) -> None:
    batches = client.batches()
    with next(batches) as batch:
        batch.ack()
    with next(batches) as batch:
        batch.nack()
    assert actions(service) == ["lease", "ack", "lease", "nack"]
    with pytest.raises(LeaseLost, match="is nacked"):
        batch.ack()


def test_extend_moves_the_deadline(service: ScriptedService, client: TrainerClient) -> None:
    batch = next(client.batches(lease_seconds=60))
    assert batch.extend() == batch.expires_at == 3000.0
    assert batch.extend(90) == 3000.0
    assert [request.body for request in service.received[1:]] == [{"lease_seconds": 60}, {"lease_seconds": 90}]


def keepers() -> list[str]:
    """The names of the threads that extend leases."""
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("lease-keeper")]


def test_the_lease_is_extended_while_its_block_runs(service: ScriptedService, client: TrainerClient) -> None:
    with next(client.batches(lease_seconds=0.4)) as batch:
        started = time.monotonic()
        assert keepers() == ["lease-keeper-lease-1"]
        service.wait_for(lambda: actions(service).count("extend") >= 3)
        assert time.monotonic() - started >= 0.5
    assert batch.expires_at == 3000.0
    # The keeper's last extension may have been on its way.
    assert "ack" in actions(service)[-2:]
    assert keepers() == []


def test_a_lease_that_is_not_kept_is_not_extended(service: ScriptedService, client: TrainerClient) -> None:
    with next(client.batches(lease_seconds=0.1, keep=False)):
        assert keepers() == []
    assert actions(service) == ["lease", "ack"]


def test_the_keeper_outlives_a_failed_extension(service: ScriptedService, client: TrainerClient) -> None:
    service.script(
        EXTEND, error_answer(503, "store_unavailable", "loading"), Answer(drop=True), json_answer({"expires_at": 1.0})
    )
    with next(client.batches(lease_seconds=0.4)) as batch:
        service.wait_for(lambda: actions(service).count("extend") >= 4)
    assert batch.expires_at == 1.0 and actions(service)[-1] == "ack"


def test_a_lease_the_keeper_finds_lost_is_told_at_the_end(service: ScriptedService, client: TrainerClient) -> None:
    service.script(EXTEND, error_answer(404, "not_found", "no such lease"))
    with pytest.raises(LeaseLost, match="no such lease"), next(client.batches(lease_seconds=0.2)) as batch:
        wait_until(lambda: batch._lease is not None and batch._lease.state == "lost", 120, "the keeper has its answer")
    assert "ack" not in actions(service)


def test_a_503_is_retried_after_the_time_it_names(service: ScriptedService, client: TrainerClient) -> None:
    refused = error_answer(503, "store_unavailable", "loading", retry_after="1")
    service.script(LEASE, refused, leased([trajectory()]))
    started = time.monotonic()
    assert client.lease() is not None
    assert time.monotonic() - started > 0.9
    assert actions(service) == ["lease", "lease"]


def test_lost_connections_and_502_are_retried(service: ScriptedService, client: TrainerClient) -> None:
    service.script(LEASE, Answer(drop=True), error_answer(502, "engine_failed", "x"), leased([trajectory()]))
    assert client.lease() is not None
    assert actions(service) == ["lease"] * 3


@pytest.mark.parametrize("encoding", ["json", "msgpack", "packed"])
@pytest.mark.parametrize("share", [0.1, 0.9])
def test_an_answer_that_breaks_off_is_asked_for_again_and_nothing_of_it_is_kept(
    service: ScriptedService, client: TrainerClient, encoding: str, share: float
) -> None:
    lost = leased([trajectory("t1")], [trajectory("t2")], encoding=encoding)
    begun = replace(lost, content=lost.content[: int(share * len(lost.content))], cut=True)
    service.script(LEASE, begun, leased([trajectory("t1")], [trajectory("t3")], encoding=encoding))
    batch = client.lease()
    assert [row.trajectory_id for row in batch.rows] == ["t1", "t3"]
    assert actions(service) == ["lease"] * 2


@pytest.mark.parametrize("encoding", ["json", "msgpack", "packed"])
def test_an_answer_that_ends_too_early_is_refused(service: ScriptedService, client: TrainerClient, encoding: str) -> None:
    """A gateway may end an answer properly that was broken off before it."""
    whole = leased([trajectory("t1")], [trajectory("t2")], encoding=encoding)
    for size in (len(whole.content) - 1, len(whole.content) // 2, 1):
        service.script(LEASE, replace(whole, content=whole.content[:size]))
        with pytest.raises(InvalidAnswer):
            client.lease()
    # Of JSON nothing can be read, not even whose lease it is.
    assert actions(service) == ["lease"] * 3 if encoding == "json" else ["lease", "nack"] * 2 + ["lease"]


def test_bytes_behind_the_end_of_an_answer_are_refused(service: ScriptedService, client: TrainerClient) -> None:
    whole = leased([trajectory()])
    service.script(LEASE, replace(whole, content=whole.content + b"\x00"))
    with pytest.raises(InvalidAnswer, match="behind its end"):
        client.lease()


def test_a_group_is_decoded_before_the_next_one_arrives() -> None:
    """The old bug: the client held the answer, its decoded copy and the rows: three times the batch."""
    reader, seen = LeaseReader(), list[int]()

    def arriving() -> Iterator[bytes]:
        encode = msgpack.packb
        body = lease_body(*([trajectory(name)] for name in "abc"), arrays="bytes")
        groups = body.pop("groups")
        yield encode({**body, "groups": []})[:-1] + b"\x93"
        for group in groups:
            yield encode(group)
            # It is asked for more bytes.
            seen.append(len(reader.groups))

    reader.read(httpx.Response(200, headers={"content-type": ACCEPT}, content=arriving()))
    assert seen == [1, 2, 3]
    assert [row.trajectory_id for group in reader.groups for row in group.trajectories] == ["a", "b", "c"]


def test_retries_end_before_a_wait_that_would_outlast_retry_seconds(service: ScriptedService) -> None:
    refused = [
        error_answer(503, "store_unavailable", "Redis is down", retry_after=seconds) for seconds in ("0.05", "0.05", "60")
    ]
    service.script(LEASE, *refused)
    with TrainerClient(service.url, "t", retry_seconds=30) as client, pytest.raises(ServiceUnavailable) as error:
        client.lease()
    assert (error.value.status, error.value.code, error.value.attempts) == (503, "store_unavailable", 3)


def test_a_request_that_had_waited_long_for_its_answer_is_retried_too(service: ScriptedService) -> None:
    """A service killed in the middle of a long poll ended the training loop, though it was back a moment later."""
    service.script(LEASE, Answer(delay_seconds=0.6, drop=True), leased([trajectory()]))
    with TrainerClient(service.url, "t", retry_seconds=0.5) as client:
        assert client.lease(wait_seconds=60) is not None


def test_a_service_that_is_not_there_is_named(service: ScriptedService) -> None:
    with TrainerClient("http://127.0.0.1:1", "t", retry_seconds=0.1) as client, pytest.raises(NoAnswer) as error:
        client.lease()
    assert not error.value.lost and "POST http://127.0.0.1:1/batches/lease" in str(error.value)


def test_stop_ends_the_polling_of_a_service_that_is_away() -> None:
    asked: list[int] = []
    with TrainerClient("http://127.0.0.1:1", "t") as client:
        assert list(client.batches(stop=lambda: asked.append(1) or len(asked) > 3)) == []  # type: ignore[func-returns-value]


@pytest.mark.parametrize(
    ("status", "kind"), [(401, AuthenticationFailed), (403, AuthenticationFailed), (400, ServiceError), (422, ServiceError)]
)
def test_an_error_of_ours_is_raised_at_once(
    service: ScriptedService, client: TrainerClient, status: int, kind: type[ServiceError]
) -> None:
    service.script(LEASE, error_answer(status, "bad_request", "max_groups is 0"))
    with pytest.raises(kind, match="max_groups is 0") as error:
        client.lease(max_groups=0)
    assert error.value.status == status and actions(service) == ["lease"]
    assert "trainer-token" not in str(error.value)


@pytest.mark.parametrize("encoding", ["json", "msgpack", "packed"])
def test_arrays_are_equal_in_every_encoding(service: ScriptedService, client: TrainerClient, encoding: str) -> None:
    sent = trajectory(prompt=[3, 151_935], versions=[4, 4, 5], reward=None)
    service.script(LEASE, leased([sent], encoding=encoding))
    batch = client.lease()
    (row,) = batch.rows
    for field in ("token_ids", "loss_mask", "logprobs"):
        got, expected = getattr(row, field), getattr(sent, field)
        assert got.dtype == (np.int32 if field == "loss_mask" else expected.dtype) and not got.flags.writeable
        np.testing.assert_array_equal(got, expected)
    assert row.weight_versions == (Span(4, 2, 4), Span(5, 4, 5))
    assert row.logprob_modes == sent.logprob_modes
    plain = ("trajectory_id", "session_id", "group_id", "task_id", "role", "reward", "call_ids", "metadata")
    assert [getattr(row, name) for name in plain] == [getattr(sent, name) for name in plain]


@pytest.mark.parametrize("encoding", ["json", "packed"])
def test_a_mask_adds_up_by_whichever_sum(service: ScriptedService, client: TrainerClient, encoding: str) -> None:
    """Python's own, over int8, said -56 of 200 tokens."""
    service.script(LEASE, leased([trajectory(prompt=[3], versions=[4] * 200)], encoding=encoding))
    batch = client.lease()
    assert batch is not None
    (row,) = batch.rows
    assert sum(row.loss_mask) == row.loss_mask.sum() == 200


BROKEN: dict[str, dict[str, Any]] = {
    "lengths": {"logprobs": np.zeros(3, np.float32)},
    "no finite logprob": {"logprobs": np.array([0, 0, -1, np.nan], np.float32)},
    "has a logprob": {"logprobs": np.array([0, -2, -1, -1], np.float32)},
    "values other than 0 and 1": {"loss_mask": np.array([0, 0, 1, 2], np.int8)},
    "first token is sampled": {"loss_mask": np.array([1, 0, 1, 1], np.int8)},
    "outside 0 to": {"token_ids": np.array([1, -2, 101, 102], np.int32)},
    "do not cover exactly": {"weight_versions": (Span(5, 2, 3),)},
    "is not a valid weight-version span": {"weight_versions": (Span(5, 2, 9),)},
    "Span\\(version=-1": {"weight_versions": (Span(-1, 2, 4),)},
    "logprob_modes do not cover exactly": {"logprob_modes": (ModeSpan("raw", 2, 3),)},
    "is not a valid span of a logprob mode": {"logprob_modes": (ModeSpan("raw", 2, 9),)},
    "ModeSpan\\(mode='logits'": {"logprob_modes": (ModeSpan("logits", 2, 4),)},
    "the reward is": {"reward": float("inf")},
}


@pytest.mark.parametrize("encoding", ["msgpack", "packed"])
@pytest.mark.parametrize("rule", BROKEN)
def test_a_row_that_breaks_a_rule_is_given_back(
    service: ScriptedService, client: TrainerClient, rule: str, encoding: str
) -> None:
    service.script(LEASE, leased([trajectory("bad", **BROKEN[rule])], encoding=encoding))
    with pytest.raises(InvalidAnswer, match=rule) as error:
        client.lease()
    assert "'bad'" in str(error.value) and actions(service) == ["lease", "nack"]


@pytest.mark.parametrize("value", [None, "x", [1.5, 2, 3, 4], [[1, 2, 3, 4]], [True] * 4, [2**31, 1, 1, 1]])
def test_ids_that_are_no_ids_are_refused(service: ScriptedService, client: TrainerClient, value: object) -> None:
    body = lease_body([trajectory("bad")])
    body["groups"][0]["trajectories"][0]["token_ids"] = value
    service.script(LEASE, json_answer(body))
    with pytest.raises(InvalidAnswer, match="'bad'"):
        client.lease()


def test_packed_bytes_that_end_within_a_number_are_refused(service: ScriptedService, client: TrainerClient) -> None:
    body = lease_body([trajectory("bad")], arrays="bytes")
    body["groups"][0]["trajectories"][0]["token_ids"] += b"\0"
    service.script(LEASE, Answer(200, msgpack.packb(body), {"content-type": "application/msgpack"}))
    with pytest.raises(InvalidAnswer, match="'bad'"):
        client.lease()


def test_one_row_twice_in_a_batch_is_refused(service: ScriptedService, client: TrainerClient) -> None:
    service.script(LEASE, leased([trajectory("t1")], [trajectory("t1")]))
    with pytest.raises(InvalidAnswer, match="2 times"):
        client.lease()


def test_a_missing_field_is_refused_and_an_unknown_one_is_not(service: ScriptedService, client: TrainerClient) -> None:
    body = lease_body([trajectory()])
    body["groups"][0]["trajectories"][0]["later"] = 1
    service.script(LEASE, json_answer(body))
    assert client.lease() is not None
    del body["groups"][0]["trajectories"][0]["call_ids"]
    service.script(LEASE, json_answer(body))
    with pytest.raises(InvalidAnswer, match="call_ids"):
        client.lease()


@pytest.mark.parametrize(
    "answer",
    [
        Answer(200, b"<html>", {"content-type": "text/html"}),
        Answer(200, b"{", {"content-type": "application/json"}),
        Answer(200, b"\xc1", {"content-type": "application/msgpack"}),
        json_answer([]),
        json_answer({"lease_id": "lease-1", "expires_at": 1.0, "weight_version": 1}),
    ],
)
def test_an_answer_that_is_no_lease_is_refused(service: ScriptedService, client: TrainerClient, answer: Answer) -> None:
    service.script(LEASE, answer)
    with pytest.raises(InvalidAnswer):
        client.lease()


def test_several_rows_of_one_session_are_one_rollout(service: ScriptedService, client: TrainerClient) -> None:
    rows = [trajectory("a", session="s1"), trajectory("b", session="s1"), replace(trajectory("c"), session_id="s2")]
    service.script(LEASE, leased(rows, [trajectory("d")]))
    batch = client.lease()
    assert batch.columns.rollout_index.tolist() == [0, 0, 1, 2]
    assert batch.columns.group_index.tolist() == [0, 0, 0, 1]
    assert batch.columns.row_weight.tolist() == [0.5, 0.5, 1.0, 1.0]
    assert batch.staleness.tolist() == [2, 2, 2, 2]


def test_images_of_a_lease_are_fetched_when_they_are_read(service: ScriptedService, client: TrainerClient) -> None:
    data = picture(1)
    item = Media(digest_of(data), "image", 0, 1)
    service.script(LEASE, leased([trajectory("a", media=(item,)), trajectory("b", media=(item,))]))
    path = f"/sessions/s-b/media/{item.digest}"
    service.script(f"GET {path}", Answer(200, data, {"content-type": "image/png"}))
    with next(client.batches()) as batch:
        assert list(batch.media) == [item.digest] and actions(service) == ["lease"]
        assert batch.media[item.digest] == batch.media[item.digest] == data
    assert service.paths()[1:] == [path, "/batches/lease-1/ack"]
