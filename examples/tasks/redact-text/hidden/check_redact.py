import unittest

from redact import redact


class Redact(unittest.TestCase):
    def becomes(self, **texts):
        for name, (before, after) in texts.items():
            self.assertEqual(redact(before), after, name)

    def test_email(self):
        self.becomes(
            plain=("to ada@example.org now", "to [email] now"),
            signs=("a.b_c%d+e-f@mail.example.co.uk", "[email]"),
            full_stop=("Ask ada@example.org.", "Ask [email]."),
            brackets=("<ada@example.org>, x", "<[email]>, x"),
            no_dot=("ada@localhost ada@example.org", "ada@localhost [email]"),
        )

    def test_ip(self):
        self.becomes(
            plain=("from 192.168.0.1 to 10.0.0.255", "from [ip] to [ip]"),
            full_stop=("It was 8.8.8.8.", "It was [ip]."),
            too_great=("256.1.1.1 1.1.1.256 1.1.1.1", "256.1.1.1 1.1.1.256 [ip]"),
            longer=("1.2.3.4.5 and 1.2.3 and 1.2.3.4", "1.2.3.4.5 and 1.2.3 and [ip]"),
            port=("1.2.3.4:80", "[ip]:80"),
        )

    def test_card(self):
        self.becomes(
            one=("card 4111111111111111.", "card [card]."),
            spaces=("4111 1111 1111 1111", "[card]"),
            hyphens=("4111-1111-1111-1111", "[card]"),
            mixed=("4111-1111 1111-1111 4111111111111111", "4111-1111 1111-1111 [card]"),
            longer=("41111111111111112 4111111111111111", "41111111111111112 [card]"),
        )

    def test_all_at_once(self):
        text = "ada@example.org (10.0.0.1) paid with 4111 1111 1111 1111 at 10:15"
        self.assertEqual(redact(text), "[email] ([ip]) paid with [card] at 10:15")
