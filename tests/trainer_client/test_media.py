"""Images by digest: fetched once, checked, and decoded as the engine decodes them."""

from __future__ import annotations

import base64
import hashlib
import io
import json
import threading
from functools import partial
from typing import Any

import pytest
from PIL import Image

from tests.support.engine.forked_vllm import run_beside_vllm
from tests.support.engine.vllm_server import require_vllm
from tests.support.sessions.pictures import Album, digest_of, picture
from trainer_client.batch import Batch
from trainer_client.errors import InvalidAnswer
from trainer_client.media import MediaFiles, decode_image


def test_an_image_is_fetched_when_it_is_first_read_and_once() -> None:
    album = Album()
    digests = [album.add(picture(seed)) for seed in (1, 2, 3)]
    media = MediaFiles({digest: partial(album.fetch, "s", digest) for digest in digests})
    assert set(media) == set(digests) and album.fetched == []
    assert media[digests[0]] == picture(1) and media[digests[0]] == picture(1)
    media.fetch()
    assert sorted(album.fetched) == sorted(digests)
    with pytest.raises(KeyError):
        media["0" * 64]


def test_images_are_fetched_side_by_side() -> None:
    """Each waits for the others to be asked for."""
    album, together = Album(), threading.Barrier(3)

    def fetch(digest: str) -> bytes:
        together.wait(60)
        return album.files[digest]

    media = MediaFiles({digest: partial(fetch, digest) for digest in map(album.add, map(picture, range(3)))})
    media.fetch(connections=3)
    assert {digest_of(data) for data in media.values()} == set(media)


def test_bytes_of_another_digest_are_refused() -> None:
    media = MediaFiles({digest_of(picture(1)): lambda: picture(2)})
    with pytest.raises(InvalidAnswer, match="came as"):
        media[digest_of(picture(1))]


def test_a_joined_batch_has_the_images_of_its_parts_and_fetches_none_again() -> None:
    album = Album()
    digests = [album.add(picture(seed)) for seed in (1, 2)]
    parts = [Batch([], 0, media=MediaFiles({digest: partial(album.fetch, "s", digest)})) for digest in digests]
    parts[0].media.fetch()
    joined = Batch.join(parts)
    joined.media.fetch()
    assert len(joined.media) == 2 and len(album.fetched) == 2


def saved(image: Image.Image, form: str, **options: Any) -> bytes:
    file = io.BytesIO()
    image.save(file, form, **options)
    return file.getvalue()


def odd_images() -> list[bytes]:
    """Of every mode and trait whose decoding is a choice: transparency, palettes, grey, 16 bits, CMYK, orientation, several frames."""
    plain = Image.open(io.BytesIO(picture(7, 24, 16)))
    clear = plain.copy()
    clear.putalpha(Image.linear_gradient("L").resize(plain.size))
    turned = Image.Exif()
    turned[0x0112] = 6
    second = Image.new("RGB", plain.size, "red")
    return [
        picture(7, 24, 16),
        saved(clear, "PNG"),
        saved(clear, "WEBP", lossless=True),
        saved(clear.convert("LA"), "PNG"),
        saved(plain.convert("L"), "PNG"),
        saved(plain.convert("I;16"), "PNG"),
        saved(plain.convert("P"), "PNG", transparency=3),
        saved(plain.convert("P"), "GIF", transparency=3),
        saved(plain, "PNG", transparency=plain.getpixel((0, 0))),
        saved(plain.convert("CMYK"), "JPEG"),
        saved(plain, "JPEG", exif=turned.tobytes()),
        saved(plain, "GIF", save_all=True, append_images=[second]),
    ]


_AS_VLLM = """
import base64, hashlib, json, sys
from vllm.multimodal.media.image import ImageMediaIO
def pixels(data):
    image = ImageMediaIO().load_bytes(base64.b64decode(data)).media
    return [image.mode, list(image.size), hashlib.sha256(image.tobytes()).hexdigest()]
print(json.dumps([pixels(data) for data in json.loads(sys.argv[1])]))
"""


@pytest.mark.engine
def test_images_are_decoded_as_the_engine_decodes_them() -> None:
    """Other pixels behind what is transparent, or an image that lies on its side, would be another context."""
    require_vllm()
    files = odd_images()
    finished = run_beside_vllm("-c", _AS_VLLM, json.dumps([base64.b64encode(data).decode() for data in files]))
    assert finished.returncode == 0, finished.stderr
    ours = [decode_image(data) for data in files]
    assert [[each.mode, [*each.size], hashlib.sha256(each.tobytes()).hexdigest()] for each in ours] == json.loads(
        finished.stdout.splitlines()[-1]
    )
