"""LeasedRows in real DataLoaders, on batches of a real service: what is handed out, acknowledged and given back."""

from __future__ import annotations

import multiprocessing
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

from examples.trainers import torch_loop
from tests.support.service.running_service import TRAINER, RunningService, wait_until
from tests.support.sessions.finished_groups import finish, groups
from trainer_client.adapters.microbatches import Cut, Packed, Padded, Rows
from trainer_client.adapters.torch_dataset import LeasedRows
from trainer_client.errors import LeaseLost, RowTooLong


def leased(service: RunningService, cut: Cut | None = None, **options: Any) -> LeasedRows:
    return LeasedRows(service.url, TRAINER, cut or Rows(), **{"wait_seconds": 0.5, **options})


def expected_rows(service: RunningService, session_ids: list[str]) -> dict[tuple[int, ...], dict[str, Any]]:
    rows = [service.request("GET", f"/sessions/{each}/trajectories").json()["trajectories"] for each in session_ids]
    return {tuple(row["token_ids"]): row for [row] in rows}


def test_rows_are_handed_out_as_they_were_recorded(service: RunningService) -> None:
    wanted = expected_rows(service, finish(service, "g", [1.0, 0.0]))
    with leased(service) as rows:
        for micro in islice(rows.loader(), 2):
            row = wanted.pop(tuple(micro.token_ids.tolist()))
            assert micro.loss_mask.tolist() == [mask == 1 for mask in row["loss_mask"]]
            segments = torch.diff(micro.loss_mask.int(), prepend=torch.tensor([0])).eq(1).sum()
            assert segments == 2, "one for each turn"
            assert torch.equal(micro.inference_logprobs, torch.tensor(row["logprobs"]))
            assert micro.rewards.item() == row["reward"]
            assert micro.advantages.item() == pytest.approx(0.7071 if row["reward"] else -0.7071, abs=1e-3)
    assert not wanted


def test_a_lease_is_acknowledged_with_the_last_of_its_parts(service: RunningService) -> None:
    finish(service, "g", [1.0, 0.0])
    with leased(service) as rows:
        loop = rows.loader()
        next(loop)
        rows.ack()
        assert groups(service) == {"leased": 1}
        next(loop)
        assert groups(service) == {"leased": 1}
        rows.ack()
        assert groups(service) == {"acked": 1}
    assert groups(service) == {"acked": 1}


def test_asking_for_the_next_part_may_be_the_acknowledgement(service: RunningService) -> None:
    for group_id in ("g1", "g2"):
        finish(service, group_id, [1.0])
    with leased(service) as rows:
        loop = rows.loader(ack="next")
        next(loop)
        assert groups(service) == {"leased": 1, "ready": 1}
        next(loop)
        assert groups(service) == {"leased": 1, "acked": 1}
    assert groups(service) == {"ready": 1, "acked": 1}, "nobody asked for what comes after the last one"


def test_a_loop_that_raises_gives_back_what_it_has_not_acknowledged(service: RunningService) -> None:
    for group_id in ("g1", "g2"):
        finish(service, group_id, [1.0])
    with pytest.raises(ZeroDivisionError), leased(service) as rows:
        for at, _ in enumerate(rows.loader()):
            _ = 1 // (1 - at)
            rows.ack()
    assert groups(service) == {"ready": 1, "acked": 1}


def test_a_loop_that_is_left_without_a_word_gives_back_too(service: RunningService) -> None:
    finish(service, "g", [1.0])
    rows = leased(service)
    for _ in rows.loader():
        break
    rows.close()
    assert groups(service) == {"ready": 1}


def test_what_is_acknowledged_after_the_loop_has_been_given_back(service: RunningService) -> None:
    finish(service, "g", [1.0])
    with leased(service) as rows:
        [part] = islice(DataLoader(rows, batch_size=None), 1)
        wait_until(lambda: groups(service) == {"ready": 1}, 120, "the lease has been given back")
        with pytest.raises(LeaseLost):
            rows.ack(part)


def test_rows_may_be_asked_for_again_after_a_loop(service: RunningService) -> None:
    finish(service, "g", [1.0])
    with leased(service) as rows:
        for _ in range(2):
            [micro] = islice(rows.loader(), 1)
        rows.close()
        [part] = islice(rows, 1)
        assert torch.equal(part.data.token_ids, micro.token_ids)


def test_a_row_that_does_not_fit_is_given_back_and_told(service: RunningService) -> None:
    finish(service, "g", [1.0])
    with pytest.raises(RowTooLong), leased(service, Rows(max_length=8)) as rows:
        next(rows.loader())
    assert groups(service) == {"ready": 1}


def test_a_batch_of_which_nothing_is_trained_is_acknowledged_and_passed_over(service: RunningService) -> None:
    """The first group's prompt alone is longer than what is kept of a row."""
    finish(service, "long" * 50, [1.0])
    [short] = expected_rows(service, finish(service, "g", [1.0]))
    with leased(service, Rows(max_length=60, truncate=True)) as rows:
        micro = next(rows.loader())
        assert tuple(micro.token_ids.tolist()) == short[:60]
        assert int(micro.cut_tokens) > 0 and bool(micro.loss_mask.any())
        assert groups(service) == {"acked": 1, "leased": 1}


@pytest.mark.parametrize("cut", [Padded(micro_rows=2, pad_id=7, multiple_of=8), Packed(token_budget=4096)])
def test_parts_may_be_padded_or_packed(service: RunningService, cut: Cut) -> None:
    wanted = expected_rows(service, finish(service, "g", [1.0, 0.0, 0.5]))
    sampled = sum(sum(row["loss_mask"]) for row in wanted.values())
    with leased(service, cut) as rows:
        parts = list(islice(rows.loader(), 2 if isinstance(cut, Padded) else 1))
    assert sum(int(part.loss_mask.sum()) for part in parts) == sampled
    assert sorted(float(reward) for part in parts for reward in part.rewards) == [0.0, 0.5, 1.0]
    assert all(isinstance(part.token_ids, torch.Tensor) for part in parts)


@pytest.fixture(scope="module")
def workers() -> dict[str, Any]:
    """Two, as with "spawn", but forked off one process that has imported torch."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["trainer_client.adapters.torch_dataset"])
    return {"num_workers": 2, "multiprocessing_context": context}


def test_workers_lease_each_for_itself_and_every_row_comes_once(service: RunningService, workers: dict[str, Any]) -> None:
    ids = [each for at in range(6) for each in finish(service, f"g{at}", [1.0, 0.0])]
    wanted = expected_rows(service, ids)
    with leased(service, consumer="trainer") as rows:
        for at, micro in enumerate(rows.loader(**workers), start=1):
            del wanted[tuple(micro.token_ids.tolist())]
            rows.ack()
            if at == len(ids):
                break
    assert not wanted
    assert groups(service) == {"acked": 6}


def test_workers_give_back_what_they_had_fetched_ahead(service: RunningService, workers: dict[str, Any]) -> None:
    for at in range(6):
        finish(service, f"g{at}", [1.0, 0.0])
    with leased(service) as rows:
        loop = rows.loader(**workers)
        next(loop)
        wait_until(lambda: groups(service).get("leased", 0) > 1, 120, "the workers fetch ahead")
    assert groups(service) == {"ready": 6}


def test_the_example_trains_and_publishes(
    folder: Path, service: RunningService, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for at in range(4):
        finish(service, f"g{at}", [1.0, 0.0])
    monkeypatch.setenv("VERBATIM_URL", service.url)
    monkeypatch.setenv("VERBATIM_TRAINER_TOKEN", TRAINER)
    torch_loop.train(str(folder), tmp_path / "weights", steps=2, microbatches=2, workers=0)
    assert groups(service) == {"acked": 4}
    assert service.request("GET", "/weights", TRAINER).json()["current"]["version"] == 2
    assert [line.partition(",")[0].split()[:2] for line in capsys.readouterr().out.splitlines()] == [
        ["step", "1:"],
        ["step", "2:"],
    ]
