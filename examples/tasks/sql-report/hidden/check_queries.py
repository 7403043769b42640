import sqlite3
import unittest
from pathlib import Path

SCHEMA = """
CREATE TABLE customers (id INTEGER PRIMARY KEY, name TEXT NOT NULL);
CREATE TABLE products (id INTEGER PRIMARY KEY, name TEXT NOT NULL, price_cents INTEGER NOT NULL);
CREATE TABLE orders (id INTEGER PRIMARY KEY, customer_id INTEGER, ordered_on TEXT NOT NULL, status TEXT NOT NULL);
CREATE TABLE items (order_id INTEGER, product_id INTEGER, quantity INTEGER NOT NULL, price_cents INTEGER NOT NULL);
INSERT INTO customers VALUES (1, 'Ada'), (2, 'Bob'), (3, 'Cy'), (4, 'Dee'), (5, 'Ada');
INSERT INTO products VALUES (1, 'Pen', 150), (2, 'Ink', 900), (3, 'Nib', 80), (4, 'Cap', 10);
"""


class Queries(unittest.TestCase):
    def rows(self, name, orders, items):
        database = sqlite3.connect(":memory:")
        self.addCleanup(database.close)
        database.executescript(SCHEMA)
        database.executemany("INSERT INTO orders VALUES (?, ?, ?, ?)", orders)
        database.executemany("INSERT INTO items VALUES (?, ?, ?, ?)", items)
        return database.execute(Path(name).read_text(encoding="utf-8")).fetchall()

    def test_greatest_first_and_three_at_most(self):
        orders = [(number, number, "2025-05-05", "paid") for number in (1, 2, 3, 4)]
        items = [(1, 1, 1, 100), (2, 1, 2, 100), (3, 1, 3, 100), (4, 1, 4, 100)]
        self.assertEqual(self.rows("top_customers.sql", orders, items), [("Dee", 400), ("Cy", 300), ("Bob", 200)])

    def test_only_paid_orders_of_the_year(self):
        days = ["2024-12-31", "2025-01-01", "2025-12-31", "2026-01-01"]
        orders = [(number, 1, day, "paid") for number, day in enumerate(days)]
        orders += [(10, 1, "2025-06-01", "open"), (11, 2, "2025-06-01", "cancelled")]
        items = [(number, 1, 1, 10**number) for number in range(4)] + [(10, 1, 1, 7), (11, 1, 1, 7)]
        self.assertEqual(self.rows("top_customers.sql", orders, items), [("Ada", 110)])

    def test_the_price_is_that_of_the_order(self):
        rows = self.rows("top_customers.sql", [(1, 2, "2025-02-02", "paid")], [(1, 1, 3, 111), (1, None, 1, 0)])
        self.assertEqual(rows, [("Bob", 333)])

    def test_equal_ones_by_name_and_two_of_one_name(self):
        orders = [(number, number, "2025-05-05", "paid") for number in (5, 3, 1)]
        rows = self.rows("top_customers.sql", orders, [(number, 1, 1, 50) for number in (5, 3, 1)])
        self.assertEqual(rows, [("Ada", 50), ("Ada", 50), ("Cy", 50)])

    def test_never_ordered(self):
        orders = [(1, 1, "2020-01-01", "cancelled")]
        rows = self.rows("never_ordered.sql", orders, [(1, 2, 1, 900), (1, None, 1, 0)])
        self.assertEqual(rows, [("Cap",), ("Nib",), ("Pen",)])

    def test_nothing_ordered(self):
        self.assertEqual(self.rows("never_ordered.sql", [], []), [("Cap",), ("Ink",), ("Nib",), ("Pen",)])
        self.assertEqual(self.rows("top_customers.sql", [], []), [])
