"""Details of tokens in rows: each stands at its own token, whatever the calls leaned on and in whatever shape the row is read.

The engine of these tests says of a token what a function of the ids up to it gives, so that every number in a row can be worked out
again.
"""

from __future__ import annotations

import json
import struct
import zlib
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgpack
import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from proxy.archive.folder import read_table, write_table
from proxy.archive.tables import ArchivedSession
from proxy.archive.tables import rows_of as archived_rows
from reconstruct.accounting import account, measure_lost_share, settle
from reconstruct.builders import Builder, merged, per_call
from reconstruct.codec import decode, encode
from reconstruct.details import CallDetails
from reconstruct.errors import LengthMismatch, RecordError
from reconstruct.records import LOGPROB_MODES, Call
from reconstruct.spans import ModeSpan
from reconstruct.trajectory import NAMES, RowDetails, Trajectory, encode_row
from tests.reconstruct.test_properties import CONTEXT, FEWER, Drawn, sessions
from tests.support.sessions.calls import Talk, call
from tests.support.sessions.training_rows import groups, trajectory
from trainer_client.batch import Batch
from trainer_client.errors import InvalidAnswer, MixedLogprobModes
from trainer_client.wire import decode_trajectory

K, LAYERS, PER_TOKEN = 2, 2, 3


def state(ids: Sequence[int]) -> int:
    return zlib.crc32(struct.pack(f"<{len(ids)}i", *ids))


def top_of(ids: Sequence[int]) -> list[tuple[int, float]]:
    """The most probable tokens where the last of `ids` was sampled."""
    return [(state(ids) % 97 + at, -0.25 * (at + 1)) for at in range(K)]


def given_of(ids: Sequence[int]) -> float:
    return float("nan") if len(ids) == 1 else -(1 + state(ids) % 1000) / 8


def experts_of(ids: Sequence[int]) -> NDArray[np.uint8]:
    return np.array([[(state(ids) >> (3 * layer + at)) % 200 for at in range(PER_TOKEN)] for layer in range(LAYERS)], np.uint8)


def told(prompt: Sequence[int], said: Sequence[int], known: int = 0) -> CallDetails:
    """What an engine says of a whole call when the experts of the first `known` positions are not asked for."""
    whole = [*prompt, *said]
    tops = [top_of(whole[: len(prompt) + at + 1]) for at in range(len(said))]
    routed = [experts_of(whole[: at + 1]) for at in range(known, len(whole) - 1)]
    return CallDetails(
        top_token_ids=np.array([[token for token, _ in top] for top in tops], np.int32).reshape(-1, K),
        top_logprobs=np.array([[value for _, value in top] for top in tops], np.float32).reshape(-1, K),
        prompt_logprobs=np.array([given_of(prompt[: at + 1]) for at in range(len(prompt))], np.float32),
        routed_experts=np.array(routed, np.uint8).reshape(-1, LAYERS, PER_TOKEN),
        routed_from=known,
    )


def detailed(made: Call, prompt: Sequence[int], kinds: Sequence[str] = ("top", "prompt", "routed"), known: int = 0) -> Call:
    """The call as it is stored when the engine said these kinds."""
    said, node = told(prompt, made.node.completion_ids.tolist(), known), made.node
    if "top" not in kinds:
        said = replace(said, top_token_ids=None, top_logprobs=None)
    if "prompt" not in kinds:
        said = replace(said, prompt_logprobs=None)
    if "routed" not in kinds:
        said = replace(said, routed_experts=None, routed_from=0)
    return replace(made, node=replace(node, details=said.cut_to_delta(node.base_length, len(node.delta_ids))))


def rows_of(calls: Sequence[Call], builder: Builder = merged) -> list[Trajectory]:
    """The rows of the calls as the store gives them back."""
    settled = settle([decode(encode(made)) for made in calls])
    rows = builder(settled, CONTEXT)
    account(settled, rows)
    return rows


def check_true(row: Trajectory) -> None:
    """Whatever the row says of a token is what was said of it."""
    ids, details = row.token_ids.tolist(), row.details
    if details is None:
        return
    for at in range(len(ids)):
        before = ids[: at + 1]
        if details.top_token_ids is not None and details.top_logprobs is not None:
            if details.top_token_ids[at, 0] >= 0:
                assert row.loss_mask[at] == 1
                assert list(zip(details.top_token_ids[at].tolist(), details.top_logprobs[at].tolist(), strict=True)) == top_of(
                    before
                )
            else:
                assert np.isnan(details.top_logprobs[at]).all()
        if details.prompt_logprobs is not None and not np.isnan(details.prompt_logprobs[at]):
            assert row.loss_mask[at] == 0
            assert details.prompt_logprobs[at] == np.float32(given_of(before))
        if details.routed_experts is not None and (details.routed_experts[at] >= 0).any():
            np.testing.assert_array_equal(details.routed_experts[at], experts_of(before))


def prompts_of(drawn: Drawn) -> list[tuple[Call, list[int]]]:
    whole = drawn.talk.full
    return [
        (made, whole[made.call_id][: len(whole[made.call_id]) - len(made.node.completion_ids)]) for made in drawn.talk.calls
    ]


@FEWER
@given(sessions(flawed=False), st.sampled_from([merged, per_call]))
def test_every_detail_stands_at_its_token_and_none_is_missing_that_was_told(drawn: Drawn, builder: Builder) -> None:
    calls = [detailed(made, prompt) for made, prompt in prompts_of(drawn)]
    for row in rows_of(calls, builder):
        check_true(row)
        length = len(row.token_ids)
        assert row.details is not None and row.details.top_token_ids is not None
        np.testing.assert_array_equal(row.details.top_token_ids[:, 0] >= 0, row.loss_mask == 1)
        routed = row.details.routed_experts
        assert (routed is None) == (length == 1)
        if routed is not None:
            assert (routed[: length - 1] >= 0).all() and (routed[length - 1] == -1).all()


@FEWER
@given(sessions(), st.sampled_from([merged, per_call]), st.data())
def test_what_was_not_told_is_missing_and_nothing_else_moves(drawn: Drawn, builder: Builder, data: st.DataObject) -> None:
    kinds = st.lists(st.sampled_from(["top", "prompt", "routed"]), unique=True)
    calls = [
        detailed(made, prompt, data.draw(kinds), known=data.draw(st.integers(0, max(0, made.node.base_length - 1))))
        for made, prompt in prompts_of(drawn)
    ]
    lost = {item.call_id for item in drawn.told if item.lost}
    for row in rows_of([made for made in calls if made.call_id not in lost], builder):
        check_true(row)


@FEWER
@given(sessions())
def test_details_change_nothing_of_what_is_trained(drawn: Drawn) -> None:
    plain = rows_of(drawn.talk.calls)
    rows = rows_of([detailed(made, prompt) for made, prompt in prompts_of(drawn)])
    assert [encode_row(replace(row, details=None)) for row in rows] == [encode_row(row) for row in plain]


def conversation() -> list[Call]:
    """
    c1  1 2 | 3 4
    c2      1 2 3 4 | 5 | 6 7
    """
    talk = Talk()
    first = talk.say("c1", [1, 2], [3, 4])
    second = talk.go_on("c2", "c1", [5], [6, 7])
    return [detailed(first, [1, 2]), detailed(second, [1, 2, 3, 4, 5])]


def test_a_continued_conversation_is_one_row_with_every_detail() -> None:
    (row,) = rows_of(conversation())
    assert row.details is not None and row.details.prompt_logprobs is not None and row.details.routed_experts is not None
    assert np.isnan(row.details.prompt_logprobs).tolist() == [True, False, True, True, False, True, True]
    assert (row.details.routed_experts[:, 0, 0] >= 0).tolist() == [True] * 6 + [False]
    check_true(row)


def test_a_call_stores_the_details_of_what_is_new_and_one_routing_more() -> None:
    """The base's last token was routed when this call fed it back."""
    details = conversation()[1].node.details
    assert details is not None and details.prompt_logprobs is not None and details.routed_experts is not None
    assert (len(details.prompt_logprobs), details.routed_from, len(details.routed_experts)) == (1, 3, 3)


def test_storage_grows_with_the_new_tokens() -> None:
    """Fifty turns of ten ids: the last record is no longer than the second."""
    talk, sizes = Talk(), []
    made, prompt = talk.say("c1", [1] * 10, [2] * 5), [1] * 10
    for turn in range(2, 50):
        prompt = [*talk.full[f"c{turn - 1}"], *[3] * 5]
        made = talk.go_on(f"c{turn}", f"c{turn - 1}", [3] * 5, [4] * 5)
        sizes.append(len(encode(detailed(made, prompt, known=made.node.base_length - 1))))
    assert max(sizes) - min(sizes) < 40


def test_details_of_another_number_of_tokens_are_never_trained() -> None:
    made = call("c1", delta=[1], said=[2, 3])
    short = told([1], [2])
    for details in (
        short,
        replace(told([1], [2, 3]), prompt_logprobs=np.zeros(4, np.float32)),
        replace(told([1], [2, 3]), top_logprobs=None),
    ):
        broken = replace(made, node=replace(made.node, details=details))
        with pytest.raises(LengthMismatch):
            broken.node.check()
        assert settle([broken]).refused == {"c1": "length_mismatch"}


# Over the wire


@pytest.mark.parametrize("arrays", ["json", "list", "bytes"])
def test_a_row_comes_back_with_its_details_in_every_encoding(arrays: str) -> None:
    (row,) = rows_of(conversation())
    if arrays == "json":
        back = decode_trajectory(json.loads(msgspec.json.encode(encode_row(row))))
    else:
        back = decode_trajectory(msgpack.unpackb(msgpack.packb(encode_row(row, arrays=arrays))))
    assert row.details is not None and back.details is not None
    for name in ("top_token_ids", "top_logprobs", "prompt_logprobs", "routed_experts"):
        there, here = getattr(row.details, name), getattr(back.details, name)
        assert (here.dtype, here.shape) == (there.dtype, there.shape), name
        np.testing.assert_array_equal(here, there)


def test_a_row_without_details_says_nothing_of_them() -> None:
    (row,) = rows_of([call("c1", delta=[1], said=[2])])
    assert row.details is None
    assert not {"top_token_ids", "top_logprobs", "prompt_logprobs", "routed_experts"} & encode_row(row).keys()
    assert decode_trajectory(encode_row(row)).details is None


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("prompt_logprobs", [None, -1.0]),
        ("prompt_logprobs", [[None, -1.0, -1.0, None, -1.0, None, None]]),
        ("top_token_ids", [[1], [2], [3], [4], [5], [6], [7]]),
        ("routed_experts", [[[70000]]] * 7),
        ("routed_experts", [[[0.5]]] * 7),
        ("top_logprobs", {"shape": [7, 2], "data": b"1234"}),
    ],
)
def test_details_that_do_not_fit_their_row_are_refused(name: str, value: Any) -> None:
    (row,) = rows_of(conversation())
    with pytest.raises(InvalidAnswer):
        decode_trajectory({**encode_row(row), name: value})


def test_an_archive_has_them_as_columns_and_nothing_where_there_are_none(tmp_path: Path) -> None:
    (row,) = rows_of(conversation())
    (bare,) = rows_of([call("c1", delta=[1], said=[2])])
    state: dict[str, Any] = defaultdict(lambda: None, session_id="s", status="completed", reward_metadata={})
    session = ArchivedSession(state, [], trajectories=[encode_row(each, arrays="bytes") for each in (row, bare)])
    assert session.size_bytes > sum(getattr(row.details, name).nbytes for name in NAMES)
    path = tmp_path / "trajectories.parquet"
    write_table(path, "trajectories", archived_rows(session)["trajectories"])
    told, untold = read_table(path)
    wire = encode_row(row)
    assert {name: told[name] for name in NAMES} == {name: wire[name] for name in NAMES}
    assert [json.loads(each["logprob_modes"]) for each in (told, untold)] == [wire["logprob_modes"], [["unknown", 1, 2]]]
    assert [untold[name] for name in NAMES] == [None] * len(NAMES)


def test_a_builder_whose_details_are_of_other_tokens_is_refused() -> None:
    settled = settle(conversation())
    (row,) = merged(settled, CONTEXT)
    assert row.details is not None and row.details.routed_experts is not None
    short = replace(row.details, routed_experts=row.details.routed_experts[:-1])
    with pytest.raises(LengthMismatch, match="routed_experts for 6 tokens, not 7"):
        account(settled, [replace(row, details=short)])


# In batches


def batch() -> Batch:
    """a: seven tokens with every detail; b: a prompt of one and one sampled, with none."""
    (row,) = rows_of(conversation())
    return Batch(
        groups([replace(row, reward=1.0), trajectory("b", prompt=[9], versions=[0], mode="unknown")]), weight_version=0
    )


@pytest.mark.parametrize("framework", ["numpy", "torch"])
@pytest.mark.parametrize("side", ["left", "right"])
def test_padded_rows_have_the_details_at_their_tokens(framework: Any, side: Any) -> None:
    data: Any = batch().padded(side=side, framework=framework)
    details = batch().rows[0].details
    assert details is not None
    assert data.top_token_ids.shape == data.top_logprobs.shape == (2, 7, K)
    assert data.routed_experts.shape == (2, 7, LAYERS, PER_TOKEN)
    for name in ("top_token_ids", "top_logprobs", "prompt_logprobs", "routed_experts"):
        np.testing.assert_array_equal(np.asarray(getattr(data, name)[0]), getattr(details, name))
    assert (np.asarray(data.top_token_ids[1]) == -1).all() and np.isnan(np.asarray(data.prompt_logprobs[1])).all()


def test_packed_rows_have_the_details_at_their_tokens() -> None:
    data: Any = batch().packed(token_budget=100)[0]
    details = batch().rows[0].details
    assert details is not None
    np.testing.assert_array_equal(data.routed_experts[:7], details.routed_experts)
    np.testing.assert_array_equal(data.top_logprobs[:7], details.top_logprobs)
    assert data.routed_experts.shape == (9, LAYERS, PER_TOKEN) and (data.routed_experts[7:] == -1).all()


def test_a_row_that_is_cut_loses_the_end_of_its_details() -> None:
    data: Any = batch().padded(max_length=5, truncate=True)
    details = batch().rows[0].details
    assert details is not None
    np.testing.assert_array_equal(
        data.routed_experts[0], details.routed_experts[:5] if details.routed_experts is not None else 0
    )


def test_rows_without_details_have_none_in_a_batch() -> None:
    data = batch().padded(rows=[1])
    assert data.top_token_ids is data.top_logprobs is data.prompt_logprobs is data.routed_experts is None
    (sequence,) = batch().packed(token_budget=100, rows=[1])
    assert sequence.routed_experts is None


def test_rows_with_fewer_of_the_most_probable_tokens_are_filled_up() -> None:
    one = RowDetails(np.full((2, 1), 5, np.int32), np.full((2, 1), -1.0, np.float32))
    three = RowDetails(np.full((2, 3), 6, np.int32), np.full((2, 3), -2.0, np.float32))
    rows = [trajectory(name, prompt=[9], versions=[0], details=details) for name, details in (("a", one), ("b", three))]
    data = Batch(groups(rows), weight_version=0).padded()
    assert data.top_token_ids.tolist() == [[[5, -1, -1]] * 2, [[6, 6, 6]] * 2]


def test_experts_of_different_models_are_not_put_into_one_array() -> None:
    rows = [
        trajectory(name, prompt=[9], versions=[0], details=RowDetails(routed_experts=np.zeros((2, layers, 1), np.int16)))
        for name, layers in (("a", 1), ("b", 2))
    ]
    with pytest.raises(ValueError, match="different models"):
        Batch(groups(rows), weight_version=0).padded()


# What the logprobs are


def test_a_row_says_what_each_of_its_logprobs_was_taken_from() -> None:
    """
    c1  1 | 2 3     of two modes
    c2  .. 4 | 5    of the second; 6 is sampled next to it, without a token between
    c3  .. | 6
    """
    talk = Talk()
    talk.say("c1", [1], [2, 3], modes=[ModeSpan("raw", 0, 1), ModeSpan("masked", 1, 2)])
    talk.go_on("c2", "c1", [4], [5], mode="masked")
    talk.go_on("c3", "c2", [], [6], mode="masked")
    (row,) = rows_of(talk.calls)
    assert row.logprob_modes == (ModeSpan("raw", 1, 2), ModeSpan("masked", 2, 3), ModeSpan("masked", 4, 6))
    assert decode_trajectory(encode_row(row)).logprob_modes == row.logprob_modes


def test_logits_are_never_trained_as_logprobs() -> None:
    settled = settle([call("c1", delta=[1], said=[2], mode="logits")])
    assert settled.refused == {"c1": "logits_for_logprobs"}
    assert merged(settled, CONTEXT) == []


def test_only_the_wanted_modes_are_trained_and_the_others_stay_in_their_context() -> None:
    """A call left out by choice takes nothing from its session: the next call has its tokens as prompt."""
    talk = Talk()
    talk.say("c1", [1], [2], mode="masked")
    talk.go_on("c2", "c1", [3], [4], mode="raw")
    settled = settle(talk.calls, logprob_modes={"raw"})
    assert settled.refused == {"c1": "logprob_mode"}
    (row,) = rows = merged(settled, CONTEXT)
    accounting = account(settled, rows)
    assert (row.token_ids.tolist(), row.loss_mask.tolist()) == ([1, 2, 3, 4], [0, 0, 0, 1])
    assert row.logprob_modes == (ModeSpan("raw", 3, 4),)
    assert (accounting.sampled_tokens, accounting.exported_tokens, accounting.complete) == (2, 1, True)
    assert measure_lost_share(settled, accounting) == 0.0


@pytest.mark.case(64)
@given(st.lists(st.sampled_from(LOGPROB_MODES), min_size=1, max_size=6), st.sets(st.sampled_from(LOGPROB_MODES)))
def test_whatever_modes_are_wanted_every_token_is_trained_once_or_in_quarantine(modes: list[str], wanted: set[str]) -> None:
    talk = Talk()
    talk.say("c0", [1], [2], mode=modes[0])
    for at, mode in enumerate(modes[1:], start=1):
        talk.go_on(f"c{at}", f"c{at - 1}", [3], [4, 5], mode=mode)
    settled = settle(talk.calls, logprob_modes=wanted)
    for builder in (merged, per_call):
        rows = builder(settled, CONTEXT)
        accounting = account(settled, rows)
        left = sum(item.tokens for item in accounting.quarantined)
        assert accounting.sampled_tokens == accounting.exported_tokens + left == 2 * len(modes) - 1
        assert {item.reason for item in accounting.quarantined} <= {"logprob_mode"}
        assert {span.mode for row in rows for span in row.logprob_modes} == set(modes) & wanted


@pytest.mark.parametrize(
    "modes",
    [
        (),
        (ModeSpan("raw", 0, 1),),
        (ModeSpan("raw", 0, 3),),
        (ModeSpan("raw", 1, 2),),
        (ModeSpan("raw", 0, 2), ModeSpan("raw", 1, 2)),
    ],
)
def test_a_call_whose_modes_do_not_tile_its_tokens_is_not_trained(modes: tuple[ModeSpan, ...]) -> None:
    settled = settle([call("c1", delta=[1], said=[2, 3], modes=modes)])
    assert settled.refused == {"c1": LengthMismatch.reason}


def test_a_builder_that_says_another_mode_is_refused() -> None:
    settled = settle([call("c1", delta=[1], said=[2], mode="masked")])
    (row,) = merged(settled, CONTEXT)
    with pytest.raises(RecordError, match=r"wrong logprob mode .* token 1"):
        account(settled, [replace(row, logprob_modes=(ModeSpan("raw", 1, 2),))])


def test_rows_of_different_modes_are_put_into_one_array_only_on_request() -> None:
    rows = [trajectory("a", mode="raw"), trajectory("b", mode="masked")]
    both = Batch(groups(rows), weight_version=5)
    assert [*both.logprob_modes] == [{"raw"}, {"masked"}]
    for arrange in (both.padded, lambda: both.packed(token_budget=100), lambda: both.tree(token_budget=100)):
        with pytest.raises(MixedLogprobModes, match=r"masked \(as in trajectory 'b'\), raw .*logprob_modes=\['raw'\]"):
            arrange()
    data, (packed,), (tree,) = (
        both.padded(mix_modes=True),
        both.packed(token_budget=100, mix_modes=True),
        both.tree(token_budget=100, mix_modes=True),
    )
    assert data.logprob_modes.tolist() == [[-1, -1, 0, 0], [-1, -1, 2, 2]]
    assert packed.logprob_modes.tolist() == [-1, -1, 0, 0, -1, -1, 2, 2]
    assert tree.logprob_modes.tolist() == [0, 0, 2, 2]
    assert both.padded(rows=[1]).logprob_modes.max() == LOGPROB_MODES.index("masked")


def test_a_row_of_several_modes_is_in_an_array_only_on_request() -> None:
    row = trajectory("a", logprob_modes=(ModeSpan("raw", 2, 3), ModeSpan("masked", 3, 4)))
    batch = Batch(groups([row]), weight_version=5)
    with pytest.raises(MixedLogprobModes):
        batch.padded()
    assert batch.padded(mix_modes=True, framework="torch").logprob_modes.tolist() == [[-1, -1, 0, 2]]
