"""Models that see, for the tests of a trainer's images."""

from __future__ import annotations

import pytest

from tests.support.sessions.pictures import FAMILIES, Sighted, open_eyes


@pytest.fixture(scope="module", params=FAMILIES)
def sighted(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Sighted:
    return open_eyes(request.param, tmp_path_factory.mktemp("vision"))
