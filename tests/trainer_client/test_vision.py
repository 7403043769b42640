"""Rows with images as a model takes them: what a rectangle, a packed sequence and a tree say is what each row says alone."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from cli.audit import recompute_logprobs
from cli.refusal import CommandError
from examples.demo.tiny_model import make_tiny_model
from reconstruct.records import pack_logprobs
from tests.support.sessions.pictures import COUNTS, SIZES, Album, Sighted, picture, seen_row, three_rows
from trainer_client.errors import RowTooLong, UnseenImages, VisionMismatch
from trainer_client.recompute import recompute

TOLERANCE = 1e-5
"""Of float32: the same sums in another order."""


def scores(logits: Any, ids: Any) -> Any:
    """log p of each token but the first after those before it."""
    return torch.log_softmax(logits[:-1].float(), -1).gather(1, ids[1:, None])[:, 0]


@torch.no_grad()
def test_a_rectangle_says_of_every_token_what_its_row_says(sighted: Sighted) -> None:
    batch = three_rows(sighted)
    data = batch.padded(framework="torch", vision=sighted.vision)
    logits = sighted.model(data.token_ids, attention_mask=data.attention_mask, **data.vision_inputs).logits
    for at, row in enumerate(batch.rows):
        length = len(row.token_ids)
        ours = scores(logits[at, :length], data.token_ids[at, :length])
        np.testing.assert_allclose(ours, sighted.alone(batch, row)[1:], atol=TOLERANCE)
        if data.rope_position_ids is not None:
            assert data.rope_position_ids.shape == (3, *data.token_ids.shape)


@torch.no_grad()
def test_a_packed_sequence_says_of_every_token_what_its_row_says(sighted: Sighted) -> None:
    batch = three_rows(sighted)
    (data,) = batch.packed(1000, framework="torch", vision=sighted.vision)
    apart = data.segment_index[:, None] == data.segment_index[None, :]
    mask = torch.zeros(apart.shape).masked_fill_(~(apart & torch.ones_like(apart).tril()), torch.finfo(torch.float32).min)
    positions = data.position_ids[None] if data.rope_position_ids is None else data.rope_position_ids[:, None]
    outputs = sighted.model(data.token_ids[None], attention_mask=mask[None, None], position_ids=positions, **data.vision_inputs)
    for index, logits, ids in zip(data.row_index, data.split(outputs.logits[0]), data.split(data.token_ids), strict=True):
        np.testing.assert_allclose(scores(logits, ids), sighted.alone(batch, batch.rows[index])[1:], atol=TOLERANCE)


@pytest.mark.case(74)
@torch.no_grad()
def test_a_tree_says_of_every_trained_token_what_its_row_says_and_sees_a_shared_image_once(sighted: Sighted) -> None:
    batch = three_rows(sighted)
    (data,) = batch.tree(1000, framework="torch", vision=sighted.vision)
    flat = batch.packed(1000, framework="torch", vision=sighted.vision)[0]
    largest = "image_grid_thw" if sighted.vision.rope_merge else "pixel_values"
    axis = 0 if sighted.vision.rope_merge else 1
    per_image = 1 if sighted.vision.rope_merge else COUNTS["idefics3"][0] // 4
    assert flat.vision_inputs[largest].shape[axis] - data.vision_inputs[largest].shape[axis] == per_image
    positions = data.position_ids[None] if data.rope_position_ids is None else data.rope_position_ids[:, None]
    outputs = sighted.model(
        data.token_ids[None], attention_mask=data.attention_mask(torch.float32), position_ids=positions, **data.vision_inputs
    )
    ours = data.trained_logprobs(outputs.logits)
    theirs = []
    for index in data.row_index:
        row = batch.rows[index]
        theirs.append(sighted.alone(batch, row)[row.loss_mask == 1])
    np.testing.assert_allclose(ours, np.concatenate(theirs), atol=TOLERANCE)


def test_the_gradient_of_a_tree_is_that_of_flat_rows(sighted: Sighted) -> None:
    """Up to rounding in float32: the vision tower's too, which sees the shared image once."""
    batch = three_rows(sighted)

    def gradients(loss: Any) -> list[Any]:
        sighted.model.zero_grad()
        loss.backward()
        return [weight.grad.clone() for weight in sighted.model.parameters() if weight.grad is not None]

    (tree,) = batch.tree(1000, framework="torch", vision=sighted.vision)
    positions = tree.position_ids[None] if tree.rope_position_ids is None else tree.rope_position_ids[:, None]
    outputs = sighted.model(
        tree.token_ids[None], attention_mask=tree.attention_mask(torch.float32), position_ids=positions, **tree.vision_inputs
    )
    ours = gradients((tree.trained_logprobs(outputs.logits) * (1 + tree.segment_index)).sum())
    flat = batch.padded(framework="torch", vision=sighted.vision, rows=tree.row_index.tolist())
    logits = sighted.model(flat.token_ids, attention_mask=flat.attention_mask, **flat.vision_inputs).logits
    chosen = torch.log_softmax(logits[:, :-1], -1).gather(2, flat.token_ids[:, 1:, None])[..., 0]
    weight = flat.loss_mask[:, 1:] * (1 + torch.arange(len(flat.token_ids)))[:, None]
    theirs = gradients((chosen * weight).sum())
    for one, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-3)


@pytest.mark.case(74)
def test_rows_whose_images_differ_share_nothing_from_there_on(sighted: Sighted) -> None:
    """The placeholders of two images of one size have the same ids."""
    other = sighted.album.add(picture(99, *SIZES[0]))
    count = {sighted.digests[0]: COUNTS[sighted.family][0], other: COUNTS[sighted.family][0]}
    rows = [
        seen_row(name, [[700], digest, [701], (702,)], count=count, placeholder=sighted.vision.placeholder_id)
        for name, digest in (("a", sighted.digests[0]), ("b", other), ("c", sighted.digests[0]))
    ]
    (data,) = sighted.album.batch(rows).tree(1000, vision=sighted.vision)
    assert len(data.token_ids) == 1 + 2 * (COUNTS[sighted.family][0] + 2)


def test_an_image_is_cut_off_whole(sighted: Sighted) -> None:
    """No model can say what half an image is."""
    batch = sighted.album.batch([sighted.row("a", [[700], (701,), 0, [702], (703,)])])
    data = batch.padded(max_length=5, truncate=True, vision=sighted.vision)
    assert data.token_ids.tolist() == [[700, 701]] and data.cut_tokens.tolist() == [1] and data.vision_inputs == {}
    with pytest.raises(RowTooLong):
        batch.padded(max_length=5, vision=sighted.vision)


def test_rows_with_images_are_never_laid_out_without_their_pixels_by_accident(sighted: Sighted) -> None:
    batch = three_rows(sighted)
    layouts: list[Callable[..., Any]] = [
        batch.padded,
        lambda **more: batch.packed(1000, **more),
        lambda **more: batch.tree(1000, **more),
    ]
    for lay_out in layouts:
        with pytest.raises(UnseenImages, match=r"trajectory '[ab]' has images"):
            lay_out()
        lay_out(rows=[2])
        lay_out(vision=False)
    with pytest.raises(UnseenImages):
        recompute(sighted.model, batch.rows[0])


def test_an_image_is_fetched_and_processed_once_for_all_rows(sighted: Sighted) -> None:
    sighted.album.fetched.clear()
    batch = three_rows(sighted)
    for _ in range(2):
        batch.padded(vision=sighted.vision)
    assert sorted(sighted.album.fetched) == sorted(sighted.digests)


def test_placeholders_that_do_not_fit_the_image_are_refused(sighted: Sighted) -> None:
    """Another processor than the engine's, whose images are larger or smaller."""
    count = dict(zip(sighted.digests, (5, 5, 5), strict=True))
    row = seen_row("a", [[700], sighted.digests[0], (701,)], count=count, placeholder=sighted.vision.placeholder_id)
    with pytest.raises(
        VisionMismatch, match=f"has 5 placeholders from token 1 on, the image processor makes {COUNTS[sighted.family][0]}"
    ):
        sighted.album.batch([row]).padded(vision=sighted.vision)


def test_a_placeholder_where_no_image_stands_is_refused(sighted: Sighted) -> None:
    """transformers would shift every later image by one piece, in silence."""
    row = sighted.row("a", [[700], (sighted.vision.placeholder_id,), 0, (701,)])
    with pytest.raises(VisionMismatch, match="token 1 is the placeholder"):
        sighted.album.batch([row]).padded(vision=sighted.vision)


def test_positions_are_those_that_the_model_computes(sighted: Sighted) -> None:
    if sighted.vision.rope_merge is None:
        assert three_rows(sighted).padded(vision=sighted.vision).rope_position_ids is None
        return
    data = three_rows(sighted).padded(framework="torch", vision=sighted.vision, side="left")
    theirs, _ = sighted.model.model.get_rope_index(
        data.token_ids,
        mm_token_type_ids=data.vision_inputs["mm_token_type_ids"],
        image_grid_thw=data.vision_inputs["image_grid_thw"],
        attention_mask=data.attention_mask,
    )
    assert (data.rope_position_ids == theirs).all()


def test_other_pictures_change_what_the_model_says(sighted: Sighted) -> None:
    """Without this none of the comparisons here would prove that images are seen."""
    batch = three_rows(sighted)
    seen = sighted.alone(batch, batch.rows[0])
    others = Album()
    swapped = dict(zip(sighted.digests, (others.add(picture(50 + at, *size)) for at, size in enumerate(SIZES)), strict=True))
    batch.media._bytes |= {digest: others.files[swapped[digest]] for digest in sighted.digests}
    assert np.abs(sighted.alone(batch, batch.rows[0]) - seen).max() > 100 * TOLERANCE


def test_an_audit_recomputes_rows_with_their_pixels(sighted: Sighted, tmp_path: Path) -> None:
    batch = three_rows(sighted)
    rows = [replace(row, logprobs=pack_logprobs(sighted.alone(batch, row) * row.loss_mask)) for row in batch.rows]
    for trees in (False, True):
        (found,) = recompute_logprobs(rows, [str(sighted.folder)], media=batch.media, trees=trees).values()
        assert found.tokens == sum(int(row.loss_mask.sum()) for row in rows) and found.largest < TOLERANCE
    blind = make_tiny_model(tmp_path, layers=1, hidden_size=64)
    with pytest.raises(CommandError, match="is a model that sees none"):
        recompute_logprobs(rows, [str(blind)], media=batch.media)
