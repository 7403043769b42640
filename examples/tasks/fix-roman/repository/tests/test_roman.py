import unittest

from roman import from_roman, to_roman


class Roman(unittest.TestCase):
    def test_to_roman(self):
        self.assertEqual(to_roman(6), "VI")
        self.assertEqual(to_roman(1994), "MCMXCIV")

    def test_from_roman(self):
        self.assertEqual(from_roman("VI"), 6)
        self.assertEqual(from_roman("MCMXCIV"), 1994)
