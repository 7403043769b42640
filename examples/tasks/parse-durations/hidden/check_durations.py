import unittest

from durations import parse


class Durations(unittest.TestCase):
    def is_(self, text, seconds):
        self.assertEqual(parse(text), seconds, text)
        self.assertIs(type(parse(text)), type(seconds), text)

    def refused(self, *texts):
        """And the same text after a good one: what refuses everything has parsed nothing."""
        self.is_("1h", 3600)
        for text in texts:
            with self.assertRaises(ValueError, msg=text) as raised:
                parse(text)
            self.assertIn(text, str(raised.exception))

    def test_a_number_is_seconds(self):
        self.is_("90", 90)
        self.is_("0.5", 0.5)

    def test_every_unit(self):
        for text, seconds in (("2d", 172800), ("3h", 10800), ("4m", 240), ("5s", 5), ("250ms", 0.25), ("1000ms", 1)):
            self.is_(text, seconds)

    def test_sequences(self):
        self.is_("1h30m", 5400)
        self.is_("2d 4h", 187200)
        self.is_(" 1d1h1m1s1ms ", 90061.001)

    def test_a_fraction_at_the_end(self):
        self.is_("1.5h", 5400)
        self.is_("1h0.5m", 3630)

    def test_minus(self):
        self.is_("-10s", -10)
        self.is_("-1h30m", -5400)

    def test_units_in_a_wrong_order_or_twice(self):
        self.refused("1s2m", "1m1m", "1ms1s")

    def test_a_fraction_before_the_end(self):
        self.refused("1.5h3m")

    def test_what_is_no_duration(self):
        self.refused("h", "1x", "1h30", "1 2", "--1s", "1h-30m", "1.h", ".5h", "1e3")

    def test_the_empty_text(self):
        self.is_("0", 0)
        with self.assertRaises(ValueError):
            parse("")
