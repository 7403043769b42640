import unittest

from roman import from_roman, to_roman


class Roman(unittest.TestCase):
    def test_additive(self):
        for number, text in ((1, "I"), (3, "III"), (8, "VIII"), (2026, "MMXXVI"), (3887, "MMMDCCCLXXXVII")):
            self.assertEqual(to_roman(number), text)
            self.assertEqual(from_roman(text), number)

    def test_out_of_range(self):
        for number in (0, -1, 4000):
            with self.assertRaises(ValueError):
                to_roman(number)
        for text in ("", "ABC", "iv"):
            with self.assertRaises(ValueError):
                from_roman(text)

    def test_subtractive(self):
        for number, text in ((4, "IV"), (9, "IX"), (49, "XLIX"), (400, "CD"), (1994, "MCMXCIV"), (3999, "MMMCMXCIX")):
            self.assertEqual(to_roman(number), text)
            self.assertEqual(from_roman(text), number)

    def test_both_ways(self):
        texts = [to_roman(number) for number in range(1, 4000)]
        self.assertEqual([from_roman(text) for text in texts], list(range(1, 4000)))
        self.assertTrue(all(letter * 4 not in text for text in texts for letter in "MDCLXVI"))

    def test_not_canonical(self):
        for text in ("IIII", "VV", "IC", "IIX", "MMMM", "XCX", "IVI"):
            with self.assertRaises(ValueError, msg=text):
                from_roman(text)
