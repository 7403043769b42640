import unittest

from pages import page_count, pages


class Pages(unittest.TestCase):
    def test_full_pages(self):
        self.assertEqual(pages([1, 2, 3, 4], 2), [[1, 2], [3, 4]])

    def test_order(self):
        self.assertEqual(pages("abcd", 1), ["a", "b", "c", "d"])

    def test_empty(self):
        self.assertEqual(pages([], 3), [])

    def test_last_page(self):
        self.assertEqual(pages([1, 2, 3, 4, 5], 2), [[1, 2], [3, 4], [5]])
        self.assertEqual(page_count([1, 2, 3, 4, 5], 2), 3)

    def test_one_short_page(self):
        self.assertEqual(pages([1], 10), [[1]])

    def test_bad_size(self):
        for size in (0, -1):
            with self.assertRaises(ValueError):
                pages([1, 2], size)
