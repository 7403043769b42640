import ast
import unittest
from pathlib import Path

from invoice import render


def order(country, *items):
    return {
        "customer": "Ada",
        "country": country,
        "items": [{"name": name, "price": price, "count": count} for name, price, count in items],
    }


class Shape(unittest.TestCase):
    def setUp(self):
        self.text = Path("invoice.py").read_text(encoding="utf-8")

    def test_short_functions(self):
        functions = [node for node in ast.walk(ast.parse(self.text)) if isinstance(node, ast.FunctionDef)]
        self.assertEqual([each.name for each in functions if each.end_lineno - each.lineno >= 15], [])

    def test_one_rounding(self):
        self.assertEqual(self.text.count("round("), 1)


class Behaviour(unittest.TestCase):
    maxDiff = None

    def test_domestic(self):
        text = render(order("DE", ("Pen", 1.105, 3), ("Paper", 4.0, 10)))
        rows = ["Invoice for Ada", "", "  3 x Pen                        3.32", " 10 x Paper                     40.00"]
        rows += ["Tax                              8.23", "Total                           51.55"]
        self.assertEqual(text, "\n".join(rows) + "\n")

    def test_abroad(self):
        text = render(order("US", ("Pen", 1.0, 1)))
        rows = ["Invoice for Ada", "", "  1 x Pen                        1.00", "No tax: delivery abroad"]
        self.assertEqual(text, "\n".join([*rows, "Total                            1.00"]) + "\n")

    def test_discount(self):
        for price, discount in ((500, "-25.00"), (999.99, "-50.00"), (1000, "-100.00")):
            self.assertIn(f"Discount                   {discount:>10}\n", render(order("FR", ("Desk", price, 1))))
        self.assertNotIn("Discount", render(order("FR", ("Desk", 499.99, 1))))

    def test_nothing(self):
        text = "Invoice for Ada\n\nTax                              0.00\nTotal                            0.00\n"
        self.assertEqual(render(order("AT")), text)
