import hashlib
import re
import unittest
from pathlib import Path

SECTIONS = {
    "distance(a, b, *, squared=False)": "The distance of two points.",
    "polygon_area(points)": "The area of a simple polygon, whichever way round its points go.",
    "rotated(point, degrees, around=(0, 0))": "A point turned counter-clockwise.",
}
CODE = "aac7ff705eea60a8a6b3270240876ddc0e9492ae0d6b39324e57eebf9edfca9a"


class Docs(unittest.TestCase):
    """Whoever changed the code has not done what was asked, however the documentation looks."""

    def setUp(self):
        self.assertEqual(hashlib.sha256(Path("geometry.py").read_bytes()).hexdigest(), CODE)
        text = Path("docs/api.md").read_text(encoding="utf-8")
        self.introduction, *rest = re.split(r"^## ", text, flags=re.MULTILINE)
        self.sections = {title.strip().strip("`"): body.strip() for title, _, body in (each.partition("\n") for each in rest)}

    def test_every_function_in_order(self):
        self.assertEqual(list(self.sections), list(SECTIONS))
        self.assertIn("Points are pairs of numbers. All functions are pure.", self.introduction)

    def test_what_they_do(self):
        for title, line in SECTIONS.items():
            self.assertIn(line, self.sections.get(title, ""))

    def test_nothing_that_is_gone(self):
        self.assertEqual([title for title in self.sections if title not in SECTIONS], [])
