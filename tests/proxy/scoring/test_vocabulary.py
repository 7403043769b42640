"""Two engines mean the same by an id if their digests say so, or if both spell it alike: each id is spelled once for two engines."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import pytest

from proxy.engine.replica import Replica
from proxy.errors import RequestError
from proxy.scoring.vocabulary import Vocabularies

WORDS = {1: "a", 2: "b", 3: "c"}


class Spelling:
    """Stands for the kinds of two engines."""

    def __init__(self, words: Mapping[str, Mapping[int, str]]) -> None:
        self._words = words
        self.asked: list[tuple[str, list[int]]] = []

    def of(self, replica: Replica) -> Spelling:
        return self

    async def spell_itself(self, replica: Replica, groups: Sequence[tuple[int, ...]]) -> list[str]:
        self.asked.append((replica.name, [token for (token,) in groups]))
        unknown = [token for (token,) in groups if token not in self._words[replica.name]]
        if unknown:
            raise RequestError(f"token id {unknown[0]} is out of vocabulary")
        return [self._words[replica.name][token] for (token,) in groups]


def engines(**vocabularies: str) -> tuple[Replica, Replica]:
    return tuple(Replica(name, f"http://{name}", vocabulary=told) for name, told in vocabularies.items())  # type: ignore[return-value]


async def test_each_id_is_spelled_once_and_no_other() -> None:
    spelling = Spelling({"teacher": WORDS | {9: "more than its student"}, "student": WORDS})
    teacher, student = engines(teacher="one", student="other")
    known = Vocabularies(spelling)  # type: ignore[arg-type]
    await known.check(teacher, student, [2, 1, 2])
    await known.check(teacher, student, [1, 2, 3])
    await known.check(teacher, student, [3])
    assert spelling.asked == [("student", [1, 2]), ("teacher", [1, 2]), ("student", [3]), ("teacher", [3])]


async def test_equal_digests_need_no_spelling_and_none_is_no_digest() -> None:
    spelling = Spelling({"teacher": WORDS, "student": WORDS})
    known = Vocabularies(spelling)  # type: ignore[arg-type]
    await known.check(*engines(teacher="same", student="same"), [1])
    assert not spelling.asked
    await known.check(*engines(teacher="", student=""), [1])
    assert spelling.asked


@pytest.mark.parametrize(("teacher", "said"), [({1: "a", 2: "x"}, "id 2 is 'x' there and 'b' here"), ({1: "a"}, "id 2 is out")])
async def test_an_id_with_another_meaning_or_none_is_refused_by_name_each_time(teacher: dict[int, str], said: str) -> None:
    """It was compared by a sample of the ids of the first session."""
    known = Vocabularies(Spelling({"teacher": teacher, "student": WORDS}))  # type: ignore[arg-type]
    pair = engines(teacher="one", student="other")
    await known.check(*pair, [1])
    for _ in range(2):
        with pytest.raises(RequestError, match=f"engine teacher has another vocabulary than engine student: .*{said}"):
            await known.check(*pair, [1, 2])
